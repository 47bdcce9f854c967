"""Lines of a ledger, from its sealed parts and its current file.

Programs that decide use :class:`Lines`, which requires an unbroken chain; an unreadable frame matters only to questions
about its sequences. Programs that report use :func:`read_files`, which returns damage too.

A part never changes; its index bounds the sequences in each frame. The current file (megabytes) is read whole. A power
cut may leave a fragment of an unacknowledged append there: readers ignore it, the owner truncates it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

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

FRAME_BYTES = 256 << 10
_SECTOR_BYTES = 512  # a disk writes at least this
_TAIL_BYTES = 64 << 10  # longer than most lines
_NEWEST_BYTES = 4 << 20
_UNKNOWN = PartFrame(0, 0, 0, 0, ABOVE_U64, 0, ABOVE_U64, "")  # contents of an unreadable part


class PartName(NamedTuple):
    """A sealed part, and the number of its first line."""

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
            raise BadPart("the index is cut short")
        index = decode_part_index(os.pread(file.fileno(), size, length - size))
    if index.line != part.line:
        raise BadPart(f"the index is that of line {index.line}")
    return index


def read_index(part: PartName) -> PartIndex:
    """Read an index, or rebuild a damaged one from the lines."""
    with suppress(BadPart):
        return stored_index(part)
    index: PartIndex | None = None
    for stored_bytes, data in frames_of(part.path):
        if index is None:
            prev = first_prev(data) or ""
            index = PartIndex(part.line, 0, prev, prev)
        entries, tip = chained(part.path, data, line=index.lines + 1, prev=index.tip, listed=False)
        index.add(stored_bytes, len(data), entries, tip)
    if index is None:
        raise damaged(part.path, 1, "it has no lines")
    return index


def frames_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each frame's stored length and lines, without the index."""
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
    """Decode lines, from number ``line``, that follow digest ``prev``, if known; return them and the last digest."""
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


def first_entry(data: bytes) -> Entry | None:
    return _entry_of(data[: data.find(b"\n")]) if b"\n" in data else None


def first_prev(data: bytes) -> str | None:
    entry = first_entry(data)
    return None if entry is None else str(entry["prev"])


def _entry_of(line: bytes) -> Entry | None:
    with suppress(BadLine):
        return decode_entry(line.removesuffix(b"\n"))
    return None


