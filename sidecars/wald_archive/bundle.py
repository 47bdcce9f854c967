"""Creation of bundles: batches become the bytes of a compressed tar, with facts about them.

    <route>-<first>/batches/<first of part>.jsonl      a line for each run of records from one stored batch:
        {"part": …, "offset": …, "bytes": …, "first": …, "count": …, "append_time_ns": …}
        and "terminated": false if the last of them came without a newline
    <route>-<first>/records/<first of part>.txt        records that came as lines, exactly as they came; or
    <route>-<first>/records/<first of part>.jsonl      keyed, timed and binary records: one JSON object a line
    …                                                  further parts
    <route>-<first>/bundle.json                        facts about the whole

A part holds consecutive records of one form, up to 4 MiB, or one longer record; so reading or writing a bundle
needs no more memory than that. The index comes before its part, so a reader knows what follows. A bundle ends after a
number of records, or before the record that would make it too large. Sizes are those of the content: a line with its
newline; of a keyed record value, key and headers, and one byte more.

The tar is a pure function of the records, of the software and of the time of packing: names in order of sequence,
owner 0, mode 0644, and the append time of a part's first record as its time. It is compressed in independent frames,
which are made in parallel.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from wald.format.batch import Buffer
from wald.format.names import DIGITS
from wald.format.records import decode_columns
from wald.format.times import utc
from wald.reading.assembler import Batch
from wald_archive.codecs import FRAME_BYTES, Codec, in_order
from wald_archive.objects import bundle_stem


@dataclass(frozen=True, slots=True)
class Records:
    """Bundle size as an exact number of records; the last bundle may have fewer."""

    limit: int

    def of(self, batch: Batch) -> int:
        return batch.count

    def fitting(self, batch: Batch, room: int) -> int:
        """Return how many of the batch's first records fit into ``room``."""
        return min(batch.count, room)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bundle size as a maximum number of bytes; a bundle has at least one record."""

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
    boundary = batch.first_sequence + count
    return batch.between(batch.first_sequence, boundary - 1), batch.between(boundary, batch.last_sequence)


def content_bytes(batch: Batch) -> int:
    return _column_bytes(batch)(batch.count) if batch.is_columns else len(batch.raw())


def records_within(batch: Batch, room: int) -> int:
    if batch.is_columns:
        return bisect_right(range(1, batch.count + 1), room, key=_column_bytes(batch))
    if content_bytes(batch) <= room:
        return batch.count
    return bytes(batch.raw()[: max(0, room)]).count(b"\n")


def _column_bytes(batch: Batch) -> Callable[[int], int]:
    """Return a function that maps a number of first records to their bytes in the variable-size columns."""
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
    return f"batches/{part_name(first, '.jsonl')}"


def records_name(stem: str, part: str) -> str:
    return f"{stem}/records/{part}"


class BadIndex(ValueError):
    """Index line that :func:`IndexEntry.to_line` would not write."""


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
    """Part that is growing or complete."""

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


FORMAT_VERSION = 1
ABOUT = "bundle.json"
ABOUT_MAX_BYTES = 4096  # of bundle.json, and the same again for each part
BLOCK_BYTES = 512
RECORD_BYTES = 20 * BLOCK_BYTES  # tar ends at a multiple of this
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Origin:
    """The log, route and group of the records, and the software that packs them; the same for a whole run."""

    log: str  # id of the log, 32 hexadecimal digits
    route: str
    group: str
    software: str
    archived_at: str  # ISO time, written into the archive


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a bundle, without its compression."""

    first: int
    last: int
    after: int  # every record of the route after this sequence, up to ``last``, is in it
    count: int
    record_bytes: int  # bytes of values, keys and headers, plus one for each record
    earliest_ns: int
    latest_ns: int
    parts: tuple[PartFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        parts, earliest_ns, latest_ns = (fields.pop(name) for name in ("parts", "earliest_ns", "latest_ns"))
        times = {"earliest": utc(earliest_ns, 9), "earliest_ns": earliest_ns}
        times |= {"latest": utc(latest_ns, 9), "latest_ns": latest_ns}
        return fields | times | {"parts": list(parts)}


@dataclass(frozen=True, slots=True)
class Bundle:
    """Finished bundle.

    Attributes:
        bytes, sha256: size and digest of the file; ``tar_sha256``: digest of the tar in it.
        runs: lengths of alternating runs of absent and present sequences after ``after``.
        frames: size of each compressed frame in the file and in the tar.
    """

    name: str
    contents: Contents
    bytes: int
    sha256: str
    tar_sha256: str
    runs: array[int] = field(default_factory=lambda: array("Q"), compare=False, repr=False)
    frames: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)


