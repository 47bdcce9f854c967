"""The lines of a ledger, looked up by the sequences that they are about; memory does not grow with the ledger.

Lines that stand together form a block: a frame of a sealed part, or some lines of the active file. Of each block it is
kept which sequences its lines are about and when they were written; its lines are read when they are asked for, and
those of a few blocks are kept. So a look-up reads a block or two, however long the ledger is. The active file is read
whole, and then only what is new in it. Of sealed parts the indexes are read that a look-up needs; what the others are
about is in the index of a later one.

What is believed: that each file follows the one before it, that every line of the active file is whole, and every line
of each block that is read. A damaged part concerns the look-ups that need it, and no others.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from wald.format.checksum import crc32c
from wald.format.ledger import GENESIS, span_of
from wald.format.ledger_part import PartIndex
from wald.store.files.chain import chained, damaged
from wald.store.files.ledger_blocks import ActiveFile, Block, BlockKey, Bounds, SealedBlocks, from_line
from wald.store.files.ledger_parts import (
    FRAME_BYTES,
    first_prev,
    parts_of,
    without_copies,
)
from wald.store.files.ledger_tail import newline_is_damaged, synced
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
        self._sealed = SealedBlocks()
        self._bookmark = _Bookmark()
        self._elapsed = Elapsed()
        self._blocks: list[Block] = []
        """Of the active file."""
        self._tail: list[Line] = []
        """The lines of the last block, which grows."""
        self._kept: OrderedDict[BlockKey, list[Line]] = OrderedDict()
        self._bounds: dict[BlockKey, Bounds] = {}
        """Of the lines of some blocks."""
        self._totals: list[int] = []
        """The time elapsed at each line of the block ``_totals_of``."""
        self._totals_of: BlockKey | None = None
        self.generation = 0
        """Changes when lines that were read are not there any more."""

    def oldest_first(self, behind: int = 0) -> Iterator[Line]:
        """Every line, those with a number up to ``behind`` left off."""
        self._refresh()
        for block in chain(self._sealed.blocks_from(behind + 1), from_line(self._blocks, behind + 1)):
            yield from (line for line in self._read(block) if line.number > behind)

    def newest_first(self, before: int | None = None) -> Iterator[Line]:
        """Every line, or those with a number below ``before``."""
        self._refresh()
        bound = NO_SEQUENCE if before is None else before
        active = (block for block in reversed(self._blocks[:]) if block.line < bound)
        for block in chain(active, self._sealed.newest_first(bound)):
            yield from (line for line in reversed(self._read(block)) if line.number < bound)

    def about(self, first: int, last: int) -> Iterator[Line]:
        """The lines about any of the sequences ``first`` to ``last``, newest first."""
        self._refresh()
        for block in self._about(first, last):
            lines = self._read(block)
            for place in reversed(self._around(block, lines, first, last)):
                if lines[place].low <= last and first <= lines[place].high:
                    yield lines[place]

    def written(self, from_ns: int, until_ns: int) -> Iterator[Line]:
        """The lines with a time from ≤ t < until, oldest first."""
        self._refresh()
        for block in chain(self._sealed.written(from_ns, until_ns), self._blocks[:]):
            if block.earliest_ns < until_ns and from_ns <= block.latest_ns:
                for line in self._read(block):
                    at = line.entry.get("at")
                    if isinstance(at, int) and from_ns <= at < until_ns:
                        yield line

    def highest(self, event: str) -> int:
        """The highest sequence that a line of one kind is about; 0: there is none."""
        self._refresh()
        found = 0
        for blocks in chain([self._blocks], self._sealed.highest_first()):
            if max((block.high for block in blocks), default=0) <= found and blocks is not self._blocks:
                break
            for block in sorted(blocks, key=lambda block: -block.high):
                if block.high > found:
                    found = max([found, *(line.high for line in self._read(block) if line.is_range(event))])
        return found

    def sealed(self) -> Iterator[PartIndex]:
        """The indexes of the sealed parts, oldest first; behind their last line the active file goes on."""
        self._refresh()
        return self._sealed.indexes()

    def elapsed_ns(self, line: Line) -> int:
        """How much time had certainly passed since the ledger began when a line with a moment was written."""
        sealed = line.number <= self._sealed.lines
        block = next(iter(self._sealed.blocks_from(line.number) if sealed else from_line(self._blocks, line.number)))
        if block.key != self._totals_of:
            elapsed, self._totals_of, self._totals = Elapsed(block.clock), block.key, []
            for each in self._read(block):
                moment = moment_of(each.entry)
                self._totals.append(elapsed.advance(moment) if moment else 0)
        return self._totals[line.number - block.line]

    def elapsed(self) -> Elapsed:
        """The same at the end of the ledger, to go on from."""
        self._refresh()
        return Elapsed(self._elapsed.clock)

    def _about(self, first: int, last: int) -> Iterator[Block]:
        active = [block for block in reversed(self._blocks) if block.is_about(first, last)]
        return chain(active, self._sealed.about(first, last))

    def _read(self, block: Block) -> Sequence[Line]:
        if self._blocks and block is self._blocks[-1]:
            return self._tail[:]
        kept = self._kept.pop(block.key, None)
        if kept is None:
            kept = _lines(block.entries(), block.line)
            if len(self._kept) == _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept[block.key] = kept
        return kept

    def _around(self, block: Block, lines: Sequence[Line], first: int, last: int) -> range:
        """The places of the lines in the block that may be about any of ``first`` to ``last``."""
        if self._blocks and block is self._blocks[-1]:  # it grows
            return range(len(lines))
        if block.key not in self._bounds:
            if len(self._bounds) > _KEPT_BLOCKS:
                self._bounds.clear()
            self._bounds[block.key] = Bounds(lines)
        return self._bounds[block.key].around(first, last)

    def mark(self) -> tuple[int, ...]:
        """Return a value that changes with each line; it takes one stat(2)."""
        try:
            return _identity(self._path.stat())
        except FileNotFoundError:
            return ()

    def _refresh(self) -> None:
        try:
            seen = _identity(self._path.stat())
            if seen == self._seen:
                return
            opened = ActiveFile(self._path)
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
            self._sealed = SealedBlocks()
            self._begin()
        more = without_copies(parts, prev)[len(self._sealed.parts) :]
        if more:
            self._sealed = self._sealed.followed_by(more)
        return bool(more)

    def _begin(self, *, keep: bool = False) -> None:
        """Begin with the first line of the active file.

        Args:
            keep: whether the lines that were read are in parts now.
        """
        self.generation += not keep
        self._blocks, self._tail, self._seen = [], [], ()
        self._kept.clear()
        self._bounds.clear()
        self._bookmark = _Bookmark(tip=self._sealed.tip)
        self._elapsed = Elapsed(self._sealed.clock)

    def _read_on(self, file: BinaryIO, opened: ActiveFile, end: int) -> bool:
        """Read the rest of the last block of the active file, or another one, up to ``end``; whether there was any."""
        offset, prev, before = self._bookmark.offset, self._bookmark.tip, self._bookmark.number
        full = not self._blocks or self._blocks[-1].length >= FRAME_BYTES
        room = FRAME_BYTES - (0 if full else self._blocks[-1].length)
        entries = self._bookmark.read(file, self._path, min(room, end - offset))
        if not entries:
            return False
        line = self._sealed.lines + before + 1
        if full:
            clock = self._elapsed.clock
            self._blocks.append(Block.begin(self._path, opened, line, before + 1, offset, prev, clock))
            self._tail = []
        self._tail += _lines(entries, line)
        self._blocks[-1].extend(entries, self._bookmark.offset)
        self._elapsed.advance_over(entries)
        return True


def _lines(entries: list[Entry], first: int) -> list[Line]:
    return [Line(number, *span_of(entry), entry) for number, entry in enumerate(entries, start=first)]


def _first_line(descriptor: int) -> bytes:
    """The first line of the file, and what may follow it."""
    length = 1 << 16
    while b"\n" not in (data := os.pread(descriptor, length, 0)) and len(data) == length:
        length *= 2
    return data


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
