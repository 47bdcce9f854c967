"""Lines of a ledger, from its sealed parts and its current file.

Programs that make decisions use :class:`Lines`, which requires an unbroken chain; an unreadable frame matters only to
questions about its sequences. Programs that report use :func:`read_files`, which also returns damage.

A part never changes; the current file (megabytes) is read whole. A power cut may leave a fragment of an unacknowledged
append in the current file: readers ignore the fragment, and the writer truncates it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import zstandard

from wald.errors import Damaged
from wald.files.safe_open import open_file, read_regular
from wald.format.ledger_lines import (
    ABOVE_U64,
    FOOTER_BYTES,
    GENESIS,
    BadLine,
    BadPart,
    DecodedLedger,
    Entry,
    PartFrame,
    PartIndex,
    decode_entry,
    decode_ledger,
    decode_part_index,
    digest,
    has_damaged_newline,
    part_index_bytes,
    span_of,
)
from wald.format.names import parse_ledger_part_name
from wald.format.sealed_index import BadFrame, read_frame_lengths
from wald.format.spans import Span

_SECTOR_BYTES = 512  # smallest unit that a disk writes
_BLOCK_BYTES = 16 << 10  # of the current file, decoded together
_SHORT_BYTES = 1 << 10  # a shorter block grows with the file
_UNKNOWN = PartFrame(0, 0, ABOVE_U64, 0, ABOVE_U64, 0, ABOVE_U64, "")  # assumed for an unreadable part


class PartName(NamedTuple):
    """Sealed part and the number of its first line."""

    line: int
    path: Path


def parts_of(path: Path) -> list[PartName]:
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    ours = f"{path.stem}-"
    parsed = ((name, parse_ledger_part_name(name)) for name in names if name.startswith(ours))
    return sorted(PartName(part[1], path.parent / name) for name, part in parsed if part and part[0] == path.name)


def stored_index(part: PartName) -> PartIndex:
    with open_file(part.path) as file:
        length = os.fstat(file.fileno()).st_size
        size = part_index_bytes(os.pread(file.fileno(), FOOTER_BYTES, max(0, length - FOOTER_BYTES)))
        if size > length:
            raise BadPart("the index is truncated")
        index = decode_part_index(os.pread(file.fileno(), size, length - size))
    if index.line != part.line:
        raise BadPart(f"the index is that of line {index.line}")
    return index


def read_index(part: PartName) -> PartIndex:
    """Read a part's index; rebuild a damaged index from the lines."""
    with suppress(BadPart):
        return stored_index(part)
    frames = list(frames_of(part.path))
    if not frames:
        raise damaged(part.path, 1, "it has no lines")
    prev = first_entry(frames[0][1]).get("prev", "")
    index = PartIndex(part.line, 0, prev, prev)
    for stored_bytes, data in frames:
        entries, tip = chained(part.path, data, line=index.lines + 1, prev=index.tip, listed=False)
        index.add(stored_bytes, len(data), entries, tip)
    return index


