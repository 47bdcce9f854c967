"""Parts: the files in a bundle that hold the records, some MiB each, and the index of each part.

    batches/<first>.jsonl    a line for each run of records from one stored batch:
                             {"part": …, "offset": …, "bytes": …, "first": …, "count": …, "append_time_ns": …}
                             and "terminated": false if the last of them came without a newline
    records/<first>.txt      records that came as lines: each value and a newline, exactly as it came
    records/<first>.jsonl    keyed, timed and binary records: one JSON object a line, as ``wald read --format json``

A part holds consecutive records of one form, up to 4 MiB, or one longer record; so reading or writing a bundle
needs no more memory than that. The index comes before its part, so a reader knows what follows.

A bundle ends after a number of records, or before the record that would make it too large. Sizes are those of the
content: a line with its newline; of a keyed record value, key and headers, and one byte more.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from wald.format.batch import Buffer
from wald.format.records import decode_columns
from wald.reading.assembler import Batch
from wald_archive.layout import part_name


class Size(Protocol):
    """Limit of a bundle."""

    @property
    def limit(self) -> int: ...

    def of(self, batch: Batch) -> int:
        """Return the size of a whole batch."""

    def fitting(self, batch: Batch, room: int) -> int:
        """Return how many of its first records fit into ``room``."""


@dataclass(frozen=True, slots=True)
class Records:
    """Exact number of records; the last bundle may have fewer."""

    limit: int

    def of(self, batch: Batch) -> int:
        return batch.count

    def fitting(self, batch: Batch, room: int) -> int:
        return min(batch.count, room)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Maximum number of bytes, but at least one record."""

    limit: int

    def of(self, batch: Batch) -> int:
        return content_bytes(batch)

    def fitting(self, batch: Batch, room: int) -> int:
        return records_within(batch, room)


class BundleBatches:
    """Batches split into bundles; each portion must be read to its end before the next one."""

    def __init__(self, batches: Iterable[Batch], size: Size) -> None:
        self._batches = iter(batches)
        self._size = size
        self._ahead = next(self._batches, None)

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        while self._ahead is not None:
            yield self._portion()

    def _portion(self) -> Iterator[Batch]:
        room, begun = self._size.limit, False
        while (batch := self._ahead) is not None:
            count = self._size.fitting(batch, room)
            if not begun:
                count = max(count, 1)
            if count < batch.count:
                head, self._ahead = split(batch, count)
                if head is not None:
                    yield head
                return
            room -= self._size.of(batch)
            begun = True
            self._ahead = next(self._batches, None)
            yield batch


def split(batch: Batch, count: int) -> tuple[Batch | None, Batch | None]:
    """Return the first ``count`` records, and the rest."""
    boundary = batch.first_sequence + count
    return batch.between(batch.first_sequence, boundary - 1), batch.between(boundary, batch.last_sequence)


def content_bytes(batch: Batch) -> int:
    if batch.is_columns:
        return _Offsets(batch).bytes_of(batch.count)
    return len(batch.raw())


def records_within(batch: Batch, room: int) -> int:
    """Return how many of its first records together have at most ``room`` bytes."""
    if batch.is_columns:
        return bisect_right(range(1, batch.count + 1), room, key=_Offsets(batch).bytes_of)
    if content_bytes(batch) <= room:
        return batch.count
    return bytes(batch.raw()[: max(0, room)]).count(b"\n")


class _Offsets:
    """End offsets of the values in the variable-size columns of a batch."""

    def __init__(self, batch: Batch) -> None:
        columns = decode_columns(batch.payload)
        self._begin = batch.skipped
        self._ends = [
            column.offsets.cast("i") for column in (columns.values, columns.keys, columns.headers) if column is not None
        ]

    def bytes_of(self, count: int) -> int:
        begin = self._begin
        return count + sum(ends[begin + count] - ends[begin] for ends in self._ends)


PART_BYTES = 4 << 20  # a reader or writer holds one part in memory
INDEX_LINE_MAX_BYTES = 256  # of a line of an index, with all of its numbers at their largest


class Form(StrEnum):
    """Format of the records in a part; the value is the suffix of its name."""

    LINES = ".txt"
    OBJECTS = ".jsonl"


