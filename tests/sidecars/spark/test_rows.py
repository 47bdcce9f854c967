"""Rows match the schema that Spark expects and include only the requested columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from logs import SECOND_NS, START_NS, Built
from pyspark.sql.types import StructField, StructType

from wald.errors import InvalidInput, Refused
from wald_spark.locations import LogLocation
from wald_spark.options import STRICT, Tolerance
from wald_spark.plan import LogPiece, Range, pieces_of
from wald_spark.rows import BATCH_BYTES, Rows, schema_ddl

DEFAULT = {
    "log": "string",
    "route": "string",
    "seq": "bigint",
    "timestamp": "timestamp",
    "event_time": "timestamp",
    "key": "binary",
    "value": "binary",
    "headers": "string",
    "segment": "bigint",
}


def struct(columns: Mapping[str, object]) -> StructType:
    return StructType.fromJson(
        {
            "type": "struct",
            "fields": [
                {"name": name, "type": {"bigint": "long"}.get(str(kind), kind), "nullable": True, "metadata": {}}
                for name, kind in columns.items()
            ],
        }
    )


def rows_of(columns: Mapping[str, object], *, value_bytes: int = 1 << 30, tolerance: Tolerance = STRICT) -> Rows:
    return Rows.of(struct(columns), value_bytes=value_bytes, tolerance=tolerance)


def pieces(built: Built) -> list[LogPiece]:
    place = LogLocation(built.root, built.log_id)
    return pieces_of(place.view(), Range(None, 1, 10**9), limit_bytes=1 << 20)


def table(rows: Rows, built: Built) -> pa.Table:
    batches = [batch for piece in pieces(built) for batch in rows.read(piece)]
    assert all(batch.schema.equals(rows.schema) for batch in batches)
    read = pa.Table.from_batches(batches, rows.schema)
    read.validate(full=True)
    return read


@pytest.fixture
def few(built: Built) -> Built:
    """Two lines, and two keyed records in a separate segment."""
    built.lines("a", [b"one", b""])
    built.cut()
    built.columns("b", [b"\xff", b"four"], keys=[b"k", None], times_ns=[-1500, 2_500], headers=[None, b'{"h":"1"}'])
    built.cut()
    built.seal()
    return built


def moment(ns: int) -> datetime:
    return datetime.fromtimestamp(ns // 1_000_000_000, UTC)


def test_the_default_schema_is_the_documented_one() -> None:
    assert schema_ddl() == ", ".join(f"{name} {kind}" for name, kind in DEFAULT.items())


def test_every_column_holds_what_the_record_holds(few: Built) -> None:
    first, second = moment(START_NS + SECOND_NS), moment(START_NS + 2 * SECOND_NS)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    log = few.log_id.hex()
    assert list(zip(*table(rows_of(DEFAULT), few).to_pydict().values(), strict=True)) == [
        (log, "a", 1, first, None, None, b"one", None, 1),
        (log, "a", 2, first, None, None, b"", None, 1),
        (log, "b", 3, second, epoch - timedelta(microseconds=2), b"k", b"\xff", None, 3),
        (log, "b", 4, second, epoch + timedelta(microseconds=2), None, b"four", '{"h":"1"}', 3),
    ]


def test_columns_alone_in_another_order_and_as_strings_are_the_same(few: Built) -> None:
    everything = table(rows_of(DEFAULT), few)
    for name, kind in DEFAULT.items():
        assert table(rows_of({name: kind}), few).to_pydict() == {name: everything[name].to_pylist()}
    reverse = dict(reversed(DEFAULT.items()))
    assert table(rows_of(reverse), few).schema.names == list(reverse)
    few.columns("c", ["größe".encode()], keys=[b"k"])
    (row,) = table(rows_of({"route": "string", "key": "string"}), few).to_pylist()[4:]
    assert row == {"route": "c", "key": "k"}


def test_an_event_time_is_the_microsecond_it_is_in_on_both_sides_of_1970(built: Built) -> None:
    times = [-2001, -2000, -1999, -1, 0, 999, 1000, 1999, -(1 << 63)]
    built.columns("b", [b""] * len(times), times_ns=times)
    made = table(rows_of({"event_time": "timestamp"}), built)["event_time"].cast(pa.int64()).to_pylist()
    assert made == [time // 1000 for time in times]


def test_columns_are_found_in_any_case_and_called_as_they_were_asked_for(built: Built) -> None:
    built.lines("a", [b'{"n":1}'])
    rows = rows_of({"SEQ": "bigint", "Log": "string", "JSON": JSON, "_CORRUPT_record": "binary"})
    assert table(rows, built).to_pylist() == [
        {"SEQ": 1, "Log": built.log_id.hex(), "JSON": {"n": 1}, "_CORRUPT_record": None}
    ]


def test_not_null_stays_not_null() -> None:
    from pyspark.sql.types import LongType

    rows = Rows.of(StructType([StructField("seq", LongType(), nullable=False)]), value_bytes=1)
    assert rows.schema == pa.schema([pa.field("seq", pa.int64(), nullable=False)])


def test_columns_that_cannot_be_are_refused() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"sequence": "bigint"}, "unknown column 'sequence'"),
        ({"seq": "integer"}, "seq must be BIGINT, not INT"),
        ({"value": "integer"}, "value must be BINARY or STRING, not INT"),
        ({"_corrupt_record": "binary"}, "without json"),
        ({"json": "string"}, "json must be a STRUCT"),
    ]
    for columns, words in cases:
        with pytest.raises(InvalidInput) as refused:
            rows_of(columns)
        assert words in refused.value.message
        assert refused.value.hint


JSON = {"type": "struct", "fields": [{"name": "n", "type": "integer", "nullable": True, "metadata": {}}]}


def test_json_is_parsed_and_what_is_none_is_kept(built: Built) -> None:
    built.lines("a", [b'{"n":1,"m":2}', b"no json", b'{"n":"x"}', b"{}"])
    rows = rows_of({"seq": "bigint", "json": JSON, "_corrupt_record": "binary"})
    assert table(rows, built).to_pylist() == [
        {"seq": 1, "json": {"n": 1}, "_corrupt_record": None},
        {"seq": 2, "json": None, "_corrupt_record": b"no json"},
        {"seq": 3, "json": None, "_corrupt_record": b'{"n":"x"}'},
        {"seq": 4, "json": {"n": None}, "_corrupt_record": None},
    ]


def test_a_batch_is_no_larger_than_the_jvm_likes(built: Built) -> None:
    values = [b"x" * (1 << 20)] * 20 + [b"y" * (BATCH_BYTES + 1)] + [b"z"] * 5
    built.columns("a", values, keys=[b"k" * 100] * len(values))
    (piece,) = pieces(built)
    batches = list(rows_of(DEFAULT).read(piece))
    assert all(batch.nbytes <= BATCH_BYTES or batch.num_rows == 1 for batch in batches)
    assert pa.Table.from_batches(batches)["seq"].to_pylist() == list(range(1, 27))


def test_a_value_that_is_too_long_ends_the_query_or_is_reported(built: Built, tmp_path: Path) -> None:
    built.lines("a", [b"short", b"x" * 1001, b"short too"])
    with pytest.raises(Refused, match=r"route a has a value of 1001 B, and maxValueBytes is 1000 B") as refused:
        table(rows_of(DEFAULT, value_bytes=1000), built)
    assert 'option("maxValueBytes", "1001")' in refused.value.hint
    built.columns("b", [b"v"], keys=[b"k" * 2000])
    with pytest.raises(Refused, match=r"record 4 of route b has a key of 2.0 KiB"):
        table(rows_of({"key": "binary"}, value_bytes=1000), built)
    forgiving = Tolerance(damage=True, report=str(tmp_path / "report"))
    read = table(rows_of({"value": "binary", "json": JSON}, value_bytes=1000, tolerance=forgiving), built)
    assert read["value"].to_pylist() == [b"short", None, b"short too", b"v"]
    (report,) = (tmp_path / "report").iterdir()
    assert report.read_text().count("record 2 of route a has a value of 1001 B; it is null") == 1


def sent(read: pa.Table) -> int:
    """Return the number of bytes sent to the JVM."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, read.schema) as stream:
        stream.write_table(read)
    return int(sink.tell())


