"""Batches of one segment in order, in raw or sealed form.

Positions are offsets in the raw form, so that sealing does not change them. Readers verify raw batches. The sealer
has verified sealed batches, whose frames have checksums.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.files.safe_open import open_file, open_regular
from wald.format.batch import HEADER, Batches, BatchHeader, Flag, StoredBatch, decode_header, seed
from wald.format.log_state import BadControl, Peer, decode_peer, peer_position
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, Frame, SealedIndex
from wald.format.segment import SEGMENT_HEADER, SEGMENT_MAGIC, BadHeader, SegmentHeader, decode_segment_header
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import FIRST_BATCH, WINDOW_BYTES, DamagedBytes, RawFile, SegmentEnd
from wald.segments.sealed_file import SealedFile

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


@dataclass(frozen=True, slots=True)
class SkippedBatches:
    """Unread batches up to ``position``. Records ``first_sequence`` ≤ s < ``next_sequence`` begin in them."""

    position: int
    first_sequence: int
    next_sequence: int


@dataclass(frozen=True, slots=True)
class DroppedBatches(SkippedBatches):
    """Batches that shrinking dropped. The last was appended at ``latest_ns``."""

    latest_ns: int


SegmentItem = StoredBatch | DamagedBytes | SkippedBatches

Routes = frozenset[str] | None
CanSkip = Callable[[bytes, int], bool]
"""Returns True if a reader needs no record of the batches in some bytes, starting at an offset."""

_DROPPED = int(Flag.DROPPED)  # enums are slow
_NO_LIMIT = 1 << 63


def as_item(batch: StoredBatch) -> StoredBatch | DroppedBatches:
    """Return a batch of zeros as :class:`DroppedBatches`, and any other batch unchanged."""
    header = batch.header
    if header.flags & _DROPPED:
        return DroppedBatches(batch.end, header.base_sequence, header.end_sequence, header.append_time_ns)
    return batch


class OpenSegment(ABC):
    """Open segment. Reading a raw or salvaged segment to the end sets ``tail``."""

    salt: int | None = None  # only a repair changes it; None if unknown
    _descriptor: int

    def __init__(self, segment: Segment) -> None:
        self.base_sequence = segment.base_sequence
        self.path = segment.path
        self.tail: SegmentEnd | None = None

    def close(self) -> None:
        os.close(self._descriptor)

    @abstractmethod
    def batches(
        self, position: int, limit: int | None, routes: Routes = None, can_skip: CanSkip | None = None, /
    ) -> Iterator[SegmentItem]:
        """Yield batches and damage from ``position`` to ``limit``; None reads to the end.

        A sealed segment skips frames without ``routes``, and decompressed frames that ``can_skip`` accepts. Only a
        search gives ``can_skip``: it keeps all processors busy, so no frame is decompressed ahead.
        """

    def file_offset(self, position: int) -> int:
        """Return the file offset of a raw byte or its frame."""
        return position

    def position_of_sequence(self, sequence: int, limit: int | None) -> int:  # noqa: ARG002
        """Return a position from which reading finds ``sequence``, if it begins in this segment."""
        return FIRST_BATCH

    def position_of_time(self, time_ns: int, limit: int | None) -> int:  # noqa: ARG002
        """Return a position from which reading finds all records of ``time_ns`` or later."""
        return FIRST_BATCH

    def first_time_ns(self, limit: int | None) -> int | None:
        headers = (item.header for item in self.batches(FIRST_BATCH, limit) if isinstance(item, StoredBatch))
        return next((header.append_time_ns for header in headers if not header.is_control), None)

    def peer(self, number: int) -> Peer | None:
        item = next(self.batches(peer_position(number), None), None)
        if isinstance(item, StoredBatch) and item.header.is_control and item.header.peer == number:
            with suppress(BadControl):
                return decode_peer(item.payload)
        return None

    def is_replaced(self, *, if_removed: bool) -> bool:  # noqa: ARG002
        """Return True if the path now names another file; ``if_removed`` if it names no file.

        After a failed write, the writer continues in a copy.
        """
        return False


class RawSegment(OpenSegment):
    """Open raw segment, readable even after the sealer has replaced the file."""

    salt: int

    def __init__(self, segment: Segment, log_id: bytes) -> None:
        super().__init__(segment)
        self._find_index = partial(find_index, segment.path.parent, log_id, segment.base_sequence)
        self._descriptor = open_regular(segment.path)
        try:
            raw = RawFile(self._descriptor, index=self._find_index)
            self.salt = raw.salt
            header: SegmentHeader | None = None
            try:
                header = raw.header()
            except BadHeader:
                if (first := self._header_at(FIRST_BATCH)) is not None and first.is_control:
                    header = SegmentHeader(log_id, first.base_sequence, first.epoch, 0, raw.salt)
            check_name(segment, log_id, header)
        except BaseException:
            self.close()
            raise

    def is_replaced(self, *, if_removed: bool) -> bool:
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return if_removed

    def position_of_sequence(self, sequence: int, limit: int | None) -> int:
        return self._last_position(limit, lambda base, _: base <= sequence)

    def position_of_time(self, time_ns: int, limit: int | None) -> int:
        return self._last_position(limit, lambda _, appended_ns: appended_ns < time_ns)

    def _last_position(self, limit: int | None, is_early: Callable[[int, int], bool]) -> int:
        """Return the last indexed position that ``is_early`` accepts, or the first batch's if the index is wrong."""
        for sequence, position, time_ns in reversed(self._find_index().entries):
            if (limit is None or position < limit) and is_early(sequence, time_ns):
                header = self._header_at(position)
                is_confirmed = header is not None and is_early(header.base_sequence, header.append_time_ns)
                return position if is_confirmed else FIRST_BATCH
        return FIRST_BATCH

    def batches(self, position: int, limit: int | None, *_: object) -> Iterator[SegmentItem]:
        self.tail = None
        raw = RawFile(self._descriptor, limit=limit, index=self._find_index)
        salt = raw.salt
        window_bytes = WINDOW_BYTES
        while True:
            data = raw.read(position, window_bytes)
            batches = Batches(data, position=position, salt=salt)
            yield from map(as_item, batches)
            position += batches.end
            rest_bytes, header = len(data) - batches.end, batches.rest.header
            needed_bytes = header.total_bytes if header else HEADER.size
            if rest_bytes < needed_bytes <= raw.limit - position and (batches.end or window_bytes < needed_bytes):
                window_bytes = max(WINDOW_BYTES, needed_bytes)
                continue
            item = next(raw.scan(start=position))
            if isinstance(item, DamagedBytes):
                yield item
                position = item.end
            elif isinstance(item, SegmentEnd):
                self.tail = item
                return
            window_bytes = WINDOW_BYTES

    def _header_at(self, position: int) -> BatchHeader | None:
        return decode_header(os.pread(self._descriptor, HEADER.size, position), 0, seed(self.salt, position))


