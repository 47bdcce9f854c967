"""Batches of one segment in order, in raw or sealed form.

One open segment as whole batches in order, from a position on, whichever form it is in.

Positions are offsets in the raw segment; the sealed form has the same ones, so a place stays a place when a segment is
sealed. Raw batches are checked against their checksums as they are read. Sealed ones are not checked again: the sealer
has, and each frame has a checksum of its own that decompression holds it to. Of a frame that fails it, the batches in
front of the damage are given, each by its own checksums.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Union

import zstandard

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.files.safe_open import open_file, open_regular
from wald.format.batch import HEADER, Batches, BatchHeader, Flag, StoredBatch, decode_header, seed
from wald.format.log_state import BadPeer, Peer, decode_peer, peer_position
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, Frame, RouteTable, SealedIndex
from wald.format.segment import (
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    BadHeader,
    SegmentHeader,
    SparseIndex,
    decode_segment_header,
)
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import FIRST_BATCH, WINDOW_BYTES, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.segments.sealed_file import ReadAhead, SealedFile

if TYPE_CHECKING:
    from wald.segments.salvage import SalvagedSegment


@dataclass(frozen=True, slots=True)
class SkippedBatches:
    """Batches up to ``position`` that the index says are not wanted: records first ≤ s < next begin in them."""

    position: int
    first_sequence: int
    next_sequence: int


@dataclass(frozen=True, slots=True)
class DroppedBatches(SkippedBatches):
    """Batches that relief has dropped; the last of them was appended at ``latest_ns``."""

    latest_ns: int


Met = StoredBatch | DamagedBytes | SkippedBatches

Passable = Callable[[bytes, int], bool]
"""Whether the batches in these bytes, from an offset on, may be passed over: a reader wants no record of them."""

_DROPPED = int(Flag.DROPPED)  # enums are slow


def as_item(batch: StoredBatch) -> StoredBatch | DroppedBatches:
    """The batch itself, or what was dropped if it only stands in the place of that."""
    header = batch.header
    if header.flags & _DROPPED:
        return DroppedBatches(batch.end, header.base_sequence, header.end_sequence, header.append_time_ns)
    return batch


class RawSegment:
    """A raw segment. The descriptor keeps it readable after the sealer has replaced it.

    Raises:
        FileNotFoundError: it has been replaced or reclaimed already.
        Misplaced: it is not the one that its name says.
        Damaged: it is not a regular file.
    """

    def __init__(self, segment: Segment, log_id: bytes) -> None:
        self.base_sequence = segment.base_sequence
        self.path = segment.path
        self.tail: SegmentEnd | None = None
        self._log_id = log_id
        self._descriptor = open_regular(segment.path)
        try:
            check_name(segment, log_id, self._own_header(log_id))
        except BaseException:
            os.close(self._descriptor)
            raise

    def _own_header(self, log_id: bytes) -> SegmentHeader | None:
        """The header; without a good one what the first batch says. Only ``wald verify`` reports a damaged header."""
        try:
            return RawFile(self._descriptor).header()
        except BadHeader:
            first = self._header_at(FIRST_BATCH)
            if first is None or not first.is_control:
                return None
            return SegmentHeader(log_id, first.base_sequence, first.epoch, 0, self._raw().salt)

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def salt(self) -> int | None:
        """The salt of its batches. Only a repair gives a segment another one."""
        return self._raw().salt

    def file_offset(self, position: int) -> int:
        """Where in the file a position is found."""
        return position

    def replaced(self, *, removed: bool) -> bool:
        """Return True if the path now names another file: the writer continues in a copy after a failed write.

        Args:
            removed: the result if the path names no file.
        """
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return removed

    def position_of_sequence(self, sequence: int, limit: int | None) -> int:
        """A position from which a scan meets the record numbered ``sequence``, if it begins in this segment."""
        position = self._index(limit).position_of_sequence(sequence)
        landed = self._header_at(position)
        return position if landed and landed.base_sequence <= sequence else FIRST_BATCH

    def position_of_time(self, time_ns: int, limit: int | None) -> int:
        """A position from which a scan meets every record of this segment appended at ``time_ns`` or later."""
        position = self._index(limit).position_of_time(time_ns)
        landed = self._header_at(position)
        return position if landed and landed.append_time_ns < time_ns else FIRST_BATCH

    def first_time_ns(self, limit: int | None) -> int | None:
        """Append time of the first batch; None if there is none."""
        return first_time_ns(self.batches(FIRST_BATCH, limit))

    def batches(
        self,
        position: int,
        limit: int | None,
        _routes: frozenset[str] | None = None,
        _passable: Passable | None = None,
    ) -> Iterator[Met]:
        """Every batch from ``position`` to ``limit``; afterwards :attr:`tail` says where and how they ended.

        Args:
            limit: where the readable bytes end; None: where the batches do.
        """
        self.tail = None
        file_bytes = os.fstat(self._descriptor).st_size
        raw = RawFile(
            self._descriptor,
            limit=file_bytes if limit is None else min(limit, file_bytes),
            index=lambda: self._index(limit),
        )
        salt = raw.salt
        asked = WINDOW_BYTES
        while True:
            data = raw.read(position, asked)
            batches = Batches(data, position=position, salt=salt)
            yield from map(as_item, batches)
            position += batches.end
            left, header = len(data) - batches.end, batches.rest.header
            wanted = header.total_bytes if header else HEADER.size
            if left < wanted <= raw.limit - position and (batches.end or asked < wanted):
                asked = max(WINDOW_BYTES, wanted)
                continue
            resumed = self._scanned_at(raw, position)
            if isinstance(resumed, DamagedBytes):
                yield resumed
                position = resumed.offset + resumed.length
            elif isinstance(resumed, SegmentEnd):
                self.tail = resumed
                return
            asked = WINDOW_BYTES

    @staticmethod
    def _scanned_at(raw: RawFile, position: int) -> ScannedBatch | DamagedBytes | SegmentEnd:
        """What stands where no whole batch does."""
        return next(raw.scan(start=position))

    def peer(self, number: int) -> Peer | None:
        """The peer that has this number in the segment; None if it was not introduced, or cannot be read."""
        return introduced_peer(self.batches(peer_position(number), None), number)

    def _header_at(self, position: int) -> BatchHeader | None:
        raw = self._raw()
        return decode_header(raw.read(position, HEADER.size), 0, seed(raw.salt, position))

    def _raw(self) -> RawFile:
        return RawFile(self._descriptor, index=lambda: self._index(None))

    def _index(self, limit: int | None) -> SparseIndex:
        """Return the sparse index without entries from ``limit`` on: it may be ahead of the durable end."""
        index = find_index(self.path.parent, self._log_id, self.base_sequence)
        if limit is not None:
            readable = bisect_left(index.positions, limit)
            for column in (index.sequences, index.positions, index.times_ns):
                del column[readable:]
        return index


class SealedSegment:
    """A sealed segment; what a frame holds from damage on is a gap, and the frames behind it stay readable.

    Raises:
        FileNotFoundError: it has been reclaimed.
        Misplaced: it is not the one that its name says.
        Damaged: its index cannot be read.
    """

    tail: SegmentEnd | None = None

    def __init__(self, segment: Segment, log_id: bytes) -> None:
        self.base_sequence = segment.base_sequence
        self.path = segment.path
        self._file = SealedFile(segment.path)
        self._ahead = ReadAhead(self._file.frame)
        self.index = self._file.index
        try:
            check_name(segment, log_id, self.index)
        except Misplaced:
            self._file.close()
            raise

    def close(self) -> None:
        self._ahead.close()
        self._file.close()

    @property
    def salt(self) -> int | None:
        """The salt; see :attr:`RawSegment.salt`."""
        return self.index.salt

    def file_offset(self, position: int) -> int:
        """Where the frame begins that holds a position."""
        frames = self.index.frames
        number = bisect_right(frames, position, key=lambda frame: frame.raw_offset) - 1
        return frames[number].offset if number >= 0 else 0

    def replaced(self, *, removed: bool) -> bool:  # noqa: ARG002
        return False

    def position_of_sequence(self, sequence: int, _limit: int | None) -> int:
        frames = self.index.frames
        number = bisect_right(frames, sequence, key=lambda frame: frame.next_sequence)
        return max(frames[number].raw_offset, FIRST_BATCH) if number < len(frames) else self.index.raw_bytes

    def position_of_time(self, time_ns: int, _limit: int | None) -> int:
        frames = [frame for frame in self.index.frames if frame.earliest_ns <= frame.latest_ns]
        number = bisect_left(frames, time_ns, key=lambda frame: frame.latest_ns)
        return max(frames[number].raw_offset, FIRST_BATCH) if number < len(frames) else self.index.raw_bytes

    def first_time_ns(self, _limit: int | None) -> int | None:
        return next((frame.earliest_ns for frame in self.index.frames if frame.earliest_ns <= frame.latest_ns), None)

    def peer(self, number: int) -> Peer | None:
        """As :meth:`RawSegment.peer`."""
        return self._peers.get(number)

    @cached_property
    def _peers(self) -> dict[int, Peer]:
        with suppress(BadSealed):
            return self.index.peers()
        return {}

    def batches(
        self,
        position: int,
        limit: int | None,
        routes: frozenset[str] | None = None,
        passable: Passable | None = None,
    ) -> Iterator[Met]:
        """As :meth:`RawSegment.batches`; frames that hold none of ``routes`` are not decompressed.

        Args:
            passable: is asked about each frame that is decompressed, so its checksum is right. Then no frame is
                decompressed ahead, as a search has other work for each processor.
        """
        index = self.index
        names = RouteTable.of(index.routes).names
        wanted = None if routes is None else {i for i, route in enumerate(names) if route in routes}
        first = max(0, bisect_right(index.frames, position, key=lambda frame: frame.raw_offset) - 1)
        readable = {
            number: frame
            for number, frame in enumerate(index.frames[first:], first)
            if frame.raw_offset + frame.raw_bytes > position and (limit is None or frame.raw_offset < limit)
        }
        needed = [
            number
            for number, frame in readable.items()
            if not index.is_damage(frame) and self._is_needed(frame, wanted)
        ]
        following = dict(pairwise(needed)) if passable is None else {}
        for number, frame in readable.items():
            if index.is_damage(frame):
                yield DamagedBytes(frame.raw_offset, frame.raw_bytes, "damaged before it was sealed")
            elif not self._is_needed(frame, wanted):
                yield self._skipped(frame)
            else:
                yield from self._frame(number, following.get(number), position, limit, passable)
        if limit is None or limit >= index.raw_bytes:
            yield SkippedBatches(index.raw_bytes, index.next_sequence, index.next_sequence)

    def _is_needed(self, frame: Frame, wanted: set[int] | None) -> bool:
        """Whether a frame must be decompressed for a reader of the routes ``wanted`` (None: all)."""
        if self.index.shrunk is None:
            return wanted is None or not wanted.isdisjoint(frame.routes)
        return bool(frame.routes) or frame.raw_offset == 0  # only its batches say what was dropped between them

    def _skipped(self, frame: Frame) -> SkippedBatches:
        span = frame.raw_offset + frame.raw_bytes, frame.first_sequence, frame.next_sequence
        if frame.routes or frame.latest_ns < frame.earliest_ns:
            return SkippedBatches(*span)
        return DroppedBatches(*span, frame.latest_ns)

    def _frame(
        self, number: int, following: int | None, position: int, limit: int | None, passable: Passable | None
    ) -> Iterator[Met]:
        frame = self.index.frames[number]
        end = frame.raw_offset + frame.raw_bytes
        reason = ""
        try:
            data = self._ahead.load(number, following)
        except Damaged as error:
            reason = error.message.removeprefix(f"{self.path}: offset {frame.offset}: ")
            data = self._file.beginning(number)
        begin = FIRST_BATCH if frame.raw_offset == 0 else 0
        relieved = self.index.shrunk is not None
        # A reader of the raw segment may have stopped where one batch now replaces several.
        at = begin if relieved else max(position - frame.raw_offset, begin)
        whole = not reason and not relieved and (limit is None or end <= limit)  # only batches show dropped records
        if whole and passable is not None and passable(data, at):
            yield self._skipped(frame)
            return
        batches = Batches(data, at, position=frame.raw_offset, salt=self.index.salt, verified=not reason)
        for batch in (each for each in batches if each.end > position) if relieved else batches:
            if limit is not None and batch.position >= limit:
                return
            yield as_item(batch)
        if (at := frame.raw_offset + batches.end) < (end if limit is None else min(end, limit)):
            yield DamagedBytes(at, end - at, reason or "no valid batch header")


def first_time_ns(batches: Iterator[Met]) -> int | None:
    """Append time of the first of ``batches`` that holds records; None if none does."""
    for found in batches:
        if isinstance(found, StoredBatch) and not found.header.is_control:
            return found.header.append_time_ns
    return None


def introduced_peer(batches: Iterator[StoredBatch | DamagedBytes | SkippedBatches], number: int) -> Peer | None:
    """The peer that the first of ``batches`` introduces under this number; None if it introduces none."""
    found = next(batches, None)
    if not isinstance(found, StoredBatch) or not found.header.is_control or found.header.peer != number:
        return None
    with suppress(BadPeer):
        return decode_peer(found.payload)
    return None


OpenSegment = Union[RawSegment, SealedSegment, "SalvagedSegment"]


def open_segment(segment: Segment, log_id: bytes) -> OpenSegment:
    """A segment in the form it has; a sealed one whose index cannot be trusted frame by frame.

    Raises:
        FileNotFoundError: there is no file of that name any more; a :class:`View` knows where it is then.
        Misplaced: it is not the one that its name says.
        Damaged: nothing in it can be read.
    """
    if segment.kind.form is Kind.RAW:
        return RawSegment(segment, log_id)
    try:
        return SealedSegment(segment, log_id)
    except Misplaced:
        raise
    except Damaged as error:
        from wald.segments.salvage import SalvagedSegment  # it needs this module

        return SalvagedSegment(segment, log_id, error)


class Misplaced(Damaged):
    """A file has the name of a segment and is another one, of this log or of another."""


def identify(path: Path) -> tuple[Kind, SegmentHeader | SealedIndex | None] | None:
    """Return the form (RAW or SEALED) of the segment in a file, and its header or index if that can be read.

    The name of the file does not matter. Return None if it does not begin like a segment.

    Raises:
        FileNotFoundError: the file does not exist.
        Damaged: it is not a regular file.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        start = file.read(SEGMENT_HEADER.size)
        if start.startswith(SEGMENT_MAGIC):
            with suppress(BadHeader):
                return Kind.RAW, decode_segment_header(start)
            return Kind.RAW, None
        if not start.startswith(zstandard.FRAME_HEADER):
            return None
        file.seek(0)
        with suppress(BadHeader, zstandard.ZstdError), zstandard.ZstdDecompressor().stream_reader(file) as stream:
            return Kind.SEALED, decode_segment_header(stream.read(SEGMENT_HEADER.size))
    with suppress(Damaged), SealedFile(path) as sealed:
        return Kind.SEALED, sealed.index
    return Kind.SEALED, None


