"""A FIFO, a directory or a link planted in place of a file of the log is reported by name; no process waits for it."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from logs import Built

from wald.checking.checker import Level
from wald.checking.dump import dump
from wald.checking.verifier import verify
from wald.errors import Refused, WaldError
from wald.files.routes import add_route
from wald.format.names import Kind
from wald.retention.cursors import read_cursors
from wald.retention.progress import read_progress
from wald.writing.daemon_lock import Lock


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
