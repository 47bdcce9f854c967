"""Another log, an older copy or a planted file at the path: a running process reports it by name."""

import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from damage import flip_bit
from logs import START_NS, Built
from repairing import repair

from wald.checking.checker import Level
from wald.checking.dump import dump
from wald.checking.verifier import verify
from wald.errors import Damaged, Gone, Refused, Replaced, WaldError
from wald.files.routes import add_route
from wald.format.head import decode_head
from wald.format.names import Kind
from wald.log import Log
from wald.retention.cursors import read_cursors
from wald.retention.progress import read_progress
from wald.segments.durable_end import OpenHead, read_head
from wald.writing.daemon_lock import Lock

LATER_NS = START_NS + 3600 * 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def restart(root: Path, epoch: int) -> Built:
    return Built(root, epoch=epoch, now_ns=LATER_NS + epoch)


def restore(copy: Path, root: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(copy, root)


def write(built: Built, *texts: str) -> None:
    for text in texts:
        built.lines("a", [text.encode()])


def seen(log: Log) -> list[bytes]:
    return [record.value for record in log.records("a")]


def test_restarts_cuts_and_repairs_are_no_other_past(root: Path) -> None:
    built = Built(root)
    write(built, "1")
    log = built.log
    for epoch in (2, 3, 5):
        assert len(seen(log)) == built.last
        built.cut(seal=True)
        built = restart(root, epoch)
        log.require_continuity()
        write(built, f"of epoch {epoch}")
    assert len(seen(log)) == 4


def test_a_head_that_stays_open_is_that_at_the_path(root: Path, copy: Path) -> None:
    built = Built(root)
    write(built, "1")
    shutil.copytree(root, copy)
    head = OpenHead(built.log.root)
    for text in ("2", "3"):
        write(built, text)
        assert head.read() == read_head(built.log.root)
    restore(copy, root)
    older = head.read()
    assert older is not None
    assert older.sequence == 1
    built.log.root.head.write_bytes(b"torn")
    assert head.read() is None
    built.log.root.head.unlink()
    assert head.read() is None
    head.close()


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-150], lambda data: data[:-300] + bytes(300)], ids=["cut", "zeros"]
)
def test_a_repair_that_gave_up_the_end_is_no_other_past(root: Path, spoil: Callable[[bytes], bytes]) -> None:
    built = Built(root)
    write(built, *(f"{number} {'.' * 100}" for number in range(20)))
    log = built.log
    log.require_continuity()
    built.crash()
    head = log.head()
    assert head is not None
    path = built.path(1, Kind.RAW)
    path.write_bytes(spoil(path.read_bytes()[: head.position]))
    repair(root)
    built = restart(root, 8)
    assert built.report.given_up
    write(built, "after")
    log.require_continuity()


def older_copy(root: Path, copy: Path) -> None:
    """Nothing but an older copy, with no start since."""
    restore(copy, root)


def started_copy(root: Path, copy: Path) -> None:
    """A start of the copy, with fewer records than were seen."""
    restore(copy, root)
    restart(root, 2)


def longer_copy(root: Path, copy: Path) -> None:
    """A start of the copy that has got more records by now than were seen."""
    restore(copy, root)
    write(restart(root, 2), *(f"new {number}" for number in range(9)))


@pytest.mark.parametrize("replace", [older_copy, started_copy, longer_copy])
def test_an_older_copy_is_noticed(root: Path, copy: Path, replace: Callable[[Path, Path], None]) -> None:
    built = Built(root)
    write(built, "1", "2")
    shutil.copytree(root, copy)
    write(built, "3", "4")
    log = built.log
    assert len(seen(log)) == 4

    replace(root, copy)
    for act in (log.view, log.head, lambda: log.cursor("a"), lambda: log.set_cursor("a", 1), lambda: seen(log)):
        with pytest.raises(Replaced, match="an older copy of the log was restored here") as error:
            act()
        assert (error.value.exit_code, error.value.hint.startswith("restart this program")) == (16, True)
    assert Log(root).cursor("a").sequence == 0
    assert seen(Log(root))[:2] == [b"1", b"2"]


def test_a_start_is_told_from_another_one_of_the_same_epoch(root: Path, copy: Path) -> None:
    """The copy was made before the start that this process knows, and has another start of that number."""
    write(Built(root), "1")
    shutil.copytree(root, copy)
    built = restart(root, 2)
    write(built, "2")
    log = built.log
    log.view()

    restore(copy, root)
    built = Built(root, epoch=2, now_ns=LATER_NS + 77)
    write(built, "other 2", "other 3")
    with pytest.raises(Replaced, match="epoch 2 belongs to another start of the daemon"):
        log.view()


