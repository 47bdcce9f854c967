"""Segments that are missing without a ledger line are damage; recorded deletions are reported as such."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logs import Built
from reading import moment

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.retention.missing import Missing


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 to 8 on route a, two in each of three sealed segments and the active one, a second apart."""
    built = Built(tmp_path / "root")
    for base in (1, 3, 5, 7):
        built.lines("a", [b"%d" % base, b"%d" % (base + 1)])
        if base < 7:
            built.cut()
    built.seal()
    return built


def read(built: Built, *arguments: object) -> tuple[list[int], list[str]]:
    reported: list[str] = []
    reading = built.log.records(*arguments, on_damage=lambda error: reported.append(error.message))  # type: ignore[arg-type]
    return [record.sequence for record in reading], reported


def errors(built: Built) -> list[str]:
    return [finding.message for finding in verify(built.root) if finding.level is Level.ERROR]


def test_one_that_comes_back_while_it_is_passed_is_read(built: Built) -> None:
    """RECLAIM had renamed three, has given one its old name back, and the ledger has taken all of it back by now."""
    for base in (1, 3, 5):
        built.path(base, Kind.SEALED).rename(built.path(base, Kind.RELEASED))
    reading = built.log.records("a", 1)
    found = [next(reading).sequence]
    built.path(3, Kind.RELEASED).rename(built.path(3, Kind.SEALED))
    found += [record.sequence for record in reading]
    assert found == [1, 2, 3, 4, 5, 6, 7, 8]


STARTS = [("earliest",), ("cursor",), (1,), (2,), (moment(0),), (moment(0), 100)]


def test_a_lost_front_is_damage_for_those_who_ask_for_it(built: Built) -> None:
    built.path(1, Kind.SEALED).unlink()
    for start in STARTS:
        found, reported = read(built, "a", *start)
        assert found == [3, 4, 5, 6, 7, 8]
        assert len(reported) == 1
        assert "records 1 to 2" in reported[0] or "record 2" in reported[0]
        assert "no ledger explains why" in reported[0]
        with pytest.raises(Damaged):
            list(built.log.records("a", *start))  # type: ignore[arg-type]
    assert any("records 1 to 2" in error for error in errors(built))
    built.log.set_cursor("a", 2)
    for later in ("cursor", "end", 3, moment(2.5)):
        assert read(built, "a", later)[1] == []


def test_a_lost_segment_behind_reclaimed_ones_is_damage_and_the_rest_is_not(built: Built) -> None:
    built.reclaim(1)
    built.path(3, Kind.SEALED).unlink()
    found, reported = read(built)
    assert found == [5, 6, 7, 8]
    assert ["records 3 to 4 are missing, and no ledger explains why" in message for message in reported] == [True]
    assert [error for error in errors(built) if "records 3 to 4 are in no segment" not in error] == []


def test_without_any_segment_reading_fails_even_if_damage_is_passed_over(built: Built) -> None:
    for segment in list_segments(built.root).segments:
        segment.path.unlink()
    with pytest.raises(Damaged, match="there is no segment, but records up to 8 were acknowledged"):
        read(built)


def test_a_reclaimed_segment_tells_its_times_by_the_ledger(built: Built) -> None:
    built.reclaim(1)
    built.reclaim(3)
    with pytest.raises(NotFound, match="records 3 to 4: 2 records of route a"):
        list(built.log.records("a", moment(1.5)))
    assert read(built, "a", moment(2.5)) == ([5, 6, 7, 8], [])
    with pytest.raises(NotFound, match="records 1 to 4: 4 records of route a"):
        list(built.log.records("a", moment(0)))


def test_a_ledger_without_times_does_not_say_that_nothing_is_missing(built: Built) -> None:
    built.reclaim(1)
    (built.root.ledger / "segments.jsonl").unlink()
    with pytest.raises(NotFound, match="up to 2 records of route a"):
        list(built.log.records("a", moment(0)))
    assert [r.sequence for r in built.log.records("a", moment(2.5))] == [5, 6, 7, 8]


class TestOnMissing:
    """Policies of ``on_missing``."""

    def test_policies(self, built: Built) -> None:
        built.reclaim(1)
        for start in (1, moment(0), "earliest", "cursor"):
            assert [r.sequence for r in built.log.records("a", start, on_missing="skip")] == [3, 4, 5, 6, 7, 8]
            with pytest.raises(NotFound, match="2 records of route a are missing"):
                list(built.log.records("a", start, on_missing="error"))
        assert built.log.to_arrow_reader("a", 1, on_missing="skip").read_all().num_rows == 6
        with pytest.raises(InvalidInput):
            built.log.records(on_missing="perhaps")  # type: ignore[arg-type]
        built.reclaim(3)
        reported: list[Missing] = []
        assert len(list(built.log.batches("a", 2, on_missing=reported.append))) == 2
        assert [(m.first, m.last, m.records, m.asked) for m in reported] == [(2, 4, 3, True)]

    def test_a_cursor_of_another_route_does_not_ask(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "root")
        for route in ("a", "b"):
            built.lines(route, [b"x"])
            built.cut()
        built.seal()
        built.log.set_cursor("b", 0)
        built.reclaim(1)
        reported: list[Missing] = []
        assert [r.sequence for r in built.log.records(None, "cursor", on_missing=reported.append)] == [2]
        assert [(sorted(m.routes), m.asked, m.group) for m in reported] == [(["a"], False, None)]


@pytest.mark.parametrize("missed", [1, 3, 7])
def test_a_segment_that_one_reading_of_the_directory_misses_is_not_missing(
    built: Built, monkeypatch: pytest.MonkeyPatch, missed: int
) -> None:
    """A file that is renamed while its directory is read, by the sealer say, may be in it under neither name."""
    scandir = os.scandir

    def missing_once(path: Path) -> Iterator[os.DirEntry[str]]:
        monkeypatch.setattr(os, "scandir", scandir)
        return iter([entry for entry in scandir(path) if not entry.name.startswith(f"{missed:020d}")])

    looks: list[Callable[[], bool]] = [
        lambda: read(built, "a") == ([*range(1, 9)], []),
        lambda: errors(built) == [],
        lambda: built.log.where(missed).durable,
    ]
    for look in looks:
        os.utime(built.root.segments)
        monkeypatch.setattr(os, "scandir", missing_once)
        assert look()