def frames_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the stored length and the lines of each frame."""
    stored, offset, lines = read_regular(path), 0, 0
    while offset < len(stored):
        try:
            span = read_frame_lengths(lambda begin, count: stored[begin : begin + count], offset)
            data = b"" if span.skippable else decompress_lines(stored[offset:][: span.stored_bytes], span.raw_bytes)
        except (BadFrame, zstandard.ZstdError) as error:
            raise damaged(path, lines + 1, f"its frame at offset {offset} is damaged") from error
        if not span.skippable:
            yield span.stored_bytes, data
            lines += data.count(b"\n")
        offset += span.stored_bytes


def decompress_lines(stored: bytes, raw_bytes: int) -> bytes:
    data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    if len(data) != raw_bytes:
        raise zstandard.ZstdError("wrong length")
    return data


def chained(path: Path, data: bytes, *, line: int, prev: str | None, listed: bool = True) -> tuple[list[Entry], str]:
    """Decode lines from number ``line``; return the entries and the last digest. Raise Damaged for a broken chain.

    ``prev`` is the digest of the line before, None if unknown.
    """
    decoded = decode_ledger(data, prev, listed=listed)
    for number, reason in decoded.broken:
        raise damaged(path, line + number - 1, reason)
    return decoded.entries, decoded.tip


def damaged(path: Path, number: int, reason: str) -> Damaged:
    return Damaged(
        f"{path}: line {number}: {reason}; refusing to rely on this ledger",
        case="ledger-damaged",
        root=path.parents[1],
    )


def first_entry(data: bytes) -> Entry:
    """Decode the first line; return {} if damaged or missing."""
    with suppress(BadLine):
        return decode_entry(BytesIO(data).readline().removesuffix(b"\n"))
    return {}


def without_copies(parts: list[PartName], prev: str | None) -> list[PartName]:
    """Leave out parts that an interrupted cut copied from the current file, whose first line carries ``prev``."""
    for number, part in enumerate(reversed(parts) if prev else ()):
        with suppress(Damaged, OSError):
            index = read_index(part)
            if index.tip == prev:
                return parts[: len(parts) - number]
            if index.prev == prev:
                return parts[: len(parts) - number - 1]
    return parts


def tip_of(parts: list[PartName]) -> str | None:
    with suppress(Damaged, OSError):
        return read_index(parts[-1]).tip if parts else None
    return None


def read_current(path: Path) -> tuple[bytes, int]:
    try:
        return synced(read_regular(path))
    except FileNotFoundError:
        return b"", 0


def synced(data: bytes) -> tuple[bytes, int]:
    """Drop an unsynced fragment; return the data and the end of the intact lines.

    Data after that end is a line with a damaged newline.
    """
    end = _synced_end(data)
    is_damage = has_damaged_newline(data[end:]) and not _lost_a_sector(data, end, len(data))
    return data if is_damage else data[:end], end


def _synced_end(data: bytes) -> int:
    end = data.rfind(b"\n") + 1
    begin = last_line_begin(data, end)
    while _lost_a_sector(data, begin, end):
        begin, end = last_line_begin(data, begin), begin
    offset = first_entry(data[begin:end]).get("append")
    while isinstance(offset, int) and 0 <= offset < end:
        begin, offset = offset, data.find(b"\n", offset) + 1
        if _lost_a_sector(data, begin, offset):
            return data.rfind(b"\n", 0, begin) + 1
    return end


def last_line_begin(data: bytes, end: int) -> int:
    return data.rfind(b"\n", 0, max(0, end - 1)) + 1


def _lost_a_sector(data: bytes, begin: int, end: int) -> bool:
    """Return True if a sector is all zeros and therefore never reached the disk."""
    edges = [begin, *range((begin // _SECTOR_BYTES + 1) * _SECTOR_BYTES, end, _SECTOR_BYTES), end]
    return begin < end and not all(any(data[start:stop]) for start, stop in pairwise(edges))


class Line(NamedTuple):
    """Line about sequences ``low`` to ``high`` (none if ``low`` > ``high``). Numbers start at 1."""

    number: int
    low: int
    high: int
    entry: Entry

    def is_range(self, event: str) -> bool:
        return self.entry.get("event") == event and self.low <= self.high and "last" in self.entry


@dataclass(slots=True, eq=False)
class _Block:
    """Lines decoded together: a part's frame, or some lines of the current file."""

    path: Path
    line: int  # number of the first line
    line_of_file: int
    frame: PartFrame
    offset: int = 0
    data: bytes = b""  # lines of the current file
    error: Damaged | None = None  # why the part is unreadable

    def text(self) -> bytes:
        if self.error is not None:
            raise self.error.with_traceback(None) from None
        if self.data:
            return self.data
        try:
            with open_file(self.path) as file:
                stored = os.pread(file.fileno(), self.frame.stored_bytes, self.offset)
            return decompress_lines(stored, self.frame.raw_bytes)
        except zstandard.ZstdError as error:
            reason = f"its frame at offset {self.offset} is damaged"
            raise damaged(self.path, self.line_of_file, reason) from error
        except OSError as error:
            raise damaged(self.path, self.line_of_file, error.strerror or str(error)) from error

    def lines(self, *, listed: bool = True) -> list[Line]:
        entries, _ = chained(self.path, self.text(), line=self.line_of_file, prev=self.frame.prev, listed=listed)
        return [Line(number, *span_of(entry), entry) for number, entry in enumerate(entries, start=self.line)]


