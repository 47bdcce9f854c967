"""Batches of a sealed segment whose index is damaged.

A sealed segment whose index or seek table cannot be trusted: its frames are walked from the front.

The index is derived, so its loss loses no record. A frame's own headers say where the next frame begins; if they are
damaged, the seek table does. Every batch is checked against its checksums, and of a frame that is damaged or cut
short the batches in front of the damage are given. Memory: one frame.
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
from wald.format.log_state import Peer, peer_position
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
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, SegmentEnd
from wald.segments.reader import Met, Passable, as_item, check_name, first_time_ns, introduced_peer
from wald.segments.sealed_file import FRAME_BYTES, beginning

_STORED_MAX_BYTES = 2 * FRAME_BYTES  # of a frame that holds as much as a sealer puts together


class SalvagedSegment:
    """
    Args:
        error: why it cannot be opened as it should.

    Attributes:
        tail: after :meth:`batches`, where its frames ended.
        header: of the segment; None if it is lost.

    Raises:
        FileNotFoundError: it has been reclaimed.
        Misplaced: it is not the one that its name says.
        Damaged: ``error``; no frame is there.
    """

    def __init__(self, segment: Segment, log_id: bytes, error: Damaged) -> None:
        self.base_sequence = segment.base_sequence
        self.path = segment.path
        self.error = error
        self.tail: SegmentEnd | None = None
        self._places: list[tuple[int, int]] = []
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
        """The salt; see :attr:`RawSegment.salt`. None if unknown."""
        return self._salt

    def file_offset(self, position: int) -> int:
        """Where the frame begins that holds a position at which damage was met."""
        number = bisect_right(self._places, position, key=lambda place: place[0]) - 1
        return self._places[number][1] if number >= 0 else 0

    def replaced(self, *, removed: bool) -> bool:  # noqa: ARG002
        return False

    def position_of_sequence(self, _sequence: int, _limit: int | None) -> int:
        return FIRST_BATCH

    def position_of_time(self, _time_ns: int, _limit: int | None) -> int:
        return FIRST_BATCH

    def first_time_ns(self, limit: int | None) -> int | None:
        """Append time of the first batch; None if there is none."""
        return first_time_ns(self.batches(FIRST_BATCH, limit))

    def peer(self, number: int) -> Peer | None:
        """As :meth:`RawSegment.peer`."""
        return introduced_peer(self.batches(peer_position(number), None), number)

    def batches(
        self,
        position: int,
        limit: int | None,
        _routes: frozenset[str] | None = None,
        _passable: Passable | None = None,
    ) -> Iterator[Met]:
        """As :meth:`RawSegment.batches`; positions are those of the raw segment."""
        return (as_item(met) if isinstance(met, StoredBatch) else met for met in self.stored(position, limit))

    def stored(self, position: int, limit: int | None) -> Iterator[StoredBatch | DamagedBytes]:
        """The same, with the batches that stand in the place of dropped ones as they are stored."""
        self.tail = None
        offset = begin = 0
        expected = self.base_sequence
        while limit is None or begin < limit:
            span, reason = self._span(offset, begin)
            if span.skippable and not reason:
                return  # the index: every frame was there
            if begin + span.raw_bytes > position or not span.raw_bytes:
                data, wrong = self._content(offset, begin, span)
                at = FIRST_BATCH if begin == 0 else 0  # a dropped run of batches may contain the position
                batches = Batches(data, at, position=begin, salt=self._salt or 0)
                for batch in batches:
                    if limit is not None and batch.position >= limit:
                        return
                    if batch.header.base_sequence < expected:
                        wrong = wrong or "its sequences were given out before"
                        break
                    if batch.end > position:
                        yield batch
                    at = batches.end
                    expected = max(expected, batch.header.end_sequence)
                wrong = wrong or batches.rest.reason
                if not span.raw_bytes:  # the next frame cannot be found
                    self._places.append((begin + at, offset))
                    left = max(1, self._file_bytes - offset)
                    self.tail = SegmentEnd(begin + at, ParseOutcome.DAMAGED, reason or wrong, left)
                    return
                if at < span.raw_bytes:
                    self._places.append((begin + at, offset))
                    yield DamagedBytes(begin + at, span.raw_bytes - at, wrong or reason)
            offset, begin = offset + span.stored_bytes, begin + span.raw_bytes

    def _span(self, offset: int, begin: int) -> tuple[FrameLengths, str]:
        """The frame at ``offset``, and what is wrong with its headers; of no length if its length is not known."""
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
        """Return the header of the segment, with which the first frame begins; None if it is lost."""
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
        """What a frame holds, as far as it can be decompressed, and what is wrong with it; "": nothing is."""
        wanted = span.raw_bytes or FRAME_BYTES
        stored_bytes = max(0, min(span.stored_bytes, self._file_bytes - offset))
        if wanted > FRAME_BYTES and self._long_batch_bytes(offset, begin) != wanted:
            return b"", f"the frame claims {wanted} bytes, and no batch of that length begins it"
        if wanted <= FRAME_BYTES:
            stored_bytes = min(stored_bytes, _STORED_MAX_BYTES)
        return beginning(self._read(offset, stored_bytes), wanted)

    def _long_batch_bytes(self, offset: int, begin: int) -> int:
        """How long the batch is with which a frame begins: what the frame claims is not what memory is taken for."""
        opening = self._opening(offset)
        if len(opening) < HEADER.size:
            return 0
        header = decode_header(opening, 0, seed(self._salt or 0, begin))
        return header.total_bytes if header is not None else 0

    def _opening(self, offset: int) -> bytes:
        """The first 64 bytes of the content of a frame: a batch's header, or the segment's."""
        try:
            with zstandard.ZstdDecompressor().stream_reader(self._read(offset, _STORED_MAX_BYTES)) as stream:
                return stream.read(HEADER.size)
        except zstandard.ZstdError:
            return b""

    def _seek_table(self) -> list[tuple[int, int]]:
        """Every frame's (offset, raw bytes), and where the last one ends, by the seek table; empty if it is damaged."""
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
        """The frame at ``offset`` by the seek table; None if it is not listed there."""
        number = bisect_right(self._table, offset, key=lambda entry: entry[0]) - 1
        if number < 0 or number + 1 >= len(self._table) or self._table[number][0] != offset:
            return None
        raw_bytes = self._table[number][1]
        return FrameLengths(self._table[number + 1][0] - offset, raw_bytes) if raw_bytes else None

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def index_salvaged(segment: Segment, log_id: bytes, error: Damaged) -> SealedIndex:
    """What the index that is lost has said, by the frames; with a digest if all of them are there.

    Args:
        error: as for :class:`SalvagedSegment`, which says what is raised.
    """
    contents = SegmentIndexBuilder(segment.base_sequence, 0)
    damage: list[tuple[int, int]] = []
    digest, frame, digested, end = hashlib.sha256(), b"", 0, 0
    with closing(SalvagedSegment(segment, log_id, error)) as salvaged:
        for met in salvaged.stored(FIRST_BATCH, None):
            if isinstance(met, DamagedBytes):
                damage.append((met.offset, met.length))
            else:
                contents.add(met.position, met.header, met.route)
                end = met.end
                if met.data is not frame:
                    frame = met.data
                    digest.update(frame)
                    digested += len(frame)
        if (tail := salvaged.tail) is not None:
            damage.append((tail.offset, tail.garbage_bytes))
    sha256 = b"" if damage or digested != end else digest.digest()
    return contents.index(log_id=log_id, epoch=0, raw_bytes=end, damage=damage, sha256=sha256)