def require_named(segment: Segment, log_id: bytes) -> None:
    """Check that a file is the segment that its name promises; a file that identifies no segment passes.

    Raises:
        Misplaced: it is another segment, or another form of the segment.
        FileNotFoundError: the file does not exist.
        OSError: it cannot be read.
    """
    try:
        found = identify(segment.path)
    except Damaged:
        return
    if found is None:
        return
    form, header = found
    check_name(segment, log_id, header)
    if form is not segment.kind.form:
        words = {Kind.RAW: "a raw segment", Kind.SEALED: "a sealed segment"}
        raise Misplaced(
            f"{segment.path}: offset 0: contains {words[form]}, which does not match its name",
            case="segment-misnamed",
            directory=segment.path.parent,
        )


def check_name(segment: Segment, log_id: bytes, found: SegmentHeader | SealedIndex | None) -> None:
    """Compare a segment's name with what its header, or its index, says (None: it says nothing).

    Raises:
        Misplaced: it is another log's, or another segment of this one. A copy is never read in its place.
    """
    if found is None or (found.log_id, found.base_sequence) == (log_id, segment.base_sequence):
        return
    if found.log_id != log_id:
        raise Misplaced(
            f"{segment.path}: offset 16: the segment belongs to log {found.log_id.hex()}",
            case="segment-of-other-log",
            directory=segment.path.parent,
        )
    raise Misplaced(
        f"{segment.path}: offset 32: it is segment {found.base_sequence}, not what its name says",
        case="segment-misnamed",
        directory=segment.path.parent,
    )
