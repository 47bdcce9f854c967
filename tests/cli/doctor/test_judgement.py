"""Which facts lead to which outcome: a row for every rule of every check, and what the page says of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pages import rows

from wald.cli.doctor.checks import Check, Outcome
from wald.cli.doctor.examination import CHECKS
from wald.cli.doctor.judging import files, host, log, medium, space

GIB = 1 << 30
MIB = 1 << 20
OK, SKIPPED, UNKNOWN, WARN, FAIL = (
    Outcome.OK,
    Outcome.SKIPPED,
    Outcome.UNKNOWN,
    Outcome.WARN,
    Outcome.FAIL,
)


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
SPACE = space.Space(100 * GIB, GIB, 64 * MIB, 64 * MIB, 0, None)
RUNNING = log.Running("pid 7 on host", answers=True)


@dataclass(frozen=True)
class Row:
    """Some facts, the outcome, and words that the message has."""

    check: Check[Any]
    facts: Any
    outcome: Outcome
    words: str

    def __str__(self) -> str:
        return f"{self.check.name}-{self.outcome}-{self.words[:30]}"


TABLE = [
    Row(medium.MOUNT, mount("ext4"), OK, "ext4 on /data"),
    Row(medium.MOUNT, mount("xfs", "noatime", "discard"), OK, "xfs"),
    Row(medium.MOUNT, medium.Mount("ext4", "/dev/sda1", "/", ("ro", "relatime")), FAIL, "read-only"),
    Row(medium.MOUNT, mount("tmpfs"), FAIL, "a crash of the host loses the whole log"),
    Row(medium.MOUNT, mount("cgroup2"), FAIL, "belongs to the kernel"),
    Row(medium.MOUNT, mount("ramfs"), FAIL, "memory"),
    Row(medium.MOUNT, mount("ext4", "nobarrier"), FAIL, "nobarrier"),
    Row(medium.MOUNT, mount("ext4", "barrier=0"), FAIL, "barrier=0"),
    Row(medium.MOUNT, mount("overlay", "volatile"), FAIL, "volatile"),
    Row(medium.MOUNT, mount("vfat"), FAIL, "no owners"),
    Row(medium.MOUNT, mount("overlay"), WARN, "layer of a container"),
    Row(medium.MOUNT, mount("nfs4"), WARN, "one host only"),
    Row(medium.MOUNT, mount("9p"), WARN, "one host only"),
    Row(medium.MOUNT, mount("fuse.sshfs"), WARN, "program that serves it"),
    Row(medium.MOUNT, mount("ext4", "sync"), WARN, "mounted with sync"),
    Row(medium.MOUNT, mount("ext4", "data=writeback"), WARN, "data=writeback"),
    Row(medium.MOUNT, mount("newfs"), UNKNOWN, "newfs"),
    Row(medium.DEVICE, medium.Device(), SKIPPED, "no block device"),
    Row(medium.DEVICE, medium.Device("loop0", "write back", backing="/srv/image"), WARN, "/srv/image"),
    Row(medium.DEVICE, medium.Device("sda", "write back"), OK, "volatile"),
    Row(medium.DEVICE, medium.Device("sda", "write through"), OK, "no volatile"),
    Row(medium.DEVICE, medium.Device("sda"), UNKNOWN, "does not report"),
    Row(medium.SYNC, medium.Sync(error="Input/output error"), FAIL, "Input/output error"),
    Row(medium.SYNC, medium.Sync(is_in_memory=True, syncs=300), SKIPPED, "no disk"),
    Row(medium.SYNC, replace(GOOD_SYNC, device_writes=0), FAIL, "does not reach it"),
    Row(medium.SYNC, replace(GOOD_SYNC, device_writes=149), FAIL, "149 writes"),
    Row(medium.SYNC, replace(GOOD_SYNC, device_flushes=0), FAIL, "power cut"),
    Row(medium.SYNC, replace(GOOD_SYNC, device_flushes=0, needs_flushes=False), OK, "300 syncs"),
    Row(medium.SYNC, replace(GOOD_SYNC, device_writes=None, device_flushes=None), OK, "300 syncs"),
    Row(medium.SYNC, replace(GOOD_SYNC, p50_seconds=0.000_003), WARN, "no disk is as fast"),
    Row(medium.SYNC, replace(GOOD_SYNC, p50_seconds=0.000_1), OK, "p50 0.100 ms"),
    Row(medium.SYNC, replace(GOOD_SYNC, p99_seconds=0.2), WARN, "each commit waits"),
    Row(medium.SYNC, GOOD_SYNC, OK, "p99 4.0 ms"),
    Row(files.REPLACE, files.Tried("Permission denied"), FAIL, "cannot be replaced"),
    Row(files.REPLACE, files.Tried(seconds=0.002), OK, "2.0 ms"),
    Row(files.LINKS, files.Tried("Operation not permitted"), FAIL, "no log can be made"),
    Row(files.LINKS, files.Tried(), OK, "hard link"),
    Row(files.FIFOS, files.Tried("Operation not permitted"), FAIL, "FIFO"),
    Row(files.FIFOS, files.Tried(), OK, "work here"),
    Row(files.LOCKS, files.Locks("nfs", error="No locks available"), FAIL, "No locks available"),
    Row(files.LOCKS, files.Locks("fuse.x", excludes=False), FAIL, "two daemons"),
    Row(files.LOCKS, files.Locks("nfs", excludes=True), WARN, "another host"),
    Row(files.LOCKS, files.Locks("fuse.x", excludes=True), WARN, "another host"),
    Row(files.LOCKS, files.Locks("ext4", excludes=True), OK, "keeps out"),
    Row(files.EVENTS, files.Events(error="Too many open files"), WARN, "at intervals"),
    Row(files.EVENTS, files.Events(), WARN, "did not report"),
    Row(files.EVENTS, files.Events(arrived=True, seconds=0.001), OK, "1.0 ms"),
    Row(files.ALLOCATION, files.Allocation("ext4", MIB, 0, "No space left", is_full=True), FAIL, "1.0 MiB cannot"),
    Row(files.ALLOCATION, files.Allocation("nfs", MIB, 0, "not supported"), WARN, "does not allocate"),
    Row(files.ALLOCATION, files.Allocation("btrfs", MIB, MIB), WARN, "copies what is written"),
    Row(files.ALLOCATION, files.Allocation("strange", MIB, 0), WARN, "holds 0 B"),
    Row(files.ALLOCATION, files.Allocation("ext4", MIB, MIB), OK, "when the disk is full"),
    Row(files.MAPPING, files.Mapping("No such device"), FAIL, "cannot be mapped"),
    Row(files.MAPPING, files.Mapping(), FAIL, "old head"),
    Row(files.MAPPING, files.Mapping(is_coherent=True), OK, "at once"),
    Row(files.NAMES, files.Names(155, is_case_sensitive=False), FAIL, "two routes would be one"),
    Row(files.NAMES, files.Names(155, "File name too long"), WARN, "155 bytes cannot"),
    Row(files.NAMES, files.Names(155), OK, "155 bytes"),
    Row(host.PIPES, replace(PIPES, max_bytes=65536, reached_bytes=65536), WARN, "64.0 KiB, not 1 MiB: writers"),
    Row(host.PIPES, replace(PIPES, reached_bytes=4096), WARN, "use up the limit"),
    Row(host.PIPES, replace(PIPES, fifos=100), WARN, "100 FIFOs need 26112 pages"),
    Row(host.PIPES, replace(PIPES, fifos=100, is_limited=False), OK, "100 FIFOs"),
    Row(host.PIPES, replace(PIPES, fifos=100, soft_pages=0), OK, "100 FIFOs"),
    Row(host.PIPES, replace(PIPES, fifos=10, hard_pages=100), WARN, "may have 100"),
    Row(host.PIPES, PIPES, OK, "1.0 MiB"),
    Row(host.LIMITS, replace(LIMITS, file_bytes=MIB), FAIL, "a segment has"),
    Row(host.LIMITS, replace(LIMITS, open_files=256), WARN, "256 files"),
    Row(host.LIMITS, replace(LIMITS, open_files=None), OK, "may be open"),
    Row(host.LIMITS, LIMITS, OK, "20000 files"),
    Row(host.CLOCK, replace(CLOCK, is_past=True), WARN, "past"),
    Row(host.CLOCK, replace(CLOCK, behind_seconds=7200.0), WARN, "behind the last append time"),
    Row(host.CLOCK, replace(CLOCK, is_synchronised=False), WARN, "not synchronised"),
    Row(host.CLOCK, replace(CLOCK, is_synchronised=None), UNKNOWN, "no promise rests on it"),
    Row(host.CLOCK, replace(CLOCK, error_seconds=5.0), WARN, "off by 5.0 s"),
    Row(host.CLOCK, CLOCK, OK, "synchronised"),
    Row(host.UPTIME, host.Uptime("", 5.0), FAIL, "age limits never apply"),
    Row(host.UPTIME, host.Uptime("b00t", 5.0), OK, "5.0 s since"),
    Row(host.PARTS, replace(PARTS, has_crc32c_instruction=False), WARN, "slower"),
    Row(host.PARTS, PARTS, OK, "wald 0.1.0"),
    Row(host.SPARK, host.Spark("", 0), SKIPPED, "no PySpark"),
    Row(host.SPARK, host.Spark("4.2.0", 0), WARN, "no Java"),
    Row(host.SPARK, host.Spark("4.2.0", 11), WARN, "Java 11 is too old"),
    Row(host.SPARK, host.Spark("4.2.0", 17), OK, "Java 17"),
    Row(host.SERVICE, host.Service(), SKIPPED, "no daemon"),
    Row(host.SERVICE, replace(SERVICE, type=""), UNKNOWN, "does not answer"),
    Row(host.SERVICE, replace(SERVICE, type="simple"), WARN, "Type=simple"),
    Row(host.SERVICE, replace(SERVICE, type="notify-reload"), OK, "64 descriptors"),
    Row(host.SERVICE, replace(SERVICE, store_max=9), WARN, "keeps 9 descriptors"),
    Row(host.SERVICE, replace(SERVICE, has_watchdog=False), WARN, "no watchdog"),
    Row(host.SERVICE, SERVICE, OK, "watchdog"),
    Row(log.PLACE, replace(PLACE, kind=log.Kind.UNFIT, error="it is damaged", hint="mend"), FAIL, "it is damaged"),
    Row(log.PLACE, replace(PLACE, kind=log.Kind.ABSENT, at="/data"), OK, "/data is examined"),
    Row(log.PLACE, replace(PLACE, kind=log.Kind.EMPTY), OK, "empty"),
    Row(log.PLACE, PLACE, OK, "a log"),
    Row(log.SETTINGS, log.Settings("a.toml", "a.toml:3: no", "mend it"), FAIL, "a.toml:3: no"),
    Row(log.SETTINGS, log.Settings(""), OK, "no file was named"),
    Row(log.SETTINGS, log.Settings("a.toml"), OK, "a.toml is valid"),
    Row(log.USER, log.User("anna", "wald", may_write=False, is_read_only=True), SKIPPED, "read-only"),
    Row(log.USER, log.User("anna", "wald", may_write=False), UNKNOWN, "may not write here"),
    Row(log.USER, log.User("root", "wald", may_write=True), UNKNOWN, "may differ"),
    Row(log.USER, log.User("wald", "wald", may_write=True), OK, "user wald"),
    Row(log.RIGHTS, replace(RIGHTS, mode="0777", is_open=True), FAIL, "0777"),
    Row(log.RIGHTS, replace(RIGHTS, open_above=("/data",)), FAIL, "/data"),
    Row(log.RIGHTS, replace(RIGHTS, strange_above=("/data",)), WARN, "may replace"),
    Row(log.RIGHTS, RIGHTS, OK, "wald:wald"),
    Row(log.SOCKET, log.SocketPath("/" + "x" * 107, 108), FAIL, "108 bytes"),
    Row(log.SOCKET, log.SocketPath("/" + "x" * 106, 107), OK, "107 of 107"),
    Row(log.RUNNING, log.Running(), OK, "no daemon"),
    Row(log.RUNNING, replace(RUNNING, answers=None), UNKNOWN, "may not ask"),
    Row(log.RUNNING, replace(RUNNING, answers=False), FAIL, "does not answer"),
    Row(log.RUNNING, replace(RUNNING, degraded_by="segments"), FAIL, "segments"),
    Row(log.RUNNING, RUNNING, OK, "it answers"),
    Row(log.FILES, log.Files(9, unsafe_cursors=("/data/a.cursor: a symbolic link",)), FAIL, "a.cursor"),
    Row(log.FILES, log.Files(9, unsafe=("/data/head: a symbolic link",)), FAIL, "a symbolic link"),
    Row(log.FILES, log.Files(9, strange=tuple("abcde")), WARN, "a; b; c and 2 more"),
    Row(log.FILES, log.Files(9, troubles=("in: not a FIFO",)), WARN, "not a FIFO"),
    Row(log.FILES, log.Files(9, is_complete=False), UNKNOWN, "there are more"),
    Row(log.FILES, log.Files(9), OK, "9 names"),
    Row(space.SPACE, replace(SPACE, free_bytes=MIB, pinned_bytes=MIB), FAIL, "1.0 MiB are pinned"),
    Row(space.SPACE, replace(SPACE, free_bytes=MIB), FAIL, "are needed to take input"),
    Row(space.SPACE, replace(SPACE, full_in_seconds=3600.0), WARN, "full in 1 h"),
    Row(space.SPACE, replace(SPACE, full_in_seconds=200000.0), OK, "full in 2 d"),
    Row(space.SPACE, replace(SPACE, segment_bytes=MIB), WARN, "disk is small"),
    Row(space.SPACE, SPACE, OK, "100.0 GiB free"),
    Row(space.INODES, space.Inodes(0, 0), OK, "does not limit"),
    Row(space.INODES, space.Inodes(0, 5000), FAIL, "no file can be made"),
    Row(space.INODES, space.Inodes(999, 5000), WARN, "999 of 5000"),
    Row(space.INODES, space.Inodes(1000, 5000), OK, "1000 of 5000"),
    Row(space.QUOTA, space.Quota(()), OK, "no quota"),
    Row(space.QUOTA, space.Quota(("usrquota",)), UNKNOWN, "usrquota"),
]


def test_facts_are_judged() -> None:
    for row in TABLE:
        found = row.check.judge(row.facts, Path("/data/log"), Path("/data"))

        assert (found.outcome, row.words in found.message) == (row.outcome, True), found
        assert "{" not in found.message + found.advice


def test_every_rule_is_reached() -> None:
    """The table above leaves out none; so no rule is hidden by those before it."""
    for check, _ in CHECKS:
        reached = {check.rules.index(check.rule(row.facts)) for row in TABLE if row.check is check}

        assert reached == set(range(len(check.rules))), check.name


def test_what_is_wrong_comes_with_something_to_type() -> None:
    for check, _ in CHECKS:
        assert [rule.message for rule in check.rules if rule.outcome in (WARN, FAIL) and not rule.advice] == []


def test_a_hint_names_the_root_as_a_shell_takes_it() -> None:
    found = space.SPACE.judge(replace(SPACE, free_bytes=1, pinned_bytes=1), Path("/srv/my log"), Path("/srv/my log"))

    assert found.advice.startswith("wald --root '/srv/my log' explain; df -h '/srv/my log'")


def test_checks_name_the_promises_that_rest_on_them() -> None:
    """By their words: their numbers change when a promise is added."""
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
        if names := {check.name for check, _ in CHECKS if int(number) in check.promises}:
            found[next((words for words in concerned if words in promise), promise)] = names
    assert found == concerned


def test_names_of_checks_are_different() -> None:
    names = [check.name for check, _ in CHECKS]

    assert sorted(names) == sorted(set(names))


def test_the_page_explains_every_outcome() -> None:
    assert {row[0].strip("`") for row in rows("docs/doctor.md", "## Outcomes and exit codes")} == set(Outcome)
