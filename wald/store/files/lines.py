"""The lines of a ledger, looked up by the sequences that they are about; memory does not grow with the ledger.

Lines that stand together form a block. Of each block it is kept which sequences its lines are about and when they were
written; its lines are read when they are asked for, and those of a few blocks are kept. So a look-up reads a block or
two, however long the ledger is. Lines that are new since the last look-up are read on.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wald.format.ledger import BadLine, decode_line, digest
from wald.store.files.ledger import Bookmark, damaged, entries_behind
from wald.store.files.regular import open_regular

Entry = dict[str, Any]
"""A line of a ledger; ``Any``: it is JSON."""

BLOCK_BYTES = 128 << 10
_KEPT_BLOCKS = 8
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


class _File:
    """A ledger that is open for as long as there are blocks of it: its name may be given to another file."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(slots=True)
class _Block:
    """Lines that stand together.

    Attributes:
        line: the number of the first one.
        prev: the digest of the line before it.
        low, high: the sequences that any of them is about.
    """

    file: _File
    line: int
    offset: int
    prev: str
    length: int = 0
    low: int = NO_SEQUENCE
    high: int = -1

    def is_about(self, first: int, last: int) -> bool:
        return self.low <= last and first <= self.high


class Lines:
    """The lines of the ledger at ``path``; an absent one has none.

    Every method reads what is new first.

    Raises:
        Damaged: by every method: a line that has been read is damaged, or does not follow the one before it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._bookmark = Bookmark()
        self._blocks: list[_Block] = []
        self._tail: list[Line] = []
        """The lines of the last block, which grows."""
        self._kept: OrderedDict[int, list[Line]] = OrderedDict()
        self.generation = 0
        """Changes when lines that were read are not there any more."""

    def oldest_first(self, behind: int = 0) -> Iterator[Line]:
        """Every line, those with a number up to ``behind`` left off."""
        self._refresh()
        begin = bisect_right(self._blocks, behind + 1, key=lambda block: block.line)
        for block in self._blocks[max(0, begin - 1) :]:
            yield from (line for line in self._read(block) if line.number > behind)

    def newest_first(self) -> Iterator[Line]:
        """Every line."""
        self._refresh()
        for block in self._blocks[::-1]:
            yield from self._read(block)[::-1]

    def about(self, first: int, last: int) -> Iterator[Line]:
        """The lines about any of the sequences ``first`` to ``last``, newest first."""
        self._refresh()
        for block in [block for block in reversed(self._blocks) if block.is_about(first, last)]:
            yield from (line for line in reversed(self._read(block)) if line.low <= last and first <= line.high)

    def highest(self, event: str) -> int:
        """The highest sequence that a line of one kind is about; 0: there is none."""
        self._refresh()
        found = 0
        for block in sorted(self._blocks, key=lambda block: -block.high):
            if block.high > found:
                found = max([found, *(line.high for line in self._read(block) if line.entry.get("event") == event)])
        return found

    def _read(self, block: _Block) -> list[Line]:
        if self._blocks and block is self._blocks[-1]:
            return self._tail[:]
        kept = self._kept.pop(block.line, None)
        if kept is None:
            kept = self._decoded(block)
            if len(self._kept) == _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept[block.line] = kept
        return kept

    def _decoded(self, block: _Block) -> list[Line]:
        data = os.pread(block.file.descriptor, block.length, block.offset)
        lines, tip = [], block.prev
        for number, line in enumerate(data.split(b"\n")[:-1], start=block.line):
            try:
                entry = decode_line(line)
            except BadLine as error:
                raise damaged(self._path, number, str(error)) from error
            entry.pop("append", None)
            if entry.pop("prev") != tip:
                raise damaged(self._path, number, "does not follow the line before it")
            tip = digest(line)
            lines.append(_line(number, entry))
        return lines

    def _refresh(self) -> None:
        try:
            seen = _identity(self._path.stat())
        except FileNotFoundError:
            self._forget()
            return
        if seen == self._seen:
            return
        try:
            opened = _File(self._path)
        except FileNotFoundError:
            self._forget()
            return
        with open(opened.descriptor, "rb", closefd=False) as file:
            if not self._bookmark.holds(file):
                self._forget()
            before = self._bookmark.offset, self._bookmark.tip
            for entry in entries_behind(self._bookmark, file, self._path):
                self._take(entry, opened, *before)
                before = self._bookmark.offset, self._bookmark.tip
        self._seen = seen

    def _take(self, entry: Entry, file: _File, offset: int, prev: str) -> None:
        if not self._blocks or self._blocks[-1].length >= BLOCK_BYTES:
            self._blocks.append(_Block(file, self._bookmark.number, offset, prev))
            self._tail = []
        block, line = self._blocks[-1], _line(self._bookmark.number, entry)
        self._tail.append(line)
        block.length = self._bookmark.offset - block.offset
        if line.low <= line.high:
            block.low, block.high = min(block.low, line.low), max(block.high, line.high)

    def _forget(self) -> None:
        self.generation += bool(self._blocks)
        self._blocks, self._tail = [], []
        self._kept.clear()
        self._seen, self._bookmark = (), Bookmark()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _line(number: int, entry: Entry) -> Line:
    """A line, and what it is about: from ``base`` or ``first`` to ``last``, or ``base`` alone."""
    low = entry.get("base", entry.get("first"))
    high = entry.get("last", low)
    if isinstance(low, int) and isinstance(high, int) and low <= high:
        return Line(number, low, high, entry)
    return Line(number, NO_SEQUENCE, -1, entry)
