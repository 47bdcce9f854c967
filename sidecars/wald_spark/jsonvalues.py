"""Values that are JSON objects, parsed into columns by the task that reads them, a batch at a time.

A value fits a schema if it is one JSON object in UTF-8 and each field that the schema names is absent, null, or of its
type: a number is not a string, 1.5 and 1e2 are not integers, and nothing may be out of range. Other fields are ignored.

    BOOLEAN                         true, false
    TINYINT, SMALLINT, INT, BIGINT  a number without fraction or exponent
    FLOAT, DOUBLE                   any number, NaN and Infinity, which many programs write
    DECIMAL(p,s)                    any number, or a string with one, with at most s decimals
    STRING                          a string
    DATE                            "2026-11-21"
    TIMESTAMP                       "2026-11-21T10:00:00.25Z", or with "+01:00", or in UTC without a zone
    ARRAY<…>, STRUCT<…>             of these

Three things are bad here on which Arrow's parser and ``json.loads`` disagree: an object with a wanted field twice, half
of a surrogate pair, and a number that no double can hold.

Arrow parses the values of a batch as one text, joined by newlines. It reads "{}{}" as two rows and ignores where a
value ends, so a bad value could shift those behind it. Three facts prevent that. Every value begins with ``{`` and ends
with ``}``, and in JSON no ``{`` follows an object, so no value continues in the next one. A string does not either,
because it must not contain a newline. There are as many rows as values, so each value is one row.

A text that Arrow rejects is split until the bad value is isolated. That is fast for a few bad values; if there are
more, :class:`Weed` first removes those that ``json.loads`` rejects.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import json as arrow_json

from wald.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_BLANKS = " \t\r\n"
_ROW = re.compile(r" in row (\d+)$")  # Arrow names the bad row in some errors; for others it is searched
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_DATE_TIME = re.compile(_DATE.pattern + r"(?:[ T](\d\d)(?::?(\d\d)(?::?(\d\d))?)?|$)", re.ASCII)
_REFUSALS = 16  # texts of one batch that Arrow may reject before it is weeded
_WEEDED_CHARACTERS = 1 << 20  # Python objects of a longer value take many times its memory
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
        """Return the columns of the schema, and flags of the bad values (nulls too), which are null in every column."""
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
        """Return the values that fit, in order: the number of the first of a group, and the group's columns.

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
                waiting.append((first + 1, end))  # the first row begins in the first value: that one is bad
            else:
                middle = first + (read if read is not None and read < end - first else (end - first) // 2)
                waiting += [(middle, end), (first, middle)]
        return found

    def _read(self, part: pa.Buffer, count: int, wires: list[pa.Schema]) -> pa.Table | int | None:
        """Return the columns of ``count`` values; or the row that does not fit, None if it is unknown."""
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
    """Filter of values that are certainly bad for ``json.loads``; it must not find one that Arrow would accept."""

    def __init__(self, schema: pa.Schema) -> None:
        self._fits = _check_of_fields(list(schema))
        self._loads = json.JSONDecoder().decode
        if any(map(_has_decimals, schema.types)):  # a float loses digits
            self._loads = json.JSONDecoder(parse_float=Decimal).decode

    def keeps(self, values: pa.BinaryArray) -> np.ndarray:
        """Return a flag for each value, False if it is bad; every value is text in braces."""
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


_Check = Callable[[Any], bool]  # of a value that json.loads has returned


def _check_of(kind: Any) -> _Check:
    """Return a function that returns False for a value that cannot be of ``kind``; null fits every type."""
    if pa.types.is_boolean(kind):
        return lambda value: value is None or type(value) is bool
    if pa.types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        return lambda value: (type(value) is int and -limit <= value < limit) or value is None
    if pa.types.is_floating(kind):
        return lambda value: type(value) in (float, int, Decimal) or value is None
    if pa.types.is_decimal(kind):
        return lambda value: value is None or _is_decimal(value, kind.precision, kind.scale)
    if pa.types.is_date(kind):
        return lambda value: value is None or (type(value) is str and _is_date(value))
    if pa.types.is_timestamp(kind):
        return lambda value: value is None or (type(value) is str and _is_time(value))
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


def _is_date(text: str) -> bool:
    match = _DATE.match(text)
    return match is not None and _is_day(*map(int, match.groups()))


def _is_time(text: str) -> bool:
    match = _DATE_TIME.match(text)
    if match is None:
        return False
    year, month, day, hour, minute, second = (int(each or 0) for each in match.groups())
    return _is_day(year, month, day) and hour < 24 and minute < 60 and second < 60


def _is_day(year: int, month: int, day: int) -> bool:
    try:
        return bool(date(year or 4, month, day))  # datetime.date has no year 0, which is a leap year
    except ValueError:
        return False


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
    """Return the type to ask Arrow for instead of ``kind``: it parses no dates, and all times in one unit."""
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_timestamp(kind):
        return time
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_parsed_type(kind.value_type, time)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_parsed_type(field.type, time)) for field in kind])
    return kind
