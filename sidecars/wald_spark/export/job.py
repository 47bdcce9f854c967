"""Export run: planned by the driver, written by executors, and committed to the output.

Files are staged, listed in the file of their log, and moved to their final names, in steps that the next run can
finish or undo.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from wald.cli.output import json_line, progress
from wald.errors import Damaged, InvalidInput, Refused
from wald.files.disk import Disk
from wald.setting_types import format_bytes
from wald_spark.locations import LogLocation
from wald_spark.plan import LogPiece
from wald_spark.progress import Chunk, NewRecords, Progress, Run, find_logs, raw_bytes_of, run_tasks, running
from wald_spark.rows import CORRUPT, Rows, schema_ddl

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the files: equal for all runs of a log and, except for the routes, for all logs of an export."""

    routes: tuple[str, ...] | None = None  # None for all
    names: tuple[str, ...] = ()  # fields of JSON whose types are inferred; empty if the types were given
    json: str = ""  # the columns parsed from values, as DDL; "" to export the values unchanged

    def as_options(self) -> str:
        words = [] if self.routes is None else [f"--route {route}" for route in self.routes]
        if self.names:
            words.append(f"--columns {','.join(self.names)}")
        elif self.json:
            words.append(f"--json-schema '{self.json}'")
        return " ".join(words) or "neither --route nor --columns nor --json-schema"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """File of an export."""

    name: str  # below the directory of the export
    records: int
    bytes: int
    corrupt: int = 0  # number of records that are not JSON with these columns


@dataclass(frozen=True, slots=True)
class ExportedLog:
    """Export progress of one log, with totals over all runs."""

    log: str
    shape: Shape
    first: int
    last: int  # all records up to this one are exported, except those of routes in ``held_back``
    held_back: Mapping[str, int] = field(default_factory=dict)  # the last exported record of each route
    records: int = 0
    corrupt: int = 0
    files: int = 0
    bytes: int = 0
    passed_over: int = 0  # reports about unreadable records
    at: str = ""  # time at which the last run ended
    staging: str = ""  # directory of ``pending`` files, which are still to be moved
    pending: tuple[str, ...] = ()
    epoch: int = 0
    life: str = ""

    @property
    def progress(self) -> Progress:
        return Progress(self.last, self.held_back, self.epoch, self.life)

    def with_files(
        self, new: list[ExportedFile], *, progress: Progress, staging: str, passed_over: int, at: str
    ) -> ExportedLog:
        return replace(
            self,
            last=progress.last,
            held_back=progress.held_back,
            epoch=progress.epoch,
            life=progress.life,
            records=self.records + sum(file.records for file in new),
            corrupt=self.corrupt + sum(file.corrupt for file in new),
            files=self.files + len(new),
            bytes=self.bytes + sum(file.bytes for file in new),
            passed_over=self.passed_over + passed_over,
            at=at,
            staging=staging if new else "",
            pending=tuple(file.name for file in new),
        )


