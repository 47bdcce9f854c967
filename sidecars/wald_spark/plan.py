"""Reading plan of a log: blocks, joined into pieces, each of which one task reads.

A block is the smallest range of records worth reading individually. In a sealed segment it is a frame of the index. A
raw segment has no such index, so it is read once, and its blocks are batches joined up to about the size of a frame.
Damaged bytes may have contained any record, so the blocks around them are adjacent, and a reader finds the damage
exactly once.

The driver plans pieces, and executors read them as Arrow. A piece that is read again gives the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zlib import crc32

from wald.errors import Damaged, NotFound
from wald.files.listing import Listing, Segment
from wald.format.batch import BatchHeader, StoredBatch
from wald.format.names import Kind
from wald.format.sealed_index import SealedIndex
from wald.hints import command_line
from wald.reading.assembler import Batch
from wald.reading.reader import read_selection
from wald.reading.selection import Selection
from wald.retention.history import History
from wald.retention.missing import Missing, span_text
from wald.segments.continuity import Continuity, LastSeen, last_seen_at
from wald.segments.durable_end import Bound, lost_head
from wald.segments.raw_scan import DamagedBytes
from wald.segments.reader import OpenSegment, SealedSegment, SkippedBatches
from wald.segments.sealed_file import FRAME_BYTES
from wald.segments.view import SegmentGone, View, read_view
from wald_spark.locations import LogLocation
from wald_spark.options import PARTIAL_HINT, STRICT, DamageReport, Tolerance

if TYPE_CHECKING:
    import pyarrow as pa


TASKS = 8  # share the records, …
LEAST_BYTES = 8 << 20  # … unless each would read less than this, because a task costs 30 ms


@dataclass(frozen=True, slots=True)
class Block:
    """Records first ≤ sequence < next of one segment; reading them takes ``raw_bytes``.

    If next = first, the block is the rest of a long record that began in an earlier segment.
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
    """Records first ≤ sequence < next that are in no segment, or in one that cannot be opened (``error``)."""

    first: int
    next: int
    error: Damaged | None = None
    oldest: bool = False  # True if they precede the oldest segment


@dataclass(frozen=True, slots=True)
class Range:
    """Records ``first`` to ``last`` of ``routes`` (None: all)."""

    routes: frozenset[str] | None
    first: int
    last: int


def blocks_of(view: View, wanted: Range, *, active: bool = True) -> Iterator[Block | Unreadable]:
    """Yield, in order, the blocks that may contain records of ``wanted``, and records missing between them."""
    due, base, bound = wanted.first, 0, view.bound
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
        successor = view.listing.next_after(segment.base_sequence)
        following = None if successor is None else successor.base_sequence  # None if only its content shows that
        if segment.base_sequence == bound.segment or successor is None:
            following = None if bound.sequence is None else bound.sequence + 1
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
    segments = listing.segments
    start = listing.index_covering(sequence) if segments else 0
    return next((segment for segment in segments[start:] if segment.base_sequence >= base), None)


def _segment_blocks(view: View, segment: Segment, wanted: Range, following: int | None) -> tuple[list[Block], int]:
    with closing(view.open(segment)) as opened:
        if not isinstance(opened, SealedSegment):
            return _raw_blocks(opened, view.limit(segment), wanted, following)
        index = opened.index
        blocks = _frames(index, None if index.damage else wanted.routes)
        if index.damage:
            blocks = _without_gaps(blocks, index.base_sequence, index.next_sequence)
        return blocks, index.next_sequence


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
            elif blocks:  # pieces of a record that began earlier
                blocks[-1] = replace(blocks[-1], raw_bytes=blocks[-1].raw_bytes + raw_bytes)
            elif raw_bytes:
                blocks.append(Block(index.base_sequence, index.base_sequence, index.base_sequence, raw_bytes))
    return blocks


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
        return _without_gaps(blocks.blocks(with_others=True), segment.base_sequence, end), end
    return blocks.blocks(with_others=False), end


