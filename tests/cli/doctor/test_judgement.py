"""Verdicts of the doctor: for every verdict of every check, facts that lead to it."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

from pages import rows

from wald.cli.doctor import files, host, log, medium
from wald.cli.doctor.examination import CHECKS, Needs
from wald.cli.doctor.findings import Facts, Outcome, Paths

GIB = 1 << 30
MIB = 1 << 20
OK, SKIPPED, UNKNOWN, WARN, FAIL = (Outcome.OK, Outcome.SKIPPED, Outcome.UNKNOWN, Outcome.WARN, Outcome.FAIL)


def mount(type_: str, *options: str) -> medium.Mount:
    return medium.Mount(type_, "/dev/sda1", "/data", ("rw", "relatime", *options))


GOOD_SYNC = medium.Sync(
    syncs=300,
    p50_seconds=0.001,
    p90_seconds=0.002,
    p99_seconds=0.004,
    max_seconds=0.01,
    device_writes=600,
    device_flushes=300,
    needs_flushes=True,
)
PIPES = host.Pipes(MIB, 16384, 0, 4096, MIB, is_limited=True, fifos=10)
LIMITS = host.Limits(20000, 300, None, 64 * MIB)
CLOCK = host.Clock(is_synchronised=True, error_seconds=0.01, is_past=False)
PARTS = host.Parts("0.1.0", "3.11.7", "2.9", "0.25.0", has_crc32c_instruction=True)
SERVICE = host.Service("wald.service", "notify", 64, has_watchdog=True, fifos=10)
PLACE = log.Place(log.Kind.LOG, "/data/log")
RIGHTS = log.Rights("0750", "wald", "wald")
SPACE = medium.Space(100 * GIB, GIB, 64 * MIB, 64 * MIB, 0, None)
RUNNING = log.Running("pid 7 on host", answers=True)


class Row(NamedTuple):
    """Facts, the outcome expected of them, and part of the message."""

    facts: Facts
    outcome: Outcome
    words: str


TABLE = [
    Row(mount("ext4"), OK, "ext4 on /data"),
    Row(mount("xfs", "noatime", "discard"), OK, "xfs"),
    Row(medium.Mount("ext4", "/dev/sda1", "/", ("ro", "relatime")), FAIL, "read-only"),
    Row(mount("tmpfs"), FAIL, "a crash of the host loses the whole log"),
    Row(mount("cgroup2"), FAIL, "belongs to the kernel"),
    Row(mount("ramfs"), FAIL, "memory"),
    Row(mount("ext4", "nobarrier"), FAIL, "nobarrier"),
    Row(mount("ext4", "barrier=0"), FAIL, "barrier=0"),
    Row(mount("overlay", "volatile"), FAIL, "volatile"),
    Row(mount("vfat"), FAIL, "no owners"),
    Row(mount("overlay"), WARN, "layer of a container"),
    Row(mount("nfs4"), WARN, "one host only"),
    Row(mount("9p"), WARN, "one host only"),
    Row(mount("fuse.sshfs"), WARN, "program that serves it"),
    Row(mount("ext4", "sync"), WARN, "mounted with sync"),
    Row(mount("ext4", "data=writeback"), WARN, "data=writeback"),
    Row(mount("newfs"), UNKNOWN, "newfs"),
    Row(medium.Device(), SKIPPED, "no block device"),
    Row(medium.Device("loop0", "write back", backing="/srv/image"), WARN, "/srv/image"),
    Row(medium.Device("sda", "write back"), OK, "volatile"),
    Row(medium.Device("sda", "write through"), OK, "no volatile"),
    Row(medium.Device("sda"), UNKNOWN, "does not report"),
    Row(medium.Sync(error="Input/output error"), FAIL, "Input/output error"),
    Row(medium.Sync(is_in_memory=True, syncs=300), SKIPPED, "no disk"),
    Row(replace(GOOD_SYNC, device_writes=0), FAIL, "do not reach it"),
    Row(replace(GOOD_SYNC, device_writes=149), FAIL, "149 writes"),
    Row(replace(GOOD_SYNC, device_flushes=0), FAIL, "power cut"),
    Row(replace(GOOD_SYNC, device_flushes=0, needs_flushes=False), OK, "300 syncs"),
    Row(replace(GOOD_SYNC, device_writes=None, device_flushes=None), OK, "300 syncs"),
    Row(replace(GOOD_SYNC, p50_seconds=0.000_003), WARN, "is that fast"),
    Row(replace(GOOD_SYNC, p50_seconds=0.000_1), OK, "p50 0.100 ms"),
    Row(replace(GOOD_SYNC, p99_seconds=0.2), WARN, "commits are as slow"),
    Row(GOOD_SYNC, OK, "p99 4.0 ms"),
    Row(files.Replacement("Permission denied"), FAIL, "cannot replace"),
    Row(files.Replacement(seconds=0.002), OK, "2.0 ms"),
    Row(files.Links("Operation not permitted"), FAIL, "no log can be created"),
    Row(files.Links(), OK, "hard link"),
    Row(files.Fifos("Operation not permitted"), FAIL, "FIFO"),
    Row(files.Fifos(), OK, "work here"),
    Row(files.Locks("nfs", error="No locks available"), FAIL, "No locks available"),
    Row(files.Locks("fuse.x", excludes=False), FAIL, "two daemons"),
    Row(files.Locks("nfs", excludes=True), WARN, "other hosts"),
    Row(files.Locks("fuse.x", excludes=True), WARN, "other hosts"),
    Row(files.Locks("ext4", excludes=True), OK, "excludes other processes"),
    Row(files.Events(error="Too many open files"), WARN, "only poll"),
    Row(files.Events(), WARN, "did not report"),
    Row(files.Events(arrived=True, seconds=0.001), OK, "1.0 ms"),
    Row(files.Allocation("ext4", MIB, 0, "No space left", is_full=True), FAIL, "cannot allocate 1.0 MiB"),
    Row(files.Allocation("nfs", MIB, 0, "not supported"), WARN, "does not allocate"),
    Row(files.Allocation("btrfs", MIB, MIB), WARN, "copies on write"),
    Row(files.Allocation("strange", MIB, 0), WARN, "only 0 B"),
    Row(files.Allocation("ext4", MIB, MIB), OK, "when the disk is full"),
    Row(files.Mapping("No such device"), FAIL, "cannot map"),
    Row(files.Mapping(), FAIL, "old head"),
    Row(files.Mapping(is_coherent=True), OK, "immediately"),
    Row(files.Names(155, is_case_sensitive=False), FAIL, "two routes would be one"),
    Row(files.Names(155, "File name too long"), WARN, "a name of 155 bytes"),
    Row(files.Names(155), OK, "155 bytes"),
    Row(replace(PIPES, max_bytes=65536, reached_bytes=65536), WARN, "64.0 KiB, not 1 MiB: writers"),
    Row(replace(PIPES, reached_bytes=4096), WARN, "use up the limit"),
    Row(replace(PIPES, fifos=100), WARN, "100 FIFOs need 26112 pages"),
    Row(replace(PIPES, fifos=100, is_limited=False), OK, "100 FIFOs"),
    Row(replace(PIPES, fifos=100, soft_pages=0), OK, "100 FIFOs"),
    Row(replace(PIPES, fifos=10, hard_pages=100), WARN, "may have 100"),
    Row(PIPES, OK, "1.0 MiB"),
    Row(replace(LIMITS, file_bytes=MIB), FAIL, "a segment has"),
    Row(replace(LIMITS, open_files=256), WARN, "256 files"),
    Row(replace(LIMITS, open_files=None), OK, "any number of files"),
    Row(LIMITS, OK, "20000 files"),
    Row(replace(CLOCK, is_past=True), WARN, "past"),
    Row(replace(CLOCK, behind_seconds=7200.0), WARN, "behind the last append time"),
    Row(replace(CLOCK, is_synchronised=False), WARN, "not synchronised"),
    Row(replace(CLOCK, is_synchronised=None), UNKNOWN, "no promise depends on it"),
    Row(replace(CLOCK, error_seconds=5.0), WARN, "off by 5.0 s"),
    Row(CLOCK, OK, "synchronised"),
    Row(host.Uptime("", 5.0), FAIL, "age limits never apply"),
    Row(host.Uptime("b00t", 5.0), OK, "5.0 s ago"),
    Row(replace(PARTS, has_crc32c_instruction=False), WARN, "slower"),
    Row(PARTS, OK, "wald 0.1.0"),
    Row(host.Spark("", 0), SKIPPED, "not installed"),
    Row(host.Spark("4.2.0", 0), WARN, "without Java"),
    Row(host.Spark("4.2.0", 11), WARN, "Java 11 is too old"),
    Row(host.Spark("4.2.0", 17), OK, "Java 17"),
    Row(host.Service(), SKIPPED, "no daemon"),
    Row(replace(SERVICE, type=""), UNKNOWN, "does not answer"),
    Row(replace(SERVICE, type="simple"), WARN, "Type=simple"),
    Row(replace(SERVICE, type="notify-reload"), OK, "64 descriptors"),
    Row(replace(SERVICE, store_max=9), WARN, "keeps 9 descriptors"),
    Row(replace(SERVICE, has_watchdog=False), WARN, "no watchdog"),
    Row(SERVICE, OK, "watchdog"),
    Row(replace(PLACE, kind=log.Kind.UNFIT, error="it is damaged", hint="repair"), FAIL, "it is damaged"),
    Row(replace(PLACE, kind=log.Kind.ABSENT, at="/data"), OK, "/data is examined"),
    Row(replace(PLACE, kind=log.Kind.EMPTY), OK, "empty"),
    Row(PLACE, OK, "a log"),
    Row(log.Settings("a.toml", "a.toml:3: no", "repair it"), FAIL, "a.toml:3: no"),
    Row(log.Settings(""), OK, "no file was given"),
    Row(log.Settings("a.toml"), OK, "a.toml is valid"),
    Row(log.User("anna", "wald", may_write=False, is_read_only=True), SKIPPED, "read-only"),
    Row(log.User("anna", "wald", may_write=False), UNKNOWN, "may not write here"),
    Row(log.User("root", "wald", may_write=True), UNKNOWN, "may differ"),
    Row(log.User("wald", "wald", may_write=True), OK, "user wald"),
    Row(replace(RIGHTS, mode="0777", is_open=True), FAIL, "0777"),
    Row(replace(RIGHTS, open_above=("/data",)), FAIL, "/data"),
    Row(replace(RIGHTS, strange_above=("/data",)), WARN, "may replace"),
    Row(RIGHTS, OK, "wald:wald"),
    Row(log.SocketPath("/" + "x" * 107, 108), FAIL, "108 bytes"),
    Row(log.SocketPath("/" + "x" * 106, 107), OK, "107 of 107"),
    Row(log.Running(), OK, "no daemon"),
    Row(replace(RUNNING, answers=None), UNKNOWN, "may not query"),
    Row(replace(RUNNING, answers=False), FAIL, "does not answer"),
    Row(replace(RUNNING, degraded_by="segments"), FAIL, "segments"),
    Row(RUNNING, OK, "it answers"),
    Row(log.Files(9, unsafe_cursors=("/data/a.cursor: a symbolic link",)), FAIL, "a.cursor"),
    Row(log.Files(9, unsafe=("/data/head: a symbolic link",)), FAIL, "a symbolic link"),
    Row(log.Files(9, strange=tuple("abcde")), WARN, "a; b; c and 2 more"),
    Row(log.Files(9, troubles=("in: not a FIFO",)), WARN, "not a FIFO"),
    Row(log.Files(9, is_complete=False), UNKNOWN, "there are more"),
    Row(log.Files(9), OK, "9 names"),
    Row(replace(SPACE, free_bytes=MIB, pinned_bytes=MIB), FAIL, "groups pin 1.0 MiB"),
    Row(replace(SPACE, free_bytes=MIB), FAIL, "to accept input"),
    Row(replace(SPACE, full_in_seconds=3600.0), WARN, "full in 1 h"),
    Row(replace(SPACE, full_in_seconds=200000.0), OK, "full in 2 d"),
    Row(replace(SPACE, segment_bytes=MIB), WARN, "disk is small"),
    Row(SPACE, OK, "100.0 GiB free"),
    Row(medium.Inodes(0, 0), OK, "does not limit"),
    Row(medium.Inodes(0, 5000), FAIL, "no file can be created"),
    Row(medium.Inodes(999, 5000), WARN, "999 of 5000"),
    Row(medium.Inodes(1000, 5000), OK, "1000 of 5000"),
    Row(medium.Quota(()), OK, "quotas are off"),
    Row(medium.Quota(("usrquota",)), UNKNOWN, "usrquota"),
]


PATHS = Paths(Path("/data/my log"), Path("/data"))


def test_facts_lead_to_the_outcome() -> None:
    for facts, outcome, words in TABLE:
        found = facts.verdict(PATHS)

        assert (found.outcome, words in found.message) == (outcome, True), found
        assert found.outcome not in (WARN, FAIL) or found.advice


def test_every_check_is_in_the_table_and_every_outcome_on_its_page() -> None:
    # Every check is in the table.
    found = {check.needs for check in CHECKS}
    assert found == set(get_args(Needs))
    assert {type(row.facts) for row in TABLE} == {check.facts for check in CHECKS}

    # The page explains every outcome.
    assert {row[0].strip("`") for row in rows("docs/doctor.md", "## Outcomes and exit codes")} == set(Outcome)

    # A hint quotes the root for a shell.
    judged = replace(SPACE, free_bytes=1, pinned_bytes=1).verdict(PATHS)
    assert judged.advice.startswith("wald --root '/data/my log' explain; df -h /data")


def test_checks_name_the_promises_that_rest_on_them() -> None:
    """Promises are matched by their text, because their numbers change when a promise is added."""
    concerned = {
        "has returned": {"mapping", "mount", "device", "sync"},
        "is a prefix without gaps": {"mount", "device", "sync", "rights", "files"},
        "never given out again": {"names"},
        "RECLAIM never removes": {"replace", "names"},
        "One form of a segment replaces": {"replace"},
        "Damage is never silent": {"files"},
        "A full disk or a failing disk": {"allocation", "limits", "daemon", "space", "inodes", "quota"},
        "There is one writer": {"links", "locks", "rights", "daemon"},
        "No promise rests on the wall clock": {"uptime"},
        "each way in can lose": {"fifo", "pipes", "limits", "service"},
    }
    found: dict[str, set[str]] = {}
    for number, promise, *_ in rows("docs/guarantees.md", "## Promises"):
        if names := {check.name for check in CHECKS if int(number) in check.promises}:
            found[next((words for words in concerned if words in promise), promise)] = names
    assert found == concerned
