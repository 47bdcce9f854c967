"""A run of a compaction: executors reduce what has come, and Spark merges that with the last generation.

An executor finds the last record of each key in a chunk without a loop over records.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from wald.errors import Refused
from wald_spark.compact.generations import Generation, Generations
from wald_spark.damage import Tolerance
from wald_spark.locations import LogLocation
from wald_spark.progress import Chunk, NewRecords, new_records, passed_over
from wald_spark.rows import Rows
from wald_spark.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REDUCE_BYTES = 32 << 20  # rows are gathered up to this size before they are reduced again
_TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("route", pa.string()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("log", pa.string()),
        ("seq", pa.int64()),
        ("timestamp", _TIME),
        ("event_time", _TIME),
        ("headers", pa.string()),
    ]
)
_NO_LIMIT = (1 << 31) - 1
CHUNK_BYTES = 256 << 20  # of raw records, for one task, which holds as much in memory if few keys are equal
_DDL = (
    "route STRING, key BINARY, value BINARY, log STRING, seq BIGINT, timestamp TIMESTAMP, event_time TIMESTAMP, "
    "headers STRING"
)
_LATEST = ("timestamp", "log", "seq")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many records were read, and how many of them have no key."""

    records: int = 0
    unkeyed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.records + other.records, self.unkeyed + other.unkeyed)


@dataclass(frozen=True, slots=True)
class ChunkReduction:
    """Writes a file to ``directory`` with one row for each route and key of a chunk; the result has the counts."""

    directory: str

    def __call__(self, chunk: Chunk) -> bytes:
        pa.set_cpu_count(1)  # Spark runs as many tasks as there are cores
        last, counts = _LastRows(), Counts()
        for batch in _batches(chunk):
            keyed = batch.filter(compute.is_valid(batch.column("key"))) if batch.column("key").null_count else batch
            counts += Counts(batch.num_rows, batch.num_rows - keyed.num_rows)
            last.add(keyed)
        _write(last.table(), Path(self.directory))
        return json.dumps(asdict(counts)).encode()


def decode_counts(result: bytes) -> Counts:
    """The counts in the result of a task."""
    return Counts(**json.loads(result))


def _batches(chunk: Chunk) -> Iterator[pa.RecordBatch]:
    rows = Rows(SCHEMA, None, _NO_LIMIT)
    for piece in chunk.pieces:
        yield from rows.read(piece)


class _LastRows:
    """The last row of each route and key so far."""

    def __init__(self) -> None:
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._limit = REDUCE_BYTES

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._waiting.append(last_of(pa.Table.from_batches([batch])))
        self._waiting_bytes += self._waiting[-1].nbytes
        if self._waiting_bytes > self._limit:
            self._limit = max(REDUCE_BYTES, 2 * self.table().nbytes)

    def table(self) -> pa.Table:
        """One row for each route and key; an empty value is a null."""
        table = last_of(pa.concat_tables([SCHEMA.empty_table(), *self._waiting]))
        self._waiting, self._waiting_bytes = [table], table.nbytes
        values = table.column("value")
        kept = compute.if_else(compute.equal(compute.binary_length(values), 0), pa.scalar(None, pa.binary()), values)
        return table.set_column(table.schema.get_field_index("value"), "value", kept)


def last_of(table: pa.Table) -> pa.Table:
    """The last row of each route and key, in their order."""
    numbered = table.select(["route", "key"]).append_column("row", pa.array(np.arange(table.num_rows)))
    found = numbered.group_by(["route", "key"], use_threads=False).aggregate([("row", "max")])
    return table.take(pa.array(np.sort(found.column("row_max").to_numpy())))


