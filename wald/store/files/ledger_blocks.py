"""Blocks of lines of a ledger: frames of its sealed parts, and runs of lines of the active file.

Of a block it is known which sequences its lines are about and when they were written, without reading them. Of a part
the blocks are read from its index when they are asked for, and those of a few parts are kept.
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
from typing import Any, Protocol, Self

from wald.format.ledger import GENESIS, NO_SPAN
from wald.format.ledger_part import CLOCK_ZERO, Clock, PartIndex, PartSummary
from wald.store.files.chain import chained, damaged
from wald.store.files.ledger_parts import PartName, read_frame, read_index, summaries
from wald.store.files.part_index import CLOCK_UNKNOWN, NO_TIMES, span_of_all, times_of_all
from wald.store.files.regular import open_regular

_KEPT_PARTS = 3


class ActiveFile:
    """An active file that is open for as long as there are blocks of it: its name may be given to another."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)


BlockKey = tuple[int, int, weakref.ref[ActiveFile] | None]
"""Weak: what is kept of the lines of a file does not keep it open."""


@dataclass(slots=True)
class Block:
    """Lines that stand together.

    Attributes:
        path: the file that they are in; active: the same, if it is the active one.
        line: the number of the first one in the ledger; line_of_file: in its file.
        length, raw_bytes: as it is stored, and of its lines.
        prev: the digest of the line before it; clock: there.
    """

    path: Path
    active: ActiveFile | None
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

    @classmethod
    def begin(
        cls, path: Path, file: ActiveFile, line: int, line_of_file: int, offset: int, prev: str, clock: Clock
    ) -> Self:
        """One of the active file, without lines."""
        return cls(path, file, line, line_of_file, offset, 0, 0, *NO_SPAN, *NO_TIMES, prev, clock)

    @property
    def key(self) -> BlockKey:
        """Which lines it has: a block of a part may begin where one of the active file has begun, and end elsewhere."""
        return self.line, self.length, None if self.active is None else weakref.ref(self.active)

    def is_about(self, first: int, last: int) -> bool:
        return self.low <= last and first <= self.high

    def extend(self, entries: Sequence[dict[str, Any]], end: int) -> None:
        """Take in more lines of the active file, which end at ``end``."""
        (low, high), (earliest_ns, latest_ns) = span_of_all(entries), times_of_all(entries)
        self.length = end - self.offset
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.earliest_ns, self.latest_ns = min(self.earliest_ns, earliest_ns), max(self.latest_ns, latest_ns)

    def entries(self) -> list[dict[str, Any]]:
        """Its lines.

        Raises:
            Damaged: one is damaged, or does not follow the one before it.
        """
        if self.active is not None:
            data = os.pread(self.active.descriptor, self.length, self.offset)
        else:
            data = read_frame(self.path, self.offset, self.length, self.raw_bytes, self.line_of_file)
        return chained(self.path, data, line=self.line_of_file, prev=self.prev)[0]


class _About(Protocol):
    @property
    def low(self) -> int: ...
    @property
    def high(self) -> int: ...


class Bounds:
    """Where in a row those may be that are about some sequences: most rows are in order, and none has to be."""

    def __init__(self, row: Sequence[_About]) -> None:
        # None up to the n-th is about more than highs[n], and none from it on about less than lows[n].
        self._highs = list(accumulate((each.high for each in row), max))
        self._lows = list(accumulate((each.low for each in reversed(row)), min))[::-1]

    def around(self, first: int, last: int) -> range:
        """The places outside of which none is about any of ``first`` to ``last``."""
        return range(bisect_left(self._highs, first), bisect_right(self._lows, last))


