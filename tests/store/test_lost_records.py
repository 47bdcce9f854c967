"""Records that were given up: readers pass over them and know why; their numbers are never given out again."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from contents import errors
from logs import START_NS, Built
from repairing import repair

from wald.checking.verifier import verify
from wald.errors import NotFound
from wald.files.layout import Root
from wald.format.names import Kind
from wald.retention.missing import Missing
from wald.segments.view import State

LOST = {"event": "lost", "base": 3, "last": 4, "why": "the file is gone", "kept": "quarantine/it", "at": START_NS}


@pytest.fixture
def given_up(tmp_path: Path) -> Built:
    """Three segments of two records; the second is gone, and a line of the ledger gives it up."""
    built = Built(tmp_path / "log")
    for part in range(3):
        built.lines("a", [b"%d" % part] * 2)
        built.cut()
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
    built.lines("a", [b"1"] * 5)
    built.cut()
    built.ledger.append(LOST | {"base": 6, "last": 9})
    built.crash()
    built.root.head.unlink()
    assert Built(built.root.path, epoch=2).lines("a", [b"new"]) == 10


@pytest.fixture
def short(tmp_path: Path) -> Built:
    """Two segments of two records and the first two of a third; a repair has given up the last two, 7 and 8."""
    built = Built(tmp_path / "log")
    for _ in range(2):
        built.lines("a", [b"x"] * 2)
        built.cut()
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
