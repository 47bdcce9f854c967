"""Bundles end exactly where they have to, and hold every record once and in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from some_logs import STEPS, Step, build

from wald.format.records import Record
from wald.reading.assembler import Batch
from wald_archive.parts import BundleBatches, Bytes, Records, content_bytes


def counted(record: Record) -> int:
    """Return the size of a record by its definition."""
    return len(record.value) + len(record.key or b"") + len(record.headers or b"") + 1


def naive(records: list[Record], limit: int) -> list[list[int]]:
    """Portions of at most ``limit`` bytes, one record after the other."""
    portions: list[list[int]] = []
    room = 0
    for record in records:
        if not portions or counted(record) > room:
            portions.append([])
            room = limit
        portions[-1].append(record.sequence)
        room -= counted(record)
    return portions


def sequences(portions: BundleBatches) -> list[list[int]]:
    return [[record.sequence for batch in portion for record in batch.records()] for portion in portions]


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, limit=st.integers(1, 60))
def test_portions_are_those_of_one_record_after_the_other(steps: list[Step], limit: int) -> None:
    """By records and by bytes; the values are those of the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        records = list(log.records("a"))

        by_bytes = sequences(BundleBatches(log.batches("a"), Bytes(limit)))
        by_records = sequences(BundleBatches(log.batches("a"), Records(limit)))
        values = [
            record.value
            for portion in BundleBatches(log.batches("a"), Records(limit))
            for batch in portion
            for record in batch.records()
        ]

    numbers = [record.sequence for record in records]
    assert by_bytes == naive(records, limit)
    assert by_records == [numbers[start : start + limit] for start in range(0, len(numbers), limit)]
    assert values == [record.value for record in records]


@pytest.mark.parametrize(("limit", "portions"), [(250, 4), (1000, 1), (1001, 1), (999, 2)])
def test_exact_multiples_leave_no_empty_portion(built: Built, limit: int, portions: int) -> None:
    built.lines("a", [b"x"] * 1000)

    assert len(sequences(BundleBatches(built.log.batches("a"), Records(limit)))) == portions


def test_a_record_above_the_limit_is_a_portion_by_itself(built: Built) -> None:
    built.lines("a", [b"1", b"x" * 100, b"3", b"4"])

    assert sequences(BundleBatches(built.log.batches("a"), Bytes(4))) == [[1], [2], [3, 4]]


def test_a_line_without_newline_counts_with_one(built: Built) -> None:
    built.piece("a", b"ab", begins=True, ends=True)

    batches: list[Batch] = list(built.log.batches("a"))
    assert [content_bytes(batch) for batch in batches] == [3]
    assert sequences(BundleBatches(built.log.batches("a"), Bytes(3))) == [[1]]


def test_no_batch_is_no_portion() -> None:
    assert sequences(BundleBatches([], Records(1))) == []
