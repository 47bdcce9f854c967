"""Scan of a raw segment, and resynchronisation after damage.

Raw segments, scanned batch by batch in constant memory, whatever the bytes.

The scan finds three things: a whole batch; damaged bytes, which are no batch although good batches follow; and the end,
where the good batches end (at zeros, at the end of the file, or at what a crash left).
Each byte is checksummed once in a batch, however much damage there is: what follows damage is found by lengths.

Finding the next batch behind damage in a raw segment, by nothing that a payload can imitate.

A payload may hold whole batches with valid checksums, because every program that can read the segment can learn its
salt. So a batch is not believed because its checksums hold. Batches are found from an anchor: a position given by the
sparse index, by the head, or by the end of the data. From there the trailers lead backwards to the damage. If trailers
are damaged, too, the bytes between are searched for headers, and only a chain of headers is believed that ends exactly
where the trailers have led to.
"""

from __future__ import annotations

import os
import secrets
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from wald.format.batch import (
    ALIGNMENT,
    BODY_DAMAGED,
    HEADER,
    MAGIC,
    TRAILER,
    TRAILER_DAMAGED,
    BatchHeader,
    Parsed,
    ParseOutcome,
    batch_begin,
    decode_header,
    padded,
    parse_header,
    seed,
    trailer,
)
from wald.format.checksum import crc32c
from wald.format.segment import (
    SEGMENT_HEADER,
    SPARSE_INTERVAL_BYTES,
    BadHeader,
    SegmentHeader,
    SparseIndex,
    decode_segment_header,
)

WINDOW_BYTES = 1 << 20  # read at once; small enough for a small machine, large enough to be read at disk speed
FIRST_BATCH = SEGMENT_HEADER.size
_ZEROS = bytes(WINDOW_BYTES)


class ScannedBatch(NamedTuple):
    """A whole batch: its place, its header and its route ("" for control)."""

    offset: int
    header: BatchHeader
    route: str

    @property
    def end(self) -> int:
        return self.offset + self.header.total_bytes


@dataclass(frozen=True, slots=True)
class DamagedBytes:
    """Damaged bytes with good batches behind them."""

    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """Where the good batches end, and what stands there.

    Attributes:
        garbage_bytes: bytes from ``offset`` to the last one that is not zero; 0 if nothing but zeros follows.
    """

    offset: int
    outcome: ParseOutcome
    reason: str
    garbage_bytes: int


Scan = Iterator[ScannedBatch | DamagedBytes | SegmentEnd]