@pytest.mark.parametrize("repaired", [False, True])
def test_pieces_that_were_seen_and_are_gone_are_noticed(root: Path, copy: Path, *, repaired: bool) -> None:
    """A copy is from before a piece that a reader has seen: joined with a later one, it would forge a record."""
    built = Built(root)
    if repaired:
        write(built, "1", "2")
        built.crash()
        flip_bit(built.path(1, Kind.RAW), b"2\n")
        repair(root)
        built = restart(root, 8)
    built.piece("a", b"begins ", begins=True, ends=False)
    shutil.copytree(root, copy)
    built.piece("a", b", goes on", begins=False, ends=False)
    log = built.log
    log.view()
    restore(copy, root)
    restart(root, built.writer.epoch + 1).piece("a", b" and ends\n", begins=False, ends=True)
    with pytest.raises(Replaced):
        log.view()


def test_another_log_is_noticed_whatever_its_head(root: Path, tmp_path: Path) -> None:
    built = Built(root)
    write(built, "1")
    log = built.log
    log.view()
    root.rename(tmp_path / "old")
    write(Built(root), "1", "2", "3")
    for _ in range(2):
        with pytest.raises(Replaced, match="this is not the log that the process opened") as error:
            log.view()
        assert error.value.exit_code == 16


def test_a_log_that_is_gone_may_come_back(root: Path, tmp_path: Path) -> None:
    built = Built(root)
    write(built, "1")
    log = built.log
    log.view()
    root.rename(tmp_path / "away")
    for act in (log.view, log.head, lambda: log.set_cursor("a", 1)):
        with pytest.raises(Gone, match="the log is gone") as error:
            act()
        assert (error.value.exit_code, "findmnt" in error.value.hint) == (16, True)
    (tmp_path / "away").rename(root)
    assert seen(log) == [b"1"]


def test_neither_a_lost_head_nor_heads_that_threads_see_in_another_order_are_another_past(root: Path) -> None:
    """A thread may be late to compare its head when another one has compared a newer one."""
    built = Built(root)
    write(built, "1")
    log = built.log
    log.view()
    head = (root / "head").read_bytes()
    (root / "head").unlink()
    log.view()
    (root / "head").write_bytes(head)
    log.view()
    write(built, "2")
    log.view()
    log._continuity.check(decode_head(head))


def test_what_looks_damaged_in_another_log_is_not_called_so(root: Path, tmp_path: Path) -> None:
    """The reader has the directory of its log, and opens the files of the other one."""
    built = Built(root)
    for text in ("1", "2", "3"):
        write(built, text)
        built.cut(seal=True)
    damage: list[Damaged] = []
    reading = built.log.records("a", on_damage=damage.append)
    assert next(reading).value == b"1"
    root.rename(tmp_path / "old")
    write(Built(root), "of another log")
    with pytest.raises(Replaced):
        list(reading)
    assert not damage


def _number(directory: Path) -> Path:
    """A file that could be a cursor."""
    path = directory / "number"
    path.write_text("6\n")
    return path


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, chdir(path.parent):
        listening.bind(path.name)


