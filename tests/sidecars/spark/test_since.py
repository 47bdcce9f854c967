"""What has come since: whole records only, each once, and what is missing is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from archives import archive
from logs import Built

from sidecars.spark.damage import STRICT, Tolerance
from sidecars.spark.places import LogPlace
from sidecars.spark.since import Portion, find_logs, since
from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import Kind


def place_of(built: Built) -> LogPlace:
    return find_logs([str(built.root.path)], None)[0]


def numbers(portion: Portion | None) -> list[int]:
    assert portion is not None
    batches = [batch for piece in portion.pieces for batch in piece.batches()]
    return sorted(record.sequence for batch in batches for record in batch.records())


def test_a_run_goes_up_to_the_record_before_the_first_open_one(tmp_path: Path) -> None:
    """What other routes have written behind it comes with it in the next run, not twice and not never."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1", b"2"])
    built.piece("b", b"long ", begins=True, ends=False)
    built.lines("a", [b"4", b"5"])
    first = since(place_of(built), None, None, STRICT)
    assert first is not None
    assert (first.last, numbers(first)) == (2, [1, 2])
    assert since(place_of(built), first.last, None, STRICT) is None

    built.piece("b", b"record\n", begins=False, ends=True)
    assert numbers(since(place_of(built), first.last, None, STRICT)) == [3, 4, 5]


def test_an_open_record_of_another_route_holds_nothing_back(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.piece("b", b"long ", begins=True, ends=False)
    built.lines("a", [b"2", b"3"])

    assert numbers(since(place_of(built), None, ["a"], STRICT)) == [2, 3]


def test_a_log_without_records_has_nothing_to_do(tmp_path: Path) -> None:
    assert since(place_of(Built(tmp_path / "root")), None, None, STRICT) is None


def test_records_that_are_not_wanted_are_passed_by(tmp_path: Path) -> None:
    """There is nothing to read, and the next run does not look at them again."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1"])
    built.lines("b", [b"2", b"3"])
    found = since(place_of(built), 1, ["a"], STRICT)

    assert found is not None
    assert (found.first, found.last, found.pieces) == (2, 3, [])


def test_what_was_reclaimed_before_the_first_run_is_no_loss_and_later_it_is(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x", b"y"])
        built.cut()
    built.seal()
    built.reclaim(1)
    assert numbers(since(place_of(built), None, None, STRICT)) == [3, 4, 5, 6]
    with pytest.raises(NotFound, match="RECLAIM has removed record 2"):
        since(place_of(built), 1, None, STRICT)

    found = since(place_of(built), 1, None, Tolerance(damage=True, loss=True))
    assert found is not None
    assert "RECLAIM has removed" in found.lost
    assert numbers(found) == [3, 4, 5, 6]


def test_a_missing_segment_is_told(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x"])
        built.cut()
    built.seal()
    built.path(2, Kind.SEALED).unlink()

    with pytest.raises(Damaged, match="no segment holds record 2"):
        since(place_of(built), None, None, STRICT)


def test_logs_are_found_and_others_are_refused(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"x"])
    archive(built.root.path, tmp_path / "archive", route="a")
    root = str(built.root.path)

    assert [place.root.path for place in find_logs([root], ["a"])] == [built.root.path]
    with pytest.raises(NotFound, match="there is no route 'b'"):
        find_logs([root], ["b"])
    with pytest.raises(InvalidInput, match="archive: an archive; jobs read logs"):
        find_logs([root, str(tmp_path / "archive")], None)


def test_an_older_copy_that_was_put_back_is_told(tmp_path: Path) -> None:
    """What comes after it would be taken for what was exported before."""
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x"])
    place = LogPlace(built.root, built.log_id)
    assert since(place, 3, None, STRICT) is None
    with pytest.raises(Damaged, match="ends with record 3, and record 4 was read before"):
        since(place, 4, None, STRICT)