def without_copies(parts: list[PartName], prev: str | None) -> list[PartName]:
    """Leave out copies of the current file, whose first line carries ``prev``."""
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
    """Return the synced lines and their end, and behind it a line with a damaged newline."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return b"", 0
    with file:
        length = os.fstat(file.fileno()).st_size
        _, end = synced_line(file.fileno(), length)
        data = file.read(length)
    return (data, end) if newline_is_damaged(data[end:], end) else (data[:end], end)


def last_line(descriptor: int, end: int) -> tuple[bytes, int]:
    """Return the last complete line before ``end``, and its end."""
    want = _TAIL_BYTES
    while True:
        start = max(0, end - want)
        tail = os.pread(descriptor, end - start, start)
        whole = tail.rfind(b"\n") + 1
        begin = tail.rfind(b"\n", 0, max(0, whole - 1)) + 1
        if start == 0 or (whole and begin):
            return tail[begin:whole], start + whole
        want *= 2


def synced_line(descriptor: int, length: int) -> tuple[bytes, int]:
    """Return the last line of a synced append, and its end."""
    line, end = last_line(descriptor, length)
    while _lost_a_sector(line, end - len(line)):
        line, end = last_line(descriptor, end - len(line))
    offset = (_entry_of(line) or {}).get("append")
    if isinstance(offset, int) and 0 <= offset < end:
        for each in os.pread(descriptor, end - offset, offset).splitlines(keepends=True):
            if _lost_a_sector(each, offset):
                return last_line(descriptor, offset)
            offset += len(each)
    return line, end


def _lost_a_sector(line: bytes, offset: int) -> bool:
    """Return True if a sector is all zeros: it never reached the disk."""
    end, start = offset + len(line), offset
    while start < end:
        stop = min(end, (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
        if not any(line[start - offset : stop - offset]):
            return True
        start = stop
    return False


def newline_is_damaged(rest: bytes, offset: int) -> bool:
    """Return True if ``rest``, behind the synced lines, was a complete line."""
    return has_damaged_newline(rest) and not _lost_a_sector(rest, offset)


def is_intact(line: bytes) -> bool:
    return not line or _entry_of(line) is not None


class Line(NamedTuple):
    """Line ``number``, from 1, about sequences ``low`` to ``high``; low > high for none."""

    number: int
    low: int
    high: int
    entry: Entry

    def is_range(self, event: str) -> bool:
        return self.entry.get("event") == event and self.low <= self.high and "last" in self.entry


@dataclass(slots=True, eq=False)
class _Block:
    """A frame of a part, or lines of the current file. Immutable."""

    path: Path
    line: int  # number of the first line
    line_of_file: int
    frame: PartFrame
    offset: int = 0  # of the frame
    data: bytes = b""  # of the current file
    error: Damaged | None = None  # the part is unreadable

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
        return self.numbered(entries)

    def numbered(self, entries: list[Entry]) -> list[Line]:
        return [Line(number, *span_of(entry), entry) for number, entry in enumerate(entries, start=self.line)]

    def followed_by(self, other: Self) -> Self:
        ours, theirs = self.frame, other.frame
        frame = ours._replace(
            low=min(ours.low, theirs.low),
            high=max(ours.high, theirs.high),
            earliest_ns=min(ours.earliest_ns, theirs.earliest_ns),
            latest_ns=max(ours.latest_ns, theirs.latest_ns),
        )
        return replace(self, frame=frame, data=self.data + other.data)


_line, _high = attrgetter("line"), attrgetter("frame.high")


def _blocks(part: PartName, index: PartIndex) -> list[_Block]:
    blocks, offset, line = [], 0, 1
    for frame in index.frames:
        blocks.append(_Block(part.path, part.line - 1 + line, line, frame, offset))
        offset, line = offset + frame.stored_bytes, line + frame.lines
    return blocks


class Lines:
    """The lines of a ledger; none without a file.

    Each method first reads new lines. An iteration yields the lines that existed at its start, each once, even across a
    cut. Damaged: lines that a method needs are damaged or break the chain.
    """

    def __init__(self, path: Path) -> None:
        self.generation = 0  # changes when lines disappear
        self._path = path
        self._seen: tuple[tuple[int, ...], ...] = ()
        self._last = 0
        self._current: list[_Block] = []
        self._recent: tuple[_Block, list[Line]] | None = None
        self._forget_parts()

    def oldest_first(
        self,
        behind: int = 0,
        *,
        listed: bool = True,
        on_damage: Callable[[Damaged, Span], None] | None = None,
    ) -> Iterator[Line]:
        """Yield the lines after number ``behind``.

        ``on_damage`` gets each unreadable block's error, and the sequences it may be about, instead of an exception.
        """
        blocks = self._refreshed()
        begin = max(0, bisect_right(blocks, behind + 1, key=_line) - 1) if behind < self._last else len(blocks)
        for block in blocks[begin:]:
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
        """Yield the lines about these sequences, newest first."""
        for block in reversed(self._refreshed()):
            if block.frame.low <= last and first <= block.frame.high:
                for line in reversed(self._recent_lines(block)):
                    if line.low <= last and first <= line.high:
                        yield line

    def about_bases(self, bases: Collection[int]) -> Iterator[Line]:
        """Yield the lines with a lowest sequence in ``bases``, newest first."""
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
        found = 0
        for block in sorted(self._refreshed(), key=_high, reverse=True):
            if block.frame.high > found:
                found = max([found, *(line.high for line in block.lines() if line.is_range(event))])
        return found

    def mark(self) -> tuple[int, ...]:
        """Return a value that changes with each line; one stat(2)."""
        return _identity(self._path)

    def _recent_lines(self, block: _Block) -> list[Line]:
        if self._recent is None or self._recent[0] is not block:
            self._recent = block, block.lines()
        return self._recent[1]

    def _refreshed(self) -> list[_Block]:
        unreadable = [_identity(path) for path in self._unreadable]
        seen = _identity(self._path) or _identity(self._path.parent), *unreadable
        if seen != self._seen:
            if unreadable and [*self._seen[1:]] != unreadable:  # restored from a backup
                self._forget_parts()
                self._forget_current()
            # Before listing the parts: it contains the lines of a cut in between.
            data, end = read_current(self._path)
            self._read_parts(first_prev(data))
            self._read_new_lines(data, end)
            self._seen = seen[0], *(_identity(path) for path in self._unreadable)
        return [*self._sealed, *self._current]

    def _forget_parts(self) -> None:
        self._parts: list[PartName] = []
        self._sealed: list[_Block] = []
        self._lines: int | None = 0  # of the parts; None if unknown
        self._tip: str | None = GENESIS  # its digest
        self._unreadable: list[Path] = []

    def _read_parts(self, prev: str | None) -> None:
        parts = without_copies(parts_of(self._path), prev)
        if parts[: len(self._parts)] != self._parts:
            self._forget_parts()
            self._forget_current()
        for part in parts[len(self._parts) :]:
            self._add_part(part)
            self._current = []  # its lines are in the part

    def _forget_current(self) -> None:
        self.generation += 1
        self._current = []

    def _add_part(self, part: PartName) -> None:
        if not self._parts and part.line > 1:  # older parts were moved away
            self._lines, self._tip = part.line - 1, None
        try:
            index = read_index(part)
        except (Damaged, OSError) as error:
            reason = error if isinstance(error, Damaged) else damaged(part.path, 1, error.strerror or str(error))
            self._sealed.append(_Block(part.path, part.line, 1, _UNKNOWN, error=reason))
            self._parts.append(part)
            self._unreadable.append(part.path)
            self._lines = self._tip = None
            return
        if self._tip not in (None, index.prev) or self._lines not in (None, part.line - 1):
            raise damaged(part.path, 1, "does not follow the line before it")
        if index.before is not None:
            self._bound_unreadable(index.before)
        self._sealed += _blocks(part, index)
        self._parts.append(part)
        self._lines, self._tip = part.line - 1 + index.lines, index.tip

    def _bound_unreadable(self, span: Span) -> None:
        """Set an unreadable last part's sequences to those that the next file names."""
        if self._sealed and self._sealed[-1].error is not None:
            last = self._sealed[-1]
            self._sealed[-1] = replace(last, frame=last.frame._replace(low=span[0], high=span[1]))

    def _read_new_lines(self, data: bytes, end: int) -> None:
        offset = 0
        for block in self._current:
            if not data.startswith(block.data, offset):
                self._forget_current()
                offset = 0
                break
            offset += len(block.data)
        lines, prev = self._begin_of_current(data)
        read = data.count(b"\n", 0, offset)
        if read:
            prev = digest(data[data.rfind(b"\n", 0, offset - 1) + 1 : offset])
        while offset < end:
            chunk = data[offset : data.find(b"\n", min(offset + FRAME_BYTES, end) - 1) + 1]
            entries, tip = chained(self._path, chunk, line=read + 1, prev=prev)
            index = PartIndex(0, 0, "", prev or first_prev(chunk) or "")
            index.add(0, 0, entries, tip)
            self._add_block(_Block(self._path, lines + read + 1, read + 1, index.frames[0], data=chunk), entries)
            read, offset, prev = read + len(entries), offset + len(chunk), tip
        if len(data) > end:
            raise damaged(self._path, read + 1, "its newline is damaged")
        self._last = lines + read

    def _add_block(self, block: _Block, entries: list[Entry]) -> None:
        last = self._current[-1] if self._current else None
        if last is None or len(last.data) + len(block.data) > FRAME_BYTES:
            self._current.append(block)
            return
        self._current[-1] = last.followed_by(block)
        if self._recent is not None and self._recent[0] is last:
            self._recent = self._current[-1], [*self._recent[1], *block.numbered(entries)]

    def _begin_of_current(self, data: bytes) -> tuple[int, str | None]:
        """Return the number and digest of the line before."""
        lines = self._lines
        if lines is None:
            match first_entry(data):
                case {"event": "continues", "line": int(lines), "about": [int(low), int(high)]}:
                    self._bound_unreadable((low, high))
        return self._parts[-1].line if lines is None else lines, self._tip