class Output:
    """Directory ``out``, which this process has locked, with a file for each log below ``OUT/_wald``."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk
        self._stagings = out / "_staging"

    def entries(self) -> dict[str, ExportedLog]:
        return {path.stem: _read(path) for path in sorted(private(self._out).glob("*.json"))}

    def write(self, exported: ExportedLog) -> None:
        content = {"format": FORMAT} | asdict(exported)
        path = private(self._out) / f"{exported.log}.json"
        self._disk.replace(path, json.dumps(content, indent=1).encode() + b"\n")

    def recover(self) -> list[ExportedLog]:
        """Finish moving the files of a run interrupted at that step; remove those of other interrupted runs."""
        finished = [entry for entry in self.entries().values() if entry.pending]
        for entry in finished:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)
        for leftover in private(self._out).glob("*.tmp"):
            self._disk.unlink(leftover)
        return finished

    def stage(self) -> Path:
        staging = self._stagings / uuid.uuid4().hex
        staging.mkdir(parents=True)
        return staging

    def commit(self, entries: Sequence[ExportedLog], staging: Path) -> None:
        """List the staged files in the files of their logs, and move them to their final names.

        A crash leaves each log either unchanged or complete, once :meth:`recover` has been called.
        """
        for directory in (staging, self._stagings, self._out):
            self._disk.sync_directory(directory)
        for entry in entries:
            self.write(entry)
        for entry in entries:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)

    def refuse_strays(self, log: str) -> None:
        stray = next(self._out.glob(f"route=*/date=*/{log}-*.parquet"), None)
        if stray is not None:
            raise Refused(
                f"{stray}: {private(self._out)} does not list this log, so its records would be exported twice",
                hint=f"remove {self._out}/route=*/date=*/{log}-*.parquet, or choose another --out",
            )

    def _move(self, entry: ExportedLog) -> None:
        staging = self._stagings / entry.staging
        made: set[Path] = {self._out}
        for name in entry.pending:
            output = self._out / name
            made |= {output.parent, output.parent.parent}
            output.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._disk.rename(staging / staged_name(name), output)
            except FileNotFoundError:
                if not output.exists():
                    raise Damaged(
                        f"{output}: was to be moved here from {staging}, but is in neither place",
                        hint=f"remove {private(self._out)}/{entry.log}.json and all files of this log to redo it",
                    ) from None
        for directory in sorted(made, reverse=True):
            self._disk.sync_directory(directory)
        self.write(replace(entry, staging="", pending=()))


def _read(path: Path) -> ExportedLog:
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != FORMAT:
            raise Refused(f"{path}: made by another wald", hint="install a newer wald: docs/install.md")
        shape, pending = content.pop("shape"), tuple(content.pop("pending"))
        routes = None if shape["routes"] is None else tuple(shape["routes"])
        return ExportedLog(shape=Shape(routes, tuple(shape["names"]), shape["json"]), pending=pending, **content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(
            f"{path}: not written by an export ({error})",
            hint=f"restore it from a backup, or remove it and all files of {path.stem} to export that log again",
        ) from error


def private(out: Path) -> Path:
    return out / "_wald"


def staged_name(name: str) -> str:
    """Return the name of a staged file; it has no directories, and matches no reader's pattern."""
    return name.replace("/", ",") + ".staged"


_NO_LIMIT = (1 << 31) - 1
SAMPLE = 10_000
_TYPES: dict[type, str] = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "STRING"}


def export(
    out: Path,
    shape: Shape,
    file_bytes: int,
    *,
    roots: Sequence[str],
    as_json: bool,
    write: Callable[[str], None],
    warn: Callable[[str], None],
    **settings: Any,
) -> None:
    """Export the records since the last run, and report them; ``settings`` are for :func:`running`."""
    locations = find_logs(roots, shape.routes)
    with running("wald-export", out, "nothing of this run is exported", **settings) as run:
        output = Output(out, Disk())
        for entry in output.recover():
            warn(f"moved {_files(len(entry.pending))} that an interrupted run had left for log {entry.log}")
        results = export_new(output, shape, file_bytes, run, warn, locations)
    if as_json:
        logs = [result.to_dict() for result in results]
        fields = {"out": str(out), "logs": logs, "held_back": run.held_back, "seconds": round(run.seconds, 3)}
        write(json_line("export", fields))
        return
    for line in [result.line() for result in results] or ["nothing to export: every complete record is exported"]:
        write(line)
    passed_over = [message for result in results for message in result.passed_over]
    raw_bytes = sum(result.new.raw_bytes for result in results)
    for line in run.lines([], passed_over, raw_bytes, f", to {out}"):
        write(line)


