"""What executors do for an export: write the records of a chunk as Parquet, a file for each route and day.

The memory for this is bounded. Values are only compressed, as a dictionary would not help them; sequences are stored
as differences. Level 1 of zstd is faster than level 3, and the files are no larger (measured on JSON lines of 170
bytes).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from wald.files.disk import Disk
from wald_spark.export.output import ExportedFile, staged_name
from wald_spark.progress import Chunk
from wald_spark.rows import CORRUPT, Rows

ROW_GROUP_BYTES = 32 << 20
BUFFERED_BYTES = 128 << 20  # of all files that a task is writing
OPEN_FILES = 128
_SMALL_BYTES, _MIXED_BYTES = 256 << 10, 16 << 20
_DAY_US = 86_400_000_000
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOG = pa.field("log", pa.dictionary(pa.int8(), pa.string()))  # a STRING in the file
_NO_DICTIONARY = ("seq", "value", CORRUPT)
_NO_STATISTICS = ("value", "headers", CORRUPT)


@dataclass(frozen=True, slots=True)
class ChunkExport:
    """Writes the files of a chunk to ``staging``; the result lists them: see :func:`decode_files`.

    Attributes:
        rows: all columns but ``log``, in their order; ``route`` as a dictionary.
    """

    staging: str
    rows: Rows

    def __call__(self, chunk: Chunk) -> bytes:
        pa.set_cpu_count(1)  # Spark runs as many tasks as there are cores
        files = _Files(Path(self.staging), chunk.log, self.rows.schema)
        try:
            for piece in chunk.pieces:
                for route, day, part in by_route_and_day(self.rows.read(piece)):
                    files.add(route, day, part)
            written = files.close()
        except BaseException:
            files.abandon()
            raise
        return json.dumps([asdict(file) for file in written]).encode()


def decode_files(result: bytes) -> list[ExportedFile]:
    """The files in the result of a task."""
    return [ExportedFile(**file) for file in json.loads(result)]


def by_route_and_day(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """All rows by route and day since 1970, in UTC; those of one route in their order.

    Batches that are small, or hold several routes or days, are joined and then split, so that the parts are large
    enough even with a hundred routes. These parts are copied: a few records that wait would keep whole frames in
    memory.
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
    """Whether all rows are of one route and day; times never decrease within a route."""
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
    """A file that is being written, under a unique name, because another attempt at the same task may run."""

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
        """Keep ``batch`` for the next row group; returns its bytes."""
        size = int(batch.nbytes)
        self.waiting.append(batch)
        self.waiting_bytes += size
        self.last = batch.column("seq")[-1].as_py()
        self.records += batch.num_rows
        if CORRUPT in batch.schema.names:
            self.corrupt += batch.num_rows - batch.column(CORRUPT).null_count
        return size

    def write(self) -> int:
        """Write the waiting batches as a row group; returns their bytes."""
        if self.waiting:
            table = pa.Table.from_batches(self.waiting)
            rows = table.num_rows
            log = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int8), pa.array([self.log]))
            self.writer.write_table(table.add_column(0, _LOG, log), row_group_size=rows)
        written, self.waiting_bytes = self.waiting_bytes, 0
        self.waiting.clear()
        return written


class _Files:
    """The files that one task is writing, by route and day; the most recently used is last."""

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
        """Finish all files."""
        while self._open:
            self._finish_oldest()
        return self._finished

    def abandon(self) -> None:
        """Remove the files that are not finished."""
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
            store_schema=False,  # else a reader might read a column as a dictionary
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
    """The columns of Parquet that make up one column of Arrow."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(field.type, f"{path}.{field.name}")
    elif pa.types.is_list(kind):
        yield from _leaves(kind.value_type, f"{path}.list.element")
    else:
        yield path
