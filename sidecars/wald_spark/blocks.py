"""Blocks: the smallest ranges of records in a log that are worth reading by themselves; and how tasks are made of them.

A block of a sealed segment is a frame of its index. A raw segment has no such index: it is read once, and its blocks
are batches joined up to about the size of a frame. It is not known which records damaged bytes held. There the blocks
have no gaps between them, so that a reader of the blocks meets the damage, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from wald.errors import Damaged
from wald.files.listing import Listing, Segment
from wald.format.batch import BatchHeader, StoredBatch
from wald.format.names import Kind
from wald.format.sealed_index import SealedIndex
from wald.segments.raw_scan import DamagedBytes
from wald.segments.reader import OpenSegment, SealedSegment, SkippedBatches
from wald.segments.sealed_file import FRAME_BYTES
from wald.segments.view import SegmentGone, View

TASKS = 8  # at least so many tasks share what there is to read, …
LEAST_BYTES = 8 << 20  # … unless each would have less than this, because a task by itself costs 30 ms


@dataclass(frozen=True, slots=True)
class Block:
    """Records first ≤ s < next of one segment, which take ``raw_bytes`` to read.

    With next = first, the rest of a long record that began in an earlier segment.
    """

    segment: int
    first: int
    next: int
    raw_bytes: int

    @property
    def last(self) -> int:
        return self.next - 1


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Records first ≤ s < next that are in no segment, or in one that cannot be opened (``error``).

    Attributes:
        oldest: whether they come before the oldest segment.
    """

    first: int
    next: int
    error: Damaged | None = None
    oldest: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """Records ``first`` to ``last`` of ``routes`` (None: all)."""

    routes: frozenset[str] | None
    first: int
    last: int


def blocks_of(view: View, wanted: Range, *, active: bool = True) -> Iterator[Block | Unreadable]:
    """The blocks that hold, or may hold, records of ``wanted``, in order; and what is missing between them.

    Args:
        active: whether to read the segment that is being written.
    """
    due = wanted.first
    base = 0
    bound = view.bound
    while True:
        segment = _next_segment(view.listing, base, due)
        if segment is not None and segment.base_sequence > bound.segment:
            segment = None
        end = (bound.sequence or 0) + 1 if segment is None else segment.base_sequence
        if due < (end := min(end, wanted.last + 1)):
            yield Unreadable(due, end, oldest=segment is not None and segment is view.segments[0])
            due = end
        if segment is None or segment.base_sequence > wanted.last:
            return
        if not active and segment.kind is Kind.RAW and segment.base_sequence == bound.segment:
            return
        following = _following_sequence(view, segment)
        try:
            found, end = _segment_blocks(view, segment, wanted, following)
        except SegmentGone as gone:
            view = view.without(gone, segment)
            continue
        except Damaged as error:
            end = following if following is not None else due
            yield Unreadable(max(due, segment.base_sequence), end, error)
            found = []
        yield from (block for block in found if block.next > wanted.first and block.first <= wanted.last)
        base, due = segment.base_sequence + 1, max(due, end)


def _next_segment(listing: Listing, base: int, sequence: int) -> Segment | None:
    """The segment that holds ``sequence``, or the first one behind it; its base is at least ``base``."""
    segments = listing.segments
    start = listing.index_covering(sequence) if segments else 0
    return next((segment for segment in segments[start:] if segment.base_sequence >= base), None)


def _following_sequence(view: View, segment: Segment) -> int | None:
    """The sequence behind the last one of ``segment``, by what follows it; None: only reading the segment can say."""
    following = view.listing.next_after(segment.base_sequence)
    if segment.base_sequence == view.bound.segment or following is None:
        return None if view.bound.sequence is None else view.bound.sequence + 1
    return following.base_sequence


def _segment_blocks(view: View, segment: Segment, wanted: Range, following: int | None) -> tuple[list[Block], int]:
    """The blocks of one segment, and the sequence behind its last record."""
    with closing(view.open(segment)) as opened:
        if not isinstance(opened, SealedSegment):
            return _raw_blocks(opened, view.limit(segment), wanted, following)
        return _sealed_blocks(opened, wanted.routes), opened.index.next_sequence


def _sealed_blocks(segment: SealedSegment, routes: frozenset[str] | None) -> list[Block]:
    index = segment.index
    if index.damage:
        return _without_gaps(_frames(index, None), index.base_sequence, index.next_sequence)
    return _frames(index, routes)


def _frames(index: SealedIndex, routes: frozenset[str] | None) -> list[Block]:
    ids = None if routes is None else {number for number, entry in enumerate(index.routes) if entry.route in routes}
    dropped = index.shrunk is not None and (
        not index.shrunk.is_complete or routes is None or any(entry.route in routes for entry in index.shrunk.routes)
    )
    blocks: list[Block] = []
    for frame in index.frames:
        if ids is None or dropped or not ids.isdisjoint(frame.routes):  # a reader must see the dropped batches
            raw_bytes = frame.raw_bytes if frame.routes else 0
            if frame.first_sequence < frame.next_sequence:
                blocks.append(Block(index.base_sequence, frame.first_sequence, frame.next_sequence, raw_bytes))
            else:
                _add_rest(blocks, index.base_sequence, raw_bytes)
    return blocks


def _add_rest(blocks: list[Block], base: int, raw_bytes: int) -> None:
    """Add the size of pieces of a record that began earlier to the last block."""
    if blocks:
        blocks[-1] = replace(blocks[-1], raw_bytes=blocks[-1].raw_bytes + raw_bytes)
    elif raw_bytes:
        blocks.append(Block(base, base, base, raw_bytes))


