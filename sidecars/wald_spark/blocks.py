"""The blocks of a log: what its indexes tell of the smallest runs of records that are worth reading by themselves.

A block of a sealed segment is a frame. A raw segment has no such index; it is read through once, and its blocks are
runs of batches of about that size. Where bytes are damaged, nobody can tell what they held: blocks then have no gap
between them, so that whoever reads them meets the damage, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from wald.errors import Damaged
from wald.format.names import Kind
from wald.format.parsing import StoredBatch
from wald.format.sealed import SealedIndex
from wald.store.files.directory import Listing, Segment, look_again
from wald.store.segments.compression import FRAME_BYTES
from wald.store.segments.head import Bound
from wald.store.segments.opened import OpenSegment, SealedSegment, open_segment
from wald.store.segments.raw import DamagedBytes
from wald_spark.locations import LogLocation


@dataclass(frozen=True, slots=True)
class Block:
    """Records first ≤ s < next of one segment, which takes ``raw_bytes`` to read."""

    segment: int
    first: int
    next: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Records first ≤ s < next are in no segment, or in one that cannot be opened; ``error`` says which, None: gone."""

    first: int
    next: int
    error: Damaged | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """The records wanted: ``first`` to ``last`` of ``routes`` (None: all)."""

    routes: frozenset[str] | None
    first: int
    last: int


def blocks_of(
    location: LogLocation, bound: Bound, listing: Listing, wanted: Range, *, active: bool = True
) -> Iterator[Block | Unreadable]:
    """The blocks that hold, or may hold, records of ``wanted``, in order; and what is missing between them.

    Args:
        bound, listing: as :meth:`LogLocation.look` gave them.
        active: whether to look into the segment that is being written.
    """
    due = wanted.first
    base = 0
    while (segment := _next_segment(listing, base, due)) is not None and segment.base_sequence <= bound.segment:
        if segment.base_sequence > wanted.last:
            break
        if not active and segment.kind is Kind.RAW and segment.base_sequence == bound.segment:
            return
        if due < segment.base_sequence:
            yield Unreadable(due, segment.base_sequence)
            due = segment.base_sequence
        following = _behind(listing, segment, bound)
        try:
            found, end = _look_into(location, segment, bound, wanted, following)
        except FileNotFoundError as gone:
            listing = look_again(location.root, listing, gone)
            continue
        except Damaged as error:
            end = following if following is not None else due
            yield Unreadable(max(due, segment.base_sequence), end, error)
            found = []
        yield from (block for block in found if block.next > wanted.first and block.first <= wanted.last)
        base, due = segment.base_sequence + 1, max(due, end)
    if bound.sequence is not None and due <= min(bound.sequence, wanted.last):
        yield Unreadable(due, bound.sequence + 1)


def _next_segment(listing: Listing, base: int, sequence: int) -> Segment | None:
    """The one that holds ``sequence``, or the first one behind it, not below ``base``."""
    segments = listing.segments
    start = listing.covering(sequence) if segments else 0
    return next((segment for segment in segments[start:] if segment.base_sequence >= base), None)


def _behind(listing: Listing, segment: Segment, bound: Bound) -> int | None:
    """The sequence at which whatever follows ``segment`` begins; None: only reading can tell."""
    later = (other.base_sequence for other in listing.segments if other.base_sequence > segment.base_sequence)
    following = next(later, None)
    if segment.base_sequence == bound.segment or following is None:
        return None if bound.sequence is None else bound.sequence + 1
    return following


def _look_into(
    location: LogLocation, segment: Segment, bound: Bound, wanted: Range, following: int | None
) -> tuple[list[Block], int]:
    """The blocks of one segment, and the sequence behind its last record."""
    with closing(open_segment(segment, location.log_id)) as opened:
        if not isinstance(opened, SealedSegment):
            return _raw_blocks(opened, bound.limit(segment.base_sequence), wanted, following)
        return _sealed_blocks(opened, wanted.routes), opened.index.next_sequence


