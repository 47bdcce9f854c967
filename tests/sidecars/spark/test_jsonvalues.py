"""Rows match the requested schema; JSON values are parsed in batches, and a bad one never shifts another."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built
from pyarrow import json as arrow_json
from pyspark.sql.types import StructField, StructType

from wald.errors import InvalidInput, Refused
from wald_spark.locations import LogLocation
from wald_spark.options import STRICT, Tolerance
from wald_spark.plan import LogPiece, Range, pieces_of
from wald_spark.rows import BATCH_BYTES, JsonValues, Rows, Weed, arrow_fields, schema_ddl

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


TIME = pa.timestamp("us", "UTC")
SHORT = pa.struct([("x", pa.int16())])
BAD = object()


def parse(schema: dict[str, Any], values: list[bytes | None]) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the rows and a bad flag for each; assert the invariants of every result."""
    wanted = JsonValues(pa.schema(list(schema.items())))
    columns, bad = wanted.parse(pa.array(values, pa.binary()))
    for column, field in zip(columns, wanted.schema, strict=True):
        column.validate(full=True)
        assert column.type == field.type
        assert len(column) == len(bad) == len(values)
    rows = pa.table(columns, schema=wanted.schema).to_pylist()
    assert all(set(row.values()) == {None} for row, is_bad in zip(rows, bad.to_pylist(), strict=True) if is_bad)
    return rows, bad.to_pylist()