class RawFile:
    """An open raw segment; the descriptor stays the caller's.

    Args:
        limit: the length to read (bytes); what is behind it does not exist.
        durable: where a batch is known to end, by the head; 0: not known.
        index: returns the sparse index; called only if there is damage.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        limit: int | None = None,
        durable: int = 0,
        index: Callable[[], SparseIndex | None] = lambda: None,
    ) -> None:
        self._descriptor = descriptor
        self.limit = os.fstat(descriptor).st_size if limit is None else limit
        self._durable = durable
        self._index = index
        self._memory: memoryview | None = None
        self._window = memoryview(b"")
        self._window_offset = 0

    def header(self) -> SegmentHeader:
        """
        Raises:
            BadHeader: the first 64 bytes are not a segment header.
        """
        return decode_segment_header(self.read(0, SEGMENT_HEADER.size))

    @cached_property
    def salt(self) -> int:
        """The segment's salt; a random one, which no batch fits, if both header and sparse index are lost."""
        try:
            return self.header().salt
        except BadHeader:
            index = self._index()
            return secrets.randbits(32) if index is None or index.salt is None else index.salt

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes at ``offset``; fewer only at the limit."""
        parts = []
        length = max(0, min(length, self.limit - offset))
        while length:
            part = os.pread(self._descriptor, length, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def payload(self, batch: ScannedBatch) -> bytes:
        """The payload of a scanned batch."""
        return self.read(batch.offset + batch.header.payload_offset, batch.header.payload_bytes)

    def control_payload(self, batch: ScannedBatch) -> bytes:
        """The payload of a control batch; of another one nothing."""
        return self.payload(batch) if batch.header.is_control else b""

    def scan(self, *, start: int = FIRST_BATCH) -> Scan:
        """Every batch from ``start`` on, and all damaged bytes between them; the last item is the end."""
        offset = start
        next_sequence = 0
        damage: tuple[int, Parsed] | None = None  # damage whose end is not known yet
        while True:
            found, route = self._look(offset, self.salt)
            header = found.header
            if found.outcome is ParseOutcome.WHOLE and header is not None:
                if header.base_sequence >= next_sequence:
                    if damage is not None:
                        yield DamagedBytes(damage[0], offset - damage[0], damage[1].reason or "zeros between batches")
                        damage = None
                    yield ScannedBatch(offset, header, route)
                    offset += header.total_bytes
                    next_sequence = header.end_sequence
                    continue
                found = Parsed(ParseOutcome.DAMAGED, header, "its sequences were given out before")
            damage = damage or (offset, found)
            behind = self._behind(offset, header)
            if behind is None:
                begun, found = damage
                yield SegmentEnd(begun, found.outcome, found.reason, max(0, self._data_end - begun))
                return
            offset = behind

    def _look(self, offset: int, salt: int) -> tuple[Parsed, str]:
        """As :func:`wald.format.batch.parse`, but the body passes through the window; and the batch's route."""
        opening = self._peek(offset, HEADER.size)
        place = seed(salt, offset)
        found = parse_header(opening, max(0, self.limit - offset), place)
        header = found.header
        if found.outcome is not ParseOutcome.WHOLE or header is None:
            return found, ""
        position, end, checksum = offset + HEADER.size, offset + header.trailer_offset, 0
        route = bytes(self._peek(position, header.route_bytes)).decode("ascii", "replace")
        while position < end:
            part = self._ahead(position, end - position)
            if not part:
                return Parsed(ParseOutcome.TORN, header, "the file became shorter"), ""
            checksum = crc32c(part, checksum)
            position += len(part)
        if checksum != header.body_checksum:
            return Parsed(ParseOutcome.DAMAGED, header, BODY_DAMAGED), ""
        if self._peek(end, TRAILER.size) != trailer(header.total_bytes, place):
            return Parsed(ParseOutcome.DAMAGED, header, TRAILER_DAMAGED), ""
        return found, route

    def _behind(self, offset: int, header: BatchHeader | None) -> int | None:
        """Where to go on behind damage at ``offset``; None: nowhere.

        Args:
            header: of the batch there, if its checksum holds: it gives the length, so no payload is read.
        """
        if header is not None:
            behind = offset + header.total_bytes
            return behind if behind < self.limit else None
        if offset >= self._data_end:
            return None
        return self._resync.behind(offset)

    @cached_property
    def _resync(self) -> Resync:
        ends = self._durable, padded(self._data_end)  # of the last batch if it is whole
        return Resync(self.read, self.salt, ends=ends, index=self._index())

    @cached_property
    def _data_end(self) -> int:
        """Where nothing but zeros follows."""
        position = self.limit
        while position > 0:
            start = max(0, position - WINDOW_BYTES)
            part = self.read(start, position - start)
            if _holds_more_than_zeros(part):
                return start + len(part.rstrip(b"\0"))
            position = start
        return 0

    def _peek(self, offset: int, length: int) -> memoryview:
        """``length`` bytes at ``offset`` out of the window, which is moved where it has to be; fewer at the limit."""
        inside = offset - self._window_offset
        if inside < 0 or inside + length > len(self._window):
            self._move(offset)
            inside = 0
        return self._window[inside : inside + length]

    def _ahead(self, offset: int, length: int) -> memoryview:
        """Up to ``length`` bytes at ``offset``: what the window has of them, at least one if the file has."""
        inside = offset - self._window_offset
        if not 0 <= inside < len(self._window):
            self._move(offset)
            inside = 0
        return self._window[inside : inside + length]

    def _move(self, offset: int) -> None:
        """Fill the window from ``offset`` on; its memory is used again, which is faster than asking for new."""
        if self._memory is None:
            self._memory = memoryview(bytearray(WINDOW_BYTES))
        length, filled = max(0, min(WINDOW_BYTES, self.limit - offset)), 0
        while filled < length:
            count = os.preadv(self._descriptor, [self._memory[filled:length]], offset + filled)
            if count == 0:
                break
            filled += count
        self._window, self._window_offset = self._memory[:filled], offset