@dataclass(frozen=True, slots=True)
class LogResult:
    """Result of a run for one log."""

    new: NewRecords
    before: ExportedLog  # its progress before the run
    entry: ExportedLog
    files: list[ExportedFile]
    passed_over: list[str]  # messages about unreadable records

    def line(self) -> str:
        records, corrupt = self.entry.records - self.before.records, self.entry.corrupt - self.before.corrupt
        return (
            f"{self.new.location.root.path}: up to record {self.entry.last}: {records} records"
            f"{f' ({corrupt} of them corrupt)' if corrupt else ''} in {_files(len(self.files))}, "
            f"{format_bytes(self.entry.bytes - self.before.bytes)}"
        )

    def to_dict(self) -> dict[str, Any]:  # Any: it is JSON
        return {
            "log": self.entry.log,
            "root": str(self.new.location.root.path),
            "first": self.before.last + 1,
            "last": self.entry.last,
            "records": self.entry.records - self.before.records,
            "corrupt": self.entry.corrupt - self.before.corrupt,
            "passed_over": self.passed_over,
            "raw_bytes": self.new.raw_bytes,
            "bytes": self.entry.bytes - self.before.bytes,
            "files": [file.name for file in self.files],
        }


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def export_new(
    output: Output,
    shape: Shape,
    file_bytes: int,
    run: Run,
    warn: Callable[[str], None],
    locations: Sequence[LogLocation],
) -> list[LogResult]:
    """Export the records since the last run; the result leaves out logs without new records.

    The types of the columns in ``shape`` may be known from earlier runs; ``warn`` gets a message if they are inferred.
    """
    entries = output.entries()
    shape = agreed_shape(shape, entries, locations)
    for location in locations:
        if location.log not in entries:
            output.refuse_strays(location.log)
    wanted = run.plan(locations, {log: entry.progress for log, entry in entries.items()}, shape.routes)
    pieces = [piece for new in wanted for piece in new.pieces]
    if shape.names and not shape.json and pieces:
        shape = replace(shape, json=inferred_ddl(shape.names, values_of(pieces)))
        warn(f"inferred --json-schema '{shape.json}'")
    staging = output.stage()
    files = _written(wanted, shape, file_bytes, run, staging) if pieces else [[] for _ in wanted]
    results = []
    for new, made in zip(wanted, files, strict=True):
        log, begun, passed_over = new.location.log, new.before.last, run.passed_over(new)
        before = entries.get(log) or ExportedLog(log, shape, begun + 1, begun)
        entry = replace(before, shape=shape).with_files(
            made, progress=new.after, staging=staging.name, passed_over=len(passed_over), at=run.at
        )
        results.append(LogResult(new, before, entry, sorted(made, key=lambda file: file.name), passed_over))
    output.commit([each.entry for each in results], staging)
    return results


def _written(
    wanted: Sequence[NewRecords], shape: Shape, file_bytes: int, run: Run, staging: Path
) -> list[list[ExportedFile]]:
    files: list[list[ExportedFile]] = [[] for _ in wanted]
    with progress("export", sum(new.raw_bytes for new in wanted)) as advance, run.spark() as spark:
        cores = spark.sparkContext.defaultParallelism
        owned: list[tuple[int, Chunk]] = [
            (number, chunk)
            for number, new in enumerate(wanted)
            for chunk in chunks_of(new, shape, file_bytes=file_bytes, cores=cores)
        ]
        chunks = [chunk for _, chunk in owned]
        work = partial(export_chunk, str(staging), rows_of(shape.json))
        for number, result in run_tasks(spark, chunks, work, on_done=lambda done: advance(raw_bytes_of(chunks[done]))):
            files[owned[number][0]] += [ExportedFile(**file) for file in json.loads(result)]
    return files


