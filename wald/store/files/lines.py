"""The lines of a ledger, looked up by the sequences that they are about; memory does not grow with the ledger.

Lines that stand together form a block: a frame of a sealed part, or some lines of the active file. Of each block it is
kept which sequences its lines are about and when they were written; its lines are read when they are asked for, and
those of a few blocks are kept. So a look-up reads a block or two, however long the ledger is. The active file is read
whole, and then only what is new in it; of a sealed part only the index is, unless that is damaged.

What is believed: that each file follows the one before it, that every line of the active file is whole, and every line
of each block that is read. A damaged frame of a part concerns the look-ups that need it, and no others.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from crc32c import crc32c

from wald.format.ledger import GENESIS, NO_SPAN, span_of
from wald.format.ledger_part import CLOCK_ZERO, Clock, PartIndex
from wald.store.files.chain import chained, damaged
from wald.store.files.ledger_parts import (
    FRAME_BYTES,
    PartName,
    first_prev,
    parts_of,
    read_frame,
    read_index,
    without_copies,
)
from wald.store.files.ledger_tail import newline_is_damaged, synced
from wald.store.files.part_index import CLOCK_UNKNOWN, NO_TIMES, times_of_all
from wald.store.files.regular import open_regular
from wald.store.files.uptime import Elapsed, moment_of

Entry = dict[str, Any]
"""A line of a ledger; ``Any``: it is JSON."""

_KEPT_BLOCKS = 3
_READ_BYTES = 1 << 20
NO_SEQUENCE = 1 << 64


class Line(NamedTuple):
    """One line.

    Attributes:
        number: counted from 1.
        low, high: the sequences that it is about; low > high if it names none.
    """

    number: int
    low: int
    high: int
    entry: Entry

    def is_range(self, event: str) -> bool:
        """Whether it says something of this kind about sequences from one to another."""
        return self.entry.get("event") == event and self.low <= self.high and "last" in self.entry


def entries_of(path: Path) -> Iterator[Entry]:
    """The entries of the ledger at ``path``, oldest first, for programs that decide by them; errors as of Lines."""
    return (line.entry for line in Lines(path).oldest_first())


class _File:
    """An active file that is open for as long as there are blocks of it: its name may be given to another."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(slots=True)
class _Block:
    """Lines that stand together.

    Attributes:
        path: the file that they are in; active: the same, if it is the active one.
        line: the number of the first one in the ledger; line_of_file: in its file.
        length, raw_bytes: as it is stored, and of its lines.
        prev: the digest of the line before it; clock: there.
    """

    path: Path
    active: _File | None
    line: int
    line_of_file: int
    offset: int
    length: int
    raw_bytes: int
    low: int
    high: int
    earliest_ns: int
    latest_ns: int
    prev: str
    clock: Clock

    def is_about(self, first: int, last: int) -> bool:
        return self.low <= last and first <= self.high

    def extend(self, lines: list[Line], end: int) -> None:
        """Take in more lines, which end at ``end``."""
        self.length = end - self.offset
        self.low = min([self.low, *(line.low for line in lines)])
        self.high = max([self.high, *(line.high for line in lines)])
        earliest_ns, latest_ns = times_of_all(line.entry for line in lines)
        self.earliest_ns, self.latest_ns = min(self.earliest_ns, earliest_ns), max(self.latest_ns, latest_ns)

    def lines(self) -> list[Line]:
        if self.active is not None:
            data = os.pread(self.active.descriptor, self.length, self.offset)
        else:
            data = read_frame(self.path, self.offset, self.length, self.raw_bytes, self.line_of_file)
        entries, _ = chained(self.path, data, line=self.line_of_file, prev=self.prev)
        return [Line(number, *span_of(entry), entry) for number, entry in enumerate(entries, start=self.line)]


@dataclass(slots=True)
class _Bookmark:
    """How far the active file was read: the last line, where it ends, its digest, and a checksum of all of it."""

    number: int = 0
    offset: int = 0
    tip: str = GENESIS
    checksum: int = 0

    def holds(self, file: BinaryIO) -> bool:
        """Whether all that was read is still there as it was: nothing was damaged, replaced or taken back since."""
        checksum, left = 0, self.offset
        file.seek(0)
        while left and (part := file.read(min(left, _READ_BYTES))):
            checksum = crc32c(part, checksum)
            left -= len(part)
        return not left and checksum == self.checksum

    def read(self, file: BinaryIO, path: Path, length: int) -> list[Entry]:
        """The lines behind it that begin in the next ``length`` bytes; it is moved on. At the end there are none.

        Raises:
            Damaged: one is damaged, or does not follow the one before it.
        """
        file.seek(self.offset)
        data = file.read(length)
        data += b"" if data.endswith(b"\n") else file.readline()
        data = data[: data.rfind(b"\n") + 1]
        entries, self.tip = chained(path, data, line=self.number + 1, prev=self.tip)
        self.number += len(entries)
        self.offset += len(data)
        self.checksum = crc32c(data, self.checksum)
        return entries

    def check_rest(self, file: BinaryIO, path: Path) -> None:
        """Look at what follows: a torn line, which its owner cuts, or what is newer than this reading.

        Raises:
            Damaged: it was a whole line once.
        """
        file.seek(self.offset)
        rest = file.readline()
        if not rest.endswith(b"\n") and newline_is_damaged(rest, self.offset):
            raise damaged(path, self.number + 1, "its newline is damaged")