_line, _high = attrgetter("line"), attrgetter("frame.high")


def _blocks(part: PartName, index: PartIndex) -> list[_Block]:
    blocks, offset, line = [], 0, 1
    for frame in index.frames:
        blocks.append(_Block(part.path, part.line - 1 + line, line, frame, offset))
        offset, line = offset + frame.stored_bytes, line + frame.lines
    return blocks


class Lines:
    """Lines of a ledger; none if there is no file.

    Each method first reads new lines. An iteration yields each line that existed at its start exactly once, even across
    a cut. A method raises Damaged if lines that it needs are damaged or break the chain.
    """

    def __init__(self, path: Path) -> None:
        self.generation = -1  # changes when lines disappear
        self._path = path
        self._recent: tuple[_Block, list[Line]] | None = None
        self._forget()

    def _forget(self) -> None:
        self.generation += 1
        self._seen: tuple[int, ...] | None = None
        self._parts: list[PartName] = []
        self._unreadable: dict[Path, tuple[int, ...]] = {}
        self._sealed: list[_Block] = []
        self._end: tuple[int, str] | None = 0, GENESIS  # number and digest of the last sealed line; None if unknown
        self._current: list[_Block] = []

    def oldest_first(
        self,
        behind: int = 0,
        *,
        listed: bool = True,
        on_damage: Callable[[Damaged, Span], None] | None = None,
    ) -> Iterator[Line]:
        """Yield the lines after number ``behind``.

        Without ``on_damage``, an unreadable block raises Damaged. Otherwise ``on_damage`` receives the error and the
        sequences that the block may be about.
        """
        blocks = self._refreshed()
        begin = max(0, bisect_right(blocks, behind + 1, key=_line) - 1)
        for block in blocks[begin:]:
            if block.line + block.frame.lines <= behind + 1:
                continue
            try:
                lines = block.lines(listed=listed)
            except Damaged as error:
                if on_damage is None:
                    raise
                on_damage(error, (block.frame.low, block.frame.high))
            else:
                yield from lines if block.line > behind else lines[behind + 1 - block.line :]

    def newest_first(self, before: int | None = None) -> Iterator[Line]:
        blocks = self._refreshed()
        bound = ABOVE_U64 if before is None else before
        for block in reversed(blocks[: bisect_left(blocks, bound, key=_line)]):
            yield from (line for line in reversed(block.lines()) if line.number < bound)

    def about(self, first: int, last: int) -> Iterator[Line]:
        """Yield the lines about sequences ``first`` to ``last``, newest first."""
        for block in reversed(self._refreshed()):
            if block.frame.low <= last and first <= block.frame.high:
                if self._recent is None or self._recent[0] is not block:
                    self._recent = block, block.lines()
                for line in reversed(self._recent[1]):
                    if line.low <= last and first <= line.high:
                        yield line

    def about_bases(self, bases: Collection[int]) -> Iterator[Line]:
        """Yield the lines whose lowest sequence is in ``bases``, newest first."""
        known, ordered = frozenset(bases), sorted(bases)
        for block in reversed(self._refreshed()):
            if bisect_left(ordered, block.frame.low) < bisect_right(ordered, block.frame.high):
                yield from (line for line in reversed(block.lines()) if line.low in known)

    def written(self, from_ns: int, until_ns: int) -> Iterator[Line]:
        """Yield the lines with ``from_ns`` ≤ "at" < ``until_ns``, oldest first."""
        for block in self._refreshed():
            if block.frame.earliest_ns < until_ns and from_ns <= block.frame.latest_ns:
                for line in block.lines():
                    at = line.entry.get("at")
                    if isinstance(at, int) and from_ns <= at < until_ns:
                        yield line

    def highest(self, event: str) -> int:
        """Return the highest sequence in an event's ranges, or 0."""
        found = 0
        for block in sorted(self._refreshed(), key=_high, reverse=True):
            if block.frame.high > found:
                found = max([found, *(line.high for line in block.lines() if line.is_range(event))])
        return found

    def mark(self) -> tuple[int, ...]:
        """Return a value that changes with each line. Costs one stat(2)."""
        return _identity(self._path)

    def _refreshed(self) -> list[_Block]:
        if any(_identity(path) != seen for path, seen in self._unreadable.items()):  # restored from a backup
            self._forget()
        seen = _identity(self._path) or _identity(self._path.parent)
        if seen != self._seen:
            # Before the parts are listed: after a cut in between, both contain the lines.
            data, end = read_current(self._path)
            parts = without_copies(parts_of(self._path), first_entry(data).get("prev"))
            if len(parts) > len(self._parts):
                self._current = []  # now in the new parts
            is_same = all(data.startswith(block.data, block.offset) for block in self._current)
            if not is_same or parts[: len(self._parts)] != self._parts:
                self._forget()
            for part in parts[len(self._parts) :]:
                self._add_part(part)
                self._parts.append(part)
            self._read_current(data, end)
            self._seen = seen
        return [*self._sealed, *self._current]

    def _add_part(self, part: PartName) -> None:
        if not self._parts and part.line > 1:  # older parts were moved away
            self._end = None
        seen = _identity(part.path)
        try:
            index = read_index(part)
        except (Damaged, OSError) as error:
            reason = error if isinstance(error, Damaged) else damaged(part.path, 1, error.strerror or str(error))
            self._sealed.append(_Block(part.path, part.line, 1, _UNKNOWN, error=reason))
            self._unreadable[part.path] = seen
            self._end = None
            return
        if self._end not in (None, (part.line - 1, index.prev)):
            raise damaged(part.path, 1, "does not follow the line before it")
        if index.before is not None:
            self._bound_unreadable(*index.before)
        self._sealed += _blocks(part, index)
        self._end = part.line - 1 + index.lines, index.tip

    def _bound_unreadable(self, low: int, high: int) -> None:
        """Narrow an unreadable last part's sequences to those that the next file records."""
        if self._sealed and (last := self._sealed[-1]).error is not None:
            last.frame = last.frame._replace(low=low, high=high)

    def _read_current(self, data: bytes, end: int) -> None:
        prev: str | None
        if self._end is not None:
            lines, prev = self._end
        else:
            lines, prev = self._parts[-1].line, None
            match first_entry(data):
                case {"event": "continues", "line": int(lines), "about": [int(low), int(high)]}:
                    self._bound_unreadable(low, high)
        read = offset = 0
        if self._current and len(self._current[-1].data) < _SHORT_BYTES:
            self._current.pop()  # read again, with the new lines
        if self._current:
            last = self._current[-1]
            read, offset = last.line_of_file - 1 + last.frame.lines, last.offset + len(last.data)
            prev = digest(data[last_line_begin(data, offset) : offset])
        while offset < end:
            chunk = data[offset : data.find(b"\n", min(offset + _BLOCK_BYTES, end) - 1) + 1]
            entries, tip = chained(self._path, chunk, line=read + 1, prev=prev)
            index = PartIndex(0, 0, "", prev or first_entry(chunk)["prev"])
            index.add(0, 0, entries, tip)
            self._current.append(_Block(self._path, lines + read + 1, read + 1, index.frames[0], offset, chunk))
            read, offset, prev = read + len(entries), offset + len(chunk), tip
        if len(data) > end:
            raise damaged(self._path, read + 1, "its newline is damaged")


