"""A run: executors write all that is due, then the driver tells of it and moves it to its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from wald.errors import InvalidInput
from wald_spark.damage import Tolerance
from wald_spark.export.book import Exported, Made, Shape
from wald_spark.export.fields import ddl_of, values_of
from wald_spark.export.files import Exporting, made_by
from wald_spark.export.plan import Due, look, settled
from wald_spark.export.target import Target
from wald_spark.locations import LogPlace
from wald_spark.progress import Chunk, Portion, passed_over
from wald_spark.rows import Rows, schema_ddl
from wald_spark.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_LIMIT = (1 << 31) - 1  # of a value: none gets into the JVM


@dataclass(frozen=True, slots=True)
class Done:
    """What a run has exported of one log.

    Attributes:
        passed_over: what could not be read, and was not to be.
    """

    due: Due
    entry: Exported
    made: list[Made]
    passed_over: list[str]


def _ignore(_: object) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """What a run is asked to do.

    Attributes:
        shape: as it was asked for; what was exported before may say more.
        notes: a directory for what is passed over.
        at: the time, in words.
        spark: gives a session; asked only if there is something to do.
        on_shape: told the types that were found out.
        on_held: told of each log what is to be done, and so what is held back.
        on_begin, on_done: told the raw bytes of all that is due, and of each part of it that is written.
    """

    target: Target
    shape: Shape
    permissive: bool
    file_bytes: int
    notes: Path
    at: str
    spark: Callable[[], AbstractContextManager[SparkSession]]
    on_shape: Callable[[str], None] = field(default=_ignore)
    on_held: Callable[[Portion], None] = field(default=_ignore)
    on_begin: Callable[[int], None] = field(default=_ignore)
    on_done: Callable[[int], None] = field(default=_ignore)

    def export(self, places: Sequence[LogPlace]) -> list[Done]:
        """Export what has come since the last run; only logs of which there is something are in the result.

        Raises:
            Refused: what was exported before is of another shape, or nobody can tell what it is.
            InvalidInput: the fields of JSON are no DDL, or their types cannot be told.
            Damaged, NotFound: something cannot be read, or is reclaimed; nothing of this run is exported.
            Unavailable: Spark does not start, or gives up.
        """
        before = self.target.book.entries()
        shape = settled(self.shape, before, places)
        for place in places:
            if place.log not in before:
                self.target.refuse_strays(place.log)
        tolerance = Tolerance(self.permissive, self.permissive, str(self.notes))
        found = look(places, before, shape, tolerance)
        for each in found:
            self.on_held(each.portion)
        wanted = [each for each in found if each.portion.due]
        pieces = [piece for each in wanted for piece in each.portion.pieces]
        if shape.names and not shape.json and pieces:
            shape = replace(shape, json=ddl_of(shape.names, values_of(pieces)))
            self.on_shape(shape.json)
        staging = self.target.stage()
        files = self._written(wanted, shape.json, staging) if pieces else [[] for _ in wanted]
        done = [self._done(each, shape, made, staging) for each, made in zip(wanted, files, strict=True)]
        self.target.commit([each.entry for each in done], staging)
        return done

    def _written(self, wanted: Sequence[Due], json_ddl: str, staging: Path) -> list[list[Made]]:
        """The files of each log, which executors have made in ``staging``."""
        self.on_begin(sum(each.portion.raw_bytes for each in wanted))
        made: list[list[Made]] = [[] for _ in wanted]
        with self.spark() as spark:
            cores = spark.sparkContext.defaultParallelism
            owned: list[tuple[int, Chunk]] = [
                (number, chunk)
                for number, each in enumerate(wanted)
                for chunk in each.chunks(file_bytes=self.file_bytes, cores=cores)
            ]
            chunks = [chunk for _, chunk in owned]
            work = Exporting(str(staging), rows_of(json_ddl))
            for number, result in run(spark, chunks, work, on_done=lambda done: self.on_done(chunks[done].raw_bytes)):
                made[owned[number][0]] += made_by(result)
        return made

    def _done(self, each: Due, shape: Shape, made: list[Made], staging: Path) -> Done:
        passed = passed_over(each.portion, self.notes)
        entry = replace(each.before, shape=shape).with_files(
            made, reached=each.portion.after, staging=staging.name, passed_over=len(passed), at=self.at
        )
        return Done(each, entry, sorted(made, key=lambda file: file.name), passed)


def rows_of(json_ddl: str) -> Rows:
    """The rows of the data source, with these columns of JSON, as files are made of them; needs a running session.

    Raises:
        InvalidInput: Spark does not take it for DDL, or JSON is not parsed as such a type.
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
