"""A cursor moves forward only, is replaced in one step, and pins when it cannot be trusted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from effort import steps
from logs import Built
from running import TIMEOUT_SECONDS

from wald.errors import InvalidInput, NotFound, Refused
from wald.files.disk import Disk
from wald.format.head import CursorLines, encode_cursor
from wald.retention import cursors
from wald.retention.cursor_moves import cursor_lock, move_cursor
from wald.retention.cursors import Cursor, CursorState, SlowestCursor, read_cursor

NOW = "2026-11-21T10:00:00Z"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Ten records on route a."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"x"] * 10)
    return built


def move(
    built: Built, sequence: int, group: str = "processed", *, disk: Disk | None = None, rewind: bool = False
) -> Cursor:
    log_id = built.log_id
    return move_cursor(built.root, "a", group, sequence, log_id=log_id, disk=disk or Disk(), now=NOW, rewind=rewind)


def look(built: Built, content: bytes | None) -> Cursor:
    """The cursor whose file holds ``content``."""
    if content is not None:
        built.root.cursor("a", "processed").write_bytes(content)
    return read_cursor(built.root, "a", log_id=built.log_id, head_sequence=10)


def test_backwards_is_refused_unless_asked_for(built: Built) -> None:
    move(built, 7)
    with pytest.raises(Refused, match="backwards from 7") as refusal:
        move(built, 6)
    assert "--rewind" in refusal.value.hint
    assert built.log.cursor("a").sequence == 7
    assert move(built, 6, rewind=True).sequence == 6


def test_beyond_the_head_is_refused(built: Built) -> None:
    for rewind in (False, True):
        with pytest.raises(Refused, match="beyond the head, 10"):
            move(built, 11, rewind=rewind)
    assert look(built, None).state is CursorState.ABSENT


def test_one_that_cannot_be_trusted_is_replaced_only_when_asked(built: Built) -> None:
    for content in (b"rubbish", b"11\n", encode_cursor(CursorLines(5, b"another log 0123"))):
        look(built, content)
        with pytest.raises(Refused):
            move(built, 9)
        assert built.root.cursor("a", "processed").read_bytes() == content
        assert move(built, 9, rewind=True).effective == 9


def test_bad_names_and_numbers_are_errors(built: Built) -> None:
    with pytest.raises(NotFound):
        built.log.set_cursor("nothing", 1)
    with pytest.raises(InvalidInput):
        move(built, 1, "../x")
    with pytest.raises(InvalidInput):
        move(built, -1)


def test_a_crash_before_the_rename_keeps_the_old_one(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    move(built, 3)
    for step in ("create", "write", "sync", "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(Disk, step, fail)
            with pytest.raises(OSError, match="Input/output"):
                move(built, 7)
        assert built.log.cursor("a").sequence == 3
    assert move(built, 8).sequence == 8


def test_of_two_that_move_a_cursor_at_once_the_lower_one_is_refused(built: Built) -> None:
    waits = threading.Event()

    class Awaited(Disk):
        def lock(self, descriptor: int, *, shared: bool = False) -> bool:
            is_free = super().lock(descriptor, shared=shared)
            if not is_free:
                waits.set()
            return is_free

    with ThreadPoolExecutor() as threads:
        with cursor_lock(built.root.cursor_directory("a"), Disk()):
            moving = threads.submit(move, built, 3, disk=Awaited())
            assert waits.wait(TIMEOUT_SECONDS)
            look(built, b"7\n")
        with pytest.raises(Refused, match="backwards"):
            moving.result()
    assert built.log.cursor("a").sequence == 7


def test_a_second_look_for_the_slowest_reads_only_what_has_changed(built: Built) -> None:
    for group in ("x", "y", "z"):
        move(built, 5, group)
    slowest = SlowestCursor()

    def look() -> tuple[str, int]:
        found = slowest.find(built.root, "a", log_id=built.log_id, head_sequence=10)
        return found.group, found.effective

    assert look()[1] == 5
    expected = {"x": 5, "y": 5, "z": 5}
    for group, sequence in (("x", 3), ("x", 7), ("y", 8), ("z", 9), ("y", 1)):
        move(built, sequence, group, rewind=True)
        expected[group] = sequence
        assert look()[1] == min(expected.values())
    for content, lowest in ((b"7\n", 7), (b"none", 0), (b"2\n", 2)):
        built.root.cursor("a", "y").write_bytes(content)
        assert look() == ("y", lowest) or lowest == 7
    (built.root.cursor_directory("a") / "no group.cursor").write_bytes(b"9\n")
    assert look()[1] == 0
    (built.root.cursor_directory("a") / "no group.cursor").unlink()
    for group in "xyz":
        built.root.cursor("a", group).unlink()
    assert look() == ("processed", 0)


@pytest.mark.parametrize("content", [b"5\n", b"garbage\n"])
def test_a_look_for_the_slowest_is_cheap_once_the_cursors_rest(
    built: Built, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Any owner of a cursor can leave thousands, and the daemon looks at all of them in its loop."""
    for number in range(50):
        built.root.cursor("a", f"g{number}").write_bytes(content)
    slowest = SlowestCursor()

    def look() -> None:
        slowest.find(built.root, "a", log_id=built.log_id, head_sequence=10)

    first = steps(look)
    monkeypatch.setattr(cursors, "_SETTLED_NS", 0)  # as if they had rested for long
    look()
    assert steps(look) < first / 3


def test_a_look_for_the_slowest_ends_at_a_name_that_no_group_can_have(built: Built) -> None:
    """Nothing has read less, so the other files are not read because of it."""
    for number in range(50):
        built.root.cursor("a", f"g{number}").write_bytes(b"5\n")
    slowest = SlowestCursor()
    first = steps(lambda: slowest.find(built.root, "a", log_id=built.log_id, head_sequence=10))
    strange = built.root.cursor_directory("a") / "a b.cursor"
    strange.write_bytes(b"9\n")
    found: list[Cursor] = []
    taken = steps(lambda: found.append(slowest.find(built.root, "a", log_id=built.log_id, head_sequence=10)))

    assert (found[0].path, found[0].effective) == (strange, 0)
    assert taken < first * 1.1


def test_a_cursor_beyond_the_head_counts_once_the_head_has_reached_it(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.root.cursor("a", "g").write_bytes(b"11\n")
    monkeypatch.setattr(cursors, "_SETTLED_NS", 0)
    slowest = SlowestCursor()

    found = [slowest.find(built.root, "a", log_id=built.log_id, head_sequence=head) for head in (9, 10, 11)]
    assert [cursor.effective for cursor in found] == [0, 0, 11]
