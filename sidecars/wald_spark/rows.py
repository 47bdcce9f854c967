"""Rows as Spark expects them: the schema of the data source, and Arrow batches that match it exactly.

The columns are those of Spark's Kafka source, as far as wald has them; docs/spark/source.md lists them. A query with
its own schema gets only those columns, in that order. Key and value may be STRING, too; bytes that are not UTF-8 then
appear as U+FFFD. If a query asks for JSON, there are two columns instead of the value:

    json             STRUCT<…>  these fields of a value that is a JSON object
    _corrupt_record  BINARY     any other value; ``json`` is null then

Spark compares schemas strictly (SPARK-55583): times are microseconds in UTC, strings are not dictionaries, and every
column is nullable. A batch holds up to 8 MiB, because the JVM copies each as a whole, or one longer value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import compute

from wald.errors import Damaged, InvalidInput, Refused
from wald.setting_types import format_bytes
from wald_spark.jsonvalues import JsonValues, arrow_fields
from wald_spark.options import STRICT, DamageReport, Tolerance

if TYPE_CHECKING:
    from pyspark.sql.types import StructField, StructType

    from wald_spark.query import Piece

BATCH_BYTES = 8 << 20
JSON, CORRUPT = "json", "_corrupt_record"
_TIME = pa.timestamp("us", "UTC")
_NOUNS = {"key": "a key", "value": "a value", "headers": "headers"}
_LONG = tuple(_NOUNS)  # the columns that can be of any length
_NAMES_BYTES = 64  # of log and route, in each row
_ARROW = {"string": pa.string(), "bigint": pa.int64(), "timestamp": _TIME, "binary": pa.binary()}


# The DDL types of each column, the default first, and the column of the log that it is made from.
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
    """Pieces as rows of one schema."""

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
                arrays.append(_repeated(log, batch.num_rows))
            elif name in parsed:
                arrays.append(_as(parsed[name], field.type))
            elif name == "segment":
                bases = batch.column("segment").to_numpy()
                arrays.append(pa.array(bases, mask=bases == 0))  # a bundle does not have it
            else:
                arrays.append(_as(batch.column(_COLUMNS[name][1]), field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _field(field: StructField) -> pa.Field:
    """Return the Arrow field that Spark accepts for a field of the schema."""
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
    """Round nanoseconds down to microseconds; a cast and Arrow's division round towards 1970."""
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
    """Replace the values that are not ``kept`` by nulls without their bytes, which ``if_else`` would keep."""
    return values.take(pa.array(np.arange(len(values)), mask=~kept))


def _repeated(text: str, count: int) -> pa.Array:
    return _repeats_of_power(text, max(0, count - 1).bit_length()).slice(0, count)


@lru_cache(maxsize=8)  # a worker may read thousands of logs
def _repeats_of_power(text: str, exponent: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), 1 << exponent)