def test_a_field_is_of_its_type_or_its_record_is_bad() -> None:
    """The records before and after a bad one are still read."""
    for kind, text, meant in [
        (pa.bool_(), "true", True),
        (pa.bool_(), "1", BAD),
        (pa.int8(), "-128", -128),
        (pa.int8(), "128", BAD),
        (pa.int16(), "32767", 32767),
        (pa.int32(), "-0", 0),
        (pa.int32(), "1.0", BAD),
        (pa.int32(), "1e2", BAD),
        (pa.int32(), "01", BAD),
        (pa.int32(), '"1"', BAD),
        (pa.int32(), "true", BAD),
        (pa.int32(), "{}", BAD),
        (pa.int32(), "[1]", BAD),
        (pa.int32(), "NaN", BAD),
        (pa.int64(), "9223372036854775807", (1 << 63) - 1),
        (pa.int64(), "9223372036854775808", BAD),
        (pa.float32(), "0.5", 0.5),
        (pa.float64(), "12345678901234567890123", 12345678901234567890123.0),
        (pa.float64(), "-Infinity", -math.inf),
        (pa.float64(), "1e400", BAD),
        (pa.float64(), '"1"', BAD),
        (pa.decimal128(5, 2), "1.25", Decimal("1.25")),
        (pa.decimal128(5, 2), '"1.25"', Decimal("1.25")),
        (pa.decimal128(5, 2), "1", Decimal(1)),
        (pa.decimal128(5, 2), "1.255", BAD),
        (pa.decimal128(5, 2), "1234.5", BAD),  # Arrow accepts six digits in a type of five
        (pa.string(), '"\\u0000\\ud83d\\ude00"', "\0😀"),
        (pa.string(), '"\\ud83d"', BAD),
        (pa.string(), '"a\tb"', BAD),
        (pa.string(), '"a\nb"', BAD),
        (pa.string(), '"a\0b"', BAD),
        (pa.string(), "1", BAD),
        (pa.date32(), '"2026-02-28"', date(2026, 2, 28)),
        (pa.date32(), '"2026-02-29"', BAD),
        (pa.date32(), "20000", BAD),
        (TIME, '"2026-11-21T10:00:00Z"', datetime(2026, 11, 21, 10, tzinfo=UTC)),
        (TIME, '"2026-11-21T11:00:00.123456789+01:00"', datetime(2026, 11, 21, 10, 0, 0, 123456, UTC)),
        (TIME, '"2026-11-21 10:00:00"', datetime(2026, 11, 21, 10, tzinfo=UTC)),
        (TIME, '"9999-12-31T00:00:00Z"', datetime(9999, 12, 31, tzinfo=UTC)),
        (TIME, '"yesterday"', BAD),
        (TIME, "1700000000", BAD),
        (pa.list_(pa.date32()), '["2026-01-02", null]', [date(2026, 1, 2), None]),
        (pa.list_(TIME), '["2026-01-02"]', [datetime(2026, 1, 2, tzinfo=UTC)]),
        (pa.list_(pa.int32()), "[1, 2.5]", BAD),
        (pa.list_(pa.int32()), "{}", BAD),
        (SHORT, '{"x": 1, "y": [{}]}', {"x": 1}),
        (SHORT, "{}", {"x": None}),
        (SHORT, '{"x": 99999}', BAD),
        (pa.list_(SHORT), '[{"x": 1}, {}]', [{"x": 1}, {"x": None}]),
        (pa.int32(), "null", None),
        (pa.decimal128(5, 2), "1.250", Decimal("1.25")),
        (pa.decimal128(5, 2), "125e-2", Decimal("1.25")),
        (pa.decimal128(5, 2), "0", Decimal(0)),
        (pa.decimal128(5, 5), "0.00000", Decimal(0)),
        (pa.decimal128(5, 2), "1e3", BAD),
        (pa.float64(), "-Inf", -math.inf),
        (pa.float64(), "-1", -1.0),
        (TIME, '"2026-11-21T10Z"', datetime(2026, 11, 21, 10, tzinfo=UTC)),
        (TIME, '"2026-11-21T10:30Z"', datetime(2026, 11, 21, 10, 30, tzinfo=UTC)),
        (TIME, '"2026-11-21T10:00:00+0130"', datetime(2026, 11, 21, 8, 30, tzinfo=UTC)),
        (TIME, '"2026-11-21"', datetime(2026, 11, 21, tzinfo=UTC)),
        (TIME, '"2026-11-21T"', BAD),
        (TIME, '"2026-11-21T24:00:00Z"', BAD),
        (TIME, '"2026-11-21T23:59:60Z"', BAD),
    ]:
        rows, bad = parse({"a": kind, "b": pa.int32()}, [b'{"b":1}', b'{"a":%b, "b":2}' % text.encode(), b'{"b":3}'])

        assert bad == [False, meant is BAD, False]
        assert rows[1] == ({"a": None, "b": None} if meant is BAD else {"a": meant, "b": 2})
        assert (rows[0]["b"], rows[2]["b"]) == (1, 3)
        assert weed({"a": kind}, [b'{"a":%b}' % text.encode()] * (meant is not BAD)) == [True] * (meant is not BAD)


def weed(schema: dict[str, Any], values: list[bytes]) -> list[bool]:
    """Return the values that are still passed to Arrow when many are bad."""
    kept: list[bool] = Weed(pa.schema(list(schema.items()))).keeps(pa.array(values, pa.binary())).tolist()
    return kept


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (pa.bool_(), "1"),
        (pa.int32(), '"1"'),
        (pa.int8(), "128"),
        (pa.float64(), "true"),
        (pa.decimal128(5, 2), "1.255"),
        (pa.decimal128(5, 2), '"1234.5"'),
        (pa.string(), "1"),
        (pa.date32(), '"2026-02-29"'),
        (TIME, '"yesterday"'),
        (TIME, '"2026-02-29T10:00:00Z"'),
        (pa.list_(SHORT), '[{"x": 1}, {"x": 1.5}]'),
        (SHORT, "[]"),
        (pa.int32(), "1}}"),
    ],
)
def test_many_bad_values_do_not_cost_a_parse_each(monkeypatch: pytest.MonkeyPatch, kind: Any, bad: str) -> None:
    """Arrow parses the text a few times, regardless of the number of mistyped values."""
    calls, read = count(), arrow_json.read_json
    monkeypatch.setattr(arrow_json, "read_json", lambda *given, **named: (next(calls), read(*given, **named))[1])
    values: list[bytes | None] = [b'{"a":%b}' % (bad if n % 10 == 0 else "null").encode() for n in range(2_000)]
    assert parse({"a": kind}, values)[1] == [n % 10 == 0 for n in range(2_000)]
    assert next(calls) <= 40