def chunks_of(new: NewRecords, shape: Shape, *, file_bytes: int, cores: int) -> list[Chunk]:
    """Divide the records into chunks that make files of about ``file_bytes`` and keep all cores busy.

    A chunk makes a file of each route, so with many routes in the log it has to be larger.
    """
    routes = shape.routes or new.location.root.route_names()
    return new.chunks(min(file_bytes * max(1, len(routes)), max(new.raw_bytes // (2 * cores), file_bytes)))


def agreed_shape(shape: Shape, entries: Mapping[str, ExportedLog], locations: Sequence[LogLocation]) -> Shape:
    """Return ``shape`` with the types that an earlier run inferred for its names."""
    logs = {location.log for location in locations}
    for log, entry in entries.items():
        other = entry.shape
        alike = other.names == shape.names if shape.names else (other.names, other.json) == ((), shape.json)
        if not alike or (log in logs and other.routes != shape.routes):
            raise Refused(
                f"log {log} was exported there with {other.as_options()}, not with {shape.as_options()}",
                hint="use the same options, or another --out",
            )
    known = next((entry.shape.json for entry in entries.values() if entry.shape.json), "")
    return Shape(shape.routes, shape.names, known if shape.names else shape.json)


def rows_of(json_ddl: str) -> Rows:
    """Return the row format of the files, with these JSON columns; needs a running session."""
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
    objects = list(islice(_objects(values), SAMPLE))
    return ", ".join(f"`{name.replace('`', '``')}` {_type_of(name, objects)}" for name in names)


def values_of(pieces: Iterable[LogPiece]) -> Iterator[bytes]:
    """Yield the values of all records, reading only as far as the caller consumes them."""
    return (record.value for piece in pieces for batch in piece.batches() for record in batch.records())


def _objects(values: Iterable[bytes]) -> Iterator[dict[str, object]]:
    for value in values:
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
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


ROW_GROUP_BYTES = 32 << 20
BUFFERED_BYTES = 128 << 20  # total of all files that a task is writing
OPEN_FILES = 128
_SMALL_BYTES, _MIXED_BYTES = 256 << 10, 16 << 20
_DAY_US = 86_400_000_000
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOG = pa.field("log", pa.dictionary(pa.int8(), pa.string()))  # a STRING in the file
_NO_DICTIONARY = ("seq", "value", CORRUPT)
_NO_STATISTICS = ("value", "headers", CORRUPT)


def export_chunk(staging: str, rows: Rows, chunk: Chunk) -> bytes:
    """Write the files of a chunk to ``staging``, and return a list of them in JSON.

    ``rows`` has all columns but ``log``, in order; ``route`` as a dictionary.
    """
    pa.set_cpu_count(1)  # Spark runs as many tasks as there are cores
    files = _Files(Path(staging), chunk[0].log, rows.schema)
    try:
        for piece in chunk:
            for route, day, part in by_route_and_day(rows.read(piece)):
                files.add(route, day, part)
        written = files.close()
    except BaseException:
        files.abandon()
        raise
    return json.dumps([asdict(file) for file in written]).encode()


def by_route_and_day(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Yield rows by route and day since 1970, in UTC; the rows of one route are in order.

    Batches that are small, or have several routes or days, are joined and then split, so that the parts are large
    enough even with a hundred routes. The parts are copied: a few waiting records would keep whole frames in memory.
    """
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        size = batch.nbytes
        if not waiting and size >= _SMALL_BYTES and _is_uniform(batch):
            yield batch.column("route")[0].as_py(), int(_days(batch)[0]), batch
            continue
        waiting.append(batch)
        waiting_bytes += size
        if waiting_bytes >= _MIXED_BYTES:
            yield from _parted(pa.concat_batches(waiting))
            waiting, waiting_bytes = [], 0
    if waiting:
        yield from _parted(pa.concat_batches(waiting))


def _is_uniform(batch: pa.RecordBatch) -> bool:
    """Return True if all rows have the same route and day; times never decrease within a route."""
    days = _days(batch)
    return len(batch.column("route").dictionary) == 1 and bool(days[0] == days[-1])


def _parted(batch: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    routes, days = batch.column("route"), _days(batch)
    groups = routes.indices.to_numpy().astype(np.int64) << 32 | (days - days.min())
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        part = batch.take(pa.array(rows))
        yield part.column("route")[0].as_py(), int(days[rows[0]]), part


def _days(batch: pa.RecordBatch) -> np.ndarray:
    days: np.ndarray = batch.column("timestamp").view(pa.int64()).to_numpy() // _DAY_US
    return days


@dataclass(slots=True)
class _File:
    """File that is being written, under a unique name, because another attempt at the same task may run."""

    path: Path
    writer: parquet.ParquetWriter
    log: str
    first: int
    last: int = 0
    records: int = 0
    corrupt: int = 0
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0

    def add(self, batch: pa.RecordBatch) -> int:
        """Keep ``batch`` for the next row group; return its bytes."""
        size = int(batch.nbytes)
        self.waiting.append(batch)
        self.waiting_bytes += size
        self.last = batch.column("seq")[-1].as_py()
        self.records += batch.num_rows
        if CORRUPT in batch.schema.names:
            self.corrupt += batch.num_rows - batch.column(CORRUPT).null_count
        return size

    def write(self) -> int:
        """Write the waiting batches as a row group; return their bytes."""
        if self.waiting:
            table = pa.Table.from_batches(self.waiting)
            rows = table.num_rows
            log = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int8), pa.array([self.log]))
            self.writer.write_table(table.add_column(0, _LOG, log), row_group_size=rows)
        written, self.waiting_bytes = self.waiting_bytes, 0
        self.waiting.clear()
        return written


class _Files:
    """Open files of one task, by route and day; the most recently used is last."""

    def __init__(self, staging: Path, log: str, schema: pa.Schema) -> None:
        self._staging = staging
        self._log = log
        self._columns = [name for name in schema.names if name != "route"]
        self._schema = pa.schema([_LOG, *(schema.field(name) for name in self._columns)])
        columns = [path for field in self._schema for path in _leaves(field.type, field.name)]
        self._repetitive = [path for path in columns if path not in _NO_DICTIONARY]
        self._compared = [path for path in columns if path not in _NO_STATISTICS]
        self._open: dict[tuple[str, int], _File] = {}
        self._buffered = 0
        self._finished: list[ExportedFile] = []

    def add(self, route: str, day: int, batch: pa.RecordBatch) -> None:
        file = self._open.pop((route, day), None) or self._begin(batch)
        self._open[route, day] = file
        self._buffered += file.add(batch.select(self._columns))
        if file.waiting_bytes >= ROW_GROUP_BYTES:
            self._buffered -= file.write()
        while self._buffered > BUFFERED_BYTES:
            self._buffered -= max(self._open.values(), key=lambda each: each.waiting_bytes).write()

    def close(self) -> list[ExportedFile]:
        while self._open:
            self._finish_oldest()
        return self._finished

    def abandon(self) -> None:
        for file in self._open.values():
            file.writer.close()
            file.path.unlink(missing_ok=True)

    def _begin(self, batch: pa.RecordBatch) -> _File:
        if len(self._open) >= OPEN_FILES:
            self._finish_oldest()
        path = self._staging / f"{uuid.uuid4().hex}.tmp"
        writer = parquet.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=self._repetitive,
            write_statistics=self._compared,
            column_encoding={"seq": "DELTA_BINARY_PACKED"},
            store_schema=False,  # otherwise a reader might read a column as a dictionary
        )
        return _File(path, writer, self._log, first=batch.column("seq")[0].as_py())

    def _finish_oldest(self) -> None:
        route, day = next(iter(self._open))
        file = self._open[route, day]
        self._buffered -= file.write()
        file.writer.close()
        with file.path.open("rb") as finished:
            Disk().sync(finished.fileno())
            size = os.fstat(finished.fileno()).st_size
        date = (_UNIX_EPOCH + timedelta(days=day)).date()
        name = f"route={route}/date={date}/{self._log}-{file.first:020d}-{file.last:020d}.parquet"
        file.path.rename(self._staging / staged_name(name))
        del self._open[route, day]
        self._finished.append(ExportedFile(name, file.records, size, file.corrupt))


def _leaves(kind: pa.DataType, path: str) -> Iterator[str]:
    """Yield the Parquet columns that make up one Arrow column."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(field.type, f"{path}.{field.name}")
    elif pa.types.is_list(kind):
        yield from _leaves(kind.value_type, f"{path}.list.element")
    else:
        yield path
