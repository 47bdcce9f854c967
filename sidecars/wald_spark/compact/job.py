"""A run: executors reduce what has come, Spark reduces that with what the last run has made, and a link is replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import Refused
from wald_spark.compact.generations import Generation, Generations
from wald_spark.compact.partial import Counts, Reducing, counted
from wald_spark.damage import Tolerance
from wald_spark.locations import LogPlace
from wald_spark.progress import Chunk, Portion, passed_over, since
from wald_spark.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHUNK_BYTES = 256 << 20  # of raw records, for one task; without many equal keys it holds as much in memory
_DDL = (
    "route STRING, key BINARY, value BINARY, log STRING, seq BIGINT, timestamp TIMESTAMP, event_time TIMESTAMP, "
    "headers STRING"
)
_LATEST = ("timestamp", "log", "seq")


@dataclass(frozen=True, slots=True)
class Done:
    """What a run has made.

    Attributes:
        portions: what it has read; none: nothing had come, and the generation is the one before.
        passed_over: what could not be read, and was not to be.
    """

    directory: Path | None
    generation: Generation | None
    portions: list[Portion]
    counts: Counts
    passed_over: list[str]


def _ignore(_: object) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Compactor:
    """What a run is asked to do.

    Attributes:
        notes: a directory for what is passed over.
        at: the time, in words.
        spark: gives a session; asked only if there is something to do.
        on_held: told of each log what is to be done, and so what is held back.
        on_begin, on_done: told the raw bytes of all that is due, and of each part of it that is reduced.
    """

    generations: Generations
    routes: tuple[str, ...] | None
    permissive: bool
    notes: Path
    at: str
    spark: Callable[[], AbstractContextManager[SparkSession]]
    on_held: Callable[[Portion], None] = field(default=_ignore)
    on_begin: Callable[[int], None] = field(default=_ignore)
    on_done: Callable[[int], None] = field(default=_ignore)

    def compact(self, places: Sequence[LogPlace]) -> Done:
        """Bring up to date what the last run has made.

        Raises:
            Refused: that was of other routes.
            Damaged, NotFound: something cannot be read, or is reclaimed; then everything stays as it is.
            Unavailable: Spark does not start, or gives up.
        """
        before = self.generations.read()
        if before is not None and before.routes != self.routes:
            raise Refused(
                f"{self.generations.latest()}: made of {_in_words(before.routes)}, not of {_in_words(self.routes)}",
                hint="the same routes again, or another --out",
            )
        started = before or Generation(self.routes, {})
        tolerance = Tolerance(self.permissive, self.permissive, str(self.notes))
        found = [since(place, started.logs.get(place.log), self.routes, tolerance) for place in places]
        for portion in found:
            self.on_held(portion)
        portions = [portion for portion in found if portion.due]
        if not portions:
            return Done(self.generations.latest(), before, [], Counts(), [])
        earlier, directory = self.generations.latest(), self.generations.begin()
        with self.spark() as spark:
            counts = self._reduced(spark, portions)
            keys, deleted = _merged(spark, [earlier, self.generations.partial], directory)
        passed = [message for portion in portions for message in passed_over(portion, self.notes)]
        generation = replace(
            started,
            logs=started.logs | {portion.place.log: portion.after for portion in portions},
            keys=keys,
            deleted=deleted,
            records=started.records + counts.records,
            unkeyed=started.unkeyed + counts.unkeyed,
            passed_over=started.passed_over + len(passed),
            at=self.at,
        )
        self.generations.commit(directory, generation)
        return Done(directory, generation, portions, counts, passed)

    def _reduced(self, spark: SparkSession, portions: Sequence[Portion]) -> Counts:
        """Counts of what executors have put into the partial files."""
        total = sum(portion.raw_bytes for portion in portions)
        self.on_begin(total)
        limit = min(CHUNK_BYTES, max(1, total // (2 * spark.sparkContext.defaultParallelism)))
        chunks: list[Chunk] = [chunk for portion in portions for chunk in portion.chunks(limit)]
        work = Reducing(str(self.generations.partial))
        counts = Counts()
        for _, result in run(spark, chunks, work, on_done=lambda done: self.on_done(chunks[done].raw_bytes)):
            counts += counted(result)
        return counts


def _merged(spark: SparkSession, directories: Sequence[Path | None], made: Path) -> tuple[int, int]:
    """The latest row of each route and key, written to ``made``; gives how many there are, and how many are deleted."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    # Spark takes paths for patterns.
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


def _in_words(routes: tuple[str, ...] | None) -> str:
    return "all routes" if routes is None else f"route {', '.join(routes)}"