class Lines:
    """The lines of the ledger at ``path``; an absent one has none.

    Every method reads what is new first.

    Raises:
        Damaged: by every method: something that had to be read is damaged, or does not follow what is before it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._sealed = _Sealed(path)
        self._bookmark = _Bookmark()
        self._elapsed = Elapsed()
        self._blocks: list[_Block] = []
        """Of the active file."""
        self._tail: list[Line] = []
        """The lines of the last block, which grows."""
        self._kept: OrderedDict[int, list[Line]] = OrderedDict()
        self._totals: list[int] = []
        """The time elapsed at each line of the block that begins and is so long as in ``_totals_of``."""
        self._totals_of = 0, 0
        self.generation = 0
        """Changes when lines that were read are not there any more."""

    def oldest_first(self, behind: int = 0) -> Iterator[Line]:
        """Every line, those with a number up to ``behind`` left off."""
        self._refresh()
        for block in _from(self._sealed.blocks, behind + 1) + _from(self._blocks, behind + 1):
            yield from (line for line in self._read(block) if line.number > behind)

    def newest_first(self) -> Iterator[Line]:
        """Every line."""
        self._refresh()
        for block in [*reversed(self._blocks), *reversed(self._sealed.blocks)]:
            yield from reversed(self._read(block))

    def about(self, first: int, last: int) -> Iterator[Line]:
        """The lines about any of the sequences ``first`` to ``last``, newest first."""
        self._refresh()
        for block in self._about(first, last):
            yield from (line for line in reversed(self._read(block)) if line.low <= last and first <= line.high)

    def written(self, from_ns: int, until_ns: int) -> Iterator[Line]:
        """The lines with a time from ≤ t < until, oldest first."""
        self._refresh()
        for block in [*self._sealed.blocks, *self._blocks]:
            if block.earliest_ns < until_ns and from_ns <= block.latest_ns:
                for line in self._read(block):
                    at = line.entry.get("at")
                    if isinstance(at, int) and from_ns <= at < until_ns:
                        yield line

    def highest(self, event: str) -> int:
        """The highest sequence that a line of one kind is about; 0: there is none."""
        self._refresh()
        found = 0
        for block in sorted([*self._sealed.blocks, *self._blocks], key=lambda block: -block.high):
            if block.high > found:
                found = max([found, *(line.high for line in self._read(block) if line.is_range(event))])
        return found

    def sealed(self) -> Iterator[PartIndex]:
        """The indexes of the sealed parts, oldest first; behind their last line the active file goes on."""
        self._refresh()
        return self._sealed.indexes()

    def elapsed_ns(self, line: Line) -> int:
        """How much time had certainly passed since the ledger began when a line with a moment was written."""
        block = _from(self._sealed.blocks if line.number <= self._sealed.lines else self._blocks, line.number)[0]
        if (block.line, block.length) != self._totals_of:
            elapsed, self._totals_of, self._totals = Elapsed(block.clock), (block.line, block.length), []
            for each in self._read(block):
                moment = moment_of(each.entry)
                self._totals.append(elapsed.advance(moment) if moment else 0)
        return self._totals[line.number - block.line]

    def elapsed(self) -> Elapsed:
        """The same at the end of the ledger, to go on from."""
        self._refresh()
        return Elapsed(self._elapsed.clock)

    def _about(self, first: int, last: int) -> list[_Block]:
        active = [block for block in reversed(self._blocks) if block.is_about(first, last)]
        return active + self._sealed.about(first, last)

    def _read(self, block: _Block) -> Sequence[Line]:
        if self._blocks and block is self._blocks[-1]:
            return self._tail[:]
        kept = self._kept.pop(block.line, None)
        if kept is None:
            kept = block.lines()
            if len(self._kept) == _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept[block.line] = kept
        return kept

    def _refresh(self) -> None:
        try:
            seen = _identity(self._path.stat())
            if seen == self._seen:
                return
            opened = _File(self._path)
        except FileNotFoundError:
            self._without_active()
            return
        with open(opened.descriptor, "rb", closefd=False) as file:
            # Opened before the parts are listed: what is cut meanwhile is in it.
            began = self._take_parts(first_prev(_first_line(opened.descriptor)))
            if began or not self._bookmark.holds(file):
                self._begin(keep=began)
            _, end = synced(opened.descriptor, os.fstat(opened.descriptor).st_size)
            while self._bookmark.offset < end and self._read_on(file, opened, end):
                pass
            self._bookmark.check_rest(file, self._path)
        self._seen = seen

    def _without_active(self) -> None:
        """Go on with the parts alone; they are listed again when the directory has changed."""
        try:
            seen = _identity(self._path.parent.stat())
        except FileNotFoundError:
            seen = (0,)
        if seen != self._seen:
            self._take_parts(None)
            self._begin()
            self._seen = seen

    def _take_parts(self, prev: str | None) -> bool:
        """Take in the parts that are new; whether there are any."""
        parts = parts_of(self._path)
        if not self._sealed.precede(parts):
            self._sealed = _Sealed(self._path)
            self._begin()
        known = len(self._sealed.parts)
        return self._sealed.add(without_copies(parts, prev)[known:])

    def _begin(self, *, keep: bool = False) -> None:
        """Begin with the first line of the active file.

        Args:
            keep: whether the lines that were read are in parts now.
        """
        self.generation += not keep
        self._blocks, self._tail, self._seen = [], [], ()
        self._kept.clear()
        self._bookmark = _Bookmark(tip=self._sealed.tip)
        self._elapsed = Elapsed(self._sealed.clock)

    def _read_on(self, file: BinaryIO, opened: _File, end: int) -> bool:
        """Read the rest of the last block of the active file, or another one, up to ``end``; whether there was any."""
        offset, prev, before = self._bookmark.offset, self._bookmark.tip, self._bookmark.number
        full = not self._blocks or self._blocks[-1].length >= FRAME_BYTES
        room = FRAME_BYTES - (0 if full else self._blocks[-1].length)
        entries = self._bookmark.read(file, self._path, min(room, end - offset))
        if not entries:
            return False
        number = self._sealed.lines + before + 1
        if full:
            about = *NO_SPAN, *NO_TIMES, prev, self._elapsed.clock
            self._blocks.append(_Block(self._path, opened, number, before + 1, offset, 0, 0, *about))
            self._tail = []
        lines = [Line(each, *span_of(entry), entry) for each, entry in enumerate(entries, start=number)]
        self._tail += lines
        self._blocks[-1].extend(lines, self._bookmark.offset)
        self._elapsed.advance_over(entries)
        return True


class _Sealed:
    """The sealed parts of the ledger ``path``, as far as they were taken in.

    Attributes:
        parts: their names; blocks: their frames; lines: how many lines they have.
        tip: the digest of the last line; clock: there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: list[PartName] = []
        self.blocks: list[_Block] = []
        self.lines = 0
        self.tip = GENESIS
        self.clock = CLOCK_ZERO
        self._highs: list[int] = []
        self._lows: list[int] = []

    def precede(self, parts: list[PartName]) -> bool:
        """Whether they are the first of ``parts``."""
        return parts[: len(self.parts)] == self.parts

    def add(self, parts: list[PartName]) -> bool:
        """Take in parts; whether there are any.

        Raises:
            Damaged: one cannot be read, or does not follow the one before it.
        """
        for part in parts:
            if not self.parts and part.line > 1:  # what was before it is not there any more
                self.lines, self.clock = part.line - 1, CLOCK_UNKNOWN
                self.tip = read_index(part, self.clock).prev
            index = read_index(part, self.clock)
            if index.prev != self.tip or part.line != self.lines + 1:
                raise damaged(part.path, 1, "does not follow the line before it")
            self._take(part, index)
        if parts:  # no block up to the n-th is about more than highs[n], and none from it on about less than lows[n]
            self._highs = list(accumulate((block.high for block in self.blocks), max))
            self._lows = list(accumulate((block.low for block in reversed(self.blocks)), min))[::-1]
        return bool(parts)

    def about(self, first: int, last: int) -> list[_Block]:
        """The blocks about any of ``first`` to ``last``, newest first."""
        begin, end = bisect_left(self._highs, first), bisect_right(self._lows, last)
        return [block for block in reversed(self.blocks[begin:end]) if block.is_about(first, last)]

    def indexes(self) -> Iterator[PartIndex]:
        clock = CLOCK_ZERO if self.parts and self.parts[0].line == 1 else CLOCK_UNKNOWN
        for part in self.parts[:]:
            index = read_index(part, clock)
            clock = index.clock
            yield index

    def _take(self, part: PartName, index: PartIndex) -> None:
        offset, line = 0, 1
        for frame in index.frames:
            about = frame.low, frame.high, frame.earliest_ns, frame.latest_ns
            place = self.lines + line, line, offset, frame.stored_bytes, frame.raw_bytes
            self.blocks.append(_Block(part.path, None, *place, *about, frame.prev, frame.clock))
            offset, line = offset + frame.stored_bytes, line + frame.lines
        self.parts.append(part)
        self.lines += index.lines
        self.tip, self.clock = index.tip, index.clock


def _from(blocks: list[_Block], line: int) -> list[_Block]:
    """The blocks from the one with this line on."""
    return blocks[max(0, bisect_right(blocks, line, key=lambda block: block.line) - 1) :]


def _first_line(descriptor: int) -> bytes:
    """The first line of the file, and what may follow it."""
    length = 1 << 16
    while b"\n" not in (data := os.pread(descriptor, length, 0)) and len(data) == length:
        length *= 2
    return data


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
