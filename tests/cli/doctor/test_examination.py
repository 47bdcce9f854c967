"""The doctor on real directories, hosts and file systems: it detects faults, and agrees with the daemon."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from examining import examine, scratch_directories
from full_disk import fill, small_file_system
from mounting import MIB, disk, mounted, overlay
from running import Daemon, command, output_of, refusal_of, run, wald
from users import MEMBER, OWNER, STRANGER, needs_root, place_of_owner

from wald.cli.doctor.medium import Mount, parse_mounts


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log without a daemon."""
    output_of("init", "--root", tmp_path / "log")
    return tmp_path / "log"


@pytest.fixture
def open_place() -> Iterator[Path]:
    with place_of_owner() as place:
        yield place


def test_the_text_says_the_same_and_sums_it_up(log: Path) -> None:
    found, done = examine(log), wald("doctor", "--root", log)
    table, _, summary = done.stdout.decode().partition("\n\n")
    rows = [line.split()[:2] for line in table.splitlines() if line[0] != " "]

    assert done.returncode == found.code
    assert rows == [[check["outcome"], name] for name, check in found.checks.items()]
    assert " ".join(summary.split()).startswith(f"{log}: ")
    assert " ".join(summary.split()).endswith("No promise is in doubt.")
    assert "\x1b" not in done.stdout.decode()
    outcomes = {check["outcome"] for check in found.checks.values()}
    assert found.code == (14 if "warn" in outcomes else 0)

    log.chmod(0o777)
    done = wald("doctor", "--root", log)
    assert done.returncode == 13
    printed = " ".join(done.stdout.decode().split())  # only these depend on rights; a slow disk may add text
    assert re.search(r"Promises of docs/guarantees.md broken here: 2, 10[.;]", printed), printed