class _RawBlocks:
    """Blocks of a raw segment: batches joined up to the size of a frame, wanted routes separate from others."""

    def __init__(self, base: int, routes: frozenset[str] | None) -> None:
        self.end = base
        self._base = base
        self._routes = routes
        self._blocks: list[tuple[bool, Block]] = []  # True if it is wanted

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
        elif not header.is_control:  # a piece of a record that began earlier, so it adds to the last block of its route
            for number, (is_wanted, last) in reversed([*enumerate(self._blocks)]):
                if is_wanted is wanted:
                    self._blocks[number] = wanted, replace(last, raw_bytes=last.raw_bytes + total)
                    return
            self._blocks.insert(0, (wanted, Block(self._base, self._base, self._base, total)))

    def drop(self, dropped: SkippedBatches) -> None:
        """Add batches, of any route, that shrinking dropped: a reader must see them."""
        if dropped.first_sequence < dropped.next_sequence:
            self.end = dropped.next_sequence
            self._blocks.append((True, Block(self._base, dropped.first_sequence, self.end, 0)))

    def blocks(self, *, with_others: bool) -> list[Block]:
        return [block for wanted, block in self._blocks if wanted or with_others]


def _without_gaps(blocks: list[Block], first: int, end: int) -> list[Block]:
    """Return the blocks, extended to cover ``first`` to ``end`` without gaps; none if that range is empty."""
    if first >= end:
        return []
    if not blocks:
        return [Block(first, first, end, 0)]
    joined = [replace(block, next=behind.first) for block, behind in pairwise(blocks)]
    joined.append(replace(blocks[-1], next=end))
    return [replace(joined[0], first=first), *joined[1:]]


def joined_blocks(blocks: Iterable[Block], *, first: int, last: int, limit_bytes: int) -> Iterator[Block]:
    """Join neighbouring blocks up to ``limit_bytes``, cut to ``first`` to ``last``; a larger block stays separate.

    Frames between two blocks of a segment become part of the joined block; readers skip them by the index.
    """
    joined: Block | None = None
    for block in blocks:
        if block.first == block.next:
            if joined is not None:
                joined = replace(joined, raw_bytes=joined.raw_bytes + block.raw_bytes)
        elif (
            joined is not None
            and (block.segment == joined.segment or block.first == joined.next)
            and joined.raw_bytes + block.raw_bytes <= limit_bytes
        ):
            joined = Block(joined.segment, joined.first, block.next, joined.raw_bytes + block.raw_bytes)
        else:
            if joined is not None:
                yield _cut(joined, first, last)
            joined = block
    if joined is not None:
        yield _cut(joined, first, last)


def _cut(block: Block, first: int, last: int) -> Block:
    return replace(block, first=max(block.first, first), next=min(block.next, last + 1))


