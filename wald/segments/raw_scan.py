"""Scan of a raw segment in linear time and constant memory, and resynchronisation after damage.

A payload may contain forged batches with valid checksums, because any reader can learn the salt. So :class:`Resync`
follows the trailers backwards from an anchor (from the sparse index, the head, or the end of the data) to the damage.
If a trailer is damaged, it accepts only a chain of headers that ends exactly where the trailers have led.
"""

from __future__ import annotations

import os
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
    ParseOutcome,
    ParseResult,
    batch_start,
    decode_header,
    padded,
    parse_header,
    seed,
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

WINDOW_BYTES = 1 << 20  # fits small machines and reads at disk speed
FIRST_BATCH = SEGMENT_HEADER.size
_ZEROS = bytes(WINDOW_BYTES)
SEQUENCES_REPEAT = "a batch repeats the sequences of an earlier batch"


class ScannedBatch(NamedTuple):
    """Whole batch. The route of a control batch is ""."""

    offset: int
    header: BatchHeader
    route: str

    @property
    def end(self) -> int:
        return self.offset + self.header.total_bytes


@dataclass(frozen=True, slots=True)
class DamagedBytes:
    """Damaged bytes before a whole batch."""

    offset: int
    length: int
    reason: str

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """End of the whole batches. After it, ``garbage_bytes`` extend to the last nonzero byte."""

    offset: int
    outcome: ParseOutcome
    reason: str
    garbage_bytes: int


FindIndex = Callable[[], SparseIndex | None]


