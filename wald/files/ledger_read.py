"""Lines of a ledger, from its sealed parts and its current file.

For decisions, use :class:`LedgerLines`, which requires an unbroken chain; an unreadable frame matters only to questions
about its sequences. For reports, use :func:`read_files`, which also returns damage.

A part never changes; readers load the whole current file (megabytes). A power cut may leave a fragment of an
unacknowledged append in the current file, which readers ignore and the writer truncates.
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
_SHORT_BLOCK_BYTES = 1 << 10  # a shorter block grows with the file
_UNKNOWN_FRAME = PartFrame(0, 0, ABOVE_U64, 0, ABOVE_U64, 0, ABOVE_U64, "")  # assumed for an unreadable part


class PartName(NamedTuple):
    """Sealed part and the number of its first line."""

    line: int
    path: Path


def parts_of(path: Path) -> list[PartName]:
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    prefix = f"{path.stem}-"
    parsed = ((name, parse_ledger_part_name(name)) for name in names if name.startswith(prefix))
    return sorted(PartName(part[1], path.parent / name) for name, part in parsed if part and part[0] == path.name)


def stored_index(part: PartName) -> PartIndex:
    with open_file(part.path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        index_bytes = part_index_bytes(os.pread(file.fileno(), FOOTER_BYTES, max(0, file_bytes - FOOTER_BYTES)))
        if index_bytes > file_bytes:
            raise BadPart("the index is truncated")
        index = decode_part_index(os.pread(file.fileno(), index_bytes, file_bytes - index_bytes))
    if index.line != part.line:
        raise BadPart(f"the index begins with line {index.line}")
    return index


def read_index(part: PartName) -> PartIndex:
    """Read a part's index; rebuild a damaged index from the lines."""
    with suppress(BadPart):
        return stored_index(part)
    frames = list(frames_of(part.path))
    if not frames:
        raise damaged_line(part.path, 1, "the part has no lines")
    prev = first_entry(frames[0][1]).get("prev", "")
    index = PartIndex(part.line, 0, prev, prev)
    for stored_bytes, data in frames:
        entries, tip = decode_chain(part.path, data, line=index.lines + 1, prev=index.tip, with_routes=False)
        index.add(stored_bytes, len(data), entries, tip)
    return index