class SealedSegment(OpenSegment):
    """Open sealed segment."""

    def __init__(self, segment: Segment, log_id: bytes) -> None:
        super().__init__(segment)
        self._file = SealedFile(segment.path)
        self._pool: ThreadPoolExecutor | None = None
        self._read_ahead: tuple[int, Future[bytes]] | None = None  # next frame: number and data
        self.index = self._file.index
        self.salt = self.index.salt
        try:
            check_name(segment, log_id, self.index)
        except Misplaced:
            self._file.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def file_offset(self, position: int) -> int:
        frames = self.index.frames
        number = bisect_right(frames, position, key=lambda frame: frame.raw_offset) - 1
        return frames[number].offset if number >= 0 else 0

    def position_of_sequence(self, sequence: int, limit: int | None) -> int:  # noqa: ARG002
        frames = self.index.frames
        number = bisect_right(frames, sequence, key=lambda frame: frame.next_sequence)
        return max(frames[number].raw_offset, FIRST_BATCH) if number < len(frames) else self.index.raw_bytes

    def position_of_time(self, time_ns: int, limit: int | None) -> int:  # noqa: ARG002
        frames = self.index.frames
        late_offsets = (frame.raw_offset for frame in frames if max(frame.earliest_ns, time_ns) <= frame.latest_ns)
        return max(next(late_offsets, self.index.raw_bytes), FIRST_BATCH)

    def first_time_ns(self, limit: int | None) -> int | None:  # noqa: ARG002
        return next((frame.earliest_ns for frame in self.index.frames if frame.earliest_ns <= frame.latest_ns), None)

    def peer(self, number: int) -> Peer | None:
        return self._peers.get(number)

    @cached_property
    def _peers(self) -> dict[int, Peer]:
        with suppress(BadSealed):
            return self.index.peers()
        return {}

    def batches(
        self, position: int, limit: int | None, routes: Routes = None, can_skip: CanSkip | None = None, /
    ) -> Iterator[SegmentItem]:
        index = self.index
        end = _NO_LIMIT if limit is None else limit
        names = index.routes.names
        route_ids = None if routes is None else {i for i, route in enumerate(names) if route in routes}
        first = max(0, bisect_right(index.frames, position, key=lambda frame: frame.raw_offset) - 1)
        substitutes = {
            number: self._substitute(frame, route_ids)
            for number, frame in enumerate(index.frames[first:], first)
            if frame.raw_offset < end and frame.raw_offset + frame.raw_bytes > position
        }
        needed = [number for number, substitute in substitutes.items() if substitute is None]
        next_needed = dict(pairwise(needed)) if can_skip is None else {}
        for number, substitute in substitutes.items():
            if substitute is not None:
                yield substitute
            else:
                yield from self._frame_items(number, next_needed.get(number), position, end, can_skip)
        if end >= index.raw_bytes:
            yield SkippedBatches(index.raw_bytes, index.next_sequence, index.next_sequence)

    def _substitute(self, frame: Frame, route_ids: set[int] | None) -> DamagedBytes | SkippedBatches | None:
        """Return the item that replaces a frame's batches; None if the frame must be decompressed."""
        if self.index.was_damaged(frame):
            return DamagedBytes(frame.raw_offset, frame.raw_bytes, "damaged before the segment was sealed")
        # Only the decompressed batches of a shrunk segment reveal the records dropped between them.
        if self.index.shrunk is not None:
            is_needed = bool(frame.routes) or frame.raw_offset == 0
        else:
            is_needed = route_ids is None or not route_ids.isdisjoint(frame.routes)
        return None if is_needed else _skipped_batches(frame)

    def _frame_items(
        self, number: int, following: int | None, position: int, limit: int, can_skip: CanSkip | None
    ) -> Iterator[SegmentItem]:
        """Yield the items of frame ``number`` while frame ``following`` is being decompressed."""
        frame = self.index.frames[number]
        end = frame.raw_offset + frame.raw_bytes
        reason = ""
        try:
            data = self._load_frame(number, following)
        except Damaged as error:
            reason = error.message.removeprefix(f"{self.path}: offset {frame.offset}: ")
            data = self._file.readable_start(number)
        begin = FIRST_BATCH if frame.raw_offset == 0 else 0
        is_shrunk = self.index.shrunk is not None
        # Before shrinking, a reader may have stopped inside what is now one batch.
        at = begin if is_shrunk else max(position - frame.raw_offset, begin)
        if can_skip is not None and not (reason or is_shrunk or end > limit) and can_skip(data, at):
            yield _skipped_batches(frame)
            return
        batches = Batches(data, at, position=frame.raw_offset, salt=self.index.salt, verified=not reason)
        for batch in (each for each in batches if each.end > position) if is_shrunk else batches:
            if batch.position >= limit:
                return
            yield as_item(batch)
        if (at := frame.raw_offset + batches.end) < min(end, limit):
            yield DamagedBytes(at, end - at, reason or "no valid batch header")

    def _load_frame(self, number: int, following: int | None) -> bytes:
        if self._pool is None:
            data = self._file.frame(number)
            if following is not None:
                from concurrent.futures import ThreadPoolExecutor  # takes 10 ms

                self._pool = ThreadPoolExecutor(1, "wald-read-ahead")
            return data
        ahead, self._read_ahead = self._read_ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == number else self._pool.submit(self._file.frame, number)
        if following is not None:
            self._read_ahead = (following, self._pool.submit(self._file.frame, following))
        return future.result()