def _raw_blocks(
    segment: OpenSegment, limit: int | None, wanted: Range, following: int | None
) -> tuple[list[Block], int]:
    blocks, damaged = _RawBlocks(segment.base_sequence, wanted.routes), False
    for found in segment.batches(segment.position_of_sequence(wanted.first, limit), limit):
        if isinstance(found, DamagedBytes):
            damaged = True
        elif isinstance(found, StoredBatch):
            blocks.add(found.header, found.route)
        else:
            blocks.drop(found)
    tail, end = segment.tail, blocks.end
    if damaged or (tail is not None and (tail.garbage_bytes or (following is not None and end < following))):
        end = max(end, following or 0)
        return _without_gaps(blocks.all, segment.base_sequence, end), end
    return blocks.wanted, end


class _RawBlocks:
    """The blocks of a raw segment: batches joined up to the size of a frame, those of wanted routes apart."""

    def __init__(self, base: int, routes: frozenset[str] | None) -> None:
        self.end = base
        self._base = base
        self._routes = routes
        self._blocks: list[tuple[bool, Block]] = []  # whether it is wanted

    def add(self, header: BatchHeader, route: str) -> None:
        total, wanted = header.total_bytes, self._routes is None or route in self._routes
        if header.count:
            self.end = header.end_sequence
            if self._blocks:
                last_wanted, last = self._blocks[-1]
                if last_wanted is wanted and last.raw_bytes + total <= FRAME_BYTES:
                    self._blocks[-1] = wanted, replace(last, next=self.end, raw_bytes=last.raw_bytes + total)
                    return
            self._blocks.append((wanted, Block(self._base, header.base_sequence, self.end, total)))
        elif not header.is_control:
            self._add_rest(wanted, total)

    def _add_rest(self, wanted: bool, total: int) -> None:
        """Add the size of a piece of a record that began earlier to the last block of its route."""
        for number in reversed(range(len(self._blocks))):
            last_wanted, last = self._blocks[number]
            if last_wanted is wanted:
                self._blocks[number] = wanted, replace(last, raw_bytes=last.raw_bytes + total)
                return
        self._blocks.insert(0, (wanted, Block(self._base, self._base, self._base, total)))

    def drop(self, dropped: SkippedBatches) -> None:
        """Add batches that shrinking has dropped, of any route: a reader must see them."""
        if dropped.first_sequence < dropped.next_sequence:
            self.end = dropped.next_sequence
            self._blocks.append((True, Block(self._base, dropped.first_sequence, self.end, 0)))

    @property
    def all(self) -> list[Block]:
        return [block for _, block in self._blocks]

    @property
    def wanted(self) -> list[Block]:
        return [block for wanted, block in self._blocks if wanted]


def _without_gaps(blocks: list[Block], first: int, end: int) -> list[Block]:
    """The same, extended so that they cover ``first`` to ``end``; no block if there is no record between them."""
    if first >= end:
        return []
    if not blocks:
        return [Block(first, first, end, 0)]
    joined = [replace(block, next=behind.first) for block, behind in pairwise(blocks)]
    joined.append(replace(blocks[-1], next=end))
    return [replace(joined[0], first=first), *joined[1:]]


class Sized(Protocol):
    """Anything that takes ``raw_bytes`` to read."""

    @property
    def raw_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def joined_blocks(blocks: Iterable[Block], *, first: int, last: int, limit_bytes: int) -> Iterator[Block]:
    """Neighbouring blocks joined up to ``limit_bytes``, a larger one by itself, and cut to ``first`` to ``last``.

    Frames between two blocks of one segment become part of the joined block; a reader skips them by the index.
    """
    joined: Block | None = None
    for block in blocks:
        if block.first == block.next:
            if joined is not None:
                joined = replace(joined, raw_bytes=joined.raw_bytes + block.raw_bytes)
        elif joined is None or not _joinable(joined, block, limit_bytes):
            if joined is not None:
                yield _cut(joined, first, last)
            joined = block
        else:
            joined = Block(joined.segment, joined.first, block.next, joined.raw_bytes + block.raw_bytes)
    if joined is not None:
        yield _cut(joined, first, last)


def _joinable(joined: Block, block: Block, limit_bytes: int) -> bool:
    neighbours = block.segment == joined.segment or block.first == joined.next
    return neighbours and joined.raw_bytes + block.raw_bytes <= limit_bytes


def _cut(block: Block, first: int, last: int) -> Block:
    return replace(block, first=max(block.first, first), next=min(block.next, last + 1))


def fair_share(total_bytes: int, most_bytes: int) -> int:
    """How much of ``total_bytes`` one task is to read, which may read up to ``most_bytes``."""
    return min(most_bytes, max(total_bytes // TASKS, LEAST_BYTES))


def shared(pieces: Sequence[S], *, most_bytes: int) -> list[tuple[S, ...]]:
    """``pieces`` as tasks, each of which reads its fair share."""
    return packed(pieces, limit_bytes=fair_share(sum(piece.raw_bytes for piece in pieces), most_bytes))


def packed(pieces: Sequence[S], *, limit_bytes: int) -> list[tuple[S, ...]]:
    """``pieces`` in their order, in tuples of up to ``limit_bytes``; a larger one by itself."""
    tasks: list[tuple[S, ...]] = []
    room = 0
    for piece in pieces:
        if tasks and piece.raw_bytes <= room:
            tasks[-1] = (*tasks[-1], piece)
        else:
            tasks.append((piece,))
            room = limit_bytes
        room -= piece.raw_bytes
    return tasks