def _write(table: pa.Table, directory: Path) -> None:
    """Write a file that has its name only when it is complete; another attempt at the same task replaces it."""
    if not table.num_rows:
        return
    temporary = directory / f"_{uuid.uuid4().hex}.tmp"
    parquet.write_table(table, temporary, compression="zstd", compression_level=1, use_dictionary=["route", "log"])
    first, last = table.column("seq")[0].as_py(), table.column("seq")[-1].as_py()
    os.replace(temporary, directory / f"{table.column('log')[0].as_py()}-{first:020d}-{last:020d}.parquet")


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a run has made.

    Attributes:
        parts: what was read of each log; none: nothing had come, and the generation is the previous one.
        passed_over: messages about what could not be read.
    """

    directory: Path | None
    generation: Generation | None
    parts: list[NewRecords]
    counts: Counts
    passed_over: list[str]

    @property
    def raw_bytes(self) -> int:
        """Of the records that were read."""
        return sum(new.raw_bytes for new in self.parts)


def _ignore(_: object) -> None:
    """The default of callbacks."""


@dataclass(frozen=True, slots=True)
class Compactor:
    """What a run is asked to do.

    Attributes:
        permissive: whether to pass over what cannot be read.
        partial: whether logs may lack their oldest segments.
        notes: a directory for reports of what is passed over.
        at: the time of the run, as text.
        spark: makes a session; called only if there is something to do.
        on_new: called with what has come in each log.
        on_begin, on_done: called with the raw bytes of all that is due, and of each part of it that is reduced.
    """

    generations: Generations
    routes: tuple[str, ...] | None
    permissive: bool
    partial: bool
    notes: Path
    at: str
    spark: Callable[[], AbstractContextManager[SparkSession]]
    on_new: Callable[[NewRecords], None] = field(default=_ignore)
    on_begin: Callable[[int], None] = field(default=_ignore)
    on_done: Callable[[int], None] = field(default=_ignore)

    def compact(self, locations: Sequence[LogLocation]) -> Compacted:
        """Make the next generation, if anything has come.

        Raises:
            Refused: the last generation is of other routes.
            Damaged, NotFound: something cannot be read, or was reclaimed; then everything stays as it is.
            Unavailable: Spark does not start, or gives up.
        """
        before = self.generations.read()
        self._require_same_routes(before)
        started = before or Generation(self.routes, {})
        parts = self._new_records(started, locations)
        if not parts:
            return Compacted(self.generations.latest(), before, [], Counts(), [])
        earlier, directory = self.generations.latest(), self.generations.begin()
        with self.spark() as spark:
            counts = self._reduced(spark, parts)
            keys, deleted = _merged(spark, [earlier, self.generations.partial], directory)
        passed = [message for new in parts for message in passed_over(new, self.notes)]
        generation = replace(
            started,
            logs=started.logs | {new.location.log: new.after for new in parts},
            keys=keys,
            deleted=deleted,
            records=started.records + counts.records,
            unkeyed=started.unkeyed + counts.unkeyed,
            passed_over=started.passed_over + len(passed),
            at=self.at,
        )
        self.generations.commit(directory, generation)
        return Compacted(directory, generation, parts, counts, passed)

    def _require_same_routes(self, before: Generation | None) -> None:
        if before is not None and before.routes != self.routes:
            raise Refused(
                f"{self.generations.latest()}: made of {_named(before.routes)}, not of {_named(self.routes)}",
                hint="the same routes again, or another --out",
            )

    def _new_records(self, started: Generation, locations: Sequence[LogLocation]) -> list[NewRecords]:
        """What has come in each log where anything has."""
        tolerance = Tolerance(self.permissive, self.permissive, str(self.notes), partial=self.partial)
        found = [new_records(each, started.logs.get(each.log), self.routes, tolerance) for each in locations]
        for new in found:
            self.on_new(new)
        return [new for new in found if new.due]

    def _reduced(self, spark: SparkSession, parts: Sequence[NewRecords]) -> Counts:
        """Let executors write the partial files; returns what they have counted."""
        total = sum(new.raw_bytes for new in parts)
        self.on_begin(total)
        limit = min(CHUNK_BYTES, max(1, total // (2 * spark.sparkContext.defaultParallelism)))
        chunks: list[Chunk] = [chunk for new in parts for chunk in new.chunks(limit)]
        work = ChunkReduction(str(self.generations.partial))
        counts = Counts()
        for _, result in run(spark, chunks, work, on_done=lambda done: self.on_done(chunks[done].raw_bytes)):
            counts += decode_counts(result)
        return counts


def _merged(spark: SparkSession, directories: Sequence[Path | None], made: Path) -> tuple[int, int]:
    """Write the latest row of each route and key to ``made``; returns how many there are, and how many are deleted."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    # Spark reads paths as patterns.
    paths = [re.sub(r"([\[\]{}*?\\])", r"\\\1", str(directory)) for directory in directories if directory]
    rows = spark.read.schema(_DDL).parquet(*paths)
    others = [name for name in rows.columns if name not in ("route", "key")]
    latest = rows.groupBy("route", "key").agg(F.max_by(F.struct(*others), F.struct(*_LATEST)).alias("row"))
    seen = Observation()
    counted_rows = latest.select("route", "key", "row.*").observe(
        seen, F.count(F.lit(1)).alias("keys"), F.count("value").alias("values")
    )
    counted_rows.write.option("compression", "zstd").parquet(str(made))
    keys, values = seen.get["keys"], seen.get["values"]
    return keys, keys - values


def _named(routes: tuple[str, ...] | None) -> str:
    return "all routes" if routes is None else f"route {', '.join(routes)}"
