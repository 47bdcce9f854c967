"""Rewriting of a sealed segment without records that no group needs.

A batch of zeros of the same length, with the flag DROPPED, replaces the dropped batches. So the others keep their
positions and bytes, ``zstd -dc`` still makes a raw segment, and the frames alone show which sequences were dropped.
Memory: a few times the longest batch, and about 60 bytes per batch.
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
    Flag,
    StoredBatch,
    control_header,
    encode_batch,
    seed,
)
from wald.format.sealed_index import RouteEntry, SealedIndex, Shrunk, encode_sealed_index, merge_routes
from wald.format.spans import Spans
from wald.segments.index_builder import SegmentIndexBuilder
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.sealed_file import FRAME_BYTES, LEVEL, FrameWriter, SealedFile

Keeps = Callable[[BatchHeader, str], bool]
"""Returns True if a batch of a route is still needed. Control batches are always kept."""


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """Result of :func:`shrink_segment`; only ``index.shrunk`` includes records dropped before."""

    index: SealedIndex
    dropped: list[RouteEntry]
    stored_bytes: int
    spans: dict[str, Spans]


def shrink_segment(source: SealedFile, target: int, disk: Disk, keeps: Keeps) -> Shrinkage:
    """Copy the batches that ``keeps`` selects from a sealed segment to an empty file; the caller syncs it."""
    old = source.index
    writer = _Writer(FrameWriter(target, disk, LEVEL), SegmentIndexBuilder(old.base_sequence, old.salt), old.salt)
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
    frames, builder = writer.frames, writer.builder
    if frames.raw_bytes != old.raw_bytes or builder.next_sequence != old.next_sequence:
        raise _damaged(source.path, "it differs from its index")
    dropped = lost.routes()
    if old.shrunk is None:
        shrunk = Shrunk(old.sha256, source.stored_bytes, builder.dropped, dropped)
    else:
        shrunk = replace(old.shrunk, ranges=builder.dropped, routes=merge_routes(old.shrunk.routes, dropped))
    index = replace(old, frames=frames.frames, routes=builder.routes(), sha256=frames.sha256.digest(), shrunk=shrunk)
    return Shrinkage(index, dropped, frames.finish(encode_sealed_index(index, builder.table, builder.peers)), spans)


def check_shrunk(source: SealedFile, made: SealedFile, shrinkage: Shrinkage, keeps: Keeps) -> None:
    """Read a shrunk segment back; raise Damaged if a needed batch is missing or differs, or the source has changed."""
    if source.sha256() != source.index.sha256:
        raise _damaged(source.path, "it differs from its index")
    if made.index != shrinkage.index or made.sha256() != shrinkage.index.sha256:
        raise _damaged(made.path, "it reads back differently")
    compare_shrunk(source, made, keeps)


def compare_shrunk(source: SealedFile, made: SealedFile, keeps: Keeps) -> None:
    if _segment_of(source.index) != _segment_of(made.index):
        raise _damaged(made.path, f"it is not a form of the segment in {source.path}")
    for old, new in _aligned(source, made):
        if not _may_replace(old, new, keeps):
            position = (new or old)[0].position
            raise _damaged(made.path, f"required batch at position {position} is missing or differs")


def dropped_batch(length: int, base: int, following: int, append_time_ns: int, epoch: int) -> tuple[BatchHeader, bytes]:
    """Return header and payload of a batch of ``length`` bytes for the records base ≤ s < following."""
    payload = bytes(length - FRAMING_BYTES)
    flags = int(Flag.CONTROL | Flag.DROPPED)
    return control_header(payload, base, append_time_ns, epoch, count=following - base, flags=flags), payload


def _segment_of(index: SealedIndex) -> tuple[bytes, int, int, int, int]:
    return index.log_id, index.base_sequence, index.salt, index.next_sequence, index.raw_bytes


def _aligned(one: SealedFile, other: SealedFile) -> Iterator[tuple[list[StoredBatch], list[StoredBatch]]]:
    """Yield the batches of two forms in the smallest groups that end at the same position in both.

    The last groups may end differently; one list is empty if that form has no more batches.
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
    if not (old and new) or (old[0].position, old[-1].end) != (new[0].position, new[-1].end):
        return False
    if any(batch.header.is_dropped for batch in (*old, *new)) and not any(_is_kept(batch, keeps) for batch in old):
        return True
    return [_bytes_of(batch) for batch in old] == [_bytes_of(batch) for batch in new]


class _Writer:
    def __init__(self, frames: FrameWriter, builder: SegmentIndexBuilder, salt: int) -> None:
        self.frames = frames
        self.builder = builder
        self._salt = salt
        self._parts: list[Buffer] = []  # of the next frame
        self._parts_bytes = 0
        self._gap: tuple[StoredBatch, StoredBatch] | None = None  # first and last batch of the current run to drop

    def add_header(self, header: bytes) -> None:
        self._parts, self._parts_bytes = [header], len(header)

    def keep(self, batch: StoredBatch) -> None:
        self._fill()
        self._add(batch, _bytes_of(batch))

    def drop(self, batch: StoredBatch) -> None:
        if self._gap is not None and batch.end - self._gap[0].position > FRAME_BYTES:
            self._fill()
        self._gap = self._gap[0] if self._gap else batch, batch

    def finish(self) -> None:
        self._fill()
        self._end_frame()

    def _fill(self) -> None:
        gap, self._gap = self._gap, None
        if gap is not None:
            filling = _zeros(*gap, self._salt)
            self._add(filling, filling.data)

    def _add(self, batch: StoredBatch, data: Buffer) -> None:
        if self._parts_bytes + len(data) > FRAME_BYTES:
            self._end_frame()
        self._parts.append(data)
        self._parts_bytes += len(data)
        self.builder.add(batch.position, batch.header, batch.route, batch.payload)

    def _end_frame(self) -> None:
        if self._parts:
            self.frames.add(b"".join(self._parts), self.builder.end_frame())
        self._parts, self._parts_bytes = [], 0


def _zeros(first: StoredBatch, last: StoredBatch, salt: int) -> StoredBatch:
    length = last.end - first.position
    span = first.header.base_sequence, last.header.end_sequence
    header, payload = dropped_batch(length, *span, last.header.append_time_ns, last.header.epoch)
    data = b"".join(encode_batch(header, b"", [payload], seed(salt, first.position)))
    return StoredBatch(data, 0, first.position, header, "")


def _batches(file: SealedFile) -> Iterator[StoredBatch]:
    for number in range(len(file.index.frames)):
        data = file.frame(number)
        batches = file.batches(number, data)
        yield from batches
        if batches.end < len(data):
            raise _damaged(file.path, f"frame {number} has no batch at {batches.end}")


def _bytes_of(batch: StoredBatch) -> memoryview:
    return memoryview(batch.data)[batch.at : batch.at + batch.header.total_bytes]


def _is_kept(batch: StoredBatch, keeps: Keeps) -> bool:
    header = batch.header
    if header.is_control:
        return not header.is_dropped
    return keeps(header, batch.route)


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path}: offset 0: {reason}", case="sealed-segment-damaged", path=path)
