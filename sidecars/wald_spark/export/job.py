"""A run of an export: what is due is planned here, written by executors, and committed to the output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from wald.errors import InvalidInput, Refused
from wald_spark.damage import Tolerance
from wald_spark.export.files import ChunkExport, decode_files
from wald_spark.export.output import ExportedFile, ExportedLog, Output, Shape
from wald_spark.locations import LogLocation
from wald_spark.pieces import LogPiece
from wald_spark.progress import Chunk, NewRecords, new_records, passed_over
from wald_spark.rows import Rows, schema_ddl
from wald_spark.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_NO_LIMIT = (1 << 31) - 1
SAMPLE = 10_000
_TYPES: dict[type, str] = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "STRING"}


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be exported of one log, and what was exported of it before."""

    new: NewRecords
    before: ExportedLog

    def chunks(self, *, file_bytes: int, cores: int) -> list[Chunk]:
        """In chunks that make files of about ``file_bytes``, and that keep all cores at work.

        A chunk makes a file of each route, so with many routes in the log it has to be larger.
        """
        routes = self.before.shape.routes or self.new.location.root.route_names()
        fair = self.new.raw_bytes // (2 * cores)
        return self.new.chunks(min(file_bytes * max(1, len(routes)), max(fair, file_bytes)))


@dataclass(frozen=True, slots=True)
class LogResult:
    """What a run has exported of one log.

    Attributes:
        passed_over: messages about what could not be read.
    """

    due: Due
    entry: ExportedLog
    files: list[ExportedFile]
    passed_over: list[str]


def _ignore(_: object) -> None:
    """The default of callbacks."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """What a run is asked to do.

    Attributes:
        shape: as it was requested; the types of its columns may be known from earlier runs.
        permissive: whether to pass over what cannot be read.
        partial: whether logs may lack their oldest segments.
        notes: a directory for reports of what is passed over.
        at: the time of the run, as text.
        spark: makes a session; called only if there is something to do.
        on_shape: called with the types that were inferred.
        on_new: called with what has come in each log.
        on_begin, on_done: called with the raw bytes of all that is due, and of each part of it that is written.
    """

    output: Output
    shape: Shape
    permissive: bool
    partial: bool
    file_bytes: int
    notes: Path
    at: str
    spark: Callable[[], AbstractContextManager[SparkSession]]
    on_shape: Callable[[str], None] = field(default=_ignore)
    on_new: Callable[[NewRecords], None] = field(default=_ignore)
    on_begin: Callable[[int], None] = field(default=_ignore)
    on_done: Callable[[int], None] = field(default=_ignore)

    def export(self, locations: Sequence[LogLocation]) -> list[LogResult]:
        """Export what has come since the last run; logs without anything new are not in the result.

        Raises:
            Refused: what was exported before is of another shape, or is not known.
            InvalidInput: the fields of JSON are not DDL, or their types cannot be inferred.
            Damaged, NotFound: something cannot be read, or was reclaimed; nothing of this run is exported.
            Unavailable: Spark does not start, or gives up.
        """
        before = self.output.catalog.entries()
        shape = agreed_shape(self.shape, before, locations)
        for location in locations:
            if location.log not in before:
                self.output.refuse_strays(location.log)
        wanted = self._due(locations, before, shape)
        pieces = [piece for each in wanted for piece in each.new.pieces]
        shape = self._with_types(shape, pieces)
        staging = self.output.stage()
        files = self._written(wanted, shape.json, staging) if pieces else [[] for _ in wanted]
        results = [self._result(each, shape, made, staging) for each, made in zip(wanted, files, strict=True)]
        self.output.commit([each.entry for each in results], staging)
        return results

    def _due(self, locations: Sequence[LogLocation], before: Mapping[str, ExportedLog], shape: Shape) -> list[Due]:
        """The logs in which something has come."""
        tolerance = Tolerance(self.permissive, self.permissive, str(self.notes), partial=self.partial)
        found = due(locations, before, shape, tolerance)
        for each in found:
            self.on_new(each.new)
        return [each for each in found if each.new.due]

    def _with_types(self, shape: Shape, pieces: Sequence[LogPiece]) -> Shape:
        """``shape``, with inferred types if its names have none yet."""
        if not shape.names or shape.json or not pieces:
            return shape
        ddl = inferred_ddl(shape.names, values_of(pieces))
        self.on_shape(ddl)
        return replace(shape, json=ddl)

    def _written(self, wanted: Sequence[Due], json_ddl: str, staging: Path) -> list[list[ExportedFile]]:
        """The files of each log, which executors make in ``staging``."""
        self.on_begin(sum(each.new.raw_bytes for each in wanted))
        files: list[list[ExportedFile]] = [[] for _ in wanted]
        with self.spark() as spark:
            cores = spark.sparkContext.defaultParallelism
            owned: list[tuple[int, Chunk]] = [
                (number, chunk)
                for number, each in enumerate(wanted)
                for chunk in each.chunks(file_bytes=self.file_bytes, cores=cores)
            ]
            chunks = [chunk for _, chunk in owned]
            work = ChunkExport(str(staging), rows_of(json_ddl))
            for number, result in run(spark, chunks, work, on_done=lambda done: self.on_done(chunks[done].raw_bytes)):
                files[owned[number][0]] += decode_files(result)
        return files

    def _result(self, each: Due, shape: Shape, files: list[ExportedFile], staging: Path) -> LogResult:
        passed = passed_over(each.new, self.notes)
        entry = replace(each.before, shape=shape).with_files(
            files, progress=each.new.after, staging=staging.name, passed_over=len(passed), at=self.at
        )
        return LogResult(each, entry, sorted(files, key=lambda file: file.name), passed)


def due(
    locations: Sequence[LogLocation], entries: Mapping[str, ExportedLog], shape: Shape, tolerance: Tolerance
) -> list[Due]:
    """What has come in each log, which may be nothing.

    Raises:
        Damaged, NotFound: as :func:`wald_spark.progress.new_records` does.
    """
    found = []
    for location in locations:
        before = entries.get(location.log)
        new = new_records(location, before.progress if before else None, shape.routes, tolerance)
        begun = new.before.last
        found.append(Due(new, before or ExportedLog(location.log, shape, begun + 1, begun)))
    return found


def agreed_shape(shape: Shape, entries: Mapping[str, ExportedLog], locations: Sequence[LogLocation]) -> Shape:
    """``shape``, with the types that an earlier run has inferred for its names.

    Raises:
        Refused: the files of earlier runs are of another shape.
    """
    logs = {location.log for location in locations}
    for log, entry in entries.items():
        other = entry.shape
        alike = other.names == shape.names if shape.names else (other.names, other.json) == ((), shape.json)
        if not alike or (log in logs and other.routes != shape.routes):
            raise Refused(
                f"log {log} was exported there with {other.as_options()}, not with {shape.as_options()}",
                hint="the same options again, or another --out",
            )
    known = next((entry.shape.json for entry in entries.values() if entry.shape.json), "")
    return Shape(shape.routes, shape.names, known if shape.names else shape.json)


def rows_of(json_ddl: str) -> Rows:
    """The rows of the data source, with these columns of JSON, as the files have them; it needs a running session.

    Raises:
        InvalidInput: it is not DDL of Spark, or JSON cannot be parsed as such a type.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        schema = StructType.fromDDL(schema_ddl(json_ddl))
    except PySparkException as error:
        why = next(line.strip() for line in str(error).splitlines() if line.strip())
        raise InvalidInput(f"--json-schema '{json_ddl}': {why}", hint="--json-schema 'a INT, b STRING'") from error
    assert isinstance(schema, StructType)
    rows = Rows.of(schema, value_bytes=_NO_LIMIT)
    route = pa.field("route", pa.dictionary(pa.int32(), pa.string()))
    fields = [route if field.name == "route" else field for field in rows.schema if field.name != "log"]
    return replace(rows, schema=pa.schema(fields))