def frames_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the stored length and the lines of each frame."""
    stored, offset, lines = read_regular(path), 0, 0
    while offset < len(stored):
        try:
            frame = read_frame_lengths(lambda start, count: stored[start : start + count], offset)
            data = b"" if frame.skippable else decompress_lines(stored[offset:][: frame.stored_bytes], frame.raw_bytes)
        except (BadFrame, zstandard.ZstdError) as error:
            raise damaged_line(path, lines + 1, f"the frame at offset {offset} is damaged") from error
        if not frame.skippable:
            yield frame.stored_bytes, data
            lines += data.count(b"\n")
        offset += frame.stored_bytes


def decompress_lines(stored: bytes, raw_bytes: int) -> bytes:
    data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    if len(data) != raw_bytes:
        raise zstandard.ZstdError("the length of the lines is wrong")
    return data


def decode_chain(
    path: Path, data: bytes, *, line: int, prev: str | None, with_routes: bool = True
) -> tuple[list[Entry], str]:
    """Decode lines; return the entries and the last digest. Raise Damaged if the chain is broken.

    ``line`` is the number of the first line, ``prev`` the digest of the line before (None if unknown).
    """
    decoded = decode_ledger(data, prev, with_routes=with_routes)
    for number, reason in decoded.broken_lines:
        raise damaged_line(path, line + number - 1, reason)
    return decoded.entries, decoded.tip


def damaged_line(path: Path, number: int, reason: str) -> Damaged:
    return Damaged(
        f"{path}: line {number}: {reason}; wald cannot rely on this ledger",
        case="ledger-damaged",
        root=path.parents[1],
    )


def first_entry(data: bytes) -> Entry:
    """Decode the first line; return {} if damaged or missing."""
    with suppress(BadLine):
        return decode_entry(BytesIO(data).readline().removesuffix(b"\n"))
    return {}


def without_copies(parts: list[PartName], prev: str | None) -> list[PartName]:
    """Drop parts that an interrupted cut copied from the current file, which begins with ``prev``."""
    for number, part in enumerate(reversed(parts) if prev else ()):
        with suppress(Damaged, OSError):
            index = read_index(part)
            if index.tip == prev:
                return parts[: len(parts) - number]
            if index.prev == prev:
                return parts[: len(parts) - number - 1]
    return parts


def last_digest(parts: list[PartName]) -> str | None:
    with suppress(Damaged, OSError):
        return read_index(parts[-1]).tip if parts else None
    return None


def read_current(path: Path) -> tuple[bytes, int]:
    """Read a current file as :func:`drop_unsynced` does; a missing file is empty."""
    try:
        return drop_unsynced(read_regular(path))
    except FileNotFoundError:
        return b"", 0


def drop_unsynced(data: bytes) -> tuple[bytes, int]:
    """Drop an unsynced fragment; return the data and the end of the intact lines.

    Data after that end is a line with a damaged newline.
    """
    end = _synced_end(data)
    is_damage = has_damaged_newline(data[end:]) and not _has_lost_sector(data, end, len(data))
    return data if is_damage else data[:end], end


def _synced_end(data: bytes) -> int:
    """Return the end of the last line that was certainly synced."""
    end = data.rfind(b"\n") + 1
    start = last_line_start(data, end)
    while _has_lost_sector(data, start, end):
        start, end = last_line_start(data, start), start
    boundary = first_entry(data[start:end]).get("append")
    while isinstance(boundary, int) and 0 <= boundary < end:
        start, boundary = boundary, data.find(b"\n", boundary) + 1
        if _has_lost_sector(data, start, boundary):
            return data.rfind(b"\n", 0, start) + 1
    return end


def last_line_start(data: bytes, end: int) -> int:
    return data.rfind(b"\n", 0, max(0, end - 1)) + 1


def _has_lost_sector(data: bytes, start: int, end: int) -> bool:
    """Return True if a sector is all zeros, because it never reached the disk."""
    edges = [start, *range((start // _SECTOR_BYTES + 1) * _SECTOR_BYTES, end, _SECTOR_BYTES), end]
    return start < end and not all(any(data[first:stop]) for first, stop in pairwise(edges))


class LedgerLine(NamedTuple):
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
            reason = f"the frame at offset {self.offset} is damaged"
            raise damaged_line(self.path, self.line_of_file, reason) from error
        except OSError as error:
            raise damaged_line(self.path, self.line_of_file, error.strerror or str(error)) from error

    def lines(self, *, with_routes: bool = True) -> list[LedgerLine]:
        text, line, prev = self.text(), self.line_of_file, self.frame.prev
        entries, _ = decode_chain(self.path, text, line=line, prev=prev, with_routes=with_routes)
        return [LedgerLine(number, *span_of(entry), entry) for number, entry in enumerate(entries, start=self.line)]


_line, _high = attrgetter("line"), attrgetter("frame.high")


def _blocks(part: PartName, index: PartIndex) -> list[_Block]:
    blocks, offset, line = [], 0, 1
    for frame in index.frames:
        blocks.append(_Block(part.path, part.line - 1 + line, line, frame, offset))
        offset, line = offset + frame.stored_bytes, line + frame.lines
    return blocks


class LedgerLines:
    """Lines of a ledger; none if there is no file.

    Each method first reads new lines, and raises Damaged if lines that it needs are damaged or break the chain. An
    iteration yields each line that existed at its start exactly once, even across a cut.
    """

    def __init__(self, path: Path) -> None:
        self.generation = -1  # increases when lines disappear
        self._path = path
        self._cached_block: tuple[_Block, list[LedgerLine]] | None = None
        self._reset()

    def _reset(self) -> None:
        self.generation += 1
        self._version: tuple[int, ...] | None = None
        self._parts: list[PartName] = []
        self._unreadable: dict[Path, tuple[int, ...]] = {}
        self._sealed: list[_Block] = []
        self._end: tuple[int, str] | None = 0, GENESIS  # number and digest of the last sealed line; None if unknown
        self._current: list[_Block] = []

    def oldest_first(
        self,
        after: int = 0,
        *,
        with_routes: bool = True,
        on_damage: Callable[[Damaged, Span], None] | None = None,
    ) -> Iterator[LedgerLine]:
        """Yield the lines after number ``after``.

        Without ``on_damage``, an unreadable block raises Damaged. Otherwise, ``on_damage`` receives the error and the
        sequences that the block may be about.
        """
        blocks = self._refresh()
        start = max(0, bisect_right(blocks, after + 1, key=_line) - 1)
        for block in blocks[start:]:
            if block.line + block.frame.lines <= after + 1:
                continue
            try:
                lines = block.lines(with_routes=with_routes)
            except Damaged as error:
                if on_damage is None:
                    raise
                on_damage(error, (block.frame.low, block.frame.high))
            else:
                yield from lines if block.line > after else lines[after + 1 - block.line :]

    def newest_first(self, before: int | None = None) -> Iterator[LedgerLine]:
        blocks = self._refresh()
        bound = ABOVE_U64 if before is None else before
        for block in reversed(blocks[: bisect_left(blocks, bound, key=_line)]):
            yield from (line for line in reversed(block.lines()) if line.number < bound)

    def about(self, first: int, last: int) -> Iterator[LedgerLine]:
        """Yield the lines about sequences ``first`` to ``last``, newest first."""
        for block in reversed(self._refresh()):
            if block.frame.low <= last and first <= block.frame.high:
                if self._cached_block is None or self._cached_block[0] is not block:
                    self._cached_block = block, block.lines()
                for line in reversed(self._cached_block[1]):
                    if line.low <= last and first <= line.high:
                        yield line

    def about_bases(self, bases: Collection[int]) -> Iterator[LedgerLine]:
        """Yield the lines whose lowest sequence is in ``bases``, newest first."""
        base_set, sorted_bases = frozenset(bases), sorted(bases)
        for block in reversed(self._refresh()):
            if bisect_left(sorted_bases, block.frame.low) < bisect_right(sorted_bases, block.frame.high):
                yield from (line for line in reversed(block.lines()) if line.low in base_set)

    def written_between(self, from_ns: int, until_ns: int) -> Iterator[LedgerLine]:
        """Yield the lines with ``from_ns`` ≤ "at" < ``until_ns``, oldest first."""
        for block in self._refresh():
            if block.frame.earliest_ns < until_ns and from_ns <= block.frame.latest_ns:
                for line in block.lines():
                    at_ns = line.entry.get("at")
                    if isinstance(at_ns, int) and from_ns <= at_ns < until_ns:
                        yield line

    def highest_sequence(self, event: str) -> int:
        """Return the highest sequence in an event's ranges, or 0."""
        highest = 0
        for block in sorted(self._refresh(), key=_high, reverse=True):
            if block.frame.high > highest:
                highest = max([highest, *(line.high for line in block.lines() if line.is_range(event))])
        return highest

    def version(self) -> tuple[int, ...]:
        """Return a value that changes with each line. Costs one stat(2)."""
        return _file_version(self._path)

    def _refresh(self) -> list[_Block]:
        if any(_file_version(path) != known for path, known in self._unreadable.items()):  # restored from a backup
            self._reset()
        version = _file_version(self._path) or _file_version(self._path.parent)
        if version != self._version:
            # Before the parts are listed: after a cut in between, both contain the lines.
            data, end = read_current(self._path)
            parts = without_copies(parts_of(self._path), first_entry(data).get("prev"))
            if len(parts) > len(self._parts):
                self._current = []  # now in the new parts
            is_unchanged = all(data.startswith(block.data, block.offset) for block in self._current)
            if not is_unchanged or parts[: len(self._parts)] != self._parts:
                self._reset()
            for part in parts[len(self._parts) :]:
                self._add_part(part)
                self._parts.append(part)
            self._read_current(data, end)
            self._version = version
        return [*self._sealed, *self._current]

    def _add_part(self, part: PartName) -> None:
        if not self._parts and part.line > 1:  # older parts were moved away
            self._end = None
        version = _file_version(part.path)
        try:
            index = read_index(part)
        except (Damaged, OSError) as error:
            damage = error if isinstance(error, Damaged) else damaged_line(part.path, 1, error.strerror or str(error))
            self._sealed.append(_Block(part.path, part.line, 1, _UNKNOWN_FRAME, error=damage))
            self._unreadable[part.path] = version
            self._end = None
            return
        if self._end not in (None, (part.line - 1, index.prev)):
            raise damaged_line(part.path, 1, "does not follow the line before it")
        if index.before is not None:
            self._bound_unreadable(*index.before)
        self._sealed += _blocks(part, index)
        self._end = part.line - 1 + index.lines, index.tip

    def _bound_unreadable(self, low: int, high: int) -> None:
        """Narrow an unreadable last part's sequences to those that the next file states."""
        if self._sealed and (last := self._sealed[-1]).error is not None:
            last.frame = last.frame._replace(low=low, high=high)

    def _read_current(self, data: bytes, end: int) -> None:
        prev: str | None
        if self._end is not None:
            earlier_lines, prev = self._end
        else:
            earlier_lines, prev = self._parts[-1].line, None
            match first_entry(data):
                case {"event": "continues", "line": int(earlier_lines), "about": [int(low), int(high)]}:
                    self._bound_unreadable(low, high)
        lines_read = offset = 0
        if self._current and len(self._current[-1].data) < _SHORT_BLOCK_BYTES:
            self._current.pop()  # short: decode it again, together with the new lines
        if self._current:
            last = self._current[-1]
            lines_read, offset = last.line_of_file - 1 + last.frame.lines, last.offset + len(last.data)
            prev = digest(data[last_line_start(data, offset) : offset])
        while offset < end:
            chunk = data[offset : data.find(b"\n", min(offset + _BLOCK_BYTES, end) - 1) + 1]
            entries, tip = decode_chain(self._path, chunk, line=lines_read + 1, prev=prev)
            index = PartIndex(0, 0, "", prev or first_entry(chunk)["prev"])
            index.add(0, 0, entries, tip)
            line_numbers = earlier_lines + lines_read + 1, lines_read + 1
            self._current.append(_Block(self._path, *line_numbers, index.frames[0], offset, chunk))
            lines_read, offset, prev = lines_read + len(entries), offset + len(chunk), tip
        if len(data) > end:
            raise damaged_line(self._path, lines_read + 1, "the newline is damaged")


