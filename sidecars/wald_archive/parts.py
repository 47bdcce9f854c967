"""Parts: the files in a bundle that hold the records, some MiB each, and for each a file that says what it holds.

    batches/<first>.jsonl    a line for each run of records from one stored batch:
                             {"part": …, "offset": …, "bytes": …, "first": …, "count": …, "append_time_ns": …}
                             and "terminated": false if the last of them came without a newline
    records/<first>.txt      records that came as lines: each value and a newline, exactly as it came
    records/<first>.jsonl    keyed, timed and binary records: one JSON object a line, as ``wald read --format json``

A part holds consecutive records of one form, up to 4 MiB, or one longer record; so reading or writing a bundle
needs no more memory than that. The index comes before its part: a reader knows what follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wald.format.batch import Buffer
from wald.reading.assembler import Batch
from wald_archive.layout import part_name
from wald_archive.sizes import records_within, split

PART_BYTES = 4 << 20  # a reader or writer holds one part in memory
INDEX_LINE_MAX_BYTES = 256  # of a line of an index, with all of its numbers at their largest


class Form(StrEnum):
    """How a part holds its records; the value is the suffix of its name."""

    LINES = ".txt"
    OBJECTS = ".jsonl"


class BadIndex(ValueError):
    """A line of an index that is not what :func:`IndexEntry.to_line` writes."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Consecutive records from one stored batch, ``bytes`` of a part from ``offset`` on."""

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
        """With its newline."""
        ended = "" if self.terminated else ', "terminated": false'
        return (
            f'{{"part": "{self.part}", "offset": {self.offset}, "bytes": {self.bytes}, "first": {self.first}, '
            f'"count": {self.count}, "append_time_ns": {self.append_time_ns}{ended}}}\n'
        )


def parse_index_entry(line: bytes) -> IndexEntry:
    """The inverse of :meth:`IndexEntry.to_line`.

    Raises:
        BadIndex: anything else.
    """
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
    """One file in ``records/``."""

    part: str
    first: int
    last: int
    count: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {"part": self.part, "first": self.first, "last": self.last, "count": self.count, "bytes": self.bytes}


@dataclass(slots=True)
class Part:
    """One part, while it grows and when it is complete."""

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
        """In ``records/``."""
        return part_name(self.first, self.form.value)

    @property
    def index_name(self) -> str:
        """In ``batches/``."""
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
    """Consecutive records of one batch, as a part holds them."""

    data: Buffer
    first: int
    count: int
    append_time_ns: int
    terminated: bool = True


def parts(batches: Iterable[Batch], *, limit_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Everything in ``batches``, in order; each part as soon as it is complete."""
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
