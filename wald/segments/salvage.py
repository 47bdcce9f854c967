"""Batches of a sealed segment whose index or seek table is damaged.

The index is derived, so no record is lost. A frame's headers, or else the seek table, show where the next begins. A
damaged or truncated frame yields the batches before the damage.
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
from wald.format.sealed_index import BadFrame, FrameLengths, SealedIndex, decode_salt, read_frame_lengths
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
        self._damage: list[tuple[int, int]] = []  # position of damage, offset of its frame
        self._lengths: dict[int, FrameLengths] = {}  # by offset; empty if the seek table is damaged
        self._descriptor = open_regular(segment.path)
        try:
            self._file_bytes = os.fstat(self._descriptor).st_size
            self.header = self._read_header()
            check_name(segment, log_id, self.header)
        except BaseException:
            self.close()
            raise

    def file_offset(self, position: int) -> int:
        number = bisect_right(self._damage, position, key=lambda damage: damage[0]) - 1
        return self._damage[number][1] if number >= 0 else 0

    def batches(self, position: int, limit: int | None, *_: object) -> Iterator[SegmentItem]:
        return (as_item(item) if isinstance(item, StoredBatch) else item for item in self.stored_items(position, limit))

    def stored_items(self, position: int, limit: int | None) -> Iterator[StoredBatch | DamagedBytes]:
        """Yield the items of :meth:`batches`, but DROPPED batches in stored form."""
        self.tail = None
        offset = raw_offset = 0
        expected = self.base_sequence
        while limit is None or raw_offset < limit:
            lengths, header_problem = self._frame_lengths(offset, raw_offset)
            if lengths.skippable and not header_problem:
                return  # the index follows the frames
            if raw_offset + lengths.raw_bytes > position or not lengths.raw_bytes:
                data, problem = self._content(offset, raw_offset, lengths)
                at = FIRST_BATCH if raw_offset == 0 else 0  # one batch of zeros may contain the position
                batches = Batches(data, at, position=raw_offset, salt=self.salt or 0)
                for batch in batches:
                    if limit is not None and batch.position >= limit:
                        return
                    if batch.header.base_sequence < expected:
                        problem = problem or SEQUENCES_REPEAT
                        break
                    if batch.end > position:
                        yield batch
                    at = batches.end
                    expected = max(expected, batch.header.end_sequence)
                problem = problem or batches.rest.reason
                if not lengths.raw_bytes:  # the position of the next frame is unknown
                    self._damage.append((raw_offset + at, offset))
                    rest_bytes = max(1, self._file_bytes - offset)
                    self.tail = SegmentEnd(raw_offset + at, ParseOutcome.DAMAGED, header_problem or problem, rest_bytes)
                    return
                if at < lengths.raw_bytes:
                    self._damage.append((raw_offset + at, offset))
                    yield DamagedBytes(raw_offset + at, lengths.raw_bytes - at, problem or header_problem)
            offset, raw_offset = offset + lengths.stored_bytes, raw_offset + lengths.raw_bytes

    def _frame_lengths(self, offset: int, raw_offset: int) -> tuple[FrameLengths, str]:
        """Return a frame's lengths, 0 if unknown, and the problem with its headers, or ""."""
        from_table = self._lengths.get(offset)
        try:
            from_headers = read_frame_lengths(self._read, offset)
        except BadFrame as error:
            rest = self._file_bytes - offset
            return from_table or FrameLengths(max(0, rest), 0), str(error) if rest > 0 else "the file is truncated"
        if from_table is None or from_table == from_headers or not self._content(offset, raw_offset, from_headers)[1]:
            return from_headers, ""
        return from_table, "the frame's headers are damaged"

    def _read_header(self) -> SegmentHeader | None:
        """Read seek table and header; find the salt even if both are damaged."""
        index_salt = None
        with suppress(Damaged):
            offset, frames = read_seek_table(self.path, self._descriptor)
            *_, (index_bytes, _) = frames
            index_salt = decode_salt(self._read(offset - index_bytes, index_bytes))
            offsets = accumulate((stored for stored, _ in frames), initial=0)
            self._lengths = {at: FrameLengths(*frame) for at, frame in zip(offsets, frames, strict=False) if all(frame)}
        opening = self._frame_opening(0)
        if not opening and not self._lengths:
            raise self.error
        try:
            header = decode_segment_header(opening)
        except BadHeader:
            self.salt = salt_recorded_after(self.path.parent, self.base_sequence) if index_salt is None else index_salt
            return None
        self.salt = header.salt
        return header

    def _content(self, offset: int, raw_offset: int, lengths: FrameLengths) -> tuple[bytes, str]:
        """Decompress a frame, like :func:`decompress_start`."""
        raw_bytes = lengths.raw_bytes or FRAME_BYTES
        stored_bytes = max(0, min(lengths.stored_bytes, self._file_bytes - offset))
        if raw_bytes <= FRAME_BYTES:
            stored_bytes = min(stored_bytes, _STORED_MAX_BYTES)
        else:  # a false length must not allocate memory
            header = decode_header(self._frame_opening(offset), 0, seed(self.salt or 0, raw_offset))
            if header is None or header.total_bytes != raw_bytes:
                return b"", f"the frame claims {raw_bytes} bytes, but does not begin with a batch of that length"
        return decompress_start(self._read(offset, stored_bytes), raw_bytes)

    def _frame_opening(self, offset: int) -> bytes:
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
    digest, frame, hashed_bytes, end = hashlib.sha256(), b"", 0, 0
    with closing(SalvagedSegment(segment, log_id, error)) as salvaged:
        for item in salvaged.stored_items(FIRST_BATCH, None):
            if isinstance(item, DamagedBytes):
                damage.append((item.offset, item.length))
            else:
                builder.add(item.position, item.header, item.route)
                end = item.end
                if item.data is not frame:
                    frame = item.data
                    digest.update(frame)
                    hashed_bytes += len(frame)
        if (tail := salvaged.tail) is not None:
            damage.append((tail.offset, tail.garbage_bytes))
    sha256 = b"" if damage or hashed_bytes != end else digest.digest()
    header = SegmentHeader(log_id, segment.base_sequence, 0, 0, 0)
    return builder.index(header, end, damage, sha256=sha256)