def fair_share(total_bytes: int, most_bytes: int) -> int:
    return min(most_bytes, max(total_bytes // TASKS, LEAST_BYTES))


def packed(pieces: Sequence[Any], *, limit_bytes: int) -> list[tuple[Any, ...]]:
    """Group pieces, each with its ``raw_bytes``, in order into tuples of up to ``limit_bytes`` or of a larger piece."""
    tasks: list[tuple[Any, ...]] = []
    room = 0
    for piece in pieces:
        if tasks and piece.raw_bytes <= room:
            tasks[-1] = (*tasks[-1], piece)
        else:
            tasks.append((piece,))
            room = limit_bytes
        room -= piece.raw_bytes
    return tasks


LOSS_HINT = (
    'a cursor that the query\'s owner moves keeps them; .option("failOnDataLoss", "false") continues without them'
)


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Records ``first`` to ``last`` of ``routes`` (None: all) in one log."""

    location: LogLocation
    routes: frozenset[str] | None
    first: int
    last: int
    bound: Bound  # end of the readable log at the time of planning
    raw_bytes: int  # estimated number of raw bytes to read
    tolerance: Tolerance = STRICT
    gaps: bool = False  # True if records dropped by shrinking are not lost, because no sequences were requested
    seen: LastSeen | None = None  # end of the log at the time of planning; None if unknown

    @property
    def log(self) -> str:
        return self.location.log

    @property
    def name(self) -> str:
        return f"{self.log}-{self.first:020d}-{self.last:020d}{_suffix(self.routes)}"

    def batches(self) -> Iterator[Batch]:
        with closing(DamageReport(self.tolerance, self.name)) as damage:

            def pass_over(missing: Missing) -> None:
                damage.messages.append(missing.message())

            continuity = Continuity(self.location.root, self.location.log_id, self.seen) if self.seen else None
            try:
                yield from read_selection(
                    read_view(self.location.root, self.location.log_id, bound=self.bound, continuity=continuity),
                    Selection(self.routes, self.first, last=self.last),
                    on_missing="skip" if self.gaps else pass_over if self.tolerance.loss else "error",
                    on_damage=damage.add,
                )
            except NotFound as error:
                raise NotFound(error.message, hint=LOSS_HINT) from error
            if continuity is not None:
                continuity.require()

    def arrow(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the records as :func:`record_batches` does; raises the errors of :meth:`batches`."""
        from wald.reading.arrow import record_batches

        return record_batches(self.batches(), columns)


def first_record(view: View, *, partial: bool) -> int:
    """Return the oldest record or, unless ``partial``, an earlier one that is missing without explanation."""
    oldest = view.segments[0].base_sequence if view.segments else 1
    if partial or oldest == 1:
        return oldest
    try:
        return next(History(view.root).unexplained_spans(1, oldest - 1), (oldest, oldest))[0]
    except Damaged:  # of the ledger; planning reports it
        return 1


def pieces_of(
    view: View,
    wanted: Range,
    *,
    limit_bytes: int,
    active: bool = True,
    tolerance: Tolerance = STRICT,
    gaps: bool = False,
) -> list[LogPiece]:
    """Plan the pieces for ``wanted``: each is a fair share of up to ``limit_bytes``, or one larger block."""
    location, bound = LogLocation(view.root, view.log_id), view.bound
    name = f"{location.log}-planning-{wanted.first:020d}{_suffix(wanted.routes)}"
    with closing(DamageReport(tolerance, name)) as damage:
        if bound.head_lost and active and bound.sequence is not None and wanted.last > bound.sequence:
            damage.add(lost_head(location.root, bound))
        blocks = list(_Planning(History(location.root), damage, gaps).blocks(view, wanted, active=active))
    limit = fair_share(sum(block.raw_bytes for block in blocks), limit_bytes)
    seen = last_seen_at(view.root, view.head) if view.head else None
    return [
        LogPiece(location, wanted.routes, block.first, block.last, bound, block.raw_bytes, tolerance, gaps, seen)
        for block in joined_blocks(blocks, first=wanted.first, last=wanted.last, limit_bytes=limit)
    ]


@dataclass(frozen=True, slots=True)
class _Planning:
    """Search for blocks to read that also reports records missing between them."""

    history: History
    damage: DamageReport
    gaps: bool  # True if deletions by RECLAIM are not even reported

    def blocks(self, view: View, wanted: Range, *, active: bool) -> Iterator[Block]:
        for found in blocks_of(view, wanted, active=active):
            if isinstance(found, Block):
                yield found
            elif found.error is not None:
                self.damage.add(found.error)
            elif (complete := self._report(view, wanted, found)) is not view:
                yield from self.blocks(complete, replace(wanted, first=found.first), active=active)
                return

    def _report(self, view: View, wanted: Range, missing: Unreadable) -> View:
        """Report missing records; if reclaim undid their deletion, return instead a view that has them."""
        if errors := self._errors(view, missing):
            complete = view.including_restored(missing.first, missing.next - 1)
            if complete is not view:
                return complete
            errors = self._errors(view, missing)  # RECLAIM may have deleted them since the view was made
        if not errors and not self.gaps:
            try:
                self._report_loss(view, wanted.routes, missing.first, missing.next - 1)
            except Damaged as damaged:  # the ledger
                errors = [damaged]
        for error in errors:
            self.damage.add(error)
        return view

    def _errors(self, view: View, missing: Unreadable) -> list[Damaged]:
        """Return the errors for missing records that no ledger explains, or for the damaged ledger."""
        hint = PARTIAL_HINT if missing.oldest else f"{command_line(view.root.path, 'verify')} lists all damage"
        try:
            unexplained = list(self.history.unexplained_spans(missing.first, missing.next - 1))
        except Damaged as error:
            return [error]
        return [
            Damaged(
                f"{view.root.segments}: {span_text(first, last)} {'is' if first == last else 'are'} missing, and no "
                "ledger explains why",
                hint=hint,
            )
            for first, last in unexplained
        ]

    def _report_loss(self, view: View, routes: frozenset[str] | None, first: int, last: int) -> None:
        """Report deleted records that may belong to ``routes``."""
        last_of = self.history.routes_between(first, last)
        if routes is not None and last_of is not None and all(last_of.get(route, 0) < first for route in routes):
            return
        why = "; ".join(loss.reason for loss in self.history.losses(first, last))
        span = span_text(first, last)
        message = f"{view.root.segments}: " + (f"{span} lost: {why}" if why else f"RECLAIM has removed {span}")
        if not self.damage.tolerance.loss:
            raise NotFound(message, hint=LOSS_HINT)
        self.damage.messages.append(message)


def _suffix(routes: frozenset[str] | None) -> str:
    return "" if routes is None else f"-{crc32(','.join(sorted(routes)).encode()):08x}"