PLANTS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "hard link": lambda path: os.link(_number(path.parents[1]), path),
    "socket": _bound,
}
PLACES = (
    "head",
    "log.json",
    "lock",
    "ledger/segments.jsonl",
    "ledger/reclaim.jsonl",
    "ledger/archive.jsonl",
    "routes/a/cursors/processed.cursor",
    "segments/00000000000000000001.wal.zst",
    "segments/00000000000000000003.wal",
    "segments/00000000000000000003.idx",
    "segments/00000000000000000005.wal",
)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A reclaimed front, a sealed, a cut and the active segment."""
    built = Built(tmp_path / "root")
    for number in range(3):
        built.lines("a", [b"%d" % number, b"x"])
        if number < 2:
            built.cut()
        if number == 0:
            built.seal()
    built.log.set_cursor("a", 2)
    (built.root.ledger / "reclaim.jsonl").touch()
    (built.root.ledger / "archive.jsonl").touch()
    return built


def plant(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    PLANTS[what](path)


def in_time(call: Callable[[], object], seconds: float = 20) -> object:
    """Return the result or the error of ``call``; fail if it blocks."""
    got: list[object] = []

    def run() -> None:
        try:
            got.append(call())
        except (WaldError, OSError) as error:
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits"
    assert got, "it fell over"
    return got[0]


EVERYWHERE = ("fifo", "directory")  # which waits, and which cannot be read; the others in the places that differ
SOME = ("head", "routes/a/cursors/processed.cursor", "segments/00000000000000000001.wal.zst")


@pytest.mark.parametrize(
    ("place", "what"), [(place, what) for place in PLACES for what in PLANTS if what in EVERYWHERE or place in SOME]
)
def test_whoever_looks_at_the_log_does_not_wait(built: Built, place: str, what: str) -> None:
    log, root, path = built.log, built.root, built.root.path / place
    plant(path, what)

    calls: dict[str, Callable[[], object]] = {
        "read": lambda: list(log.records(on_damage=lambda _: None)),
        "read from": lambda: list(log.records("a", 2, on_damage=lambda _: None)),
        "read on": lambda: list(log.records("a", "cursor", on_damage=lambda _: None)),
        "where": lambda: log.where(1),
        "cursor": lambda: log.cursor("a"),
        "progress": lambda: read_progress(built.view),
        "dump": lambda: list(dump(path)),
    }
    for name, call in calls.items():
        outcome = in_time(call)
        if isinstance(outcome, WaldError):
            assert str(path) in outcome.message, (name, outcome.message)
    found = in_time(lambda: list(verify(root)))
    if place not in ("lock", "segments/00000000000000000003.idx"):  # of which verify reads nothing, or needs nothing
        assert isinstance(found, list), found
        assert any(finding.level is Level.ERROR and path.name in str(finding.path) for finding in found)


@pytest.mark.parametrize("what", PLANTS)
def test_a_planted_cursor_frees_nothing_and_is_not_replaced_unasked(built: Built, what: str) -> None:
    """A hard link counts again when its group moves it, because it is replaced then, and the other name stays."""
    log, path = built.log, built.root.cursor("a", "processed")
    plant(path, what)
    (cursor,) = read_cursors(built.root, "a", log_id=built.log_id, head_sequence=6)
    assert (cursor.path, cursor.effective) == (path, 0)
    assert str(path) in cursor.message
    if what == "hard link":
        assert log.set_cursor("a", 6).effective == 6
        assert (path.parents[1] / "number").read_text() == "6\n"
        return
    with pytest.raises(Refused, match="replaced only on request"):
        log.set_cursor("a", 6)
    if what != "directory":
        assert log.set_cursor("a", 6, rewind=True).effective == 6
        assert not path.is_symlink()


def test_a_planted_lock_of_a_consumer_is_not_used(built: Built) -> None:
    add_route(built.root, built.disk, "a", consumers="group")
    before = len(os.listdir("/proc/self/fd"))
    for number, what in enumerate(PLANTS):
        path = built.root.cursor_directory("a") / f"g{number}.drain"
        plant(path, what)
        outcome = in_time(lambda path=path: built.disk.open_lock(path))  # type: ignore[misc]
        assert isinstance(outcome, OSError | WaldError), outcome
        path.rmdir() if what == "directory" else path.unlink()
        (path.parents[1] / "number").unlink(missing_ok=True)
    path = built.root.cursor_directory("a") / "g.drain"
    path.touch()
    os.chown(path, 54321, 54321)  # another consumer
    with pytest.raises(PermissionError):
        built.disk.open_lock(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_flood_of_files_holds_back_and_is_not_read(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wald.files.layout.GROUP_FILES_MAX", 10)
    add_route(built.root, built.disk, "a", consumers="group")
    for number in range(11):
        (built.root.cursor_directory("a") / f"g{number}.cursor").write_text("6\n")
    (cursor,) = read_cursors(built.root, "a", log_id=built.log_id, head_sequence=6)
    assert (cursor.effective, cursor.path) == (0, built.root.cursor_directory("a"))
    assert "more than 10 files" in cursor.message


def test_a_start_does_not_wait_for_a_planted_head_or_segment(built: Built) -> None:
    built.crash()
    for path in (built.root.head, built.path(5, Kind.RAW)):
        plant(path, "fifo")
        in_time(lambda: Lock(built.root, built.disk, now="now").release())
        in_time(lambda: Built(built.root.path, epoch=2))
