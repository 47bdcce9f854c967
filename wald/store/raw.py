"""Raw segments, scanned batch by batch in constant memory, whatever the bytes.

The scan tells three things apart: a batch that is whole; a gap, which is bytes that are no batch although good batches
follow (damage); and the tail, which is where the good batches end (zeros, the end of the file, or what a crash left).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from wald.format.batch import (
    ALIGNMENT,
    BODY_DAMAGED,
    HEADER,
    MAGIC,
    BatchHeader,
    Encoding,
    Found,
    Outcome,
    decode_header,
    look_at_header,
    padded,
)
from wald.format.segment import HEADER as SEGMENT_HEADER
from wald.format.segment import SegmentHeader
from wald.format.segment import decode_header as decode_segment_header

WINDOW_BYTES = 1 << 20  # read at once; small enough for a small machine, large enough to be read at disk speed
FIRST_BATCH = SEGMENT_HEADER.size
_ZEROS = bytes(WINDOW_BYTES)


class Scanned(NamedTuple):
    """A whole batch: its place, its header and its route ("" for control)."""

    offset: int
    header: BatchHeader
    route: str

    @property
    def end(self) -> int:
        return self.offset + self.header.total_bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Damaged bytes with good batches behind them."""

    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tail:
    """Where the good batches end, and what stands there.

    Attributes:
        garbage_bytes: bytes from ``offset`` to the last one that is not zero; 0 if nothing but zeros follows.
    """

    offset: int
    outcome: Outcome
    reason: str
    garbage_bytes: int


Scan = Iterator[Scanned | Gap | Tail]


class RawFile:
    """An open raw segment; the descriptor stays the caller's.

    Args:
        limit: the length to look at (bytes); what is behind it does not exist.
    """

    def __init__(self, descriptor: int, *, limit: int | None = None) -> None:
        self._descriptor = descriptor
        self.limit = os.fstat(descriptor).st_size if limit is None else limit
        self._memory: memoryview | None = None
        self._window = memoryview(b"")
        self._window_offset = 0

    def header(self) -> SegmentHeader:
        """
        Raises:
            BadHeader: the first 64 bytes are not a segment header.
        """
        return decode_segment_header(self.read(0, SEGMENT_HEADER.size))

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

    def payload(self, batch: Scanned) -> bytes:
        """The payload of a scanned batch."""
        return self.read(batch.offset + batch.header.payload_offset, batch.header.payload_bytes)

    def scan(self, *, start: int = FIRST_BATCH, next_sequence: int = 0) -> Scan:
        """Every batch from ``start`` on, and every gap between them; the last item is the tail.

        Args:
            next_sequence: after damage, only batches at or above it are believed.
        """
        offset = start
        last: BatchHeader | None = None
        while True:
            found, route = self._look(offset)
            header = found.header
            if found.outcome is Outcome.WHOLE and header is not None:
                if last is None or header.base_sequence >= last.end_sequence:
                    yield Scanned(offset, header, route)
                    offset += header.total_bytes
                    next_sequence = max(next_sequence, header.end_sequence)
                    last = header
                    continue
                found = Found(Outcome.DAMAGED, header, "its sequences were given out before")
            # A header that holds tells its length, so a payload that looks like batches is not taken for any.
            behind = offset + (1 if header is None else header.total_bytes)
            resumed = self._search(behind, next_sequence, last, offset)
            if resumed is None:
                yield Tail(offset, found.outcome, found.reason, self._garbage(offset))
                return
            yield Gap(offset, resumed - offset, found.reason or "zeros between batches")
            offset = resumed

    def _look(self, offset: int) -> tuple[Found, str]:
        """As :func:`wald.format.batch.look`, but the body passes through the window; and the batch's route."""
        found = look_at_header(self._peek(offset, HEADER.size), max(0, self.limit - offset))
        header = found.header
        if found.outcome is not Outcome.WHOLE or header is None:
            return found, ""
        position, end, checksum = offset + HEADER.size, offset + header.total_bytes, 0
        route = bytes(self._peek(position, header.route_bytes)).decode("ascii", "replace")
        while position < end:
            part = self._ahead(position, end - position)
            if not part:
                return Found(Outcome.TORN, header, "the file became shorter"), ""
            checksum = crc32c(part, checksum)
            position += len(part)
        if checksum != header.body_checksum:
            return Found(Outcome.DAMAGED, header, BODY_DAMAGED), ""
        return found, route

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

    def _search(self, offset: int, next_sequence: int, last: BatchHeader | None, gap: int) -> int | None:
        """The offset of the next whole batch from ``offset`` on that can follow ``last``; None if there is none.

        Args:
            gap: where the damage begins: it hides no more records than bytes.
        """
        offset = padded(offset)
        while offset + HEADER.size <= self.limit:
            window = self.read(offset, WINDOW_BYTES)
            if len(window) < HEADER.size:
                break
            at = window.find(MAGIC) if _holds_more_than_zeros(window) else -1
            while at >= 0:
                header = decode_header(window, at) if at % ALIGNMENT == 0 else None
                if header is not None and _believable(header, next_sequence, last, offset + at - gap):
                    found, _ = self._look(offset + at)
                    if found.outcome is Outcome.WHOLE:
                        return offset + at
                at = window.find(MAGIC, at + 1)
            # The next window begins with the first place at which this one does not hold a whole header.
            offset += len(window) - HEADER.size + ALIGNMENT & -ALIGNMENT
        return None

    def _garbage(self, offset: int) -> int:
        """How many bytes from ``offset`` on until only zeros follow."""
        last, position = offset, offset
        while position < self.limit:
            part = self.read(position, WINDOW_BYTES)
            if not part:
                break
            if _holds_more_than_zeros(part):
                last = position + len(part.rstrip(b"\0"))
            position += len(part)
        return last - offset


def _holds_more_than_zeros(part: bytes) -> bool:
    """Preallocated files end in many megabytes of zeros; comparing is far faster than looking for something."""
    return part != _ZEROS[: len(part)]


def _believable(header: BatchHeader, next_sequence: int, last: BatchHeader | None, gap_bytes: int) -> bool:
    """Whether a batch behind ``gap_bytes`` of damage can be one of this segment, and not a record's content."""
    if header.encoding == Encoding.CONTROL or header.base_sequence < next_sequence:
        return False
    # What the gap hides takes a byte a record at least. The append time tells nothing: clocks are set.
    return last is None or header.base_sequence <= last.end_sequence + gap_bytes
