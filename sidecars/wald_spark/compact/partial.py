"""In a worker: the last record of each key in a part of a log, found without a loop over records."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from wald_spark.progress import Chunk
from wald_spark.rows import Rows

REDUCE_BYTES = 32 << 20  # so much is gathered before it is reduced again
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


@dataclass(frozen=True, slots=True)
class Counts:
    """What a worker has met."""

    records: int = 0
    unkeyed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.records + other.records, self.unkeyed + other.unkeyed)


@dataclass(frozen=True, slots=True)
class Reducing:
    """What a task does with a chunk: a file in ``directory``, of one row for each route and key; gives the counts."""

    directory: str

    def __call__(self, chunk: Chunk) -> bytes:
        pa.set_cpu_count(1)  # Spark runs as many tasks as there are cores
        last, counts = _Last(), Counts()
        for batch in _batches(chunk):
            keyed = batch.filter(compute.is_valid(batch.column("key"))) if batch.column("key").null_count else batch
            counts += Counts(batch.num_rows, batch.num_rows - keyed.num_rows)
            last.add(keyed)
        _write(last.table(), Path(self.directory))
        return json.dumps(asdict(counts)).encode()


def counted(result: bytes) -> Counts:
    """The counts that a task tells of."""
    return Counts(**json.loads(result))


def _batches(chunk: Chunk) -> Iterator[pa.RecordBatch]:
    rows = Rows(SCHEMA, None, _NO_LIMIT)
    for piece in chunk.pieces:
        yield from rows.read(piece)


class _Last:
    """The last of each key so far."""

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
    """Of the rows of each route and key the last one, in their order."""
    numbered = table.select(["route", "key"]).append_column("row", pa.array(np.arange(table.num_rows)))
    found = numbered.group_by(["route", "key"], use_threads=False).aggregate([("row", "max")])
    return table.take(pa.array(np.sort(found.column("row_max").to_numpy())))


def _write(table: pa.Table, directory: Path) -> None:
    """In a file that has its name when it is whole; another attempt at the same task replaces it."""
    if not table.num_rows:
        return
    temporary = directory / f"_{uuid.uuid4().hex}.tmp"
    parquet.write_table(table, temporary, compression="zstd", compression_level=1, use_dictionary=["route", "log"])
    first, last = table.column("seq")[0].as_py(), table.column("seq")[-1].as_py()
    os.replace(temporary, directory / f"{table.column('log')[0].as_py()}-{first:020d}-{last:020d}.parquet")
