"""A job reads new complete records once each and reports missing ones."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
from archives import archive
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import Kind
from wald_spark.locations import LogLocation
from wald_spark.options import STRICT, Tolerance
from wald_spark.progress import NewRecords, Progress, Run, find_logs, new_records
from wald_spark.session import session


def place_of(built: Built) -> LogLocation:
    return find_logs([str(built.root.path)], None)[0]


def numbers(portion: NewRecords) -> list[int]:
    batches = [batch for piece in portion.pieces for batch in piece.batches()]
    return sorted(record.sequence for batch in batches for record in batch.records())


def test_an_open_record_holds_back_its_route_and_no_other(tmp_path: Path) -> None:
    """The next run reads the later records of that route, exactly once."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1", b"2"])
    built.piece("b", b"long ", begins=True, ends=False)
    built.lines("a", [b"4", b"5"])
    first = new_records(place_of(built), None, None, STRICT)
    assert (first.after, numbers(first)) == (Progress(5, {"b": 2}), [1, 2, 4, 5])
    again = new_records(place_of(built), first.after, None, STRICT)
    assert (again.due, again.after) == (False, first.after)

    built.lines("a", [b"6"])
    second = new_records(place_of(built), first.after, None, STRICT)
    assert (second.after, numbers(second)) == (Progress(6, {"b": 2}), [6])
    built.piece("b", b"record\n", begins=False, ends=True)
    built.lines("b", [b"7"])
    third = new_records(place_of(built), second.after, None, STRICT)
    assert (third.after, numbers(third)) == (Progress(7), [3, 7])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.sampled_from(["line a", "line b", "piece a", "piece b", "end a", "end b", "cut", "seal", "run"]), max_size=24
    )
)
def test_every_record_is_in_one_run(steps: list[str]) -> None:
    """In the end only open records are pending, regardless of the order of steps."""
    with tempfile.TemporaryDirectory() as path:
        built = Built(Path(path, "root"), segment_max_bytes=4096)
        reached, found = None, []
        for step in [*steps, "run"]:
            verb, _, route = step.partition(" ")
            begins = route not in built.writer.state.open_records
            if verb == "line" and begins:
                built.lines(route, [b"x", b"y"])
            elif verb == "piece":
                built.piece(route, b"p", begins=begins, ends=False)
            elif verb == "end" and not begins:
                built.piece(route, b"e\n", begins=False, ends=True)
            elif verb == "cut" and built.writer.has_advanced:
                built.cut()
            elif verb == "seal":
                built.seal()
            elif verb == "run":
                portion = new_records(place_of(built), reached, None, STRICT)
                found += numbers(portion)
                reached = portion.after
        assert sorted(found) == sorted(record.sequence for record in built.log.records())
        built.crash()


def test_records_that_are_not_wanted_are_passed_by(tmp_path: Path) -> None:
    """The run reads nothing, and the next run skips those records."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1"])
    built.lines("b", [b"2"])
    built.piece("b", b"3 is open", begins=True, ends=False)
    found = new_records(place_of(built), Progress(1), ["a"], STRICT)

    assert (found.after, found.pieces) == (Progress(3), [])


def test_what_was_reclaimed_before_the_first_run_is_no_loss_and_later_it_is(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x", b"y"])
        built.cut()
    built.seal()
    built.reclaim(1)
    assert numbers(new_records(place_of(built), None, None, STRICT)) == [3, 4, 5, 6]
    with pytest.raises(NotFound, match="RECLAIM has removed record 2"):
        new_records(place_of(built), Progress(1), None, STRICT)

    tolerance = Tolerance(True, True, str(tmp_path / "notes"))
    found = new_records(place_of(built), Progress(1), None, tolerance)
    built.reclaim(3)  # between planning and reading
    assert numbers(found) == [5, 6]
    assert Run(tolerance, "", partial(session, "unused")).passed_over(found) == [
        f"{built.root.segments}: RECLAIM has removed records 3 to 4: 2 records are missing",
        f"{built.root.segments}: RECLAIM has removed record 2",
    ]


def test_a_missing_segment_is_reported(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x"])
        built.cut()
    built.seal()
    built.path(2, Kind.SEALED).unlink()

    with pytest.raises(Damaged, match="record 2 is missing"):
        new_records(place_of(built), None, None, STRICT)


def test_logs_are_found_and_others_are_refused(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"x"])
    archive(built.root.path, tmp_path / "archive", route="a")
    root = str(built.root.path)

    assert [place.root.path for place in find_logs([root], ["a"])] == [built.root.path]
    with pytest.raises(NotFound, match="no log has route 'b'"):
        find_logs([root], ["b"])
    with pytest.raises(InvalidInput, match="archive: an archive; jobs read logs"):
        find_logs([root, str(tmp_path / "archive")], None)