def _sealed_blocks(segment: SealedSegment, routes: frozenset[str] | None) -> list[Block]:
    index = segment.index
    if index.damage:
        return _tiled(_frames(index, None), index.base_sequence, index.next_sequence)
    return _frames(index, routes)


def _frames(index: SealedIndex, routes: frozenset[str] | None) -> list[Block]:
    ids = None if routes is None else {number for number, entry in enumerate(index.routes) if entry.route in routes}
    return [
        Block(index.base_sequence, frame.first_sequence, frame.next_sequence, frame.raw_bytes)
        for frame in index.frames
        if frame.first_sequence < frame.next_sequence and (ids is None or not ids.isdisjoint(frame.routes))
    ]


def _raw_blocks(
    segment: OpenSegment, limit: int | None, wanted: Range, following: int | None
) -> tuple[list[Block], int]:
    base, routes = segment.base_sequence, wanted.routes
    blocks: list[Block] = []
    kept: list[bool] = []
    damaged, end = False, base
    for met in segment.batches(segment.position_of_sequence(wanted.first, limit), limit):
        if isinstance(met, DamagedBytes):
            damaged = True
        elif isinstance(met, StoredBatch) and met.header.count:
            last = blocks[-1] if blocks else None
            fits = routes is None or met.route in routes
            end, total = met.header.end_sequence, met.header.total_bytes
            if last is not None and kept[-1] is fits and last.raw_bytes + total <= FRAME_BYTES:
                blocks[-1] = replace(last, next=end, raw_bytes=last.raw_bytes + total)
            else:
                blocks.append(Block(base, met.header.base_sequence, end, total))
                kept.append(fits)
        elif (
            isinstance(met, StoredBatch) and blocks and not met.header.is_control
        ):  # more of a record that began before
            blocks[-1] = replace(blocks[-1], raw_bytes=blocks[-1].raw_bytes + met.header.total_bytes)
    short = segment.tail is not None and (segment.tail.garbage_bytes or (following is not None and end < following))
    if damaged or short:
        end = max(end, following or 0)
        return _tiled(blocks, base, end), end
    return [block for block, fits in zip(blocks, kept, strict=True) if fits], end


def _tiled(blocks: list[Block], first: int, end: int) -> list[Block]:
    """The same without gaps from ``first`` to ``end``; no block at all if there is no record between them."""
    if first >= end:
        return []
    if not blocks:
        return [Block(first, first, end, 0)]
    tiled = [replace(block, next=behind.first) for block, behind in pairwise(blocks)]
    tiled.append(replace(blocks[-1], next=end))
    return [replace(tiled[0], first=first), *tiled[1:]]


class Sized(Protocol):
    """What takes so many bytes to read."""

    @property
    def raw_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)

TASKS = 8  # so many at least share what there is to read, …
LEAST_BYTES = 8 << 20  # … unless each had less than this, as a task costs 30 ms of its own


@dataclass(frozen=True, slots=True)
class Span:
    """Records ``first`` to ``last`` of a log."""

    first: int
    last: int
    raw_bytes: int


def spans(blocks: Iterable[Block], *, first: int, last: int, limit_bytes: int) -> Iterator[Span]:
    """Neighbouring blocks joined up to ``limit_bytes``, a larger one by itself, and cut to ``first`` to ``last``.

    What lies between two blocks of one segment is part of their span: whoever reads it passes over it by the index.
    """
    joined: Block | None = None
    for block in blocks:
        if joined is not None and (
            (block.segment == joined.segment or block.first == joined.next)
            and joined.raw_bytes + block.raw_bytes <= limit_bytes
        ):
            joined = Block(block.segment, joined.first, block.next, joined.raw_bytes + block.raw_bytes)
            continue
        if joined is not None:
            yield _cut(joined, first, last)
        joined = block
    if joined is not None:
        yield _cut(joined, first, last)


def _cut(block: Block, first: int, last: int) -> Span:
    return Span(max(block.first, first), min(block.next - 1, last), block.raw_bytes)


def fair_share(total_bytes: int, most_bytes: int) -> int:
    """What one task is to read where it may read up to ``most_bytes`` and there are ``total_bytes`` for all."""
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
