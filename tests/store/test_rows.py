"""The records that are made of the rows of a batch, wherever they begin and end, are those of the batch itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from logs import Built

from wald.format.batch import Flag
from wald.format.records import Record
from wald.reading.assembler import Batch

FIRST = 3  # there are others before it


def lines(built: Built) -> None:
    built.append("a", b"1\n\n3\n4", 4, flags=Flag.UNTERMINATED)


def columns(built: Built) -> None:
    headers = [b'{"a": "b"}', None, None, None]
    built.columns("a", [b"1", b"", b"3", b"4"], keys=[None, b"k", None, b"l"], times_ns=[4, 3, 2, 1], headers=headers)


def batch_of(built: Built) -> Batch:
    (batch,) = built.log.batches("a", FIRST)
    return batch


@pytest.mark.parametrize("kind", [lines, columns])
def test_any_run_of_rows_is_made_into_the_same_records(built: Built, kind: Callable[[Built], None]) -> None:
    built.lines("b", [b"x", b"y"])
    kind(built)
    batch = batch_of(built)
    whole = list(batch.records())
    assert [record.sequence for record in whole] == [3, 4, 5, 6]
    assert all(isinstance(record, Record) for record in whole)
    for first in range(8):
        for last in range(8):
            expected = [record for record in whole if first <= record.sequence <= last]
            assert list(batch.rows().records(first, last)) == expected
            if (part := batch.between(first, last)) is not None:
                assert list(part.records()) == expected


def test_records_have_all_that_was_sent(built: Built) -> None:
    built.lines("b", [b"x", b"y"])
    columns(built)
    time_ns = batch_of(built).append_time_ns
    assert list(batch_of(built).records()) == [
        Record("a", 3, b"1", time_ns, None, 4, b'{"a": "b"}'),
        Record("a", 4, b"", time_ns, b"k", 3),
        Record("a", 5, b"3", time_ns, None, 2),
        Record("a", 6, b"4", time_ns, b"l", 1),
    ]


def test_only_the_last_line_may_have_no_newline(built: Built) -> None:
    built.lines("b", [b"x", b"y"])
    lines(built)
    assert [record.terminated for record in batch_of(built).records()] == [True, True, True, False]