def _identity(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def entries_of(path: Path) -> Iterator[Entry]:
    return (line.entry for line in Lines(path).oldest_first())


def read_ledger(path: Path) -> DecodedLedger:
    """Decode the current file, including damage."""
    data, _ = read_current(path)  # before the parts are listed, as in Lines
    parts = without_copies(parts_of(path), first_entry(data).get("prev"))
    return decode_ledger(data, tip_of(parts) if parts else GENESIS)


def read_files(path: Path) -> Iterator[tuple[Path, DecodedLedger]]:
    """Decode each part, then the current file. The oldest parts may be missing."""
    data, _ = read_current(path)
    tip: str | None = GENESIS
    for number, part in enumerate(without_copies(parts_of(path), first_entry(data).get("prev"))):
        decoded = decode_part(part, None if number == 0 and part.line > 1 else tip)
        tip = decoded.tip
        yield part.path, decoded
    yield path, decode_ledger(data, tip)


def decode_part(part: PartName, tip: str | None) -> DecodedLedger:
    """Decode every readable line. ``tip`` is the digest of the line before, None if unknown."""
    entries: list[Entry] = []
    broken: list[tuple[int, str]] = []
    try:
        index = stored_index(part)
    except BadPart as error:
        data, broken = b"", [(0, f"its index is damaged: {error}")]
        try:
            for _, lines in frames_of(part.path):
                data += lines
        except Damaged as damage:
            broken.append((data.count(b"\n") + 1, damage.message.partition(": line ")[2].partition(": ")[2]))
        decoded = decode_ledger(data, tip)
        return replace(decoded, broken=broken + decoded.broken)
    for block in _blocks(part, index):
        line = block.line_of_file
        try:
            decoded = decode_ledger(block.text(), tip or block.frame.prev)
        except Damaged as error:
            broken.append((line, error.message.partition(f"line {line}: ")[2]))
            tip = None
            continue
        entries += decoded.entries
        broken += ((line + number - 1, reason) for number, reason in decoded.broken)
        tip = decoded.tip
    if tip not in (None, index.tip):
        broken.append((index.lines + 1, "does not follow the line before it"))
    return DecodedLedger(entries, sum(frame.raw_bytes for frame in index.frames), broken, index.tip)


def highest_in_parts(path: Path, *events: str) -> int:
    """Return the highest "last" of ``events`` (default: all) in readable frames of sealed parts, or 0."""
    blocks = []
    for part in parts_of(path):
        with suppress(Damaged, OSError):
            blocks += _blocks(part, read_index(part))
    highest = 0
    for block in sorted(blocks, key=_high, reverse=True):
        if block.frame.high <= highest:
            break
        with suppress(Damaged):
            for line in block.lines():
                last = line.entry.get("last")
                if isinstance(last, int) and (not events or line.entry.get("event") in events):
                    highest = max(highest, last)
    return highest


def reported_entries(path: Path) -> Iterator[Entry]:
    return chain.from_iterable(decoded.entries for _, decoded in read_files(path))


def newest_entries(path: Path, *events: str) -> Iterator[Entry]:
    """Yield ``events`` of the current file and newest part, newest first, ignoring damage and the chain."""
    kinds = tuple(b'"event":"%s"' % event.encode() for event in events)
    for line in _newest_lines(path):
        if any(kind in line for kind in kinds):  # before long lines are decoded
            with suppress(BadLine):
                if (entry := decode_entry(line))["event"] in events:
                    yield entry


def _newest_lines(path: Path) -> Iterator[bytes]:
    data, _ = read_current(path)
    yield from reversed(data.split(b"\n"))
    with suppress(Damaged, OSError):
        for part in without_copies(parts_of(path), first_entry(data).get("prev"))[-1:]:
            for _, lines in reversed(list(frames_of(part.path))):
                yield from reversed(lines.split(b"\n"))
