"""Rows in Spark's format: the schema of the data source, and Arrow batches that match it exactly.

The columns follow Spark's Kafka source where possible; docs/spark/source.md lists them. A query with
its own schema gets only those columns, in that order. Key and value may be STRING, too; bytes that are not UTF-8 then
appear as U+FFFD. If a query asks for JSON, there are two columns instead of the value:

    json             STRUCT<…>  these fields of a value that is a JSON object
    _corrupt_record  BINARY     any other value; ``json`` is null then

A value fits if it is one JSON object in UTF-8 and each field that the schema names is absent, null, or of its type: a
number is not a string, 1.5 and 1e2 are not integers, and nothing may be out of range. Other fields are ignored.

    BOOLEAN                         true, false
    TINYINT, SMALLINT, INT, BIGINT  a number without fraction or exponent
    FLOAT, DOUBLE                   any number, NaN and Infinity, which many programs write
    DECIMAL(p,s)                    any number, or a string with one, with at most s decimals
    STRING                          a string
    DATE                            "2026-11-21"
    TIMESTAMP                       "2026-11-21T10:00:00.25Z", or with "+01:00", or in UTC without a zone
    ARRAY<…>, STRUCT<…>             of these

Three things on which Arrow's parser and ``json.loads`` disagree are bad here: an object with a duplicate wanted field,
half of a surrogate pair, and a number that no double can hold.

Arrow parses the values of a batch as one text, joined by newlines. It reads "{}{}" as two rows and ignores where a
value ends, so a bad value could shift the values after it. Three facts prevent that. Every value begins with ``{`` and
ends with ``}``, and in JSON no ``{`` follows an object, so no value continues in the next one. No string does either,
because it must not contain a newline. There are as many rows as values, so each value is one row. A text that Arrow
rejects is split until the bad value is isolated. That is fast if there are few bad values; if there are more,
:class:`Weed` first removes those that ``json.loads`` rejects.

Spark compares schemas strictly (SPARK-55583): times are microseconds in UTC, strings are not dictionaries, and every
column is nullable. A batch holds up to 8 MiB, because the JVM copies each as a whole, or one longer value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from operator import lt
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import json as arrow_json

from wald.errors import Damaged, InvalidInput, Refused
from wald.setting_types import format_bytes
from wald_spark.options import STRICT, DamageReport, Tolerance

if TYPE_CHECKING:
    from pyspark.sql.types import StructField, StructType

    from wald_spark.query import Piece

_BLANKS = " \t\r\n"
_ROW = re.compile(r" in row (\d+)$")  # Arrow names the bad row in some errors; otherwise, it is found by splitting
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_DATE_TIME = re.compile(_DATE.pattern + r"(?:[ T](\d\d)(?::?(\d\d)(?::?(\d\d))?)?|$)", re.ASCII)
_REFUSALS = 16  # texts of one batch that Arrow may reject before it is weeded
_WEEDED_CHARACTERS = 1 << 20  # the Python objects of a longer value need many times its memory
_TIME = pa.timestamp("us", "UTC")
_EXACT_TIME = pa.timestamp("ns", "UTC")
_SCALARS: dict[str, Any] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": _TIME,
}


def arrow_fields(fields: StructType) -> list[pa.Field]:
    names = [field.name.lower() for field in fields]  # Spark ignores the case of names
    for field in fields:
        if names.count(field.name.lower()) > 1:
            raise InvalidInput(f"duplicate JSON field {field.name}", hint="each field once")
        if not field.nullable:
            raise InvalidInput(
                f"{field.name} is NOT NULL, but a bad value has no fields at all", hint="leave out NOT NULL"
            )
    return [pa.field(field.name, _arrow_type(field.dataType, field.name)) for field in fields]


def _arrow_type(of: Any, name: str) -> Any:  # a type of PySpark, a type of pyarrow
    kind = of.typeName()
    if kind == "decimal":
        return pa.decimal128(of.precision, of.scale)
    if kind == "array":
        return pa.list_(pa.field("element", _arrow_type(of.elementType, name)))
    if kind == "struct":
        return pa.struct(arrow_fields(of))
    if kind not in _SCALARS:
        raise InvalidInput(
            f"{name}: JSON is not parsed as {of.simpleString()}",
            hint="BOOLEAN, TINYINT to BIGINT, FLOAT, DOUBLE, DECIMAL, STRING, DATE, TIMESTAMP, ARRAY and STRUCT are",
        )
    return _SCALARS[kind]


@dataclass(frozen=True, slots=True)
class JsonValues:
    """Parser of values into the columns of ``schema``, which is one of :func:`arrow_fields`."""

    schema: pa.Schema

    def parse(self, values: pa.BinaryArray) -> tuple[list[pa.Array], pa.BooleanArray]:
        """Return the columns of the schema, and a flag for each bad value or null, which is null in all of them."""
        rows = np.flatnonzero(_enclosed(values))
        found = self._found(_Text.of(_taken(values, rows)), most_refusals=_REFUSALS)
        if found is None:
            rows = rows[Weed(self.schema).keeps(_taken(values, rows))]
            found = self._found(_Text.of(_taken(values, rows))) or []
        table = pa.concat_tables([self.schema.empty_table(), *(part for _, part in found)])
        columns = [column.combine_chunks() for column in table.columns]
        good = np.concatenate([rows[:0], *(rows[first : first + part.num_rows] for first, part in found)])
        bad = np.ones(len(values), dtype=bool)
        bad[good] = False
        if len(good) < len(values):
            indices = np.zeros(len(values), dtype=np.int64)
            indices[good] = np.arange(len(good))
            columns = [column.take(pa.array(indices, mask=bad)) for column in columns]
        return columns, pa.array(bad)

    def _found(self, text: _Text, *, most_refusals: float = math.inf) -> list[tuple[int, pa.Table]] | None:
        """Return the values that fit, in order, as groups: the number of the first value, and the columns.

        Return None if Arrow rejects more than ``most_refusals`` texts.
        """
        # Schemas to try in turn: nine decimals of a second are usual, and so is the year 9999.
        kinds = ([(field, _parsed_type(field.type, time)) for field in self.schema] for time in (_EXACT_TIME, _TIME))
        wires = [pa.schema([field.with_type(kind) for field, kind in each]) for each in kinds]
        wires = wires[:1] if wires[0] == wires[1] else wires
        found: list[tuple[int, pa.Table]] = []
        refusals = 0
        waiting = [(0, text.count)]
        while waiting:
            first, end = waiting.pop()
            if first == end:
                continue
            read = self._read(text.part(first, end), end - first, wires)
            if isinstance(read, pa.Table):
                found.append((first, read))
                continue
            refusals += 1
            if refusals > most_refusals:
                return None
            if read == 0 or end - first == 1:
                waiting.append((first + 1, end))  # the first row begins in the first value, so that value is bad
            else:
                middle = first + (read if read is not None and read < end - first else (end - first) // 2)
                waiting += [(middle, end), (first, middle)]
        return found

    def _read(self, part: pa.Buffer, count: int, wires: list[pa.Schema]) -> pa.Table | int | None:
        """Return the columns of ``count`` values; or the number of the row that does not fit, None if unknown."""
        row = None
        for wire in wires:
            try:
                columns = [
                    column.cast(options=compute.CastOptions(field.type, allow_time_truncate=True))
                    for column, field in zip(_parsed(part, count, wire).columns, self.schema, strict=True)
                ]
                made = pa.table(columns, schema=self.schema)
                made.validate(full=True)  # Arrow's parser accepts decimals that are too long
                return made
            except pa.ArrowInvalid as error:
                match = _ROW.search(str(error))
                row = int(match[1]) if match else None
        return row


class Weed:
    """Filter for values that ``json.loads`` rejects; it must keep every value that Arrow accepts."""

    def __init__(self, schema: pa.Schema) -> None:
        self._fits = _check_of_fields(list(schema))
        self._loads = json.JSONDecoder().decode
        if any(map(_has_decimals, schema.types)):  # a float loses digits
            self._loads = json.JSONDecoder(parse_float=Decimal).decode

    def keeps(self, values: pa.BinaryArray) -> np.ndarray:
        """Return a flag for each value, False if it is bad; all values are text in braces."""
        return np.fromiter(map(self._keeps, values.view(pa.string()).to_pylist()), bool, len(values))

    def _keeps(self, text: str) -> bool:
        if len(text) > _WEEDED_CHARACTERS:
            return True
        try:
            found = self._loads(text)
        except RecursionError:
            return True
        except ValueError:
            return "Inf" in text or "-NaN" in text  # as Arrow accepts them
        return self._fits(found)


_Check = Callable[[Any], bool]  # check of a value returned by json.loads


def _check_of(kind: Any) -> _Check:
    """Return a function that checks if a value can be of type ``kind``; null fits every type."""
    if pa.types.is_boolean(kind):
        return lambda value: value is None or type(value) is bool
    if pa.types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        return lambda value: (type(value) is int and -limit <= value < limit) or value is None
    if pa.types.is_floating(kind):
        return lambda value: type(value) in (float, int, Decimal) or value is None
    if pa.types.is_decimal(kind):
        return lambda value: value is None or _is_decimal(value, kind.precision, kind.scale)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        form = _DATE if pa.types.is_date(kind) else _DATE_TIME
        return lambda value: value is None or (type(value) is str and _is_time(form.match(value)))
    if pa.types.is_list(kind):
        element = _check_of(kind.value_type)
        return lambda value: value is None or (type(value) is list and all(map(element, value)))
    if pa.types.is_struct(kind):
        return _check_of_fields([kind.field(number) for number in range(kind.num_fields)])
    return lambda value: type(value) is str or value is None


def _check_of_fields(fields: list[pa.Field]) -> _Check:
    checks = [(field.name, _check_of(field.type)) for field in fields]

    def fits(value: Any) -> bool:
        if type(value) is not dict:
            return value is None
        get = value.get
        for name, check in checks:  # noqa: SIM110 - a loop is faster than all() with a generator
            if not check(get(name)):
                return False
        return True

    return fits


def _has_decimals(kind: Any) -> bool:
    if pa.types.is_list(kind):
        return _has_decimals(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_has_decimals(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_decimal(kind))


def _is_decimal(value: Any, precision: int, scale: int) -> bool:
    if type(value) not in (int, str, Decimal):
        return False
    try:
        digits = Decimal(value).normalize()
    except InvalidOperation:
        return True
    exponent = digits.as_tuple().exponent
    return not isinstance(exponent, int) or (exponent >= -scale and digits.adjusted() < precision - scale) or not digits


def _is_time(match: re.Match[str] | None) -> bool:
    if match is None:
        return False
    year, month, day, *clock = (int(each or 0) for each in match.groups())
    try:
        date(year or 4, month, day)  # datetime.date has no year 0, which is a leap year
    except ValueError:
        return False
    return all(map(lt, clock, (24, 60, 60)))


@dataclass(frozen=True, slots=True)
class _Text:
    """Values joined by newlines; value n begins at ``starts[n]``."""

    data: pa.Buffer
    starts: np.ndarray
    count: int

    @classmethod
    def of(cls, values: pa.BinaryArray) -> _Text:
        count = len(values)
        everything = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)
        joined = compute.binary_join(everything, b"\n")[0].as_buffer()
        lengths = compute.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64) + 1
        return cls(joined, np.concatenate([[0], np.cumsum(lengths)]), count)

    def part(self, first: int, end: int) -> pa.Buffer:
        start, stop = int(self.starts[first]), int(self.starts[end]) - 1
        return self.data.slice(start, stop - start)


def _taken(values: pa.BinaryArray, rows: np.ndarray) -> pa.BinaryArray:
    return values if len(rows) == len(values) else values.take(pa.array(rows))


def _enclosed(values: pa.BinaryArray) -> np.ndarray:
    """Return a flag for each value, True if it is text between braces, as every object is."""
    text = values.view(pa.string())
    whole = _in_braces(text)
    if not whole.all():
        whole = _in_braces(compute.ascii_trim(text, _BLANKS))
    data = values.buffers()[2]
    if data is not None and not np.frombuffer(data, np.uint8).all():  # Arrow's parser would end at a NUL
        whole &= ~_flags(compute.match_substring(text, "\0"))
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        whole &= np.fromiter(map(_is_text, values), bool, len(values))
    return whole


def _in_braces(text: pa.StringArray) -> np.ndarray:
    return _flags(compute.and_(compute.starts_with(text, "{"), compute.ends_with(text, "}")))


def _flags(array: pa.BooleanArray) -> np.ndarray:
    flags: np.ndarray = compute.fill_null(array, False).to_numpy(zero_copy_only=False)
    return flags


def _is_text(value: pa.BinaryScalar) -> bool:
    try:
        str(memoryview(value.as_buffer() or b""), "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _parsed(part: pa.Buffer, count: int, schema: pa.Schema) -> pa.Table:
    table = arrow_json.read_json(
        pa.BufferReader(part),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=part.size + 1),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    if table.num_rows != count:
        raise pa.ArrowInvalid(f"{table.num_rows} objects in {count} values")
    return table


def _parsed_type(kind: Any, time: Any) -> Any:
    """Return the type to request from Arrow instead of ``kind``: Arrow parses no dates, and all times in one unit."""
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_timestamp(kind):
        return time
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_parsed_type(kind.value_type, time)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_parsed_type(field.type, time)) for field in kind])
    return kind


BATCH_BYTES = 8 << 20
JSON, CORRUPT = "json", "_corrupt_record"
_TIME = pa.timestamp("us", "UTC")
_NOUNS = {"key": "a key", "value": "a value", "headers": "headers"}
_LONG = tuple(_NOUNS)  # the columns that can be of any length
_NAMES_BYTES = 64  # of log and route, in each row
_ARROW = {"string": pa.string(), "bigint": pa.int64(), "timestamp": _TIME, "binary": pa.binary()}


# The DDL types of each column, default first, and the log column that it is made from.
_COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "log": (("string",), ""),
    "route": (("string",), "route"),
    "seq": (("bigint",), "sequence"),
    "timestamp": (("timestamp",), "append_time"),
    "event_time": (("timestamp",), "event_time"),
    "key": (("binary", "string"), "key"),
    "value": (("binary", "string"), "value"),
    "headers": (("string",), "headers"),
    "segment": (("bigint",), "segment"),
    CORRUPT: (("binary", "string"), "value"),
}


def schema_ddl(json_ddl: str = "") -> str:
    """Return the schema of a query that does not give one, as DDL; ``json_ddl`` names columns parsed from values."""
    left_out = {"value"} if json_ddl else {CORRUPT}
    ours = ", ".join(f"{name} {types[0]}" for name, (types, _) in _COLUMNS.items() if name not in left_out)
    return f"{ours}, {JSON} struct<{json_ddl}>" if json_ddl else ours


@dataclass(frozen=True, slots=True)
class Rows:
    """Converter of pieces to rows of one schema."""

    schema: pa.Schema  # of the batches, as Spark expects them
    json: JsonValues | None
    value_bytes: int  # longer values, keys or headers end the query; if damage is tolerated, they are null and reported
    tolerance: Tolerance = STRICT

    @classmethod
    def of(cls, schema: StructType, *, value_bytes: int, tolerance: Tolerance = STRICT) -> Rows:
        fields = [_field(field) for field in schema]
        json = next((JsonValues(pa.schema(list(field.type))) for field in fields if field.name.lower() == JSON), None)
        if json is None and any(field.name.lower() == CORRUPT for field in fields):
            raise InvalidInput(f"{CORRUPT} without {JSON}", hint='.option("jsonSchema", "status INT, host STRING")')
        return cls(pa.schema(fields), json, value_bytes, tolerance)

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        sources = {_COLUMNS[name.lower()][1] for name in self.schema.names if name.lower() in _COLUMNS} - {""}
        sources |= {"sequence"} | ({"value"} if self.json else set())
        if not sources.isdisjoint(_LONG):
            sources |= {"route"}  # a report of a long value names the route
        with closing(DamageReport(self.tolerance, f"{piece.name}-values")) as damage:
            for batch in piece.arrow(sorted(sources)):
                for part in _parts(self._bounded(batch, damage)):
                    yield self._rows(part, piece.log)

    def _bounded(self, batch: pa.RecordBatch, damage: DamageReport) -> pa.RecordBatch:
        """Return the batch without values that are too long for the JVM."""
        if batch.nbytes <= self.value_bytes:
            return batch
        for name in (name for name in _LONG if name in batch.schema.names):
            values = batch.column(name)
            too_long = compute.fill_null(compute.greater(compute.binary_length(values), self.value_bytes), False)
            rows = too_long.to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(rows):
                sequence, length = batch.column("sequence")[row].as_py(), len(values[row].as_buffer())
                route = batch.column("route")[row].as_py()
                message = f"record {sequence} of route {route} has {_NOUNS[name]} of {format_bytes(length)}"
                if not self.tolerance.damage:
                    raise Refused(
                        f"{message}, and maxValueBytes is {format_bytes(self.value_bytes)}",
                        hint=f'.option("maxValueBytes", "{length}"), with three times as much memory for each task; or '
                        '.option("mode", "PERMISSIVE"), which makes it null',
                    )
                damage.add(Damaged(f"{message}; it is null"))
            number, kind = batch.schema.get_field_index(name), pa.field(name, values.type)
            batch = batch.set_column(number, kind, _only(values, ~rows))
        return batch

    def _rows(self, batch: pa.RecordBatch, log: str) -> pa.RecordBatch:
        parsed: dict[str, pa.Array] = {}
        if self.json is not None:
            values = batch.column("value")
            columns, bad = self.json.parse(compute.fill_null(values, b""))
            parsed[JSON] = pa.StructArray.from_arrays(columns, fields=list(self.json.schema), mask=bad)
            parsed[CORRUPT] = _only(values, bad.to_numpy(zero_copy_only=False))
        arrays = []
        for field in self.schema:
            name = field.name.lower()  # Spark accepts SEQ for seq, and expects the name that was asked for
            if name == "log":
                repeats = max(0, batch.num_rows - 1).bit_length()  # a few lengths, so that the cache has most
                arrays.append(_repeated(log, 1 << repeats).slice(0, batch.num_rows))
            elif name in parsed:
                arrays.append(_as(parsed[name], field.type))
            elif name == "segment":
                bases = batch.column("segment").to_numpy()
                arrays.append(pa.array(bases, mask=bases == 0))  # a bundle does not have it
            else:
                arrays.append(_as(batch.column(_COLUMNS[name][1]), field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _field(field: StructField) -> pa.Field:
    if field.name.lower() == JSON:
        from pyspark.sql.types import StructType

        if isinstance(field.dataType, StructType):
            return pa.field(field.name, pa.struct(arrow_fields(field.dataType)), field.nullable)
        raise InvalidInput(
            f"{JSON} must be a STRUCT, not {field.dataType.simpleString()}", hint=f"{JSON} STRUCT<a INT>"
        )
    types, kind = _COLUMNS.get(field.name.lower(), ((), ""))[0], field.dataType.simpleString()
    if not types:
        names = ", ".join([*_COLUMNS, JSON])
        raise InvalidInput(f"unknown column {field.name!r}", hint=f"columns: {names}; fields of JSON are in {JSON}")
    if kind not in types:
        message = f"{field.name} must be {' or '.join(map(str.upper, types))}, not {kind.upper()}"
        raise InvalidInput(message, hint=f"cast it: CAST({field.name} AS …)")
    return pa.field(field.name, _ARROW[kind], field.nullable)


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if pa.types.is_timestamp(kind):
        return _microseconds(array).view(kind)
    return array.view(kind)


def _microseconds(times: pa.Array) -> pa.Array:
    """Round nanoseconds down to microseconds; a cast or Arrow's division would round towards 1970."""
    numbers = times.view(pa.int64())
    quotient = compute.divide(numbers, 1000)
    before = compute.greater(compute.multiply(quotient, 1000), numbers)
    return compute.subtract(quotient, before.cast(pa.int64()))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield slices of ``batch`` of up to :data:`BATCH_BYTES`, or of one longer row."""
    if batch.nbytes + batch.num_rows * _NAMES_BYTES <= BATCH_BYTES:
        yield batch
        return
    ends = np.cumsum(sum(_row_bytes(column) for column in batch.columns) + _NAMES_BYTES, dtype=np.int64)
    start = 0
    while start < batch.num_rows:
        room = BATCH_BYTES + (int(ends[start - 1]) if start else 0)
        stop = max(start + 1, int(np.searchsorted(ends, room, side="right")))
        yield batch.slice(start, stop - start)
        start = stop


def _row_bytes(column: pa.Array) -> np.ndarray:
    if pa.types.is_binary(column.type):
        lengths = compute.fill_null(compute.binary_length(column), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    return np.full(len(column), 8, np.int64)


def _only(values: pa.Array, kept: np.ndarray) -> pa.Array:
    """Replace values that are not ``kept`` with nulls, without their bytes, which ``if_else`` would keep."""
    return values.take(pa.array(np.arange(len(values)), mask=~kept))


@lru_cache(maxsize=8)  # a worker may read thousands of logs
def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), count)
