"""Intact batches of a damaged segment, and the records they contain.

A record survives only with all its pieces. Damaged bytes may have been a piece of any record open before them, so all
are broken. The batch in which a broken record begins is kept without it; readers skip later pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from wald.checking.checker import payload_errors
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
    """Intact batch. ``replaced_damage`` is the damage to dropped batches that it replaces, or ""."""

    header: BatchHeader
    route: str
    position: int
    payload: memoryview
    replaced_damage: str = ""


@dataclass(slots=True)
class IntactContents:
    """Intact contents of a damaged segment."""

    spans: Spans = field(default_factory=Spans)  # records that begin in intact batches or were dropped
    broken: dict[int, str] = field(default_factory=dict)  # record that lost a piece, wherever it began → route
    open_records: dict[str, int] = field(default_factory=dict)  # route → unfinished record at the end
    damage: str = ""  # first damage
    has_pieces: bool = False  # some batches only continue a record
    count: int = 0  # records that begin in intact batches
    is_shrunk: bool = False  # a batch replaces dropped ones

    @property
    def is_empty(self) -> bool:
        return not self.has_pieces and not any(self.spans)

    def add(self, header: BatchHeader, route: str) -> None:
        """Add a batch. An open record that the batch does not continue is broken."""
        unfinished = self.open_records.pop(route, 0)
        if unfinished and header.continues_sequence != unfinished:
            self.broken[unfinished] = route
        if header.open_sequence:
            self.open_records[route] = header.open_sequence
        self.count += header.count
        self.has_pieces = self.has_pieces or not header.count
        self.spans.add(header.base_sequence, header.end_sequence - 1)

    def break_open_records(self) -> None:
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
) -> IntactContents:
    """Collect the intact contents of a damaged segment; raise Damaged if nothing is readable.

    ``before`` has the records open at the end of the previous segment. A readable state in this segment replaces it.
    """
    contents = IntactContents(open_records=dict(before))
    for batch in intact_batches(segment, log_id, durable=durable, end=end, cut=cut):
        if isinstance(batch, str):
            contents.damage = contents.damage or batch
            contents.break_open_records()
        elif batch.header.is_dropped:  # any of the dropped batches may have been a piece of a record
            contents.is_shrunk, contents.damage = True, contents.damage or batch.replaced_damage
            if dropped is None:
                contents.break_open_records()
            contents.open_records = still_open(contents.open_records, dropped)
            contents.spans.add(batch.header.base_sequence, batch.header.end_sequence - 1)
        elif batch.header.is_state:
            # A record open in the previous segment may have ended in a deleted one.
            if (state := control_state(batch)) is not None:
                contents.open_records = state.open_records
        elif not batch.header.is_control:
            contents.add(batch.header, batch.route)
    return contents


def intact_batches(
    segment: Segment, log_id: bytes, *, durable: int | None, end: int, cut: int
) -> Iterator[IntactBatch | str]:
    """Yield intact batches in order, and a description of each damaged range. Raise Damaged if no batch is readable.

    Batches beyond ``end``, the next segment's first sequence, count as damage. After ``durable``, the head's position,
    only contiguous batches count. ``cut`` is where a raw segment was cut, or 0.
    """
    expected, position = segment.base_sequence, 0
    index = readable_index(segment)
    replacements = {} if index is None else _replacement_batches(index)
    for item in _stored_batches(segment, log_id, durable, () if index is None else index.damage):
        if isinstance(item, DamagedBytes):
            position = item.offset + item.length
            damage, batch = item.reason or "zeros between batches", replacements.get((item.offset, item.length))
            if batch is not None and expected <= batch.header.base_sequence and batch.header.end_sequence <= end:
                expected = batch.header.end_sequence
                yield batch._replace(replaced_damage=damage)
            else:
                yield damage
            continue
        header, position = item.header, item.end
        if header.base_sequence < expected or header.end_sequence > end:
            yield SEQUENCES_REPEAT
        elif not header.is_control and (error := next(payload_errors(header, item.payload), "")):
            yield error
        else:
            expected = header.end_sequence
            yield IntactBatch(header, item.route, item.position, item.payload)
    if position < cut:
        yield "another program truncated the segment"


def without_broken(batch: IntactBatch, is_broken: Callable[[int], bool]) -> IntactBatch | None:
    """Cut off a broken record that begins in a batch. Return None if nothing remains."""
    header = batch.header
    if not header.count or not header.open_sequence or not is_broken(header.open_sequence):
        return batch
    data = bytes(batch.payload)
    whole_records = data[: data.rfind(b"\n") + 1]
    if header.count == 1 and not header.continues_sequence:
        return None
    prefix = route_prefix(batch.route.encode())
    header = header._replace(
        body_checksum=checksum_body(prefix, [whole_records], len(whole_records)),
        payload_bytes=len(whole_records),
        count=header.count - 1,
        flags=header.flags & ~int(Flag.CONTINUED),
    )
    return IntactBatch(header, batch.route, batch.position, memoryview(whole_records))


def readable_index(segment: Segment) -> SealedIndex | None:
    if segment.kind.form is Kind.SEALED:
        with suppress(Damaged), SealedFile(segment.path) as sealed:
            return sealed.index
    return None


def control_state(control: IntactBatch) -> LogState | None:
    """Decode a control batch, or return None if a newer version wrote it."""
    with suppress(BadControl):
        return decode_state(control.payload)
    return None


def _stored_batches(
    segment: Segment, log_id: bytes, durable: int | None, damage: Sequence[Span]
) -> Iterator[StoredBatch | DamagedBytes]:
    """Yield batches and damaged bytes. Ranges in ``damage`` are damaged even if they look like batches."""
    reader: RawSegment | SalvagedSegment
    if segment.kind.form is Kind.RAW:
        reader = RawSegment(segment, log_id)
        items = reader.batches(FIRST_BATCH, durable)
    else:  # by frames, even with a readable index: a damaged frame yields its first batches
        error = Damaged(f"{segment.path}: offset 0: no frame can be read")
        reader = SalvagedSegment(segment, log_id, error)
        items = reader.stored_items(FIRST_BATCH, durable)
    with closing(reader):
        for item in items:
            if isinstance(item, StoredBatch) and any(at <= item.position < at + length for at, length in damage):
                yield DamagedBytes(item.position, item.end - item.position, "damaged before the segment was sealed")
            elif isinstance(item, StoredBatch | DamagedBytes):
                yield item
        tail = reader.tail
        if tail is not None and tail.garbage_bytes:
            yield DamagedBytes(tail.offset, tail.garbage_bytes, tail.reason)
        if durable is not None:  # batches after the head are intact, or were never acknowledged
            for item in reader.batches(durable, None):
                if not isinstance(item, StoredBatch):
                    break
                yield item


def _replacement_batches(index: SealedIndex) -> dict[Span, IntactBatch]:
    """Return (offset, length) → replacement batch, for frames whose batches were all dropped. Readers skip them."""
    batches = {}
    for frame in index.frames[1:] if index.shrunk is not None else ():
        if not frame.routes and not index.was_damaged(frame):
            span = frame.first_sequence, frame.next_sequence
            header, payload = dropped_batch(frame.raw_bytes, *span, frame.latest_ns, index.epoch)
            batches[frame.raw_offset, frame.raw_bytes] = IntactBatch(header, "", frame.raw_offset, memoryview(payload))
    return batches
