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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wald.format.batch import Buffer
from wald.format.names import DIGITS
from wald.format.records import decode_columns
from wald.reading.assembler import Batch


@dataclass(frozen=True, slots=True)
class Records:
    """Size of a bundle: an exact number of records; the last bundle may have fewer."""

    limit: int

    def of(self, batch: Batch) -> int:
        """Return the size of a whole batch."""
        return batch.count

    def fitting(self, batch: Batch, room: int) -> int:
        """Return how many of its first records fit into ``room``."""
        return min(batch.count, room)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Size of a bundle: a maximum number of bytes, but at least one record."""

    limit: int

    def of(self, batch: Batch) -> int:
        return content_bytes(batch)

    def fitting(self, batch: Batch, room: int) -> int:
        return records_within(batch, room)


Size = Records | Bytes


def bundle_batches(batches: Iterable[Batch], size: Size) -> Iterator[Iterator[Batch]]:
    """Split batches into bundles; each portion must be read to its end before the next one."""
    rest = iter(batches)
    ahead = next(rest, None)

    def portion() -> Iterator[Batch]:
        nonlocal ahead
        room, begun = size.limit, False
        while (batch := ahead) is not None:
            count = size.fitting(batch, room)
            if not begun:
                count = max(count, 1)
            if count < batch.count:
                head, ahead = split(batch, count)
                if head is not None:
                    yield head
                return
            room -= size.of(batch)
            begun = True
            ahead = next(rest, None)
            yield batch

    while ahead is not None:
        yield portion()


def split(batch: Batch, count: int) -> tuple[Batch | None, Batch | None]:
    """Return the first ``count`` records, and the rest."""
    boundary = batch.first_sequence + count
    return batch.between(batch.first_sequence, boundary - 1), batch.between(boundary, batch.last_sequence)


def content_bytes(batch: Batch) -> int:
    return _column_bytes(batch)(batch.count) if batch.is_columns else len(batch.raw())


def records_within(batch: Batch, room: int) -> int:
    """Return how many of its first records together have at most ``room`` bytes."""
    if batch.is_columns:
        return bisect_right(range(1, batch.count + 1), room, key=_column_bytes(batch))
    if content_bytes(batch) <= room:
        return batch.count
    return bytes(batch.raw()[: max(0, room)]).count(b"\n")


def _column_bytes(batch: Batch) -> Callable[[int], int]:
    """Return a function from a number of first records to their bytes in the columns of variable size."""
    columns, begin = decode_columns(batch.payload), batch.skipped
    offsets = [
        column.offsets.cast("i") for column in (columns.values, columns.keys, columns.headers) if column is not None
    ]
    return lambda count: count + sum(ends[begin + count] - ends[begin] for ends in offsets)


PART_BYTES = 4 << 20  # a reader or writer holds one part in memory
INDEX_LINE_MAX_BYTES = 256  # of a line of an index, with all of its numbers at their largest


class Form(StrEnum):
    """Format of the records in a part; the value is the suffix of its name."""

    LINES = ".txt"
    OBJECTS = ".jsonl"


def part_name(first: int, suffix: str) -> str:
    return f"{first:0{DIGITS}d}{suffix}"


def index_name(first: int) -> str:
    """Return the name, below the folder in the tar, of the index of a part."""
    return f"batches/{part_name(first, '.jsonl')}"


def records_name(stem: str, part: str) -> str:
    """Return the name in the tar of the file with the records of ``part``."""
    return f"{stem}/records/{part}"


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
    data: list[Buffer] = field(default_factory=list)
    runs: list[IndexEntry] = field(default_factory=list)

    @property
    def name(self) -> str:
        return part_name(self.first, self.form.value)

    @property
    def last(self) -> int:
        return self.runs[-1].last

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def data_bytes(self) -> int:
        return self.runs[-1].offset + self.runs[-1].bytes if self.runs else 0

    @property
    def facts(self) -> PartFacts:
        return PartFacts(self.name, self.first, self.last, self.count, self.data_bytes)

    def index(self) -> bytes:
        return "".join(run.to_line() for run in self.runs).encode()

    def add(self, data: Buffer, first: int, count: int, append_time_ns: int, terminated: bool) -> None:
        offset = self.data_bytes
        self.runs.append(IndexEntry(self.name, offset, len(data), first, count, append_time_ns, terminated))
        self.data.append(data)


def parts(batches: Iterable[Batch], *, limit_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Yield the parts of ``batches`` in order, each when it is complete."""
    part: Part | None = None
    for batch in batches:
        form, chunks = (Form.OBJECTS, _objects) if batch.is_columns else (Form.LINES, _lines)
        for data, first, count in chunks(batch, limit_bytes):
            if part is not None and (part.form is not form or part.data_bytes + len(data) > limit_bytes):
                yield part
                part = None
            if part is None:
                part = Part(form, first)
            terminated = batch.terminated or batch.is_columns or first + count <= batch.last_sequence
            part.add(data, first, count, batch.append_time_ns, terminated)
    if part is not None:
        yield part


_Chunk = tuple[Buffer, int, int]  # data, first sequence and number of consecutive records of a batch


def _lines(batch: Batch, limit_bytes: int) -> Iterator[_Chunk]:
    rest: Batch | None = batch
    while rest is not None:
        head, rest = split(rest, max(1, records_within(rest, limit_bytes)))
        assert head is not None
        yield head.raw(), head.first_sequence, head.count


def _objects(batch: Batch, limit_bytes: int) -> Iterator[_Chunk]:
    lines: list[bytes] = []
    first, length = batch.first_sequence, 0
    for record in batch.records():
        line = record.to_json().encode() + b"\n"
        if lines and length + len(line) > limit_bytes:
            yield b"".join(lines), first, len(lines)
            lines, first, length = [], record.sequence, 0
        lines.append(line)
        length += len(line)
    yield b"".join(lines), first, len(lines)