class RawFile:
    """Open raw segment, readable up to ``limit``. The caller closes the descriptor.

    ``index`` and ``durable_end``, the head's position (0 if unknown), are used only after damage.
    """

    def __init__(
        self, descriptor: int, *, limit: int | None = None, durable_end: int = 0, index: FindIndex = lambda: None
    ) -> None:
        self._descriptor = descriptor
        file_bytes = os.fstat(descriptor).st_size
        self.limit = file_bytes if limit is None else min(limit, file_bytes)
        self._durable_end = durable_end
        self._index = index
        self._memory: memoryview | None = None
        self._window = memoryview(b"")
        self._window_offset = 0

    def header(self) -> SegmentHeader:
        return decode_segment_header(self.read(0, SEGMENT_HEADER.size))

    @cached_property
    def salt(self) -> int:
        """Salt, or a random salt that matches no batch if header and sparse index are lost."""
        try:
            return self.header().salt
        except BadHeader:
            index = self._index()
            return int.from_bytes(os.urandom(4)) if index is None or index.salt is None else index.salt

    def read(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, or fewer at the limit."""
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
        return self.read(batch.offset + batch.header.payload_offset, batch.header.payload_bytes)

    def control_payload(self, batch: ScannedBatch) -> bytes:
        return self.payload(batch) if batch.header.is_control else b""

    def scan(self, *, start: int = FIRST_BATCH) -> Iterator[ScannedBatch | DamagedBytes | SegmentEnd]:
        """Yield batches and damage, then the end."""
        offset = start
        next_sequence = 0
        damage: tuple[int, ParseResult] | None = None  # damage whose end is unknown
        while True:
            parsed, route = self._parse(offset)
            header = parsed.header
            if parsed.outcome is ParseOutcome.WHOLE and header is not None:
                if header.base_sequence >= next_sequence:
                    if damage is not None:
                        yield DamagedBytes(damage[0], offset - damage[0], damage[1].reason or "zeros between batches")
                        damage = None
                    yield ScannedBatch(offset, header, route)
                    offset += header.total_bytes
                    next_sequence = header.end_sequence
                    continue
                parsed = ParseResult(ParseOutcome.DAMAGED, header, SEQUENCES_REPEAT)
            damage = damage or (offset, parsed)
            resume_at: int | None = None
            if header is not None:  # an intact header shows where to continue
                resume_at = offset + header.total_bytes
            elif offset < self._data_end:
                resume_at = self._resync.batch_after(offset)
            if resume_at is None or resume_at >= self.limit:
                begin, parsed = damage
                yield SegmentEnd(begin, parsed.outcome, parsed.reason, max(0, self._data_end - begin))
                return
            offset = resume_at

    def _parse(self, offset: int) -> tuple[ParseResult, str]:
        """Parse a batch like :func:`parse_batch`, but in windows, to save memory."""
        opening = self._peek(offset, HEADER.size)
        parsed = parse_header(opening, max(0, self.limit - offset), seed(self.salt, offset))
        header = parsed.header
        if parsed.outcome is not ParseOutcome.WHOLE or header is None:
            return parsed, ""
        position, end, checksum = offset + HEADER.size, offset + header.total_bytes - TRAILER.size, 0
        route = bytes(self._peek(position, header.route_bytes)).decode("ascii", "replace")
        while position < end:
            part = self._peek(position, end - position, least=1)
            if not part:
                return ParseResult(ParseOutcome.TORN, header, "the file was truncated while it was read"), ""
            checksum = crc32c(part, checksum)
            position += len(part)
        if checksum != header.body_checksum:
            return ParseResult(ParseOutcome.DAMAGED, header, BODY_DAMAGED), ""
        if batch_start(self._peek(end, TRAILER.size), end + TRAILER.size, self.salt) != offset:
            return ParseResult(ParseOutcome.DAMAGED, header, TRAILER_DAMAGED), ""
        return parsed, route

    @cached_property
    def _resync(self) -> Resync:
        ends = self._durable_end, padded(self._data_end)
        return Resync(self.read, self.salt, ends=ends, index=self._index())

    @cached_property
    def _data_end(self) -> int:
        position = self.limit
        while position > 0:
            start = max(0, position - WINDOW_BYTES)
            part = self.read(start, position - start)
            if part != _ZEROS[: len(part)]:  # faster than searching megabytes of zeros
                return start + len(part.rstrip(b"\0"))
            position = start
        return 0

    def _peek(self, offset: int, length: int, least: int | None = None) -> memoryview:
        """Return ``length`` bytes, or at least ``least``; fewer at the limit. The next call may overwrite them."""
        inside = offset - self._window_offset
        if inside < 0 or inside + (least or length) > len(self._window):
            if self._memory is None:  # reuse is faster than allocation
                self._memory = memoryview(bytearray(WINDOW_BYTES))
            filled, window_bytes = 0, min(WINDOW_BYTES, self.limit - offset)
            while filled < window_bytes:
                count = os.preadv(self._descriptor, [self._memory[filled:window_bytes]], offset + filled)
                if count == 0:
                    break
                filled += count
            self._window, self._window_offset, inside = self._memory[:filled], offset, 0
        return self._window[inside : inside + length]


class Resync:
    """Search for the first batch after damage.

    Batches should end at ``ends``. Entries of ``index`` that contradict the segment are ignored.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], salt: int, *, ends: Iterable[int], index: SparseIndex | None
    ) -> None:
        self._read = read
        self._salt = salt
        self._anchors = sorted({*self._confirmed_positions(index or SparseIndex()), *filter(self._batch_start, ends)})

    def batch_after(self, position: int) -> int | None:
        """Return where the first batch after damage at ``position`` begins; None if unknown."""
        number = bisect_right(self._anchors, position)
        if number == len(self._anchors):
            return None
        end = anchor = self._anchors[number]
        while begin := self._batch_start(end):
            if begin <= position:
                return end
            end = begin
            if anchor - end >= SPARSE_INTERVAL_BYTES:  # an anchor nearer to the next damage
                insort(self._anchors, end)
                anchor = end
        return self._start_of_chain(position, end)

    def _batch_start(self, end: int) -> int | None:
        """Return the start of the batch before ``end``; None if the trailer is damaged."""
        return batch_start(self._read(max(0, end - TRAILER.size), TRAILER.size), end, self._salt)

    def _confirmed_positions(self, index: SparseIndex) -> Iterator[int]:
        """Yield the positions of index entries that match the segment."""
        for sequence, position, time_ns in index.entries:
            header = decode_header(self._read(position, HEADER.size), 0, seed(self._salt, position))
            if header is not None and (header.base_sequence, header.append_time_ns) == (sequence, time_ns):
                yield position

    def _start_of_chain(self, position: int, end: int) -> int:
        """Return the first position from which headers lead exactly to ``end``; ``end`` if there is none."""
        dead_ends: set[int] = set()
        for candidate in self._header_positions(position + ALIGNMENT, end):
            at, visited = candidate, set[int]()
            while at < end and at not in dead_ends:
                visited.add(at)
                header = decode_header(self._read(at, HEADER.size), 0, seed(self._salt, at))
                if header is None:
                    break
                at += header.total_bytes
            if at == end:
                return candidate
            dead_ends |= visited
        return end

    def _header_positions(self, start: int, end: int) -> Iterator[int]:
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
            # to the first header that this window cuts off
            offset += max(ALIGNMENT, len(window) - HEADER.size + ALIGNMENT & -ALIGNMENT)