def about(origin: Origin, contents: Contents) -> bytes:
    fields = {"format": FORMAT_VERSION, "bundle": bundle_stem(origin.route, contents.first)}
    return json.dumps(fields | asdict(origin) | contents.to_dict(), indent=2).encode() + b"\n"


def bundle(
    batches: Iterable[Batch], *, origin: Origin, codec: Codec, after: int, sink: Callable[[Buffer], object]
) -> Bundle:
    """Pack all of ``batches``, at least one; every later record of the route than ``after`` is in them."""
    tally, stored, tar = Tally(after), hashlib.sha256(), hashlib.sha256()
    frames: list[tuple[int, int]] = []

    def contents_of_tar() -> Iterator[memoryview]:
        for frame in _frames(batches, origin, tally):
            tar.update(frame)
            yield frame

    for frame, length in in_order(lambda piece: (codec.compress(piece), len(piece)), contents_of_tar()):
        stored.update(frame)
        frames.append((len(frame), length))
        sink(frame)
    contents = tally.contents()
    name = bundle_stem(origin.route, contents.first) + codec.suffix
    stored_bytes = sum(length for length, _ in frames)
    return Bundle(name, contents, stored_bytes, stored.hexdigest(), tar.hexdigest(), tally.runs, tuple(frames))


def _frames(batches: Iterable[Batch], origin: Origin, tally: Tally) -> Iterator[memoryview]:
    def counted() -> Iterator[Batch]:
        for batch in batches:
            tally.record_bytes += content_bytes(batch)
            yield batch

    folder, tar_bytes = "", 0
    for part in parts(counted()):
        folder = folder or bundle_stem(origin.route, part.first)
        tally.add(part)
        index = _member(f"{folder}/{index_name(part.first)}", part.runs[0], [part.index()])
        data = b"".join([*index, *_member(records_name(folder, part.name), part.runs[0], part.data)])
        tar_bytes += len(data)
        yield from _pieces(data)
    last = b"".join(_member(f"{folder}/{ABOUT}", part.runs[-1], [about(origin, tally.contents())]))
    end = tar_bytes + len(last) + 2 * BLOCK_BYTES
    yield from _pieces(last + bytes(2 * BLOCK_BYTES + -end % RECORD_BYTES))


def _pieces(data: bytes) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES))


def _member(name: str, run: IndexEntry, data: list[Any]) -> list[Any]:
    """Return a file in the tar: header, content, and zeros up to a block. ``Any``: anything that bytes.join accepts."""
    info = tarfile.TarInfo(name)
    info.size = sum(map(len, data))
    info.mtime = run.append_time_ns // _SECOND_NS
    info.mode = 0o644
    return [info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"), *data, bytes(-info.size % BLOCK_BYTES)]


@dataclass(slots=True)
class Tally:
    """Running totals over the parts of a bundle that follows record ``after``."""

    after: int
    runs: array[int] = field(default_factory=lambda: array("Q"))
    parts: list[PartFacts] = field(default_factory=list)
    record_bytes: int = 0
    earliest_ns: int = 0
    latest_ns: int = 0

    def add(self, part: Part) -> None:
        at = self.parts[-1].last if self.parts else self.after
        if not self.parts:
            self.earliest_ns = part.runs[0].append_time_ns
        self.latest_ns = part.runs[-1].append_time_ns
        self.parts.append(part.facts)
        for run in part.runs:
            if self.runs and run.first == at + 1:
                self.runs[-1] += run.count
            else:
                self.runs.extend((run.first - at - 1, run.count))
            at = run.last

    def contents(self) -> Contents:
        first, last, count = self.parts[0].first, self.parts[-1].last, sum(part.count for part in self.parts)
        return Contents(
            first, last, self.after, count, self.record_bytes, self.earliest_ns, self.latest_ns, tuple(self.parts)
        )
