"""The daemon restores a lost name of the active segment, so that the next start finds acknowledged records."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import stat
from contents import assert_sound, errors, values
from crashed import newest
from full_disk import fill
from running import Client, Daemon, Start, eventually, wald

from wald.daemon.pipes import readable_bytes
from wald.setting_types import MIB

DISK_BYTES = 32 * MIB


def replaced(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"a stranger")


def all_removed(path: Path) -> None:
    """The file for the next cut, too."""
    for each in path.parent.iterdir():
        each.unlink()


TAKEN = [replaced, all_removed]


@pytest.fixture
def daemon(start: Start, root: Path) -> Daemon:
    daemon = start(routes=["a"])
    assert daemon.ask("PUB a 2\nx") == "OK 1 1"
    return daemon


@pytest.mark.parametrize("taken", TAKEN)
def test_what_is_acknowledged_after_it_is_there_after_a_kill(
    daemon: Daemon, root: Path, taken: Callable[[Path], None]
) -> None:
    path = newest(root)
    taken(path)
    assert daemon.ask("PUB a 2\ny") == "OK 2 2"
    daemon.kill()
    assert f'"path": "{path}"' in daemon.log
    assert "active segment removed or replaced" in daemon.log
    daemon.start_again()

    assert values(root) == [b"x", b"y"]
    assert daemon.stop() == 0
    assert_sound(root)
    found = list((root / "quarantine").iterdir())
    assert [each.read_bytes() for each in found] == [b"a stranger"] * (taken is replaced)
    assert all(f'"quarantined": "{each}"' in daemon.log for each in found)


def test_an_idle_daemon_a_cut_and_a_stop_restore_the_name(daemon: Daemon, root: Path) -> None:
    path = newest(root)
    path.unlink()
    eventually(path.exists)
    path.unlink()
    assert daemon.ask("CUT").startswith("OK")
    assert daemon.ask("PUB a 2\ny") == "OK 2 2"
    newest(root).unlink()
    assert daemon.stop() == 0

    assert values(root) == [b"x", b"y"]


@pytest.mark.usefixtures("unsound")
@pytest.mark.parametrize(("left", "idle"), [(0, True), (100, False), (-10, False)])
def test_a_truncated_active_segment_is_reported_and_what_follows_is_kept(
    daemon: Daemon, root: Path, left: int, *, idle: bool
) -> None:
    path = newest(root)
    os.truncate(path, left if left >= 0 else stat(daemon)["position"] + left)
    with Client(daemon.socket_path) as client:
        if idle:
            eventually(lambda: "active segment truncated" in daemon.log)
        assert client.ask(b"PUB a 2\ny\n") == "OK 2 2"
    assert "active segment truncated" in daemon.log
    daemon.kill()
    daemon.start_again()
    assert newest(root) != path
    assert wald("read", "a", "--root", root, "--from", 2).stdout == b"y\n"
    assert errors(root) != []


@pytest.mark.usefixtures("unsound")
@pytest.mark.parametrize(("cut", "killed"), [(False, True), (True, False)])
def test_no_record_is_joined_without_the_pieces_that_a_truncation_has_taken(
    daemon: Daemon, root: Path, *, cut: bool, killed: bool
) -> None:
    daemon.ask("ROUTE ADD p fifo")
    holder = os.open(root / "routes/p/in", os.O_RDWR)

    def write(data: bytes) -> None:
        """Return when all of it is in the log: a pipe is emptied only then."""
        with os.fdopen(os.dup(holder), "wb") as fifo:
            fifo.write(data)
        eventually(lambda: readable_bytes(holder) == 0)

    write(b"a" * 3_000_000)  # more than the pipe holds, so its pieces are taken without a newline
    if cut:  # the next segment then has used no sequence
        assert daemon.ask("CUT") == "OK cut 3"
    path, end = newest(root), stat(daemon)["position"]
    write(b"b" * 100_000)
    os.truncate(path, end)
    eventually(lambda: "active segment truncated" in daemon.log)
    assert "pieces of unfinished records are lost, so these cannot be read: 2" in daemon.log
    if killed:
        daemon.kill()
        daemon.start_again()
    write(b"c" * 100_000 + b"\nwhole\n")
    eventually(lambda: wald("read", "p", "--root", root).stdout.endswith(b"whole\n"))
    done = wald("read", "p", "--root", root)
    assert done.stdout == b"whole\n"
    assert b"record 2 cannot be read" in done.stderr
    assert errors(root) != []
    os.close(holder)


def on_full_disk(start: Start, disk: Path, payload_bytes: int) -> Daemon:
    """A daemon with one record in its active segment and a spare file, on a full disk."""
    daemon = start(at=disk / "log", segment_max_bytes="2MiB", free_space_min="1MiB", routes=["a"])
    with Client(daemon.socket_path) as client:
        client.publish("a", b"x" * (payload_bytes - 1) + b"\n")
        assert client.reply() == "OK 1 1"
    eventually(lambda: list((daemon.root / "segments").glob("spare-*")))
    eventually(lambda: stat(daemon)["needed_bytes"] < 4 * MIB)
    fill(disk / "filler")
    return daemon


@pytest.mark.parametrize("taken", [Path.unlink, all_removed])
def test_on_a_full_disk_the_room_for_the_next_segment_is_used(
    start: Start, disk: Path, taken: Callable[[Path], None]
) -> None:
    daemon = on_full_disk(start, disk, 1 * MIB)
    path = newest(daemon.root)
    inode = path.stat().st_ino
    taken(path)
    eventually(lambda: path.exists() and path.stat().st_size > MIB and path.stat().st_ino != inode)
    assert daemon.stop() == 0

    assert len(values(daemon.root)) == 1


def test_without_room_it_is_reported_and_put_back_when_there_is_some(start: Start, disk: Path) -> None:
    """And then no request waits any more, even if nothing comes."""
    daemon = on_full_disk(start, disk, 4 * MIB)
    path = newest(daemon.root)
    path.unlink()
    eventually(lambda: "active segment removed or replaced" in daemon.log)
    assert f"{path}: the active segment was removed or replaced" in daemon.log
    assert "its records (sequence 1 and later) will be lost when the daemon exits" in daemon.log
    eventually(lambda: stat(daemon)["degraded"])
    (disk / "filler").unlink()
    # Not the path: a segment that is full is cut as soon as it has its name, and then sealed.
    eventually(lambda: "the daemon has restored the segment and its contents" in daemon.log)
    eventually(lambda: not stat(daemon)["degraded"])
    daemon.kill()
    daemon.start_again()

    assert len(values(daemon.root)) == 1


@pytest.mark.usefixtures("unsound")
def test_a_stop_that_loses_what_has_no_name_says_what(start: Start, disk: Path) -> None:
    daemon = on_full_disk(start, disk, 4 * MIB)
    path = newest(daemon.root)
    path.unlink()
    assert daemon.stop() == 7
    last = daemon.log.splitlines()[-2:]
    assert f"{path}: the active segment was removed or replaced" in last[0]
    assert "its records (sequence 1 and later)" in last[0]
    assert "free some space" in last[1]


def test_what_passes_by_itself_is_waited_for(daemon: Daemon, root: Path) -> None:
    """The daemon briefly has no descriptor left; it acknowledges nothing until it has one."""
    path = newest(root)
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PING\n").startswith("OK")  # it is accepted
        pid = daemon.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        path.unlink()
        client.publish("a", b"y\n")
        eventually(lambda: "Too many open files" in daemon.log)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert client.reply() == "OK 2 2"
    daemon.kill()
    daemon.start_again()

    assert values(root) == [b"x", b"y"]
