"""The daemon's lock, and temporary files: those of killed programs are removed, those of running programs stay."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import Died
from logs import Built, Unsynced
from reclaiming import Reclaimer
from repairing import repair
from running import eventually, wald
from running import reclaim as reclaim_command

from wald.errors import Locked
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.files.locks import abandoned_files, leftovers, remove_leftovers
from wald.writing.daemon_lock import Lock
from wald.writing.sealing import remove_temporaries

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(tmp_path / "log", Disk(), now=NOW)


def take(root: Root) -> Lock:
    return Lock(root, Disk(), now=NOW)


def test_a_second_writer_is_told_who_the_first_is(root: Root) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    lock = take(root)
    before = root.lock.read_bytes()
    who = rf"{re.escape(str(root.lock))}: .*pid {os.getpid()} on .+, epoch 1, since {NOW}"
    for _ in range(3):
        with pytest.raises(Locked, match=who):
            take(root)
    assert lock.is_ours()
    assert root.lock.read_bytes() == before
    lock.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("known", ["segment", "head"])
def test_the_epoch_grows_though_the_lock_file_is_lost(root: Root, known: str) -> None:
    """The head and the newest segment know it too."""
    built = Built(root.path, epoch=7)
    built.lines("web", [b"1"])
    if known == "head":
        for segment in list_segments(root).segments:
            segment.path.write_bytes(b"not a header")
    else:
        root.head.write_bytes(b"not a head")
    for content in (None, b"", b"nonsense", b"[]", b'{"epoch": "9"}'):
        root.lock.unlink(missing_ok=True)
        if content is not None:
            root.lock.write_bytes(content)
        lock = take(root)
        assert lock.epoch == 8
        lock.release()


def test_a_writer_that_was_not_turned_away_takes_it_from_the_first(root: Root) -> None:
    """Somebody deleted the file, or the file system let another one have it too."""

    class Unlocked(Disk):
        def lock(self, descriptor: int, *, shared: bool = False) -> bool:
            return True

    first = take(root)
    root.lock.unlink()
    assert not first.is_ours()
    second = take(root)
    assert (first.is_ours(), second.is_ours()) == (False, True)
    third = Lock(root, Unlocked(), now=NOW)
    assert third.epoch == second.epoch + 1
    assert (second.is_ours(), third.is_ours()) == (False, True)
    for lock in (first, second, third):
        lock.release()


OLD_NS = 1_700_000_000 * 10**9
STOPPED_IN_REPLACE = """
import os, signal, sys
from pathlib import Path
from wald.files.disk import Disk

class Stopping(Disk):
    def sync(self, descriptor):
        os.kill(os.getpid(), signal.SIGSTOP)
        super().sync(descriptor)

    def write(self, descriptor, buffers, offset):
        super().write(descriptor, buffers, offset)
        os.utime(descriptor, (0, 0))

Stopping().replace(Path(sys.argv[1]), b"1\\n")
"""


class Killed(Unsynced):
    """A disk on which the process ends before a file gets its name."""

    def rename(self, source: Path, target: Path) -> None:
        raise Died


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    built = Built(tmp_path / "log")
    for _ in range(3):
        built.lines("a", [b"x" * 20_000] * 2, cut=True)
    built.seal()
    built.log.set_cursor("a", 1)
    yield built
    built.crash()


class Scanned(Disk):
    """A disk where a cleaner looks between the steps that create and lock a file, and removes before its rename."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.found: list[Path] = []

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        os.utime(path, ns=(OLD_NS, OLD_NS))
        self.found = leftovers(self._root, Disk())
        return descriptor

    def rename(self, source: Path, target: Path) -> None:
        os.utime(source, ns=(OLD_NS, OLD_NS))
        remove_leftovers(self.found, Disk())
        super().rename(source, target)