class BadIndex(ValueError):
    """Line of an index that :func:`IndexEntry.to_line` does not write."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Consecutive records from one stored batch: ``bytes`` of a part, starting at ``offset``."""

    part: str
    offset: int
    bytes: int
    first: int
    count: int
    append_time_ns: int
    terminated: bool = True

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def to_line(self) -> str:
        ended = "" if self.terminated else ', "terminated": false'
        return (
            f'{{"part": "{self.part}", "offset": {self.offset}, "bytes": {self.bytes}, "first": {self.first}, '
            f'"count": {self.count}, "append_time_ns": {self.append_time_ns}{ended}}}\n'
        )


def parse_index_entry(line: bytes) -> IndexEntry:
    try:
        fields: dict[str, Any] = json.loads(line)  # Any: it is JSON
        run = IndexEntry(**fields)
        if run.to_line().encode() != line + b"\n":
            raise BadIndex("not a line that wald writes")
    except (ValueError, TypeError, RecursionError) as error:
        raise BadIndex(f"not the line of an index ({error})") from error
    return run


@dataclass(frozen=True, slots=True)
class PartFacts:
    """File in ``records/``."""

    part: str
    first: int
    last: int
    count: int
    bytes: int


@dataclass(slots=True)
class Part:
    """Part, while it grows or complete."""

    form: Form
    first: int
    last: int = 0
    count: int = 0
    data_bytes: int = 0
    earliest_ns: int = 0
    latest_ns: int = 0
    data: list[Buffer] = field(default_factory=list)
    runs: list[IndexEntry] = field(default_factory=list)

    @property
    def name(self) -> str:
        return part_name(self.first, self.form.value)

    @property
    def index_name(self) -> str:
        return part_name(self.first, ".jsonl")

    @property
    def facts(self) -> PartFacts:
        return PartFacts(self.name, self.first, self.last, self.count, self.data_bytes)

    def index(self) -> bytes:
        return "".join(run.to_line() for run in self.runs).encode()

    def add(self, chunk: _Chunk) -> None:
        if not self.runs:
            self.earliest_ns = chunk.append_time_ns
        length = len(chunk.data)
        self.runs.append(
            IndexEntry(
                self.name, self.data_bytes, length, chunk.first, chunk.count, chunk.append_time_ns, chunk.terminated
            )
        )
        self.data.append(chunk.data)
        self.data_bytes += length
        self.count += chunk.count
        self.last = chunk.first + chunk.count - 1
        self.latest_ns = chunk.append_time_ns


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive records of one batch in the form of a part."""

    data: Buffer
    first: int
    count: int
    append_time_ns: int
    terminated: bool = True


def parts(batches: Iterable[Batch], *, limit_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Yield the parts of ``batches`` in order, each when it is complete."""
    part: Part | None = None
    for batch in batches:
        form, chunks = (Form.OBJECTS, _objects) if batch.is_columns else (Form.LINES, _lines)
        for chunk in chunks(batch, limit_bytes):
            if part is not None and (part.form is not form or part.data_bytes + len(chunk.data) > limit_bytes):
                yield part
                part = None
            if part is None:
                part = Part(form, chunk.first)
            part.add(chunk)
    if part is not None:
        yield part


def _lines(batch: Batch, limit_bytes: int) -> Iterator[_Chunk]:
    rest: Batch | None = batch
    while rest is not None:
        head, rest = split(rest, max(1, records_within(rest, limit_bytes)))
        assert head is not None
        yield _Chunk(head.raw(), head.first_sequence, head.count, head.append_time_ns, head.terminated)


def _objects(batch: Batch, limit_bytes: int) -> Iterator[_Chunk]:
    lines: list[bytes] = []
    first, length = batch.first_sequence, 0
    for record in batch.records():
        line = record.to_json().encode() + b"\n"
        if lines and length + len(line) > limit_bytes:
            yield _Chunk(b"".join(lines), first, len(lines), batch.append_time_ns)
            lines, first, length = [], record.sequence, 0
        lines.append(line)
        length += len(line)
    yield _Chunk(b"".join(lines), first, len(lines), batch.append_time_ns)