def test_checks_that_say_the_same_are_one_row(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    printed = " ".join(wald("doctor", "--root", tmp_path).stdout.decode().split())

    assert printed.count("not tested") == 1
    assert "also replace, links, locks, allocation, mapping, fifo, names, events" in printed


def test_a_root_that_is_not_there_is_examined_above_with_the_rights_of_its_parents(tmp_path: Path) -> None:
    # A root that is not there is examined above.
    found = examine(tmp_path / "not" / "there")
    assert (found.failed, found.outcome("replace")) == (set(), "ok")
    assert found.measured("root") | {"removed": 0} == {
        "kind": "absent",
        "at": str(tmp_path),
        "error": "",
        "hint": "",
        "removed": 0,
    }
    assert os.listdir(tmp_path) == []

    # A parent in which every user may rename is found.
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found = examine(tmp_path / "open" / "log")
    assert found.failed == {"rights"}
    assert found.measured("rights")["open_above"] == [str(tmp_path / "open")]
    (tmp_path / "open").chmod(0o1777)
    assert examine(tmp_path / "open" / "log").outcome("rights") == "ok"


@pytest.mark.parametrize("made", ["file", "foreign", "dangling", "in a file"])
def test_what_cannot_be_a_root_is_left_alone(tmp_path: Path, made: str) -> None:
    root = tmp_path / "root"
    match made:
        case "file" | "in a file":
            root.write_text("")
        case "foreign":
            root.mkdir()
            (root / "thesis.tex").write_text("")
        case "dangling":
            root.symlink_to(tmp_path / "nowhere")
    found = examine(root / "log" if made == "in a file" else root)

    assert "root" in found.failed
    assert str(root) in found.message("root")
    assert found.outcome("replace") == "skipped"
    assert not (tmp_path / "nowhere").exists()


def test_what_another_user_can_have_planted_is_named_and_not_followed(log: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("")
    (log / "head").symlink_to(elsewhere / "secret")
    (log / "quarantine").rmdir()
    (log / "quarantine").symlink_to(elsewhere)
    (log / "routes" / "linked").symlink_to(elsewhere)
    os.mkfifo(log / "segments" / "00000000000000000001.wal")
    os.link(log / "log.json", log / "transfers")
    (log / "ledger" / "segments.jsonl").touch()
    (log / "ledger" / "segments.jsonl").chmod(0o666)
    found = examine(log)
    unsafe = dict(each.split(": ", 1) for each in found.measured("files")["unsafe"])

    assert found.failed == {"root", "files"}
    assert found.outcome("replace") == "skipped"  # a daemon would not write here
    assert {path.removeprefix(f"{log}/") for path in unsafe} == {
        "head",
        "quarantine",
        "routes/linked",
        "segments/00000000000000000001.wal",
        "transfers",
        "ledger/segments.jsonl",
    }
    assert not any("secret" in str(each) for each in found.measured("files").values())
    assert "every user may change it" in unsafe[str(log / "ledger/segments.jsonl")]


def test_names_that_are_not_walds_are_warnings(log: Path) -> None:
    (log / "notes.txt").write_text("")
    output_of("route", "add", "a", "--fifo", "--root", log)
    (log / "routes" / "a" / "core.123").write_text("")
    found = examine(log)

    assert (found.failed, found.outcome("files")) == (set(), "warn")
    assert sorted(found.measured("files")["strange"]) == [str(log / "notes.txt"), str(log / "routes/a/core.123")]


def test_a_socket_or_settings_that_the_daemon_would_refuse_are_found(tmp_path: Path) -> None:
    # A socket that the daemon could not make is found.
    root = tmp_path / ("long" * 30)
    found = examine(root)
    code, _, _ = refusal_of("run", "--root", root)
    assert (code, found.failed) == (2, {"socket"})
    assert examine(root, env={"WALD_SOCKET": "/run/wald.sock"}).outcome("socket") == "ok"

    # Settings are judged as the daemon judges them.
    config = tmp_path / "wald.toml"
    config.write_text('sync = "commit"\nsegment_max_byte = 5\n')
    found = examine(tmp_path / "log", "--config", config)
    _, message, hint = refusal_of("run", "--root", tmp_path / "log", "--config", config)
    assert found.failed == {"settings"}
    assert (found.message("settings"), found.checks["settings"]["advice"]) == (message, hint)


def test_limits_that_are_too_small_are_found_also_those_of_the_daemon_that_runs(log: Path) -> None:
    # A limit of files that is too small is found.
    prlimit = shutil.which("prlimit")
    assert prlimit
    found = examine(log, prefix=[prlimit, "--nofile=100:100", "--fsize=2097152:2097152"])
    assert found.failed == {"limits"}
    assert "2097152 bytes" in found.message("limits")
    found = examine(log, prefix=[prlimit, "--nofile=100:100"])
    assert (found.outcome("limits"), found.measured("limits")["open_files"]) == ("warn", 100)

    # Limits are those of the daemon that runs.
    with Daemon(log, prefix=[prlimit, "--nofile=150:150"]):
        found = examine(log)
    assert (found.outcome("limits"), found.measured("limits")["open_files"]) == ("warn", 150)


@needs_root
def test_fifos_beyond_the_limit_of_a_user_are_counted(open_place: Path) -> None:
    """Root has no limit; the limit of other users is pipe-user-pages-soft."""
    root = open_place / "log"
    done = run([*OWNER.prefix, *command("init", "--root", root)])
    assert done.returncode == 0, done.stderr
    limit = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())
    for number in range(limit * resource.getpagesize() // (1 << 20) + 1):
        os.makedirs(root / "routes" / f"r{number}")
        os.mkfifo(root / "routes" / f"r{number}" / "in")

    assert examine(root, prefix=OWNER.prefix).outcome("pipes") == "warn"
    assert examine(root).outcome("pipes") == "ok"


@needs_root
def test_a_user_who_may_only_read_gets_what_can_be_read(open_place: Path) -> None:
    with Daemon(open_place / "log", prefix=OWNER.prefix) as daemon:
        output_of("route", "add", "a", "--root", daemon.root)
        found = examine(daemon.root, prefix=MEMBER.prefix)

    assert found.failed == set()
    assert (found.outcome("user"), found.outcome("replace"), found.outcome("sync")) == ("unknown", "skipped", "skipped")
    assert (found.outcome("mount"), found.outcome("space"), found.outcome("daemon")) == ("ok", "ok", "ok")
    assert f"runuser -u {OWNER.user_id} --" in found.checks["user"]["advice"]


@needs_root
@pytest.mark.parametrize("name", ["log", "parent/log", "link"])
def test_what_a_stranger_may_not_see_is_not_called_missing(open_place: Path, name: str) -> None:
    (open_place / "parent").mkdir(mode=0o700)
    (open_place / "link").symlink_to(open_place / "parent/log")
    for root in ("log", "parent/log"):
        output_of("init", "--root", open_place / root)
        (open_place / root).chmod(0o750)
    found = examine(open_place / name, prefix=STRANGER.prefix)
    messages = {check: found.message(check) for check in ("files", "daemon", "service", "replace")}

    assert found.failed == {"root"}
    assert found.measured("root")["kind"] == "hidden"
    assert {found.outcome(check) for check in ("files", "daemon", "service")} == {"unknown"}
    assert [each for each in messages.values() if "not permitted to see" not in each] == []
    if name == "log":
        assert f"permission denied by {open_place / 'log'}" in found.message("root")


@needs_root
def test_root_learns_that_the_daemon_is_another_user(open_place: Path) -> None:
    done = run([*OWNER.prefix, *command("init", "--root", open_place / "log")])
    assert done.returncode == 0, done.stderr
    found = examine(open_place / "log")

    assert (found.outcome("user"), found.outcome("replace")) == ("unknown", "ok")
    assert scratch_directories(open_place / "log") == []


def test_a_daemon_that_takes_no_input_is_named(log: Path) -> None:
    """The disk counts as full even if other programs free space, because the reserve is 8 GiB above the free space."""
    status = os.statvfs(log)
    reserve = status.f_bavail * status.f_frsize + (8 << 30)
    with Daemon(log, env={"WALD_FREE_SPACE_MIN": str(reserve)}):
        found = examine(log)

    assert {"daemon", "space"} <= found.failed
    assert "accepts no input" in found.message("daemon")


def test_no_check_is_left_out_when_time_is_over(log: Path) -> None:
    found = examine(log, "--timeout", "0.02s")

    assert [name for name, check in found.checks.items() if check["outcome"] == "unknown"]
    assert found.checks.keys() == examine(log).checks.keys()
    assert "--timeout" in found.checks["spark"]["advice"]
    assert scratch_directories(log) == []


TRIED = {"replace", "links", "locks", "mapping", "fifo", "names", "events"}


def test_an_ext4_is_judged_by_its_options_and_by_what_it_does(tmp_path: Path) -> None:
    # An ext4 holds every promise.
    with disk(tmp_path, "ext4") as at:
        found = examine(at / "log")
    assert found.failed == set()
    assert {found.outcome(check) for check in (*TRIED, "mount", "allocation", "sync")} == {"ok"}
    assert found.measured("mount")["type"] == "ext4"
    assert found.measured("device")["backing"] == str(tmp_path / "image")
    measured = found.measured("sync")
    assert 0 < measured["p50_seconds"] <= measured["p90_seconds"] <= measured["p99_seconds"] <= measured["max_seconds"]
    assert measured["device_writes"] >= measured["syncs"]

    # An ext4 without barriers is found by its name and by what it does.
    with disk(tmp_path, "ext4", "nobarrier") as at:
        found = examine(at / "log")
    assert (found.code, found.failed) == (13, {"mount", "sync"})
    assert "nobarrier" in found.message("mount")
    assert (found.measured("sync")["device_flushes"], found.measured("sync")["syncs"] > 100) == (0, True)

    # Options that only cost are warnings.
    with disk(tmp_path, "ext4", "data=writeback") as at:
        found = examine(at / "log")
    assert (found.failed, found.outcome("mount")) == (set(), "warn")
    assert "data=writeback" in found.message("mount")


def test_btrfs_does_not_reserve_space(tmp_path: Path) -> None:
    with disk(tmp_path, "btrfs") as at:
        found = examine(at / "log")
        left = os.listdir(at)

    assert (found.failed, found.outcome("allocation")) == (set(), "warn")
    assert "copies on write" in found.message("allocation")
    assert found.outcome("inodes") == "ok"
    assert left == []


def test_a_tmpfs_survives_no_crash_of_the_host_and_the_layer_of_a_container_is_a_warning(tmp_path: Path) -> None:
    # A tmpfs survives no crash of the host.
    with small_file_system(tmp_path / "disk", 512 * MIB) as at:
        found = examine(at / "log")
        left = os.listdir(at)
    assert (found.code, found.failed) == (13, {"mount"})
    assert found.checks["mount"]["promises"] == [1, 2]
    assert found.outcome("sync") == "skipped"
    assert {found.outcome(check) for check in TRIED} == {"ok"}
    assert left == []

    # The layer of a container is a warning.
    with overlay(tmp_path) as at:
        found = examine(at / "log")
    assert found.outcome("mount") == "warn"
    assert "container" in found.message("mount")
    assert {found.outcome(check) for check in TRIED} == {"ok"}


def test_nothing_is_tried_where_no_file_can_be_created(tmp_path: Path) -> None:
    # Nothing is tried on a read only mount.
    there = tmp_path / "there"
    there.mkdir()
    with mounted(tmp_path / "disk", "--bind", there) as at:
        subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
        found = examine(at)
    assert found.failed == {"mount"}
    assert "read-only" in found.message("mount")
    assert {found.outcome(check) for check in (*TRIED, "sync", "allocation", "user")} == {"skipped"}
    assert "because the file system is read-only" in found.message("replace")

    # Nothing is created in a file system of the kernel.
    found = examine(Path("/proc/log"))
    assert found.outcome("mount") == "fail"
    assert "belongs to the kernel" in found.message("mount")
    assert {found.outcome(check) for check in TRIED} == {"skipped"}
    assert "the kernel stores no files here" in found.message("replace")


def test_a_disk_without_room_or_inodes_is_reported_and_given_no_more(tmp_path: Path) -> None:
    # A full disk is reported and given no more.
    with small_file_system(tmp_path / "disk", 4 * MIB) as at:
        fill(at / "filling")
        found = examine(at / "log")
        left = scratch_directories(at)
    assert found.failed == {"mount", "allocation", "space"}
    for check in ("sync", "replace", "links", "mapping"):
        assert (found.outcome(check), found.message(check)) == ("skipped", "not tested: No space left on device")
    assert found.measured("space")["free_bytes"] == 0
    assert left == []

    # A disk without inodes is reported.
    with mounted(tmp_path / "another", "-t", "tmpfs", "-o", "size=512m,nr_inodes=2", "tmpfs") as at:
        (at / "last").touch()
        found = examine(at / "log")
    assert found.failed == {"mount", "inodes"}
    assert found.outcome("replace") == "skipped"
    assert "No space left" in found.message("replace")


def test_what_a_mount_point_is_called_is_read_as_the_kernel_writes_it() -> None:
    """Spaces are octal escapes, the number of fields before the hyphen varies, and one read-only flag is enough."""
    line = "36 35 98:0 /a /disks/a\\040b ro,noatime shared:7 master:1 - ext4 /dev/sda1 rw,nobarrier\n"

    assert list(parse_mounts(line)) == [Mount("ext4", "/dev/sda1", "/disks/a b", ("ro", "noatime", "nobarrier"))]


def test_the_mount_that_hides_another_is_the_one_that_counts(tmp_path: Path) -> None:
    at = tmp_path / "disk"
    with small_file_system(at, MIB), mounted(at, "-t", "tmpfs", "-o", "size=7m", "tmpfs"):
        found = examine(at)

    assert "size=7168k" in found.measured("mount")["options"]
