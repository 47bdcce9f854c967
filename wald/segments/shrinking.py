"""Rewriting of a sealed segment without records that no group needs.

A DROPPED batch of zeros of the same length replaces each run of dropped batches. So kept batches have the same bytes
and positions, ``zstd -dc`` still writes a raw segment, and the frames show the dropped sequences.
Memory: a few times the longest batch, and about 60 bytes per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from wald.files.disk import Disk
from wald.format.batch import FRAMING_BYTES, BatchHeader, Flag, StoredBatch, control_header, encode_batch, seed
from wald.format.sealed_index import DroppedRecords, FrameTable, RouteEntry, SealedIndex, merge_routes
from wald.format.spans import Spans
from wald.segments.index_builder import SegmentIndexBuilder
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.sealed_file import FRAME_BYTES, FrameWriter, SealedFile, damaged

_segment_of = attrgetter("log_id", "base_sequence", "salt", "next_sequence", "raw_bytes")

Keeps = Callable[[BatchHeader, str], bool]
"""Returns True if a batch of a route is still needed. Control batches are kept anyway."""


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """Result of :func:`shrink_segment`. Only ``index.shrunk`` includes records that an earlier call dropped."""

    index: SealedIndex
    dropped: list[RouteEntry]
    stored_bytes: int
    spans: dict[str, Spans]


def shrink_segment(source: SealedFile, target: int, disk: Disk, keeps: Keeps) -> Shrinkage:
    """Copy the batches that ``keeps`` selects to an empty file, which the caller syncs."""
    old = source.index
    builder, dropped_builder = SegmentIndexBuilder(old.base_sequence), SegmentIndexBuilder(old.base_sequence)
    writer = FrameWriter(target, disk, builder)
    spans: dict[str, Spans] = {}

    def drop(batch: StoredBatch) -> None:
        if not batch.header.is_dropped:
            dropped_builder.add(batch.position, batch.header, batch.route)
            base, count = batch.header.base_sequence, batch.header.count
            spans.setdefault(batch.route, Spans()).add(base, base + count - 1)

    frame = bytearray(source.frame(0)[:FIRST_BATCH])
    for batch in _kept_and_zeroed(source, keeps, drop):
        data = _bytes_of(batch)
        if len(frame) + len(data) > FRAME_BYTES:
            writer.add(frame)
            frame = bytearray()
        frame += data
        builder.add(batch.position, batch.header, batch.route, batch.payload)
    writer.add(frame)
    if writer.raw_bytes != old.raw_bytes or builder.next_sequence != old.next_sequence:
        raise damaged(source.path, "the segment differs from its index")
    dropped, ranges = list(dropped_builder.routes()), list(builder.dropped)
    if old.shrunk is None:
        shrunk = DroppedRecords(old.sha256, source.stored_bytes, ranges, dropped)
    else:
        shrunk = replace(old.shrunk, ranges=ranges, routes=merge_routes(old.shrunk.routes, dropped))
    frames = FrameTable.from_frames(builder.frames)
    index = replace(old, frames=frames, routes=builder.routes(), sha256=writer.sha256.digest(), shrunk=shrunk)
    writer.finish(index)
    return Shrinkage(index, dropped, writer.stored_bytes, spans)


def check_shrunk(source: SealedFile, shrunk_file: SealedFile, shrinkage: Shrinkage, keeps: Keeps) -> None:
    """Read a shrunk segment back. Raise Damaged if a needed batch is missing, or the source has changed."""
    if source.sha256() != source.index.sha256:
        raise damaged(source.path, "the segment differs from its index")
    if shrunk_file.index != shrinkage.index or shrunk_file.sha256() != shrinkage.index.sha256:
        raise damaged(shrunk_file.path, "the shrunk segment differs when read back")
    compare_shrunk(source, shrunk_file, keeps)


def compare_shrunk(source: SealedFile, shrunk_file: SealedFile, keeps: Keeps) -> None:
    """Raise Damaged if a batch that ``keeps`` selects is missing or differs."""
    if _segment_of(source.index) != _segment_of(shrunk_file.index):
        raise damaged(shrunk_file.path, f"the file does not contain the same segment as {source.path}")
    for old, new in _aligned(source, shrunk_file):
        if not _may_replace(old, new, keeps):
            position = (new or old)[0].position
            raise damaged(shrunk_file.path, f"the required batch at position {position} is missing or differs")


def dropped_batch(length: int, base: int, following: int, append_time_ns: int, epoch: int) -> tuple[BatchHeader, bytes]:
    """Return the header and payload of a batch of ``length`` bytes for the dropped records base ≤ s < following."""
    payload = bytes(length - FRAMING_BYTES)
    flags = int(Flag.CONTROL | Flag.DROPPED)
    return control_header(payload, base, append_time_ns, epoch, count=following - base, flags=flags), payload


def _aligned(one: SealedFile, other: SealedFile) -> Iterator[tuple[list[StoredBatch], list[StoredBatch]]]:
    """Yield the batches of two forms in the smallest groups that end at the same position.

    The last groups may end differently, and one may be empty.
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
    """Return True if ``new`` has the positions of ``old``, and the same bytes unless all of ``old`` may be dropped."""
    if not (old and new) or (old[0].position, old[-1].end) != (new[0].position, new[-1].end):
        return False
    if any(batch.header.is_dropped for batch in (*old, *new)) and not any(_is_kept(batch, keeps) for batch in old):
        return True
    return [_bytes_of(batch) for batch in old] == [_bytes_of(batch) for batch in new]


def _kept_and_zeroed(source: SealedFile, keeps: Keeps, drop: Callable[[StoredBatch], None]) -> Iterator[StoredBatch]:
    """Yield kept batches, and a batch of zeros for each run of batches passed to ``drop``."""
    run: list[StoredBatch] = []  # first and last batch
    for batch in _batches(source):
        is_kept = _is_kept(batch, keeps)
        if run and (is_kept or batch.end - run[0].position > FRAME_BYTES):
            yield _zero_batch(run[0], run[-1], source.index.salt)
            run = []
        if is_kept:
            yield batch
        else:
            drop(batch)
            run = [*run[:1], batch]
    if run:
        yield _zero_batch(run[0], run[-1], source.index.salt)


def _zero_batch(first: StoredBatch, last: StoredBatch, salt: int) -> StoredBatch:
    length = last.end - first.position
    sequences = first.header.base_sequence, last.header.end_sequence
    header, payload = dropped_batch(length, *sequences, last.header.append_time_ns, last.header.epoch)
    data = b"".join(encode_batch(header, b"", [payload], seed(salt, first.position)))
    return StoredBatch(data, 0, first.position, header, "")


def _batches(file: SealedFile) -> Iterator[StoredBatch]:
    for number in range(len(file.index.frames)):
        data = file.frame(number)
        batches = file.batches(number, data)
        yield from batches
        if batches.end < len(data):
            raise damaged(file.path, f"frame {number} has no valid batch at byte {batches.end}")


def _bytes_of(batch: StoredBatch) -> memoryview:
    return memoryview(batch.data)[batch.offset : batch.offset + batch.header.total_bytes]


def _is_kept(batch: StoredBatch, keeps: Keeps) -> bool:
    header = batch.header
    return not header.is_dropped if header.is_control else keeps(header, batch.route)
