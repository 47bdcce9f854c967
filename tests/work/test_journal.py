"""Journal on disk: after a crash, the owner truncates an unfinished line; damage prevents the group from starting."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs import Built

from wald.errors import Damaged, Refused
from wald.format.work import Commit, JournalLine, JournalStart, WorkerLease
from wald.work.group import WorkGroup
from wald.work.journal import Journal

LINES: list[JournalLine] = [
    Commit(done=[(1, 1)]),
    Commit(leased=[WorkerLease("w", 5, [(2, 3)])]),
    Commit(done=[(2, 2)]),
]


@pytest.fixture
def path(built: Built) -> Path:
    """A journal with three synced lines after the first."""
    built.lines("a", [b"x"] * 5)
    journal = opened(built)
    for line in LINES:
        journal.append([line])
        journal.sync()
    journal.close()
    return journal.path


def opened(built: Built, said: list[JournalLine] | None = None, group: str = "g") -> Journal:
    lines: list[JournalLine] = [] if said is None else said
    return Journal(built.root, built.disk, JournalStart(built.log_id, "a", group, 0, 1), lines.append)


def lines(built: Built) -> list[JournalLine]:
    said: list[JournalLine] = []
    opened(built, said).close()
    return said


def said(path: Path) -> bytes:
    """Return the lines without the preallocated space."""
    return path.read_bytes().rstrip(b"\n") + b"\n"


@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_line_keeps_the_group_from_starting(built: Built, path: Path, number: int) -> None:
    data = path.read_bytes()
    offset = sum(len(line) for line in data.splitlines(keepends=True)[:number])
    path.write_bytes(data[: offset + 5] + bytes([data[offset + 5] ^ 1]) + data[offset + 6 :])
    with pytest.raises(Damaged, match=f"offset {offset}:") as refusal:
        opened(built)
    assert f"group show a {path.stem} says" in refusal.value.hint


def test_a_line_that_is_gone_from_the_middle_is_damage_if_later_ones_show_it(built: Built, path: Path) -> None:
    pieces = said(path).splitlines(keepends=True)
    path.write_bytes(b"".join([pieces[0], bytes(len(pieces[1])), *pieces[2:]]))
    with pytest.raises(Damaged):
        opened(built)


def test_the_journal_of_another_group_is_not_used(built: Built, path: Path) -> None:
    path.rename(path.with_name("other.work"))
    with pytest.raises(Damaged, match="another"):
        opened(built, group="other")


def test_a_damaged_journal_pins(built: Built, path: Path) -> None:
    with WorkGroup(built.root.path, "a", "h") as work:
        work.lease("x", 2, wait=5)
        work.ack("x", [2])
        work._held.close()
    journal = built.root.cursor_directory("a") / "h.work"
    data = journal.read_bytes()
    journal.write_bytes(data.replace(b'"done": [2, 2]', b'"done": [2, 5]'))
    with pytest.raises(Damaged):
        WorkGroup(built.root.path, "a", "h")
    assert built.log.cursor("a", "h").effective == 0


def test_a_removed_group_starts_from_the_beginning(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    for _ in range(2):
        with WorkGroup(built.root.path, "a", "g") as work:
            assert len(work.lease("x", wait=5)) == 2
            work.ack("x", [1, 2])
        built.log.cursor("a", "g").path.unlink()


def test_a_cursor_is_not_moved_back_below_what_the_workers_have_done(built: Built) -> None:
    built.lines("a", [b"1", b"2"])
    with WorkGroup(built.root.path, "a", "g") as work:
        work.lease("x", wait=5)
        work.ack("x", [1, 2])
    with pytest.raises(Refused, match=r"g\.work") as refusal:
        built.log.set_cursor("a", 0, "g", rewind=True)
    assert refusal.value.hint.startswith("stop the workers; rm ")
    built.root.cursor_directory("a").joinpath("g.work").unlink()
    built.log.set_cursor("a", 0, "g", rewind=True)
    with WorkGroup(built.root.path, "a", "g") as work:
        assert len(work.lease("x", wait=5)) == 2