def leave(path: Path, *, written_ns: int = OLD_NS) -> Path:
    """Leave the temporary file of a process that was killed while it replaced a file; return its path."""
    before = set(path.parent.iterdir())
    with pytest.raises(Died):
        Killed().replace(path, b"unfinished")
    (left,) = set(path.parent.iterdir()) - before
    os.utime(left, ns=(written_ns, written_ns))
    return left


def places(built: Built) -> list[Path]:
    root = built.root
    return [
        root.cursor("a", "g"),
        root.cursor_directory("a") / "g.work",
        root.retired("a"),
        root.ledger / "reclaim.jsonl",
        root.identity,
    ]


def remove_by_start(built: Built) -> None:
    remove_temporaries(built.root, built.disk)


def remove_by_repair(built: Built) -> None:
    repair(built.root.path, accept_loss=False)


def remove_by_reclaim(built: Built) -> None:
    reclaim_command(built.root.path)


@pytest.mark.parametrize("removed_by", [remove_by_start, remove_by_repair, remove_by_reclaim])
def test_leftovers_of_killed_programs_are_removed(built: Built, removed_by: Callable[[Built], None]) -> None:
    left = [leave(path) for path in places(built)]
    removed_by(built)
    assert [path for path in left if path.exists()] == []
    assert built.root.cursor("a", "processed").exists()


def test_group_remove_removes_what_killed_owners_of_the_group_have_left(built: Built) -> None:
    work = "import wald,sys; k = wald.WorkGroup(sys.argv[1], 'a', 'g'); k.lease('w', 1); k.close()"
    subprocess.run([sys.executable, "-c", work, built.root.path], check=True)
    left = [leave(built.root.cursor("a", "g")), leave(built.root.cursor_directory("a") / "g.work")]
    done = wald("group", "remove", "a", "g", "--root", built.root.path)
    assert done.returncode == 0, done.stderr
    assert [path for path in left if path.exists()] == []


def test_a_file_that_a_process_is_writing_stays_and_gets_its_name(built: Built) -> None:
    target = built.root.cursor("a", "g")
    writer = subprocess.Popen([sys.executable, "-c", STOPPED_IN_REPLACE, target])
    try:
        eventually(lambda: Path(f"/proc/{writer.pid}/stat").read_text().split()[2] == "T")
        assert len(list(target.parent.glob("g.cursor.*.tmp"))) == 1
        assert leftovers(built.root, Disk()) == []
        remove_by_start(built)
    finally:
        writer.send_signal(signal.SIGCONT)
        assert writer.wait() == 0
    assert target.read_bytes() == b"1\n"
    assert abandoned_files(target.parent, Disk()) == []


def test_a_file_found_before_its_writer_locked_it_stays_and_gets_its_name(built: Built) -> None:
    disk = Scanned(built.root)
    disk.replace(built.root.cursor("a", "g"), b"1\n")
    assert len(disk.found) == 1
    assert built.root.cursor("a", "g").read_bytes() == b"1\n"


def test_a_file_written_within_the_last_minute_or_in_the_future_stays(built: Built) -> None:
    left = leave(built.root.cursor("a", "g"), written_ns=time.time_ns() + 3600 * 10**9)
    remove_leftovers([*leftovers(built.root, Disk()), left], Disk())
    remove_by_repair(built)
    assert left.exists()


def test_a_start_leaves_the_file_that_a_running_reclaim_is_making(built: Built) -> None:
    made = built.root.segments / "00000000000000000001.wal.zst.shrunk.tmp"
    made.write_bytes(b"")
    reclaimer = Reclaimer(built.root, Unsynced())
    assert remove_temporaries(built.root, built.disk) == []
    assert made.exists()
    reclaimer.ledger.close()
    assert remove_temporaries(built.root, built.disk) == [made.name]
    assert not made.exists()


def test_a_repair_removes_the_copies_of_repairs_that_were_killed(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "wald-repair-killed"
    left.mkdir()
    (left / "log.json").write_bytes(b"{}")
    built.root.identity.unlink()  # so that the repair makes a copy
    repair(built.root.path, accept_loss=False)
    assert list(tmp_path.glob("wald-repair-*")) == []