def _identity(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def entries_of(path: Path) -> Iterator[Entry]:
    return (line.entry for line in Lines(path).oldest_first())


def read_ledger(path: Path) -> DecodedLedger:
    data, _ = read_current(path)  # before the parts are listed, as in Lines
    parts = without_copies(parts_of(path), first_prev(data))
    return decode_ledger(data, tip_of(parts) if parts else GENESIS)


def read_files(path: Path) -> Iterator[tuple[Path, DecodedLedger]]:
    """Decode each file, oldest first; parts may be missing before the first."""
    data, _ = read_current(path)
    tip: str | None = GENESIS
    for number, part in enumerate(without_copies(parts_of(path), first_prev(data))):
        decoded = decode_part(part, None if number == 0 and part.line > 1 else tip)
        tip = decoded.tip
        yield part.path, decoded
    yield path, decode_ledger(data, tip)


def decode_part(part: PartName, tip: str | None) -> DecodedLedger:
    """Decode every readable line; ``tip`` is the digest of the line before, None if unknown."""
    try:
        index = stored_index(part)
    except BadPart as error:
        return _decode_without_index(part, tip, str(error))
    result, tips = DecodedLedger([], 0, [], tip or index.prev), [*(frame.prev for frame in index.frames[1:]), index.tip]
    if tip not in (None, index.prev):
        result.broken.append((1, "does not follow the line before it"))
    for block, frame, end in zip(_blocks(part, index), index.frames, tips, strict=True):
        line = block.line_of_file
        try:
            decoded = decode_ledger(block.text(), frame.prev)
        except Damaged as error:
            result.broken.append((line, error.message.partition(f"line {line}: ")[2]))
            continue
        result.entries.extend(decoded.entries)
        result.broken.extend((line + number - 1, reason) for number, reason in decoded.broken)
        if decoded.tip != end:
            result.broken.append((line + frame.lines, "does not follow the line before it"))
    return replace(result, whole_bytes=sum(frame.raw_bytes for frame in index.frames), tip=index.tip)


def _decode_without_index(part: PartName, tip: str | None, reason: str) -> DecodedLedger:
    data, broken = b"", [(0, f"its index is damaged: {reason}")]
    try:
        for _, content in frames_of(part.path):
            data += content
    except Damaged as error:
        broken.append((data.count(b"\n") + 1, error.message.partition(": line ")[2].partition(": ")[2]))
    decoded = decode_ledger(data, tip)
    return replace(decoded, broken=[*broken, *decoded.broken])


def highest_in_parts(path: Path, *events: str) -> int:
    """Return the highest "last" of these (or all) events in intact lines of sealed parts; 0 without one."""
    blocks = []
    for part in parts_of(path):
        with suppress(Damaged, OSError):
            blocks += _blocks(part, read_index(part))
    highest = 0
    for block in sorted(blocks, key=_high, reverse=True):
        if block.frame.high <= highest:
            break
        with suppress(Damaged):
            entries = (line.entry for line in block.lines())
            lasts = (entry.get("last") for entry in entries if not events or entry.get("event") in events)
            highest = max([highest, *(last for last in lasts if isinstance(last, int))])
    return highest


def reported_entries(path: Path) -> Iterator[Entry]:
    return chain.from_iterable(decoded.entries for _, decoded in read_files(path))


def newest_entries(path: Path, *events: str) -> Iterator[Entry]:
    """Yield these events near the end, newest first, without checking the chain or reporting damage."""
    kinds = tuple(b'"event":"%s"' % event.encode() for event in events)
    for line in _newest_lines(path):
        if any(kind in line for kind in kinds):  # before long lines are decoded
            with suppress(BadLine):
                if (entry := decode_entry(line))["event"] in events:
                    yield entry


def _newest_lines(path: Path) -> Iterator[bytes]:
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - _NEWEST_BYTES))
        data = file.read()
    yield from reversed(data.split(b"\n"))
    parts = without_copies(parts_of(path), first_prev(data)) if length < _NEWEST_BYTES else []
    with suppress(Damaged, OSError):
        for _, lines in reversed(list(frames_of(parts[-1].path))) if parts else []:
            yield from reversed(lines.split(b"\n"))
