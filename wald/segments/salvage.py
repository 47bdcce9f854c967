"""Batches of a sealed segment whose index or seek table is damaged.

The index is derived, so its loss loses no record. The headers of a frame show where the next one begins; if they are
damaged, the seek table does. A damaged or truncated frame gives the batches before the damage.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate

import zstandard

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.files.safe_open import open_regular
from wald.format.batch import HEADER, Batches, ParseOutcome, StoredBatch, decode_header, seed
from wald.format.sealed_index import (
    SEEK_FOOTER,
    BadFrame,
    BadSealed,
    FrameLengths,
    SealedIndex,
    decode_salt,
    decode_seek_table,
    read_frame_lengths,
    seek_table_bytes,
)
from wald.format.segment import BadHeader, SegmentHeader, decode_segment_header
from wald.segments.index_builder import SegmentIndexBuilder, salt_recorded_after
from wald.segments.raw_scan import FIRST_BATCH, SEQUENCES_REPEAT, DamagedBytes, SegmentEnd
from wald.segments.reader import OpenSegment, Passable, SegmentItem, as_item, check_name
from wald.segments.sealed_file import FRAME_BYTES, decompress_start

_STORED_MAX_BYTES = 2 * FRAME_BYTES  # of a frame of several batches


class SalvagedSegment(OpenSegment):
    """A sealed segment without a usable index, because of ``error``, raised if no frame is readable."""

    def __init__(self, segment: Segment, log_id: bytes, error: Damaged) -> None:
        super().__init__(segment)
        self.error = error
        self._gaps: list[tuple[int, int]] = []  # position of damage, offset of its frame
        self._salt: int | None = None
        self._index_salt: int | None = None
        self._descriptor = open_regular(segment.path)
        try:
            self._file_bytes = os.fstat(self._descriptor).st_size
            self._table = self._seek_table()
            self.header = self._header()
            check_name(segment, log_id, self.header)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def salt(self) -> int | None:
        return self._salt

    def file_offset(self, position: int) -> int:
        number = bisect_right(self._gaps, position, key=lambda gap: gap[0]) - 1
        return self._gaps[number][1] if number >= 0 else 0

    def position_of_sequence(self, sequence: int, limit: int | None) -> int:  # noqa: ARG002
        return FIRST_BATCH

    def position_of_time(self, time_ns: int, limit: int | None) -> int:  # noqa: ARG002
        return FIRST_BATCH

    def batches(
        self,
        position: int,
        limit: int | None,
        routes: frozenset[str] | None = None,  # noqa: ARG002
        passable: Passable | None = None,  # noqa: ARG002
    ) -> Iterator[SegmentItem]:
        return (as_item(found) if isinstance(found, StoredBatch) else found for found in self.stored(position, limit))

    def stored(self, position: int, limit: int | None) -> Iterator[StoredBatch | DamagedBytes]:
        """Yield the items of :meth:`batches`, with DROPPED batches in stored form."""
        self.tail = None
        offset = begin = 0
        expected = self.base_sequence
        while limit is None or begin < limit:
            span, reason = self._span(offset, begin)
            if span.skippable and not reason:
                return  # the index: all frames are complete
            if begin + span.raw_bytes > position or not span.raw_bytes:
                data, wrong = self._content(offset, begin, span)
                at = FIRST_BATCH if begin == 0 else 0  # a dropped run of batches may contain the position
                batches = Batches(data, at, position=begin, salt=self._salt or 0)
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
        """Return the lengths of a frame, 0 if unknown, and why its headers are unusable, or ""."""
        listed = self._listed(offset)
        try:
            own = read_frame_lengths(self._read, offset)
        except BadFrame as error:
            left = self._file_bytes - offset
            unknown = FrameLengths(max(0, left), 0)
            return listed or unknown, str(error) if left > 0 else "the file is cut short"
        if listed is None or listed == own or not self._content(offset, begin, own)[1]:
            return own, ""
        return listed, "the frame's headers are damaged"

    def _header(self) -> SegmentHeader | None:
        """Determine the salt, even without a readable header."""
        opening = self._opening(0)
        if not opening and not self._table:
            raise self.error
        try:
            header = decode_segment_header(opening)
        except BadHeader:
            self._salt = self._index_salt
            if self._salt is None:
                self._salt = salt_recorded_after(self.path.parent, self.base_sequence)
            return None
        self._salt = header.salt
        return header

    def _content(self, offset: int, begin: int, span: FrameLengths) -> tuple[bytes, str]:
        wanted = span.raw_bytes or FRAME_BYTES
        stored_bytes = max(0, min(span.stored_bytes, self._file_bytes - offset))
        if wanted > FRAME_BYTES and self._first_batch_bytes(offset, begin) != wanted:
            return b"", f"the frame claims {wanted} bytes, and no batch of that length begins it"
        if wanted <= FRAME_BYTES:
            stored_bytes = min(stored_bytes, _STORED_MAX_BYTES)
        return decompress_start(self._read(offset, stored_bytes), wanted)

    def _first_batch_bytes(self, offset: int, begin: int) -> int:
        """Return the length of the first batch, because the claim of a frame must not allocate memory."""
        opening = self._opening(offset)
        if len(opening) < HEADER.size:
            return 0
        header = decode_header(opening, 0, seed(self._salt or 0, begin))
        return header.total_bytes if header is not None else 0

    def _opening(self, offset: int) -> bytes:
        try:
            with zstandard.ZstdDecompressor().stream_reader(self._read(offset, _STORED_MAX_BYTES)) as stream:
                return stream.read(HEADER.size)
        except zstandard.ZstdError:
            return b""

    def _seek_table(self) -> list[tuple[int, int]]:
        """Return (offset, raw bytes) of every frame, and the end; [] if the seek table is damaged."""
        size = self._file_bytes
        try:
            length = seek_table_bytes(self._read(max(0, size - SEEK_FOOTER.size), SEEK_FOOTER.size))
            if length > size:
                return []
            *frames, (index_bytes, _) = decode_seek_table(self._read(size - length, length), file_bytes=size)
        except BadSealed:
            return []
        self._index_salt = decode_salt(self._read(size - length - index_bytes, index_bytes))
        offsets = accumulate((stored for stored, _ in frames), initial=0)
        return list(zip(offsets, [*(raw for _, raw in frames), 0], strict=True))

    def _listed(self, offset: int) -> FrameLengths | None:
        number = bisect_right(self._table, offset, key=lambda entry: entry[0]) - 1
        if number < 0 or number + 1 >= len(self._table) or self._table[number][0] != offset:
            return None
        raw_bytes = self._table[number][1]
        return FrameLengths(self._table[number + 1][0] - offset, raw_bytes) if raw_bytes else None

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def index_salvaged(segment: Segment, log_id: bytes, error: Damaged) -> SealedIndex:
    """Return an index equivalent to the lost one; with a digest if no frame is damaged."""
    builder = SegmentIndexBuilder(segment.base_sequence, 0)
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
    return builder.index(log_id=log_id, epoch=0, raw_bytes=end, damage=damage, sha256=sha256)
