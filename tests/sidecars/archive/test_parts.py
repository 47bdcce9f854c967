"""Parts hold the records of consecutive batches and list them; bundles end exactly at their limit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built
from some_logs import STEPS, Step, build

from wald.format.records import Record
from wald.reading.assembler import Batch
from wald_archive.parts import (
    BadIndex,
    Bytes,
    Form,
    IndexEntry,
    Part,
    Records,
    bundle_batches,
    content_bytes,
    parse_index_entry,
    parts,
)

RUN = IndexEntry("00000000000000000001.txt", 0, 8, 1, 2, START_NS, terminated=False)


def lines_of(part: Part, run: IndexEntry) -> list[bytes]:
    """The records of a run, found as its index says."""
    data = b"".join(part.data)[run.offset : run.offset + run.bytes]
    assert data.endswith(b"\n")
    return data[:-1].split(b"\n")


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, limit=st.integers(1, 200))
def test_the_indexes_lead_to_every_record(steps: list[Step], limit: int) -> None:
    """Whatever the parts, each record is where a run says, in the form that its batch has."""
    found: list[tuple[int, int, bool, bytes | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        for part in parts(log.batches("a"), limit_bytes=limit):
            assert part.data_bytes <= limit or part.count == 1
            assert part.name == f"{part.first:020d}{part.form.value}"
            for run in part.runs:
                for number, line in enumerate(lines_of(part, run), start=run.first):
                    ended = run.terminated or number < run.last
                    value = line if part.form is Form.LINES else line.decode()
                    found.append((number, run.append_time_ns, ended, value))
        expected: list[tuple[int, int, bool, bytes | str]] = []
        for batch in log.batches("a"):
            for record in batch.records():
                value = record.to_json() if batch.is_columns else record.value
                expected.append((record.sequence, record.append_time_ns, record.terminated, value))

    assert found == expected


def test_a_batch_goes_on_in_the_next_part(built: Built) -> None:
    built.lines("a", [b"one", b"two", b"three"])

    found = list(parts(built.log.batches("a"), limit_bytes=8))

    assert [(part.first, part.last, b"".join(part.data)) for part in found] == [
        (1, 2, b"one\ntwo\n"),
        (3, 3, b"three\n"),
    ]


def test_batches_are_put_together(built: Built) -> None:
    built.lines("a", [b"one"])
    built.lines("b", [b"not this"])
    built.lines("a", [b"two"])

    (part,) = parts(built.log.batches("a"))

    assert [(run.first, run.offset, run.bytes) for run in part.runs] == [(1, 0, 4), (3, 4, 4)]
    assert (part.count, part.runs[0].append_time_ns, part.runs[-1].append_time_ns) == (
        2,
        START_NS + 10**9,
        START_NS + 3 * 10**9,
    )


def test_a_line_of_an_index_is_json_and_comes_back() -> None:
    line = RUN.to_line()

    assert json.loads(line) == {
        "part": RUN.part,
        "offset": 0,
        "bytes": 8,
        "first": 1,
        "count": 2,
        "append_time_ns": START_NS,
        "terminated": False,
    }
    assert parse_index_entry(line.rstrip("\n").encode()) == RUN


def test_another_line_is_refused() -> None:
    for line in [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"part": 1}',
        RUN.to_line().replace(" ", "").encode(),
        RUN.to_line().encode(),
    ]:
        with pytest.raises(BadIndex):
            parse_index_entry(line)


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


def sequences(portions: Iterator[Iterator[Batch]]) -> list[list[int]]:
    return [[record.sequence for batch in portion for record in batch.records()] for portion in portions]


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, limit=st.integers(1, 60))
def test_portions_are_those_of_one_record_after_the_other(steps: list[Step], limit: int) -> None:
    """By records and by bytes; the values are those of the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        records = list(log.records("a"))

        by_bytes = sequences(bundle_batches(log.batches("a"), Bytes(limit)))
        by_records = sequences(bundle_batches(log.batches("a"), Records(limit)))
        values = [
            record.value
            for portion in bundle_batches(log.batches("a"), Records(limit))
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

    assert len(sequences(bundle_batches(built.log.batches("a"), Records(limit)))) == portions


def test_a_record_above_the_limit_is_a_portion_by_itself(built: Built) -> None:
    built.lines("a", [b"1", b"x" * 100, b"3", b"4"])

    assert sequences(bundle_batches(built.log.batches("a"), Bytes(4))) == [[1], [2], [3, 4]]


def test_a_line_without_newline_counts_with_one(built: Built) -> None:
    built.piece("a", b"ab", begins=True, ends=True)

    batches: list[Batch] = list(built.log.batches("a"))
    assert [content_bytes(batch) for batch in batches] == [3]
    assert sequences(bundle_batches(built.log.batches("a"), Bytes(3))) == [[1]]


def test_no_batch_is_no_portion() -> None:
    assert sequences(bundle_batches([], Records(1))) == []