def inferred_ddl(names: Sequence[str], values: Iterable[bytes]) -> str:
    """DDL for ``names``, from the first :data:`SAMPLE` values that are JSON objects.

    Raises:
        InvalidInput: a field is missing from all of them, has several types, or is not a scalar.
    """
    objects = list(islice(_objects(values), SAMPLE))
    return ", ".join(f"`{name.replace('`', '``')}` {_type_of(name, objects)}" for name in names)


def values_of(pieces: Iterable[LogPiece]) -> Iterator[bytes]:
    """The values of all records, read only as far as the caller consumes them."""
    for piece in pieces:
        for batch in piece.batches():
            yield from (record.value for record in batch.records())


def _objects(values: Iterable[bytes]) -> Iterator[dict[str, object]]:
    for value in values:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _type_of(name: str, objects: Sequence[dict[str, object]]) -> str:
    types = Counter(type(found[name]) for found in objects if found.get(name) is not None)
    if types.keys() == {int, float}:
        return _TYPES[float]
    if not types:
        raise InvalidInput(
            f"field {name} does not occur in the first {len(objects)} records",
            hint=f"name its type: --json-schema '{name} STRING', or BIGINT, DOUBLE, …",
        )
    if not types.keys() <= _TYPES.keys():
        raise InvalidInput(
            f"field {name} is an object or an array in some of the first {len(objects)} records",
            hint=f"name its type: --json-schema '{name} STRUCT<…>' or '{name} ARRAY<…>'",
        )
    if len(types) > 1:
        raise InvalidInput(
            f"field {name} is of several types in the first {len(objects)} records: "
            + ", ".join(f"{_TYPES[kind]} in {count}" for kind, count in types.most_common()),
            hint=f"--json-schema '{name} {_TYPES[types.most_common(1)[0][0]]}' keeps records with another type in "
            "_corrupt_record",
        )
    return _TYPES[next(iter(types))]
