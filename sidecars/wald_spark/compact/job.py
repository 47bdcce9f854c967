"""Compaction run: executors reduce new records, and Spark merges the results with the last generation.

An executor finds the last record of each key in a chunk without looping over records.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from wald.cli.output import json_line, progress
from wald.errors import Damaged, Refused
from wald.files.disk import Disk
from wald_spark.locations import LogLocation
from wald_spark.progress import Chunk, NewRecords, Progress, Run, find_logs, raw_bytes_of, run_tasks, running
from wald_spark.rows import Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


REDUCE_BYTES = 32 << 20  # rows are gathered up to this size before they are reduced again
_TIME = pa.timestamp("us", "UTC")
_TEXT, _BYTES = pa.string(), pa.binary()
SCHEMA = pa.schema(
    [
        *(("route", _TEXT), ("key", _BYTES), ("value", _BYTES), ("log", _TEXT), ("seq", pa.int64())),
        *(("timestamp", _TIME), ("event_time", _TIME), ("headers", _TEXT)),
    ]
)
_NO_LIMIT = (1 << 31) - 1
CHUNK_BYTES = 256 << 20  # of raw records for one task, which keeps that much in memory if most keys differ
_DDL = (
    "route STRING, key BINARY, value BINARY, log STRING, seq BIGINT, timestamp TIMESTAMP, event_time TIMESTAMP, "
    "headers STRING"
)
_LATEST = ("timestamp", "log", "seq")


def compact(
    *,
    roots: Sequence[str],
    out: Path,
    routes: tuple[str, ...] | None,
    as_json: bool,
    write: Callable[[str], None],
    **settings: Any,
) -> None:
    """Make the next generation if there are new records, and report it; ``settings`` are for :func:`running`."""
    locations = find_logs(roots, routes)
    with running("wald-compact", out, "nothing has changed", **settings) as run:
        done = next_generation(Generations(out, Disk()), routes, run, locations)
    counts, made = done.counts, done.generation
    raw_bytes = sum(new.raw_bytes for new in done.parts)
    if as_json:
        fields = {
            "directory": str(done.directory) if done.directory else None,
            "read": counts | {"raw_bytes": raw_bytes},
            "generation": asdict(made) if made else None,
            "held_back": run.held_back,
            "passed_over": done.passed_over,
            "seconds": round(run.seconds, 3),
        }
        write(json_line("compact", fields))
        return
    if not done.parts:
        write("nothing to compact: the generation includes every complete record")
    result = []
    if made is not None:
        result = [
            f"{counts['records']} records, {counts['unkeyed']} of them without a key and left out",
            f"{made.keys} keys, {made.deleted} of them deleted, in {done.directory}",
        ]
    for line in run.lines(result, done.passed_over, raw_bytes):
        write(line)


def reduce_chunk(directory: str, chunk: Chunk) -> bytes:
    """Write a row for each route and key of a chunk to a file in ``directory``; return the counts in JSON."""
    pa.set_cpu_count(1)  # Spark runs as many tasks as there are cores
    last, counts = _LastRows(), Counter(records=0, unkeyed=0)
    rows = Rows(SCHEMA, None, _NO_LIMIT)
    for batch in chain.from_iterable(map(rows.read, chunk)):
        keyed = batch.filter(compute.is_valid(batch.column("key"))) if batch.column("key").null_count else batch
        counts.update(records=batch.num_rows, unkeyed=batch.num_rows - keyed.num_rows)
        last.add(keyed)
    _write(last.table(), Path(directory))
    return json.dumps(counts).encode()


class _LastRows:
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
        """Return one row for each route and key; an empty value becomes a null."""
        table = last_of(pa.concat_tables([SCHEMA.empty_table(), *self._waiting]))
        self._waiting, self._waiting_bytes = [table], table.nbytes
        values = table.column("value")
        kept = compute.if_else(compute.equal(compute.binary_length(values), 0), pa.scalar(None, pa.binary()), values)
        return table.set_column(table.schema.get_field_index("value"), "value", kept)


def last_of(table: pa.Table) -> pa.Table:
    numbered = table.select(["route", "key"]).append_column("row", pa.array(np.arange(table.num_rows)))
    found = numbered.group_by(["route", "key"], use_threads=False).aggregate([("row", "max")])
    return table.take(pa.array(np.sort(found.column("row_max").to_numpy())))


def _write(table: pa.Table, directory: Path) -> None:
    """Write a file that gets its name once it is complete; another attempt at the same task replaces it."""
    if not table.num_rows:
        return
    temporary = directory / f"_{uuid.uuid4().hex}.tmp"
    parquet.write_table(table, temporary, compression="zstd", compression_level=1, use_dictionary=["route", "log"])
    first, last = table.column("seq")[0].as_py(), table.column("seq")[-1].as_py()
    os.replace(temporary, directory / f"{table.column('log')[0].as_py()}-{first:020d}-{last:020d}.parquet")


@dataclass(frozen=True, slots=True)
class Compacted:
    """Result of a run; without new records ``parts`` is empty, and the generation is the previous one.

    ``counts`` are the numbers of records that were read, and of those without a key.
    """

    directory: Path | None
    generation: Generation | None
    parts: list[NewRecords]
    counts: dict[str, int]
    passed_over: list[str]


def next_generation(
    generations: Generations, routes: tuple[str, ...] | None, run: Run, locations: Sequence[LogLocation]
) -> Compacted:
    before, counts = generations.read(), Counter(records=0, unkeyed=0)
    if before is not None and before.routes != routes:
        raise Refused(
            f"{generations.latest()}: made of {_named(before.routes)}, not of {_named(routes)}",
            hint="the same routes again, or another --out",
        )
    started = before or Generation(routes, {})
    parts = run.plan(locations, started.logs, routes)
    if not parts:
        return Compacted(generations.latest(), before, [], counts, [])
    earlier, directory = generations.latest(), generations.begin()
    total = sum(new.raw_bytes for new in parts)
    with progress("compact", total) as advance, run.spark() as spark:
        limit = min(CHUNK_BYTES, max(1, total // (2 * spark.sparkContext.defaultParallelism)))
        chunks: list[Chunk] = [chunk for new in parts for chunk in new.chunks(limit)]
        work = partial(reduce_chunk, str(generations.partial))
        for _, result in run_tasks(spark, chunks, work, on_done=lambda done: advance(raw_bytes_of(chunks[done]))):
            counts.update(json.loads(result))
        keys, deleted = _merged(spark, [earlier, generations.partial], directory)
    passed_over = [message for new in parts for message in run.passed_over(new)]
    generation = replace(
        started,
        logs=started.logs | {new.location.log: new.after for new in parts},
        keys=keys,
        deleted=deleted,
        records=started.records + counts["records"],
        unkeyed=started.unkeyed + counts["unkeyed"],
        passed_over=started.passed_over + len(passed_over),
        at=run.at,
    )
    generations.commit(directory, generation)
    return Compacted(directory, generation, parts, counts, passed_over)


def _merged(spark: SparkSession, directories: Sequence[Path | None], made: Path) -> tuple[int, int]:
    """Write the latest row of each route and key to ``made``; return the number of keys and of deleted keys."""
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


FORMAT = 1
_LINK, _STATE = "latest", "_wald.json"
_NAME = re.compile(r"gen-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Generation:
    """Description of a generation: positions in ``logs``, and totals over all runs."""

    routes: tuple[str, ...] | None
    logs: dict[str, Progress]
    keys: int = 0  # its rows
    deleted: int = 0  # those of them whose value is null
    records: int = 0
    unkeyed: int = 0  # number of records without a key, which have no row
    passed_over: int = 0  # reports about unreadable records
    at: str = ""


class Generations:
    """Directory ``out``, which this process has locked."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk

    @property
    def partial(self) -> Path:
        """The directory of files that executors hand to Spark."""
        return self._out / "_partial"

    def latest(self) -> Path | None:
        """Return the current generation's directory; None before the first run has ended."""
        try:
            return self._out / os.readlink(self._out / _LINK)
        except FileNotFoundError:
            return None

    def read(self) -> Generation | None:
        latest = self.latest()
        if latest is None:
            return None
        path = latest / _STATE
        try:
            content = json.loads(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise Refused(f"{path}: made by another wald", hint="install a newer wald: docs/install.md")
            routes = content.pop("routes")
            logs = {log: Progress(**reached) for log, reached in content.pop("logs").items()}
            return Generation(None if routes is None else tuple(routes), logs, **content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: not written by a compaction ({error})",
                hint="another --out starts from scratch",
            ) from error

    def begin(self) -> Path:
        """Remove the remains of interrupted runs; return the directory of the next generation."""
        number = self._sweep()
        self.partial.mkdir()
        return self._out / f"gen-{number + 1:06d}"

    def commit(self, directory: Path, generation: Generation) -> None:
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.sync(descriptor)
            finally:
                os.close(descriptor)
        content = {"format": FORMAT} | asdict(generation)
        self._disk.replace(directory / _STATE, json.dumps(content, indent=1).encode() + b"\n")
        self._disk.sync_directory(self._out)
        temporary = self._out / f"{_LINK}.tmp"
        os.symlink(directory.name, temporary)
        self._disk.rename(temporary, self._out / _LINK)
        self._disk.sync_directory(self._out)
        self._sweep()

    def _sweep(self) -> int:
        """Remove all but the current generation and the previous one; return the number of the current one."""
        latest = self.latest()
        number = _number(latest) if latest else 0
        for path in self._out.glob("gen-*"):
            if not number - 1 <= _number(path) <= number:
                shutil.rmtree(path)
        shutil.rmtree(self.partial, ignore_errors=True)
        (self._out / f"{_LINK}.tmp").unlink(missing_ok=True)
        return number


def _number(directory: Path) -> int:
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise Damaged(f"{directory}: not a generation of wald-compact", hint=f"mv {directory} to another place")
    return int(match[1])