def test_values_that_are_not_one_object_are_bad_and_shift_no_other() -> None:
    cases: list[list[bytes | None]] = [
        [b'{"a":1}{"a":2}'],
        [b'{"a":1}\n{"a":2}', b""],
        [b'{"a":1}{"a":2}', b'{"a":'],
        [b'{"a":', b"1}"],
        [b'{"b":"}', b'{"}{"a":2}'],
        [b'{"b":{}', b'{"a":2}}'],
        [b'{"b":[{}', b'{"a":2}]}'],
        [b'{"a":1}{"a":2}', b"{\0}"],
        [b'{"a":1},', b'{"a":2}]'],
        [b'{"a":1,"a":2}'],
        [b'{"b":"\xff"}'],
        [b'{"a":1}\0'],
        [b"", b" ", b"\r", b"\n\n"],
        [b"[]", b"null", b"1", b'"{}"', b"GET / 200"],
        [b"\xef\xbb\xbf{}"],
        [b"{}}", b"{{}", b"{]}", b"{a}", b"{'a':1}", b'{"a":1,}', b'{"a" 1}', b"{/**/}"],
        [None],
    ]
    for values in cases:
        rows, bad = parse({"a": pa.int32()}, [b'{"a":10}', *values, b'{"a":20}', *values])

        assert bad == [False, *(True for _ in values), False, *(True for _ in values)]
        assert (rows[0], rows[len(values) + 1]) == ({"a": 10}, {"a": 20})


def test_blanks_lengths_and_far_times_do_no_harm() -> None:
    """Nor newlines within an object; Arrow's nanoseconds end in 2262, and its microseconds reject a ninth digit."""
    rows, bad = parse({"a": pa.int32()}, [b' {"a":1}\r', b'\t{\n"a"\n:\n2\n}\n', b'{"b":1,"b":2,"\\u0061":3}', b"{ }"])

    assert not any(bad)
    assert [row["a"] for row in rows] == [1, 2, 3, None]

    long = b"x" * (10 << 20)
    rows, bad = parse({"a": pa.string()}, [b'{"a":"%b"}' % long, b'{"a":"%b}' % long, b'{"a":"y"}'])

    assert bad == [False, True, False]
    assert [len(row["a"] or "") for row in rows] == [len(long), 0, 1]

    far, fine = b'{"a":"9999-01-01T00:00:00Z"}', b'{"a":"2026-01-01T00:00:00.123456789Z"}'
    rows, bad = parse({"a": TIME}, [far, fine] * 3)

    assert not any(bad)
    assert [row["a"].year for row in rows] == [9999, 2026] * 3


def test_a_slice_of_values_is_read_from_where_it_begins() -> None:
    """What is wanted is sent to a worker; no values give empty columns."""
    values = pa.array([b"\0", b'{"a":1}', b'{"a":2}', b"\xff"], pa.binary()).slice(1, 2)
    wanted = JsonValues(pa.schema([("a", pa.int32())]))
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    columns, bad = wanted.parse(values)
    assert (columns[0].to_pylist(), bad.to_pylist()) == ([1, 2], [False, False])
    assert parse({"a": pa.int32()}, []) == ([], [])


class Pairs(list[tuple[str, Any]]):
    """A JSON object from ``json.loads`` that keeps duplicate names."""


