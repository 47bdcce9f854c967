"""Intact batches of a damaged segment, and the records they contain.

A record in several pieces survives only with all its pieces. Damaged bytes may have been a piece of any record that was
open before them, so all those records are broken. The batch in which a broken record begins is kept without it, and
readers skip its later pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile

from wald.checking.checker import payload_wrong
from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.batch import BatchHeader, Flag, StoredBatch, checksum_body, route_prefix
from wald.format.log_state import BadControl, LogState, decode_state, still_open
from wald.format.names import Kind
from wald.format.sealed_index import Frame
from wald.format.spans import Span
from wald.segments.raw_scan import FIRST_BATCH, SEQUENCES_REPEAT, DamagedBytes
from wald.segments.reader import RawSegment
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import dropped_batch


@dataclass(frozen=True, slots=True)
class IntactBatch:
    """Intact batch, with its raw position and the payload to keep.

    Attributes:
        restored: reason for which a batch in place of dropped ones was rebuilt from the index, or "".
    """

    header: BatchHeader
    route: str
    position: int
    payload: memoryview
    restored: str = ""


@dataclass(slots=True)
class Survey:
    """Intact contents of a damaged segment.

    Attributes:
        spans: sequences that begin in intact batches or were dropped, in order.
        broken: record → route of records that have lost a piece, wherever they begin.
        open_records: route → unfinished record at the end.
        reason: first damage; "" if every batch is intact.
        pieces: some batches continue a record without beginning one.
        kept: number of records that begin in intact batches.
        relieved: a batch stands for dropped ones.
    """

    spans: list[Span] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)
    open_records: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    pieces: bool = False
    kept: int = 0
    relieved: bool = False

    def add(self, header: BatchHeader, route: str) -> None:
        begun = self.open_records.pop(route, 0)
        if begun and header.continues_sequence != begun:
            self.broken[begun] = route
        if header.open_sequence:
            self.open_records[route] = header.open_sequence
        self.kept += header.count
        if header.count:
            self._cover(header)
        else:
            self.pieces = True

    def drop(self, header: BatchHeader, dropped: Mapping[str, int] | None) -> None:
        """Add a batch that stands for dropped ones, which may be pieces of records.

        Args:
            dropped: see :func:`wald.format.log_state.still_open`.
        """
        self.relieved = True
        if dropped is None:
            self._break_open()
        self.open_records = still_open(self.open_records, dropped)
        if header.count:
            self._cover(header)

    def _cover(self, header: BatchHeader) -> None:
        if self.spans and self.spans[-1][1] + 1 == header.base_sequence:
            self.spans[-1] = self.spans[-1][0], header.end_sequence - 1
        else:
            self.spans.append((header.base_sequence, header.end_sequence - 1))

    def gap(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._break_open()
        self.open_records = {}

    def _break_open(self) -> None:
        self.broken |= {sequence: route for route, sequence in self.open_records.items()}


def survey(
    segment: Segment,
    log_id: bytes,
    before: dict[str, int],
    *,
    dropped: Mapping[str, int] | None,
    durable: int | None,
    end: int,
    cut: int = 0,
) -> Survey:
    """Return the intact contents of a segment.

    Args:
        before: records open before it, if it does not list them.
        dropped: see :func:`wald.format.log_state.still_open`.
        durable, end, cut: see :func:`batches`.

    Raises:
        Damaged: nothing in it is readable.
    """
    found = Survey(open_records=dict(before))
    for met in batches(segment, log_id, durable=durable, end=end, cut=cut):
        if isinstance(met, str):
            found.gap(met)
        elif met.header.is_dropped:
            found.reason = found.reason or met.restored
            found.drop(met.header, dropped)
        elif met.header.is_state:
            found.open_records = _open_records(met, found.open_records)
        elif met.header.is_control:
            continue
        else:
            found.add(met.header, met.route)
    return found


def batches(
    segment: Segment, log_id: bytes, *, durable: int | None = None, end: int, cut: int = 0
) -> Iterator[IntactBatch | str]:
    """Yield intact batches in order, including control batches, and a reason for each damaged range.

    Args:
        durable: position of the head in the segment; after it, only contiguous batches count.
        end: first sequence of the next segment; batches beyond it are ignored.
        cut: position at which a raw segment was cut; 0 if unknown.

    Raises:
        Damaged: nothing in it is readable.
    """
    expected, position = segment.base_sequence, 0
    relieved = _relieved_frames(segment)
    for met in _stored(segment, log_id, durable):
        if isinstance(met, DamagedBytes):
            position = met.offset + met.length
            reason, filling = met.reason or "zeros between batches", relieved.get((met.offset, met.length))
            if filling is not None and expected <= filling.header.base_sequence and filling.header.end_sequence <= end:
                expected = filling.header.end_sequence
                yield replace(filling, restored=reason)
            else:
                yield reason
            continue
        header, position = met.header, met.end
        if header.base_sequence < expected or header.end_sequence > end:
            yield SEQUENCES_REPEAT
        elif not header.is_control and (wrong := next(payload_wrong(header, met.payload), "")):
            yield wrong
        else:
            expected = header.end_sequence
            yield IntactBatch(header, met.route, met.position, met.payload)
    if position < cut:
        yield "another program truncated it"


def without(whole: IntactBatch, broken: Callable[[int], bool]) -> IntactBatch | None:
    """Return a batch without the broken record that begins in it; None if it becomes empty."""
    header = whole.header
    if not header.count or not header.open_sequence or not broken(header.open_sequence):
        return whole
    data = bytes(whole.payload)
    kept = data[: data.rfind(b"\n") + 1]
    if header.count == 1 and not header.continues_sequence:
        return None
    prefix = route_prefix(whole.route.encode())
    header = header._replace(
        body_checksum=checksum_body(prefix, [kept], len(kept)),
        payload_bytes=len(kept),
        count=header.count - 1,
        flags=header.flags & ~int(Flag.CONTINUED),
    )
    return IntactBatch(header, whole.route, whole.position, memoryview(kept))


def _stored(segment: Segment, log_id: bytes, durable: int | None) -> Iterator[StoredBatch | DamagedBytes]:
    """Yield the stored batches and damage of a segment in any form."""
    damage = _damaged_before(segment)
    with closing(_opened(segment, log_id)) as opened:
        whole = opened.batches if isinstance(opened, RawSegment) else opened.stored
        for met in whole(FIRST_BATCH, durable):
            if isinstance(met, StoredBatch) and any(begin <= met.position < end for begin, end in damage):
                yield DamagedBytes(met.position, met.end - met.position, "damaged before it was sealed")
            elif isinstance(met, StoredBatch | DamagedBytes):
                yield met
        tail = opened.tail
        if tail is not None and tail.garbage_bytes:
            yield DamagedBytes(tail.offset, tail.garbage_bytes, tail.reason)
        if durable is not None:  # batches after it are intact, or were never acknowledged
            behind = opened.batches(durable, None)
            yield from (met for met in takewhile(_is_batch, behind) if isinstance(met, StoredBatch))


def _is_batch(met: object) -> bool:
    return isinstance(met, StoredBatch)


def _opened(segment: Segment, log_id: bytes) -> RawSegment | SalvagedSegment:
    """Open a segment frame by frame, even with a readable index: a damaged frame yields its first batches."""
    if segment.kind.form is Kind.RAW:
        return RawSegment(segment, log_id)
    return SalvagedSegment(segment, log_id, Damaged(f"{segment.path}: offset 0: none of its frames can be read"))


def _damaged_before(segment: Segment) -> list[Span]:
    """Return the raw ranges that the index lists as damaged, even if they look like batches."""
    if segment.kind.form is Kind.RAW:
        return []
    try:
        with SealedFile(segment.path) as sealed:
            return [(offset, offset + length) for offset, length in sealed.index.damage]
    except Damaged:
        return []


def _relieved_frames(segment: Segment) -> dict[Span, IntactBatch]:
    """Return (offset, length) → batch for the frames whose batches were all dropped; readers skip such frames."""
    if segment.kind.form is Kind.RAW:
        return {}
    try:
        with SealedFile(segment.path) as sealed:
            index = sealed.index
    except (Damaged, OSError):
        return {}
    if index.shrunk is None:
        return {}
    frames = [frame for frame in index.frames[1:] if not frame.routes and not index.is_damage(frame)]
    return {(frame.raw_offset, frame.raw_bytes): _in_place_of(frame, index.epoch) for frame in frames}


def _in_place_of(frame: Frame, epoch: int) -> IntactBatch:
    span = frame.first_sequence, frame.next_sequence
    header, payload = dropped_batch(frame.raw_bytes, *span, frame.latest_ns, epoch)
    return IntactBatch(header, "", frame.raw_offset, memoryview(payload))


def _open_records(control: IntactBatch, before: dict[str, int]) -> dict[str, int]:
    """Return the open records in the state at the start of a segment; if that is unreadable, those ``before`` it.

    A record that is open at the end of the previous segment may have ended in a deleted one in between.
    """
    state = state_of(control)
    return dict(before) if state is None else dict(state.open_records)


def state_of(control: IntactBatch) -> LogState | None:
    """Return the state in a control batch; None if this version cannot read it."""
    try:
        return decode_state(control.payload)
    except BadControl:
        return None