def _skipped_batches(frame: Frame) -> SkippedBatches:
    extent = frame.raw_offset + frame.raw_bytes, frame.first_sequence, frame.next_sequence
    if frame.routes or frame.latest_ns < frame.earliest_ns:
        return SkippedBatches(*extent)
    return DroppedBatches(*extent, frame.latest_ns)


class Misplaced(Damaged):
    """File whose header names another segment or log."""


def identify(path: Path) -> tuple[Kind, SegmentHeader | SealedIndex | None] | None:
    """Return a segment's form, and the header or index if readable; None for any other file."""
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


def require_matching_name(segment: Segment, log_id: bytes) -> None:
    """Raise Misplaced if a readable header does not match the segment's name."""
    contents = None
    with suppress(Damaged):
        contents = identify(segment.path)
    if contents is None:
        return
    form, header = contents
    check_name(segment, log_id, header)
    if form is not segment.kind.form:
        description = "a raw segment" if form is Kind.RAW else "a sealed segment"
        raise _misplaced(segment, f"offset 0: the file contains {description}, so its name is wrong")


def check_name(segment: Segment, log_id: bytes, header: SegmentHeader | SealedIndex | None) -> None:
    if header is not None and header.log_id != log_id:
        raise _misplaced(segment, f"offset 16: the segment belongs to log {header.log_id.hex()}", foreign=True)
    if header is not None and header.base_sequence != segment.base_sequence:
        raise _misplaced(segment, f"offset 32: the file contains segment {header.base_sequence}, so its name is wrong")


def _misplaced(segment: Segment, reason: str, *, foreign: bool = False) -> Misplaced:
    return Misplaced(
        f"{segment.path}: {reason}",
        case="segment-of-other-log" if foreign else "segment-misnamed",
        directory=segment.path.parent,
    )
