"""Segments that are missing without a ledger line are damage; deleted records and those given up are reported so."""

import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from contents import errors
from logs import START_NS, Built
from reading import moment
from repairing import repair

from wald.checking.verifier import verify
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.layout import Root
from wald.format.names import Kind
from wald.retention.missing import Missing
from wald.segments.view import State


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
    assert any("records 1 to 2" in error for error in errors(built.root.path))
    built.log.set_cursor("a", 2)
    for later in ("cursor", "end", 3, moment(2.5)):
        assert read(built, "a", later)[1] == []


def test_a_reclaimed_segment_tells_its_times_by_the_ledger(built: Built) -> None:
    built.reclaim(1)
    built.reclaim(3)
    with pytest.raises(NotFound, match="records 3 to 4: 2 records of route a"):
        list(built.log.records("a", moment(1.5)))
    assert read(built, "a", moment(2.5)) == ([5, 6, 7, 8], [])
    with pytest.raises(NotFound, match="records 1 to 4: 4 records of route a"):
        list(built.log.records("a", moment(0)))


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
        lambda: errors(built.root.path) == [],
        lambda: built.log.where(missed).durable,
    ]
    for look in looks:
        os.utime(built.root.segments)
        monkeypatch.setattr(os, "scandir", missing_once)
        assert look()


LOST = {"event": "lost", "base": 3, "last": 4, "why": "the file is gone", "kept": "quarantine/it", "at": START_NS}


@pytest.fixture
def given_up(tmp_path: Path) -> Built:
    """Three segments of two records; the second is gone, and a line of the ledger gives it up."""
    built = Built(tmp_path / "log")
    for part in range(3):
        built.lines("a", [b"%d" % part] * 2, cut=True)
    built.seal()
    built.path(3, Kind.SEALED).unlink()
    built.ledger.append(LOST | {"routes": [["a", 2, 3, 4, 4]]})
    return built


def test_verify_calls_the_log_good_and_says_what_is_lost(given_up: Built) -> None:
    assert errors(given_up.root.path) == []
    messages = [found.message for found in verify(Root(given_up.root.path))]
    (loss,) = [message for message in messages if "are lost" in message]
    assert loss.startswith("records 3 to 4 are lost: given up by a repair at 2023-11-14T22:13:20Z")
    assert "quarantine/it" in loss
    assert [message for message in messages if "reclaimed" in message] == []


def test_a_reader_passes_over_them_and_is_told_why(given_up: Built) -> None:
    missing: list[Missing] = []
    found = [record.sequence for record in given_up.log.records("a", on_missing=missing.append)]
    assert found == [1, 2, 5, 6]
    (range_,) = missing
    assert (range_.first, range_.last, range_.records, range_.exact) == (3, 4, 2, True)
    assert "records 3 to 4 are lost: 2 records of route a are missing; they were given up" in range_.message()
    with pytest.raises(NotFound, match="the file is gone"):
        list(given_up.log.records("a", start=3))
    place = given_up.log.where(4)
    assert (place.state, place.durable) == (State.LOST, False)
    assert "lost: given up by a repair" in place.message
    assert "quarantine/it" in place.message


def test_the_last_records_of_a_log_are_not_given_out_again(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("a", [b"1"] * 5, cut=True)
    built.ledger.append(LOST | {"base": 6, "last": 9})
    built.crash()
    built.root.head.unlink()
    assert Built(built.root.path, epoch=2).lines("a", [b"new"]) == 10


@pytest.fixture
def short(tmp_path: Path) -> Built:
    """Two segments of two records and the first two of a third; a repair has given up the last two, 7 and 8."""
    built = Built(tmp_path / "log")
    for _ in range(2):
        built.lines("a", [b"x"] * 2, cut=True)
    built.lines("a", [b"x"] * 2)
    end = built.writer.position
    built.lines("a", [b"x"] * 2)
    built.crash()
    os.truncate(built.path(5, Kind.RAW), end)
    repair(built.root.path)
    return built


def test_lost_records_at_the_end_of_a_log_are_reported_before_there_is_a_later_one(short: Built) -> None:
    log = short.log
    missing: list[Missing] = []
    assert [record.sequence for record in log.records("a", on_missing=missing.append)] == [1, 2, 3, 4, 5, 6]
    assert list(log.records("a", 8, on_missing=missing.append)) == []
    later = datetime.fromtimestamp(short.now_ns / 1e9 + 1, UTC)
    assert list(log.records("a", later, on_missing=missing.append)) == []
    assert [(range_.first, range_.last, bool(range_.lost)) for range_ in missing] == [
        (7, 8, True),
        (8, 8, True),
        (7, 8, True),
    ]
    with pytest.raises(NotFound, match="records 7 to 8 are lost"):
        list(log.records("a", 5))
    assert [record.sequence for record in log.records("a", 5, 6)] == [5, 6]


def test_a_reader_that_follows_reports_lost_records_at_the_end_before_it_waits_and_once(short: Built) -> None:
    missing: list[Missing] = []
    before_wait: list[int] = []
    cancel = threading.Event()

    def append() -> None:
        if not before_wait:
            before_wait.append(len(missing))
            Built(short.root.path, epoch=8).lines("a", [b"new"])

    found = short.log.records("a", 5, follow=True, cancel=cancel, on_missing=missing.append, on_wait=append)
    assert [next(found).sequence for _ in range(3)] == [5, 6, 9]
    cancel.set()
    assert list(found) == []
    assert before_wait == [1]
    assert [(range_.first, range_.last) for range_ in missing] == [(7, 8)]


def test_a_start_does_not_call_damage_what_a_repair_has_given_up(short: Built) -> None:
    report = Built(short.root.path, epoch=2).report
    assert report.errors == []
    assert [message for message in report.info if "records 7 to 8" in message and "gave them up" in message]
