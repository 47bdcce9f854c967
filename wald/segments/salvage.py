"""Batches of a sealed segment whose index or seek table is damaged.

The index is derived, so no record is lost. The headers of a frame, or else the seek table, show where the next frame
begins. A damaged or truncated frame yields the batches before the damage.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import accumulate

import zstandard

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.files.safe_open import open_regular
from wald.format.batch import HEADER, Batches, ParseOutcome, StoredBatch, decode_header, seed
from wald.format.sealed_index import (
    BadFrame,
    FrameLengths,
    SealedIndex,
    decode_salt,
    read_frame_lengths,
)
from wald.format.segment import BadHeader, SegmentHeader, decode_segment_header
from wald.segments.index_builder import SegmentIndexBuilder, salt_recorded_after
from wald.segments.raw_scan import FIRST_BATCH, SEQUENCES_REPEAT, DamagedBytes, SegmentEnd
from wald.segments.reader import OpenSegment, SegmentItem, as_item, check_name
from wald.segments.sealed_file import FRAME_BYTES, decompress_start, read_seek_table

_STORED_MAX_BYTES = 2 * FRAME_BYTES  # of a compressed frame with several batches


class SalvagedSegment(OpenSegment):
    """Open sealed segment without a usable index. Raises ``error`` if no frame is readable."""

    def __init__(self, segment: Segment, log_id: bytes, error: Damaged) -> None:
        super().__init__(segment)
        self.error = error
        self._gaps: list[tuple[int, int]] = []  # position of damage, offset of its frame
        self._table: dict[int, FrameLengths] = {}  # by offset; empty if the seek table is damaged
        self._descriptor = open_regular(segment.path)
        try:
            self._file_bytes = os.fstat(self._descriptor).st_size
            self.header = self._header()
            check_name(segment, log_id, self.header)
        except BaseException:
            self.close()
            raise

    def file_offset(self, position: int) -> int:
        number = bisect_right(self._gaps, position, key=lambda gap: gap[0]) - 1
        return self._gaps[number][1] if number >= 0 else 0

    def batches(self, position: int, limit: int | None, *_: object) -> Iterator[SegmentItem]:
        return (as_item(found) if isinstance(found, StoredBatch) else found for found in self.stored(position, limit))

    def stored(self, position: int, limit: int | None) -> Iterator[StoredBatch | DamagedBytes]:
        """Yield the items of :meth:`batches`, but DROPPED batches in stored form."""
        self.tail = None
        offset = begin = 0
        expected = self.base_sequence
        while limit is None or begin < limit:
            span, reason = self._span(offset, begin)
            if span.skippable and not reason:
                return  # the index follows the frames
            if begin + span.raw_bytes > position or not span.raw_bytes:
                data, wrong = self._content(offset, begin, span)
                at = FIRST_BATCH if begin == 0 else 0  # one batch of zeros may contain the position
                batches = Batches(data, at, position=begin, salt=self.salt or 0)
                for batch in batches:
                    if limit is not None and batch.position >= limit:
                        return
                    if batch.header.base_sequence < expected:
                        wrong = wrong or SEQUENCES_REPEAT
                        break
                    if batch.end > position:
                        yield batch
                    at = batches.end
                    expected = max(expected, batch.header.end_sequence)
                wrong = wrong or batches.rest.reason
                if not span.raw_bytes:  # the position of the next frame is unknown
                    self._gaps.append((begin + at, offset))
                    left = max(1, self._file_bytes - offset)
                    self.tail = SegmentEnd(begin + at, ParseOutcome.DAMAGED, reason or wrong, left)
                    return
                if at < span.raw_bytes:
                    self._gaps.append((begin + at, offset))
                    yield DamagedBytes(begin + at, span.raw_bytes - at, wrong or reason)
            offset, begin = offset + span.stored_bytes, begin + span.raw_bytes

    def _span(self, offset: int, begin: int) -> tuple[FrameLengths, str]:
        """Return a frame's lengths, 0 if unknown, and the problem with its headers, or ""."""
        listed = self._table.get(offset)
        try:
            own = read_frame_lengths(self._read, offset)
        except BadFrame as error:
            left = self._file_bytes - offset
            return listed or FrameLengths(max(0, left), 0), str(error) if left > 0 else "the file is truncated"
        if listed is None or listed == own or not self._content(offset, begin, own)[1]:
            return own, ""
        return listed, "the frame's headers are damaged"

    def _header(self) -> SegmentHeader | None:
        """Read seek table and header; determine the salt even without them."""
        index_salt = None
        with suppress(Damaged):
            offset, frames = read_seek_table(self.path, self._descriptor)
            *_, (index_bytes, _) = frames
            index_salt = decode_salt(self._read(offset - index_bytes, index_bytes))
            offsets = accumulate((stored for stored, _ in frames), initial=0)
            self._table = {at: FrameLengths(*frame) for at, frame in zip(offsets, frames, strict=False) if all(frame)}
        opening = self._opening(0)
        if not opening and not self._table:
            raise self.error
        try:
            header = decode_segment_header(opening)
        except BadHeader:
            self.salt = salt_recorded_after(self.path.parent, self.base_sequence) if index_salt is None else index_salt
            return None
        self.salt = header.salt
        return header

    def _content(self, offset: int, begin: int, span: FrameLengths) -> tuple[bytes, str]:
        """Decompress a frame, like :func:`decompress_start`."""
        wanted = span.raw_bytes or FRAME_BYTES
        stored_bytes = max(0, min(span.stored_bytes, self._file_bytes - offset))
        if wanted <= FRAME_BYTES:
            stored_bytes = min(stored_bytes, _STORED_MAX_BYTES)
        else:  # a false length must not allocate memory
            header = decode_header(self._opening(offset), 0, seed(self.salt or 0, begin))
            if header is None or header.total_bytes != wanted:
                return b"", f"the frame claims {wanted} bytes, and no batch of that length begins it"
        return decompress_start(self._read(offset, stored_bytes), wanted)

    def _opening(self, offset: int) -> bytes:
        """Return the first 64 bytes of a frame."""
        try:
            with zstandard.ZstdDecompressor().stream_reader(self._read(offset, _STORED_MAX_BYTES)) as stream:
                return stream.read(HEADER.size)
        except zstandard.ZstdError:
            return b""

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def index_salvaged(segment: Segment, log_id: bytes, error: Damaged) -> SealedIndex:
    """Rebuild the index of a sealed segment, with a digest if no frame is damaged."""
    builder = SegmentIndexBuilder(segment.base_sequence)
    damage: list[tuple[int, int]] = []
    digest, frame, digested, end = hashlib.sha256(), b"", 0, 0
    with closing(SalvagedSegment(segment, log_id, error)) as salvaged:
        for found in salvaged.stored(FIRST_BATCH, None):
            if isinstance(found, DamagedBytes):
                damage.append((found.offset, found.length))
            else:
                builder.add(found.position, found.header, found.route)
                end = found.end
                if found.data is not frame:
                    frame = found.data
                    digest.update(frame)
                    digested += len(frame)
        if (tail := salvaged.tail) is not None:
            damage.append((tail.offset, tail.garbage_bytes))
    sha256 = b"" if damage or digested != end else digest.digest()
    header = SegmentHeader(log_id, segment.base_sequence, 0, 0, 0)
    return builder.index(header, end, damage, sha256=sha256)