def fits(value: bytes) -> dict[str, Any] | None:
    """Return the fields of SCHEMA according to ``json.loads``, with the exceptions that the module documents."""
    try:
        pairs = json.loads(value.decode(), object_pairs_hook=Pairs, parse_float=finite, parse_int=whole)
        value.decode().encode("utf-16")
        json.dumps(pairs, ensure_ascii=False).encode()  # rejects a lone surrogate
    except (ValueError, RecursionError):
        return None
    names = [name for name, _ in pairs] if isinstance(pairs, Pairs) else ["i", "i"]
    if any(names.count(name) > 1 for name in SCHEMA):
        return None
    found = {name: dict(pairs).get(name) for name in SCHEMA}
    kinds = {"i": (int,), "f": (int, float), "s": (str,)}
    for name, each in found.items():
        if each is not None and (type(each) not in kinds[name] or (name == "i" and not -(2**31) <= each < 2**31)):
            return None
    return found


def finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def whole(text: str) -> int:
    finite(text)
    return int(text)


SCHEMA = {"i": pa.int32(), "f": pa.float64(), "s": pa.string()}
NAMES = st.sampled_from(["i", "f", "s", "o"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=5)
)
OBJECTS = st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2))
WHOLE = st.builds(lambda each, ascii_only: json.dumps(each, ensure_ascii=ascii_only), OBJECTS, st.booleans())
GOOD = st.fixed_dictionaries({"i": st.integers(0, 9), "f": st.floats(-1, 1), "s": st.text('ab{}\n\\"')}).map(json.dumps)
PARTS = st.lists(
    st.sampled_from(
        ['{"i":', "{", "}", '"', "1", ",", '"s":', '"f"', ":", "{}", "[", "]", " ", "\n", "\0", "\\", "1.5"]
    )
    | WHOLE,
    max_size=6,
).map("".join)
VALUES = (GOOD | WHOLE | PARTS).map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=8)


@given(st.lists(VALUES, max_size=8))
def test_agrees_with_json_loads(values: list[bytes]) -> None:
    """Neighbouring values do not affect each other."""
    expected = [fits(value) for value in values]
    rows, bad = parse(SCHEMA, list(values))

    assert bad == [each is None for each in expected]
    assert rows == [each or dict.fromkeys(SCHEMA) for each in expected]
    assert all(weed(SCHEMA, [value for value, each in zip(values, expected, strict=True) if each is not None]))


def struct(ddl: str) -> StructType:
    """Parse DDL with Spark."""
    from pyspark.sql.types import StructType

    parsed = StructType.fromDDL(ddl)
    assert isinstance(parsed, StructType)
    return parsed


@pytest.mark.parametrize(
    ("ddl", "kinds"),
    [
        (
            "a BOOLEAN, b TINYINT, c SMALLINT, d INT, e BIGINT",
            [pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()],
        ),
        ("a FLOAT, b DOUBLE, c DECIMAL(5,2), d STRING", [pa.float32(), pa.float64(), pa.decimal128(5, 2), pa.string()]),
        ("a DATE, b TIMESTAMP", [pa.date32(), TIME]),
        ("a ARRAY<STRUCT<x: SMALLINT>>", [pa.list_(pa.field("element", SHORT))]),
    ],
)
def test_ddl_becomes_arrow(spark: Any, ddl: str, kinds: list[Any]) -> None:
    assert [field.type for field in arrow_fields(struct(ddl))] == kinds


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        ("a MAP<STRING, INT>", "a: JSON is not parsed as map<string,int>"),
        ("a ARRAY<BINARY>", "a: JSON is not parsed as binary"),
        ("a INT NOT NULL", "a is NOT NULL"),
        ("a INT, A STRING", "duplicate JSON field a"),
    ],
)
def test_ddl_that_cannot_be_parsed_is_refused(spark: Any, ddl: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        arrow_fields(struct(ddl))


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


def struct_of(columns: Mapping[str, object]) -> StructType:
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
    return Rows.of(struct_of(columns), value_bytes=value_bytes, tolerance=tolerance)


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