def _file_version(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def entries_of(path: Path) -> Iterator[Entry]:
    return (line.entry for line in LedgerLines(path).oldest_first())


def read_ledger(path: Path) -> DecodedLedger:
    """Decode the current file, including damage."""
    data, _ = read_current(path)  # before the parts are listed, as in LedgerLines
    parts = without_copies(parts_of(path), first_entry(data).get("prev"))
    return decode_ledger(data, last_digest(parts) if parts else GENESIS)


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
    """Decode a part's readable lines. ``tip`` is the digest of the line before; None if unknown."""
    entries: list[Entry] = []
    broken_lines: list[tuple[int, str]] = []
    try:
        index = stored_index(part)
    except BadPart as error:
        data, broken_lines = b"", [(0, f"the index is damaged: {error}")]
        try:
            for _, lines in frames_of(part.path):
                data += lines
        except Damaged as damage:
            broken_lines.append((data.count(b"\n") + 1, damage.message.partition(": line ")[2].partition(": ")[2]))
        decoded = decode_ledger(data, tip)
        return replace(decoded, broken_lines=broken_lines + decoded.broken_lines)
    for block in _blocks(part, index):
        line = block.line_of_file
        try:
            decoded = decode_ledger(block.text(), tip or block.frame.prev)
        except Damaged as error:
            broken_lines.append((line, error.message.partition(f"line {line}: ")[2]))
            tip = None
            continue
        entries += decoded.entries
        broken_lines += ((line + number - 1, reason) for number, reason in decoded.broken_lines)
        tip = decoded.tip
    if tip not in (None, index.tip):
        broken_lines.append((index.lines + 1, "does not follow the line before it"))
    return DecodedLedger(entries, sum(frame.raw_bytes for frame in index.frames), broken_lines, index.tip)


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


def readable_entries(path: Path) -> Iterator[Entry]:
    return chain.from_iterable(decoded.entries for _, decoded in read_files(path))


def newest_entries(path: Path, *events: str) -> Iterator[Entry]:
    """Yield ``events`` of the current file and newest part, newest first. Ignore damage and the chain."""
    patterns = tuple(b'"event":"%s"' % event.encode() for event in events)
    for line in _newest_lines(path):
        if any(pattern in line for pattern in patterns):  # before long lines are decoded
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