class SealedBlocks:
    """The sealed parts of a ledger, as far as they were taken in.

    They never change: who reads on after a cut reads what was sealed when the reading began. The lines that were cut
    since are in the blocks of the active file that were taken then.

    Attributes:
        parts: their names; lines: how many lines they have.
        tip: the digest of the last line; clock: there.
    """

    def __init__(
        self,
        parts: list[PartName] | None = None,
        known: list[PartSummary] | None = None,
        kept: OrderedDict[int, list[Block]] | None = None,
    ) -> None:
        self.parts = parts or []
        self._known = known or []
        """What each is about."""
        self.lines = self.parts[-1].line - 1 + self._known[-1].lines if self._known else 0
        self.tip = self._known[-1].tip if self._known else GENESIS
        self.clock = self._known[-1].clock if self._known else CLOCK_ZERO
        self._bounds = Bounds(self._known)
        self._kept: OrderedDict[int, list[Block]] = OrderedDict() if kept is None else kept

    def precede(self, parts: list[PartName]) -> bool:
        """Whether they are the first of ``parts``."""
        return parts[: len(self.parts)] == self.parts

    def followed_by(self, parts: list[PartName]) -> SealedBlocks:
        """The same with more parts behind them.

        Raises:
            Damaged: one cannot be read, or does not follow the one before it.
        """
        lines, tip, more = self.lines, self.tip, list[PartSummary]()
        for part, summary in zip(parts, summaries([*self.parts, *parts], self._known), strict=True):
            if not (self.parts or more) and part.line > 1:  # what was before it is no longer there
                lines, tip = part.line - 1, summary.prev
            if summary.prev != tip or part.line != lines + 1:
                raise damaged(part.path, 1, "does not follow the line before it")
            more.append(summary)
            lines, tip = lines + summary.lines, summary.tip
        return SealedBlocks([*self.parts, *parts], [*self._known, *more], self._kept)

    def about(self, first: int, last: int) -> Iterator[Block]:
        """The blocks about any of ``first`` to ``last``, newest first."""
        for number in reversed(self._bounds.around(first, last)):
            known = self._known[number]
            if known.low <= last and first <= known.high:
                yield from (block for block in reversed(self._blocks(number)) if block.is_about(first, last))

    def blocks_from(self, line: int) -> Iterator[Block]:
        """The blocks from the one with this line on."""
        begin = bisect_right(self.parts, line, key=lambda part: part.line) - 1
        for number in range(max(0, begin), len(self.parts)):
            blocks = self._blocks(number)
            yield from from_line(blocks, line) if number == begin else blocks

    def newest_first(self, before: int) -> Iterator[Block]:
        """Every block with a line whose number is below ``before``."""
        for number in reversed(range(len(self.parts))):
            if self.parts[number].line < before:
                yield from (block for block in reversed(self._blocks(number)) if block.line < before)

    def written(self, from_ns: int, until_ns: int) -> Iterator[Block]:
        """The blocks of the parts with lines of that time, oldest first."""
        for number, known in enumerate(self._known):
            if known.earliest_ns < until_ns and from_ns <= known.latest_ns:
                yield from self._blocks(number)

    def highest_first(self) -> Iterator[list[Block]]:
        """The blocks of each part, by the highest sequence that one is about."""
        for number in sorted(range(len(self.parts)), key=lambda number: -self._known[number].high):
            yield self._blocks(number)

    def indexes(self) -> Iterator[PartIndex]:
        for number in range(len(self.parts)):
            yield self._index(number)

    def _index(self, number: int) -> PartIndex:
        part, known = self.parts[number], self._known[number]
        first = CLOCK_ZERO if part.line == 1 else CLOCK_UNKNOWN
        index = read_index(part, self._known[number - 1].clock if number else first)
        if (index.prev, index.tip) != (known.prev, known.tip):
            raise damaged(part.path, 1, "does not follow the line before it")
        return index

    def _blocks(self, number: int) -> list[Block]:
        blocks = self._kept.pop(number, None)
        if blocks is None:
            blocks = list(self._read(number))
            if len(self._kept) == _KEPT_PARTS:
                self._kept.popitem(last=False)
        self._kept[number] = blocks
        return blocks

    def _read(self, number: int) -> Iterator[Block]:
        part, offset, line = self.parts[number], 0, 1
        for frame in self._index(number).frames:
            about = frame.low, frame.high, frame.earliest_ns, frame.latest_ns
            place = part.line - 1 + line, line, offset, frame.stored_bytes, frame.raw_bytes
            yield Block(part.path, None, *place, *about, frame.prev, frame.clock)
            offset, line = offset + frame.stored_bytes, line + frame.lines


def from_line(blocks: list[Block], line: int) -> list[Block]:
    """The blocks from the one with this line on."""
    return blocks[max(0, bisect_right(blocks, line, key=lambda block: block.line) - 1) :]
