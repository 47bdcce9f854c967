"""Conversion of records to Arrow batches."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built

from wald.format.batch import BatchHeader, Encoding, Flag
from wald.reading.arrow import record_batch, schema
from wald.reading.assembler import Batch


def rows(table: pa.Table | pa.RecordBatch) -> list[tuple[object, ...]]:
    """Every row, times as integers (a datetime does not hold nanoseconds)."""
    table = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
    columns = []
    for name in schema.names:
        column = table.column(name)
        columns.append(column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column)
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def expected(built: Built, **options: int) -> list[tuple[object, ...]]:
    return [
        (r.sequence, r.route, r.append_time_ns, r.event_time_ns, r.key, r.value, r.headers)
        for r in built.log.records(**options)  # type: ignore[arg-type]
    ]


def test_it_holds_what_the_records_hold(built: Built) -> None:
    built.lines("a", [b"one", b"", b"\xff\r", b"four"])
    built.columns(
        "b", [b"x\n", b"", b"z"], keys=[b"k", None, b""], times_ns=[-1, 0, START_NS + 1], headers=[None, b"{}", None]
    )
    built.columns("b", [b"plain"])
    built.lines("c", [b"five"])
    built.append("a", b"six\nseven", 2, flags=Flag.UNTERMINATED)
    built.cut()
    built.seal()
    table = built.log.to_arrow_reader().read_all()
    table.validate(full=True)
    assert table.schema == schema
    assert rows(table) == expected(built)


def test_only_what_was_asked_for_is_in_it(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3", b"4"])
    built.columns("b", [b"5", b"6", b"7", b"8"], keys=[None, b"k6", None, b"k8"])
    for start, stop in [(1, 1), (2, 3), (4, 6), (6, 8)]:
        table = built.log.to_arrow_reader(start=start, stop=stop).read_all()
        table.validate(full=True)
        assert rows(table) == expected(built, start=start, stop=stop)
        assert table["sequence"].to_pylist() == list(range(start, stop + 1))


def test_an_empty_log_is_an_empty_table_and_a_joined_record_is_a_row(built: Built) -> None:
    table = built.log.to_arrow_reader().read_all()
    assert (table.num_rows, table.schema) == (0, schema)
    built.piece("a", b"be", begins=True, ends=False)
    built.piece("a", b"gun\nnext\n", begins=False, ends=True)
    assert built.log.to_arrow_reader().read_all()["value"].to_pylist() == [b"begun", b"next"]


def test_small_batches_are_put_together(built: Built) -> None:
    for number in range(50):
        built.lines("ab"[number % 2], [b"%d" % number])
    reader = built.log.to_arrow_reader()
    batches = list(reader)
    assert len(batches) == 1
    assert rows(batches[0]) == expected(built)


def test_columns_are_not_copied(built: Built) -> None:
    built.columns("a", [b"x" * 100] * 100, keys=[b"k"] * 100)
    batch = next(built.log.batches())
    values = batch.to_arrow().column("value").buffers()[2]
    payload = np.frombuffer(batch.payload, dtype=np.uint8)
    begin = payload.__array_interface__["data"][0]
    assert begin <= values.address < begin + len(payload)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=30), st.booleans())
def test_any_lines_come_out_as_they_went_in(lines: list[bytes], terminated: bool) -> None:
    """The split of Arrow is the split of records."""
    payload = b"\n".join(lines) + (b"\n" if terminated else b"")
    header = BatchHeader(0, len(payload), 7, START_NS, 0, 0, len(lines), 1, Encoding.LINES, 0, 1)
    batch = Batch("a", 7, 6 + len(lines), memoryview(payload), terminated, header, 1, 64)
    table = record_batch([batch, batch])
    table.validate(full=True)
    assert table.column("value").to_pylist() == lines * 2
    assert table.column("sequence").to_pylist() == list(range(7, 7 + len(lines))) * 2