def _holds_more_than_zeros(part: bytes) -> bool:
    """Preallocated files end in many megabytes of zeros; comparing is far faster than searching."""
    return part != _ZEROS[: len(part)]


_BACKWARDS_BYTES = 64 << 10  # read at once on the way back


class Resync:
    """
    Args:
        read: gives the bytes of the segment: (offset, length) → bytes, fewer only at its end.
        salt: of the segment.
        ends: places where batches end if anything does: the head, the end of the data.
        index: the sparse index, as far as there is one; it is believed where it agrees with the segment.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], salt: int, *, ends: Iterable[int], index: SparseIndex | None
    ) -> None:
        self._read = read
        self._salt = salt
        self._window, self._window_offset = b"", 0
        self._anchors = sorted({*self._agreeing(index or SparseIndex()), *filter(self._begin, ends)})

    def behind(self, position: int) -> int | None:
        """The first place behind ``position``, where there is damage, at which a batch ended; None if none is known."""
        number = bisect_right(self._anchors, position)
        if number == len(self._anchors):
            return None
        end = marked = self._anchors[number]
        while begin := self._begin(end):
            if begin <= position:
                return end
            end = begin
            if marked - end >= SPARSE_INTERVAL_BYTES:  # the next damage on this way need not be reached from as far
                insort(self._anchors, end)
                marked = end
        return self._chain(position, end)

    def _begin(self, end: int) -> int | None:
        """Where the batch begins that ends at ``end``; None if its trailer is damaged."""
        offset = end - TRAILER.size
        inside = offset - self._window_offset
        if not 0 <= inside <= len(self._window) - TRAILER.size:
            self._window_offset = max(0, end - _BACKWARDS_BYTES)
            self._window = self._read(self._window_offset, end - self._window_offset)
            inside = offset - self._window_offset
        return batch_begin(self._window[max(0, inside) : inside + TRAILER.size], end, self._salt)

    def _agreeing(self, index: SparseIndex) -> Iterator[int]:
        """The positions in the index at which such a batch begins as it says."""
        entries = zip(index.sequences, index.positions, index.times_ns, strict=True)
        for sequence, position, time_ns in entries:
            header = decode_header(self._read(position, HEADER.size), 0, seed(self._salt, position))
            if header is not None and (header.base_sequence, header.append_time_ns) == (sequence, time_ns):
                yield position

    def _chain(self, position: int, end: int) -> int:
        """The first header behind ``position`` from which headers lead to ``end`` exactly; ``end`` if none does."""
        leads_nowhere: set[int] = set()
        for candidate in self._headers(position + ALIGNMENT, end):
            at, met = candidate, set[int]()
            while at < end and at not in leads_nowhere:
                met.add(at)
                header = decode_header(self._read(at, HEADER.size), 0, seed(self._salt, at))
                if header is None:
                    break
                at += header.total_bytes
            if at == end:
                return candidate
            leads_nowhere |= met
        return end

    def _headers(self, start: int, end: int) -> Iterator[int]:
        """Every position of a valid header of a batch that lies between ``start`` and ``end``."""
        offset = padded(start)
        while offset + HEADER.size <= end:
            window = self._read(offset, min(1 << 20, end - offset))
            at = window.find(MAGIC)
            while at >= 0:
                position = offset + at
                header = decode_header(window, at, seed(self._salt, position)) if not at % ALIGNMENT else None
                if header is not None and position + header.total_bytes <= end:
                    yield position
                at = window.find(MAGIC, at + 1)
            # The next window begins with the first place at which this one does not hold a whole header.
            offset += max(ALIGNMENT, len(window) - HEADER.size + ALIGNMENT & -ALIGNMENT)