def test_the_bytes_of_a_value_that_is_null_are_not_sent(built: Built) -> None:
    built.lines("a", [b"short", b"x" * 100_000])
    built.columns("a", [b"v", b"v"], keys=[b"k" * 100_000, None], headers=[None, b'{"h":"%b"}' % (b"1" * 100_000)])
    read = table(rows_of(DEFAULT, value_bytes=1000, tolerance=Tolerance(damage=True)), built)
    assert [read["value"].null_count, read["key"].null_count, read["headers"].null_count] == [1, 4, 4]
    assert sent(read) < 10_000


def test_a_value_that_is_json_is_not_sent_as_a_corrupt_record_too(built: Built) -> None:
    built.lines("a", [b'{"n":1,"other":"%b"}' % (b"x" * 100_000), b"no json"])
    read = table(rows_of({"json": JSON, "_corrupt_record": "binary"}), built)
    assert read["_corrupt_record"].to_pylist() == [None, b"no json"]
    assert sent(read) < 10_000


def test_what_was_not_asked_for_is_not_made(few: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Sequence[str]] = []
    arrow = LogPiece.arrow

    def watched(piece: LogPiece, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        wanted.append(columns)
        return arrow(piece, columns)

    monkeypatch.setattr(LogPiece, "arrow", watched)
    list(rows_of({"seq": "bigint", "segment": "bigint"}).read(pieces(few)[0]))
    assert wanted == [["segment", "sequence"]]
