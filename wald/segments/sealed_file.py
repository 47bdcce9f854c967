"""Writer and reader of sealed segments, frame by frame.

A frame contains whole batches or damaged bytes, never both, and ends before the batch that would make it longer than
``FRAME_BYTES``; a longer batch gets a frame of its own.

Frames are compressed and decompressed with both sizes given: a ``zstandard`` stream without them ends silently at the
end of a truncated file, and a call without them stops after the first frame.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import zstandard

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.safe_open import open_file, open_regular
from wald.format.batch import HEADER, MAGIC, PAYLOAD_MAX_BYTES, Batches, Buffer
from wald.format.sealed_index import (
    SEEK_FOOTER,
    BadSealed,
    Frame,
    FrameTable,
    SealedIndex,
    decode_sealed_index,
    decode_seek_table,
    encode_sealed_index,
    encode_seek_table,
    seek_table_bytes,
)
from wald.format.segment import SparseIndex
from wald.segments.index_builder import BatchSpan, SegmentIndexBuilder, read_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd

FRAME_BYTES = (1 << 20) + (1 << 16)  # 1 MiB, and room for the headers of two half-MiB batches that fill it
LEVEL = 3
_BLOCK_BYTES = 128 << 10  # of zstd: blocks before a damaged one decompress


def decompress_start(stored: bytes, wanted: int) -> tuple[bytes, str]:
    """Return up to ``wanted`` bytes of a frame, and a reason if not all decompress, or ""."""
    parts, got = [], 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as stream:
            while got < wanted and (part := stream.read(min(_BLOCK_BYTES, wanted - got))):
                parts.append(part)
                got += len(part)
            if got == wanted:
                stream.read(1)  # it compares the checksum after the last byte
    except zstandard.ZstdError as error:
        return b"".join(parts), f"a frame does not decompress ({error})"
    return b"".join(parts), "" if got == wanted else "the frame is cut short"


class FrameWriter:
    """Writer of one sealed segment."""

    def __init__(self, target: int, disk: Disk, level: int) -> None:
        self.frames: list[Frame] = []
        self.raw_bytes = 0
        self.sha256 = hashlib.sha256()
        self._stored_bytes = 0
        self._target = target
        self._disk = disk
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

    def add(self, data: Buffer, span: BatchSpan) -> None:
        stored = self._compressor.compress(data)
        self.sha256.update(data)
        self._disk.write(self._target, [stored], self._stored_bytes)
        self._enter(len(stored), len(data), span)

    def add_long(self, raw: RawFile, length: int, span: BatchSpan) -> None:
        """Add the next ``length`` bytes of ``raw`` as one frame, in constant memory."""
        stream = self._compressor.compressobj(size=length)
        start, written = self.raw_bytes, 0
        for offset in range(start, start + length, FRAME_BYTES):
            part = raw.read(offset, min(FRAME_BYTES, start + length - offset))
            self.sha256.update(part)
            written += self._disk.write(self._target, [stream.compress(part)], self._stored_bytes + written)
        written += self._disk.write(self._target, [stream.flush()], self._stored_bytes + written)
        self._enter(written, length, span)

    def _enter(self, stored_bytes: int, raw_bytes: int, span: BatchSpan) -> None:
        self.frames.append(Frame(self._stored_bytes, stored_bytes, self.raw_bytes, raw_bytes, *span))
        self._stored_bytes += stored_bytes
        self.raw_bytes += raw_bytes

    def finish(self, index_frame: bytes) -> int:
        sizes = [(frame.compressed_bytes, frame.raw_bytes) for frame in self.frames]
        seek_table = encode_seek_table([*sizes, (len(index_frame), 0)])
        return self._stored_bytes + self._disk.write(self._target, [index_frame, seek_table], self._stored_bytes)


@dataclass(frozen=True, slots=True)
class Compressed:
    """Result of :func:`compress_segment`."""

    index: SealedIndex
    stored_bytes: int
    gaps: list[DamagedBytes]


def compress_segment(
    source: int,
    target: int,
    disk: Disk,
    *,
    index_path: Path | None = None,
    level: int = LEVEL,
    frame_bytes: int = FRAME_BYTES,
) -> Compressed:
    """Write the sealed form of a complete raw segment to an empty file; the caller syncs it.

    Takes a few MiB of memory, and about 60 bytes per batch. Bytes other than zeros after the last batch are damage, and
    are kept. The sparse index helps to find batches after damage.
    """

    def sparse_index() -> SparseIndex | None:
        return None if index_path is None else read_index(index_path, header.log_id, header.base_sequence)

    raw = RawFile(source, index=sparse_index)
    header = raw.header()
    builder = SegmentIndexBuilder(header.base_sequence, header.salt)
    writer = FrameWriter(target, disk, level)
    gaps: list[DamagedBytes] = []
    for part, length in _parts(raw, builder, frame_bytes):
        if isinstance(part, ScannedBatch):
            writer.add_long(raw, length, builder.end_frame())
        elif isinstance(part, DamagedBytes):
            gaps.append(part)
            end = part.offset + length
            for start in range(part.offset, end, frame_bytes):
                writer.add(raw.read(start, min(frame_bytes, end - start)), builder.end_frame())
        else:
            writer.add(part, builder.end_frame())
    index = SealedIndex(
        log_id=header.log_id,
        base_sequence=header.base_sequence,
        next_sequence=builder.next_sequence,
        raw_bytes=writer.raw_bytes,
        epoch=header.epoch,
        salt=header.salt,
        frames=builder.sort_routes(writer.frames),
        routes=builder.routes(),
        sha256=writer.sha256.digest(),
        damage=[(gap.offset, gap.length) for gap in gaps],
        shrunk=builder.shrunk(),
        writer=header.writer,
    )
    return Compressed(index, writer.finish(encode_sealed_index(index, builder.table, builder.peers)), gaps)


def index_raw(source: int) -> SealedIndex:
    """Return the index of a complete raw segment, in one frame and without a digest."""
    raw = RawFile(source)
    header = raw.header()
    builder = SegmentIndexBuilder(header.base_sequence, header.salt)
    damage: list[tuple[int, int]] = []
    raw_bytes = 0
    for part, length in _parts(raw, builder, FRAME_BYTES):
        if isinstance(part, DamagedBytes):
            damage.append((part.offset, length))
        raw_bytes += length
    return builder.index(log_id=header.log_id, epoch=header.epoch, raw_bytes=raw_bytes, damage=damage, sha256=b"")


def _parts(
    raw: RawFile, builder: SegmentIndexBuilder, window_bytes: int
) -> Iterator[tuple[memoryview | ScannedBatch | DamagedBytes, int]]:
    """Yield windows of whole batches, longer batches, and damage, with their lengths."""
    offset = 0
    while True:
        window = raw.read(offset, window_bytes)
        if whole := builder.add_window(window, offset):
            yield memoryview(window)[:whole], whole
            offset += whole
            continue
        if offset >= raw.limit:
            return
        # from the batch before, on which the accepted sequences depend
        scan = raw.scan(start=builder.last_position or FIRST_BATCH)
        found = next(found for found in scan if found.offset >= offset or isinstance(found, SegmentEnd))
        if isinstance(found, ScannedBatch):
            builder.add(found.offset, found.header, found.route, raw.control_payload(found))
            length = found.header.total_bytes
        elif isinstance(found, SegmentEnd):
            if not found.garbage_bytes:
                return
            length = raw.limit - offset
            found = DamagedBytes(offset, length, found.reason)
        else:
            length = found.length
        yield found, length
        offset += length


class SealedFile:
    """An open sealed segment; for one thread at a time, except :meth:`readable_start`.

    Every method raises Damaged if the bytes have changed since sealing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decompressor = zstandard.ZstdDecompressor()
        self._descriptor = open_regular(path)
        try:
            self.stored_bytes = os.fstat(self._descriptor).st_size
            self.index = self._read_index()
        except BaseException:
            self.close()
            raise

    def frame(self, number: int) -> bytes:
        frame = self.index.frames[number]
        stored = self._read(frame.offset, frame.compressed_bytes)
        try:
            # zstd allocates the length that the frame claims, so check that first.
            if zstandard.frame_content_size(stored) != frame.raw_bytes:
                raise self._damaged(frame.offset, f"frame {number} does not claim {frame.raw_bytes} bytes")
            if frame.raw_bytes > FRAME_BYTES and not self._is_one_batch(stored, frame.raw_bytes):
                raise self._damaged(frame.offset, f"frame {number} claims {frame.raw_bytes} bytes, but is not a batch")
            return self._decompressor.decompress(stored, max_output_size=frame.raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._damaged(frame.offset, f"frame {number} does not decompress ({error})") from error

    def batches(self, number: int, data: bytes) -> Batches:
        begin = 0 if number else FIRST_BATCH
        return Batches(data, begin, position=self.index.frames[number].raw_offset, salt=self.index.salt)

    def readable_start(self, number: int) -> bytes:
        """Return the raw bytes of a frame before the damage, which only checksums of batches validate.

        Another thread may be in :meth:`frame`, reading ahead.
        """
        frame = self.index.frames[number]
        stored = self._read(frame.offset, frame.compressed_bytes)
        if frame.raw_bytes > FRAME_BYTES:
            try:
                if not self._is_one_batch(stored, frame.raw_bytes):
                    return b""
            except zstandard.ZstdError:
                return b""
        return decompress_start(stored, frame.raw_bytes)[0]

    @staticmethod
    def _is_one_batch(stored: bytes, raw_bytes: int) -> bool:
        with zstandard.ZstdDecompressor().stream_reader(stored) as stream:  # the file's may be in use by a thread
            opening = stream.read(HEADER.size)
        if len(opening) < HEADER.size:
            return False
        magic, _, _, payload_bytes, *_ = HEADER.unpack(opening)
        return bool(
            magic == MAGIC and payload_bytes <= PAYLOAD_MAX_BYTES and 0 < raw_bytes - payload_bytes < FRAME_BYTES
        )

    def sha256(self) -> bytes:
        """Hash all raw bytes, in constant memory."""
        digest = hashlib.sha256()
        for number in range(len(self.index.frames)):
            for part in self._parts(number):
                digest.update(part)
        return digest.digest()

    def damage(self) -> list[tuple[Frame, Damaged]]:
        """Return the frames changed since sealing, with the errors, in constant memory."""
        found = []
        digest = hashlib.sha256()
        for number, frame in enumerate(self.index.frames):
            try:
                for part in self._parts(number):
                    digest.update(part)
            except Damaged as error:
                found.append((frame, error))
            except OSError as error:
                found.append((frame, self._damaged(frame.offset, error.strerror or str(error))))
        if not found and digest.digest() != self.index.sha256:
            reason = f"the sha256 is {digest.hexdigest()}, the index says {self.index.sha256.hex()}"
            return [(frame, self._damaged(0, reason)) for frame in self.index.frames]
        return found

    def _parts(self, number: int) -> Iterator[bytes]:
        frame = self.index.frames[number]
        if frame.raw_bytes <= FRAME_BYTES:
            yield self.frame(number)
            return
        with open_file(self.path) as file:
            file.seek(frame.offset)
            stream = self._decompressor.stream_reader(file)
            left = frame.raw_bytes
            try:
                while left and (part := stream.read(min(FRAME_BYTES, left))):
                    yield part
                    left -= len(part)
                stream.read(1)  # it compares the checksum after the last byte
            except zstandard.ZstdError as error:
                raise self._damaged(frame.offset, f"frame {number} does not decompress ({error})") from error
        if left:
            raise self._damaged(frame.offset, f"frame {number} is cut short")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_index(self) -> SealedIndex:
        size = self.stored_bytes
        offset = max(0, size - SEEK_FOOTER.size)
        try:
            table_bytes = seek_table_bytes(self._read(offset, SEEK_FOOTER.size))
            if table_bytes > size:
                raise BadSealed(f"a seek table of {table_bytes} bytes does not fit: bytes are missing")
            offset = size - table_bytes
            *listed, (index_bytes, _) = decode_seek_table(self._read(offset, table_bytes), file_bytes=size)
            offset -= index_bytes
            index = decode_sealed_index(self._read(offset, index_bytes))
        except BadSealed as error:
            raise self._damaged(offset, str(error)) from error
        frames = FrameTable.from_frames(index.frames)
        if listed != list(zip(frames.compressed_bytes, frames.raw_bytes, strict=True)):
            raise self._damaged(size - table_bytes, "the seek table and the index disagree about the frames")
        if [*frames.offsets, offset] != list(accumulate(frames.compressed_bytes, initial=0)):
            raise self._damaged(offset, "the index is wrong about where the frames are")
        return index

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def _damaged(self, offset: int, reason: str) -> Damaged:
        return Damaged(f"{self.path}: offset {offset}: {reason}", case="sealed-segment-damaged", path=self.path)
