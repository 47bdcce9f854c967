"""Intact batches of a damaged segment, and the records they contain.

A record survives only with all its pieces. Damaged bytes may have been a piece of any record open before them, so all
are broken. The batch in which a broken record begins is kept without it; readers skip later pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from wald.checking.checker import payload_wrong
from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import BatchHeader, Flag, StoredBatch, checksum_body, route_prefix
from wald.format.log_state import BadControl, LogState, decode_state, still_open
from wald.format.names import Kind
from wald.format.sealed_index import SealedIndex
from wald.format.spans import Span, Spans
from wald.segments.raw_scan import FIRST_BATCH, SEQUENCES_REPEAT, DamagedBytes
from wald.segments.reader import RawSegment
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import dropped_batch


class IntactBatch(NamedTuple):
    """Intact batch. ``rebuilt`` is the damage to dropped batches that it replaces, or ""."""

    header: BatchHeader
    route: str
    position: int
    payload: memoryview
    rebuilt: str = ""


@dataclass(slots=True)
class Rescued:
    """Intact contents of a damaged segment."""

    spans: Spans = field(default_factory=Spans)  # records that begin in intact batches or were dropped
    broken: dict[int, str] = field(default_factory=dict)  # record → route: lost a piece, wherever it begins
    open_records: dict[str, int] = field(default_factory=dict)  # route → unfinished record at the end
    reason: str = ""  # first damage
    pieces: bool = False  # some batches only continue a record
    count: int = 0  # records that begin in intact batches
    shrunk: bool = False  # a batch replaces dropped ones

    @property
    def is_empty(self) -> bool:
        return not self.pieces and not any(self.spans)

    def add(self, header: BatchHeader, route: str) -> None:
        """Add a batch. An open record that the batch does not continue is broken."""
        begun = self.open_records.pop(route, 0)
        if begun and header.continues_sequence != begun:
            self.broken[begun] = route
        if header.open_sequence:
            self.open_records[route] = header.open_sequence
        self.count += header.count
        self.pieces = self.pieces or not header.count
        self.spans.add(header.base_sequence, header.end_sequence - 1)

    def break_open(self) -> None:
        self.broken |= {sequence: route for route, sequence in self.open_records.items()}
        self.open_records = {}


def rescue(
    segment: Segment,
    log_id: bytes,
    before: dict[str, int],
    *,
    dropped: Mapping[str, int] | None,
    durable: int | None,
    end: int,
    cut: int,
) -> Rescued:
    """Collect the intact contents of a damaged segment; raise Damaged if nothing is readable.

    ``before`` has the records open at the end of the previous segment. A readable state in this segment replaces it.
    """
    found = Rescued(open_records=dict(before))
    for batch in intact_batches(segment, log_id, durable=durable, end=end, cut=cut):
        if isinstance(batch, str):
            found.reason = found.reason or batch
            found.break_open()
        elif batch.header.is_dropped:  # any of the dropped batches may have been a piece of a record
            found.shrunk, found.reason = True, found.reason or batch.rebuilt
            if dropped is None:
                found.break_open()
            found.open_records = still_open(found.open_records, dropped)
            found.spans.add(batch.header.base_sequence, batch.header.end_sequence - 1)
        elif batch.header.is_state:
            # A record open in the previous segment may have ended in a deleted one.
            if (state := state_of(batch)) is not None:
                found.open_records = state.open_records
        elif not batch.header.is_control:
            found.add(batch.header, batch.route)
    return found


def intact_batches(
    segment: Segment, log_id: bytes, *, durable: int | None, end: int, cut: int
) -> Iterator[IntactBatch | str]:
    """Yield the intact batches in order, and a reason for each damaged range. Raise Damaged if no batch is readable.

    Batches beyond ``end``, the next segment's first sequence, count as damage. After ``durable``, the head's position,
    only contiguous batches count. ``cut`` is where a raw segment was cut, or 0.
    """
    expected, position = segment.base_sequence, 0
    index = readable_index(segment)
    dropped = {} if index is None else _dropped_frames(index)
    for found in _stored(segment, log_id, durable, () if index is None else index.damage):
        if isinstance(found, DamagedBytes):
            position = found.offset + found.length
            reason, rebuilt = found.reason or "zeros between batches", dropped.get((found.offset, found.length))
            if rebuilt is not None and expected <= rebuilt.header.base_sequence and rebuilt.header.end_sequence <= end:
                expected = rebuilt.header.end_sequence
                yield rebuilt._replace(rebuilt=reason)
            else:
                yield reason
            continue
        header, position = found.header, found.end
        if header.base_sequence < expected or header.end_sequence > end:
            yield SEQUENCES_REPEAT
        elif not header.is_control and (wrong := next(payload_wrong(header, found.payload), "")):
            yield wrong
        else:
            expected = header.end_sequence
            yield IntactBatch(header, found.route, found.position, found.payload)
    if position < cut:
        yield "another program truncated it"


def without_broken(batch: IntactBatch, broken: Callable[[int], bool]) -> IntactBatch | None:
    """Cut off a broken record that begins in a batch. Return None if nothing remains."""
    header = batch.header
    if not header.count or not header.open_sequence or not broken(header.open_sequence):
        return batch
    data = bytes(batch.payload)
    kept = data[: data.rfind(b"\n") + 1]
    if header.count == 1 and not header.continues_sequence:
        return None
    prefix = route_prefix(batch.route.encode())
    header = header._replace(
        body_checksum=checksum_body(prefix, [kept], len(kept)),
        payload_bytes=len(kept),
        count=header.count - 1,
        flags=header.flags & ~int(Flag.CONTINUED),
    )
    return IntactBatch(header, batch.route, batch.position, memoryview(kept))


def readable_index(segment: Segment) -> SealedIndex | None:
    if segment.kind.form is Kind.SEALED:
        with suppress(Damaged), SealedFile(segment.path) as sealed:
            return sealed.index
    return None


def state_of(control: IntactBatch) -> LogState | None:
    """Decode a state, or return None if a newer version wrote it."""
    with suppress(BadControl):
        return decode_state(control.payload)
    return None


def _stored(
    segment: Segment, log_id: bytes, durable: int | None, damage: Sequence[Span]
) -> Iterator[StoredBatch | DamagedBytes]:
    """Yield batches and damaged bytes. Ranges in ``damage`` are damaged even if they look like batches."""
    opened: RawSegment | SalvagedSegment
    if segment.kind.form is Kind.RAW:
        opened = RawSegment(segment, log_id)
        stored = opened.batches(FIRST_BATCH, durable)
    else:  # by frames, even with a readable index: a damaged frame yields its first batches
        error = Damaged(f"{segment.path}: offset 0: none of its frames can be read")
        opened = SalvagedSegment(segment, log_id, error)
        stored = opened.stored_items(FIRST_BATCH, durable)
    with closing(opened):
        for found in stored:
            if isinstance(found, StoredBatch) and any(at <= found.position < at + length for at, length in damage):
                yield DamagedBytes(found.position, found.end - found.position, "damaged before the segment was sealed")
            elif isinstance(found, StoredBatch | DamagedBytes):
                yield found
        tail = opened.tail
        if tail is not None and tail.garbage_bytes:
            yield DamagedBytes(tail.offset, tail.garbage_bytes, tail.reason)
        if durable is not None:  # batches after the head are intact, or were never acknowledged
            for item in opened.batches(durable, None):
                if not isinstance(item, StoredBatch):
                    break
                yield item


def _dropped_frames(index: SealedIndex) -> dict[Span, IntactBatch]:
    """Return (offset, length) → replacement batch, for frames whose batches were all dropped. Readers skip them."""
    found = {}
    for frame in index.frames[1:] if index.shrunk is not None else ():
        if not frame.routes and not index.was_damaged(frame):
            span = frame.first_sequence, frame.next_sequence
            header, payload = dropped_batch(frame.raw_bytes, *span, frame.latest_ns, index.epoch)
            found[frame.raw_offset, frame.raw_bytes] = IntactBatch(header, "", frame.raw_offset, memoryview(payload))
    return found
