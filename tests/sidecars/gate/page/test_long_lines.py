"""Lines split into pieces: the page shows them once complete, and the search for their end delays no other reader."""

from pathlib import Path

import pytest
from logs import Built
from reading import result_of

from wald.errors import WaldError
from wald.format.names import Kind
from wald_gate.page.records import COUNT, Newest, Query, excerpt, read_record


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A log with one record on each of two routes."""
    log = Built(tmp_path / "log")
    log.lines("a", [b"first"])
    log.lines("b", [b"other"])
    return log


def live(newest: Newest) -> tuple[list[tuple[int, str]], int]:
    """Return the rows, oldest first, and the number of arrivals since the previous call."""
    found = newest.read_on()
    return [(row.sequence, str(row.value)) for row in reversed(found.rows)], found.arrived


@pytest.mark.parametrize("route", ["a", None])
def test_a_line_whose_pieces_come_between_looks_is_among_the_newest(built: Built, route: str | None) -> None:
    newest = Newest(built.log, route)
    before = live(newest)[0]
    for text, begins in ((b"be", True), (b"gin", False), (b"ning", False)):
        built.piece("a", text, begins=begins, ends=False)
        assert live(newest) == (before, 0)
    built.cut()
    built.piece("a", b" end\nnext\n", begins=False, ends=True)
    assert live(newest) == ([*before, (3, "beginning end"), (4, "next")], 2)
    assert live(newest)[1] == 0


def test_no_record_is_missing_or_shown_twice_after_a_look_that_failed(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.piece("a", b"be", begins=True, ends=False)  # before the first look
    newest = Newest(built.log, None)
    built.lines("b", [b"between"])
    assert live(newest)[0] == [(1, "first"), (2, "other"), (4, "between")]
    built.piece("a", b"gun\n", begins=False, ends=True)
    built.lines("b", [b"last"])
    hidden = built.root.segments.rename(built.root.path / "hidden")
    with pytest.raises((WaldError, OSError)):
        newest.read_on()
    hidden.rename(built.root.segments)
    assert live(newest)[0] == [(1, "first"), (2, "other"), (4, "between"), (3, "begun"), (5, "last")]


def test_what_is_damaged_is_noted_and_what_follows_comes(built: Built) -> None:
    newest = Newest(built.log, "a")
    newest.read_on()
    built.cut()
    base = built.lines("a", [b"lost"])
    built.cut()
    built.lines("a", [b"kept"])
    with built.path(base, Kind.RAW).open("r+b") as segment:
        segment.truncate(100)
    found = newest.read_on()
    assert [str(row.value) for row in reversed(found.rows)] == ["first", "kept"]
    assert [note for note in found.notes if built.path(base, Kind.RAW).name in note]
    built.lines("a", [b"later"])
    found = newest.read_on()
    assert [str(row.value) for row in reversed(found.rows)] == ["first", "kept", "later"]
    assert not found.notes


def test_many_records_that_come_at_once_are_counted_and_the_last_ones_shown(built: Built) -> None:
    newest = Newest(built.log, "a")
    newest.read_on()
    for _ in range(3):
        last = built.lines("a", [b"x"] * (COUNT - 1)) + COUNT - 2
    rows, arrived = live(newest)
    assert arrived == 3 * (COUNT - 1)
    assert [sequence for sequence, _ in rows] == list(range(last - COUNT + 1, last + 1))


def test_the_way_to_the_end_of_an_open_line_has_steps(built: Built) -> None:
    built.piece("a", b"be", begins=True, ends=False)
    for _ in range(100):
        built.piece("a", b"-", begins=False, ends=False)
    record, page = read_record(built.log, built.log.where(3)), excerpt(built.log, "a", Query(before=4))
    for _ in range(100):
        next(record)
        next(page)
    found = result_of(record)
    assert (found.record, found.where.durable) == (None, True)
    assert [row.sequence for row in result_of(page).rows] == [1]


def test_the_way_to_the_end_of_an_open_line_meets_only_batches_of_its_route(built: Built) -> None:
    built.piece("a", b"be", begins=True, ends=False)
    built.cut()
    for _ in range(100):
        built.lines("b", [b"x"])
    built.cut()
    built.seal()
    assert sum(1 for _ in read_record(built.log, built.log.where(3))) < 10
    built.piece("a", b"gun\n", begins=False, ends=True)
    found = result_of(read_record(built.log, built.log.where(3)))
    assert found.record is not None
    assert found.record.value == b"begun"
