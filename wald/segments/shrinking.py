"""Rewriting of a sealed segment without records that no group needs.

Relief: a sealed segment written again without the batches that are not needed any more.

What is dropped is replaced by a batch of zeros of the same length, which has the flag DROPPED. So every batch that is
kept keeps its position and its bytes, what ``zstd -dc`` makes of the file is a raw segment as before, and a reader of
the frames alone learns which sequences were dropped. Zeros compress to next to nothing.

Memory: a few MiB, or a few times the longest batch, and about 60 bytes per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.format.batch import (
    FRAMING_BYTES,
    BatchHeader,
    Buffer,
    Encoding,
    Flag,
    StoredBatch,
    checksum_body,
    encode_batch,
    seed,
)
from wald.format.sealed_index import RouteEntry, SealedIndex, Shrunk, encode_sealed_index, merge_routes
from wald.format.spans import Spans
from wald.segments.index_builder import SegmentIndexBuilder
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.sealed_file import FRAME_BYTES, LEVEL, FrameWriter, SealedFile

Keeps = Callable[[BatchHeader, str], bool]
"""Whether a batch of a route is still needed. A control batch is always kept."""


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """What :func:`relieve_segment` wrote.

    Attributes:
        dropped: what it has dropped of each route; ``index.shrunk`` has in addition what was dropped before.
        stored_bytes: the length of the new file.
        spans: the records that it has dropped, by route.
    """

    index: SealedIndex
    dropped: list[RouteEntry]
    stored_bytes: int
    spans: dict[str, Spans]


def shrink_segment(source: SealedFile, target: int, disk: Disk, keeps: Keeps) -> Shrinkage:
    """Write what ``keeps`` lets stay of a sealed segment; the descriptor ``target`` is not synced or closed.

    Args:
        target: of an empty file.

    Raises:
        Damaged: the source is not all there. It must stay as it is.
        OSError: reading or writing failed.
    """
    old = source.index
    frames = FrameWriter(target, disk, LEVEL)
    writer = _Writer(frames, SegmentIndexBuilder(old.base_sequence, old.salt), old.salt)
    lost = SegmentIndexBuilder(old.base_sequence, old.salt)
    spans: dict[str, Spans] = {}
    writer.add_header(source.frame(0)[:FIRST_BATCH])
    for batch in _batches(source):
        if _is_kept(batch, keeps):
            writer.keep(batch)
        else:
            writer.drop(batch)
            if not batch.header.is_dropped:
                lost.add(batch.position, batch.header, batch.route)
                base, count = batch.header.base_sequence, batch.header.count
                spans.setdefault(batch.route, Spans()).add(base, base + count - 1)
    writer.finish()
    if frames.raw_bytes != old.raw_bytes or writer.contents.next_sequence != old.next_sequence:
        raise _damaged(source.path, "it does not hold what its index says")
    index = replace(
        old,
        frames=frames.entries,
        routes=writer.contents.routes(),
        sha256=frames.sha256.digest(),
        shrunk=_relieved(source, writer.contents.dropped, lost.routes()),
    )
    return Shrinkage(
        index,
        lost.routes(),
        frames.finish(encode_sealed_index(index, writer.contents.table, writer.contents.peers)),
        spans,
    )


def check_shrunk(source: SealedFile, made: SealedFile, relief: Shrinkage, keeps: Keeps) -> None:
    """Read a relieved segment back, and compare every batch with the one that it was made of.

    Raises:
        Damaged: a batch that is needed is not in it as it was, or the source has changed.
    """
    if source.sha256() != source.index.sha256:
        raise _damaged(source.path, "it does not hold what its index says")
    if made.index != relief.index or made.sha256() != relief.index.sha256:
        raise _damaged(made.path, "it does not read back as it was written")
    compare_shrunk(source, made, keeps)


def compare_shrunk(source: SealedFile, made: SealedFile, keeps: Keeps) -> None:
    """Check that one form of a segment has every needed batch of another form.

    Raises:
        Damaged: a needed batch of ``source`` is missing or different in ``made``, they are not forms of one segment, or
            one of the two cannot be read.
    """
    if _segment_of(source.index) != _segment_of(made.index):
        raise _damaged(made.path, f"it is not a form of the segment in {source.path}")
    for old, new in _aligned(source, made):
        if not _may_replace(old, new, keeps):
            position = (new or old)[0].position
            raise _damaged(made.path, f"required batch at position {position} is missing or differs")


def _segment_of(index: SealedIndex) -> tuple[bytes, int, int, int, int]:
    """Return the index fields that identify a segment in all its forms."""
    return index.log_id, index.base_sequence, index.salt, index.next_sequence, index.raw_bytes


def _aligned(one: SealedFile, other: SealedFile) -> Iterator[tuple[list[StoredBatch], list[StoredBatch]]]:
    """Yield the batches of two forms of a segment, in the smallest groups that end at the same position in both.

    The last groups may end at different positions; one list is empty if that form has no more batches.
    """
    lefts, rights = _batches(one), _batches(other)
    while True:
        left, right = list(islice(lefts, 1)), list(islice(rights, 1))
        if not (left or right):
            return
        while left and right and left[-1].end != right[-1].end:
            shorter, batches = (left, lefts) if left[-1].end < right[-1].end else (right, rights)
            if (batch := next(batches, None)) is None:
                break
            shorter.append(batch)
        yield left, right


def _may_replace(old: list[StoredBatch], new: list[StoredBatch], keeps: Keeps) -> bool:
    """Return True if the new batches may replace the old ones: they are equal, or no old one is needed."""
    if not (old and new) or (old[0].position, old[-1].end) != (new[0].position, new[-1].end):
        return False
    if any(batch.header.is_dropped for batch in (*old, *new)) and not any(_is_kept(batch, keeps) for batch in old):
        return True
    return [_bytes_of(batch) for batch in old] == [_bytes_of(batch) for batch in new]


class _Writer:
    """Puts batches together to frames, and what is dropped between them to batches of zeros."""

    def __init__(self, frames: FrameWriter, contents: SegmentIndexBuilder, salt: int) -> None:
        self.contents = contents
        self._frames = frames
        self._salt = salt
        self._frame: list[Buffer] = []
        self._frame_bytes = 0
        self._gap: tuple[StoredBatch, StoredBatch] | None = None  # the first and the last of those dropped last

    def add_header(self, header: bytes) -> None:
        """Begin the first frame with the header of the segment."""
        self._frame, self._frame_bytes = [header], len(header)

    def keep(self, batch: StoredBatch) -> None:
        """Add a batch as it is."""
        self._fill()
        self._add(batch, _bytes_of(batch))

    def drop(self, batch: StoredBatch) -> None:
        """Leave a batch out."""
        if self._gap is not None and batch.end - self._gap[0].position > FRAME_BYTES:
            self._fill()
        self._gap = self._gap[0] if self._gap else batch, batch

    def finish(self) -> None:
        """Write what is left."""
        self._fill()
        self._end_frame()

    def _fill(self) -> None:
        gap, self._gap = self._gap, None
        if gap is not None:
            filling = _in_place_of(*gap, self._salt)
            self._add(filling, filling.data)

    def _add(self, batch: StoredBatch, data: Buffer) -> None:
        if self._frame_bytes + len(data) > FRAME_BYTES:
            self._end_frame()
        self._frame.append(data)
        self._frame_bytes += len(data)
        self.contents.add(batch.position, batch.header, batch.route, batch.payload)

    def _end_frame(self) -> None:
        if self._frame:
            self._frames.add(b"".join(self._frame), self.contents.take())
        self._frame, self._frame_bytes = [], 0


def _in_place_of(first: StoredBatch, last: StoredBatch, salt: int) -> StoredBatch:
    """The batch of zeros that takes the place of all batches from ``first`` to ``last``."""
    payload = bytes(last.end - first.position - FRAMING_BYTES)
    base, following = first.header.base_sequence, last.header.end_sequence
    header = BatchHeader(
        body_checksum=checksum_body(b"", [payload], len(payload)),
        payload_bytes=len(payload),
        base_sequence=base,
        append_time_ns=last.header.append_time_ns,
        producer_id=0,
        producer_sequence=0,
        count=following - base,
        epoch=last.header.epoch,
        encoding=int(Encoding.CONTROL),
        flags=int(Flag.CONTROL | Flag.DROPPED),
        route_bytes=0,
    )
    data = b"".join(encode_batch(header, b"", [payload], seed(salt, first.position)))
    return StoredBatch(data, 0, first.position, header, "")


def _batches(file: SealedFile) -> Iterator[StoredBatch]:
    """Every batch of a sealed segment.

    Raises:
        Damaged: something in it is no batch.
    """
    for number in range(len(file.index.frames)):
        data = file.frame(number)
        batches = file.batches(number, data)
        yield from batches
        if batches.end < len(data):
            raise _damaged(file.path, f"at {batches.end} of frame {number} there is no batch")


def _bytes_of(batch: StoredBatch) -> memoryview:
    return memoryview(batch.data)[batch.at : batch.at + batch.header.total_bytes]


def _is_kept(batch: StoredBatch, keeps: Keeps) -> bool:
    header = batch.header
    if header.is_control:
        return not header.is_dropped
    return keeps(header, batch.route)


def _relieved(source: SealedFile, ranges: list[tuple[int, int]], dropped: list[RouteEntry]) -> Shrunk:
    """What is missing of the segment as it was sealed, once ``dropped`` is missing, too."""
    before = source.index.shrunk
    if before is None:
        return Shrunk(source.index.sha256, source.stored_bytes, ranges, dropped)
    return replace(before, ranges=ranges, routes=merge_routes(before.routes, dropped))


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path}: offset 0: {reason}", case="raw-segment-damaged", path=path)
