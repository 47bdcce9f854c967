"""Writer and reader of sealed segments, frame by frame.

A frame contains whole batches or damaged bytes. It ends before the batch that would make it longer than
``FRAME_BYTES``; a longer batch has its own frame.

``zstandard`` always gets the raw and the stored size. Otherwise a stream ends silently at the end of a truncated file,
and a call stops after the first frame.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import zstandard

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.safe_open import open_regular
from wald.format.batch import HEADER, Batches, Buffer, decode_header, seed
from wald.format.sealed_index import (
    SEEK_FOOTER,
    BadSealed,
    Frame,
    SealedIndex,
    decode_sealed_index,
    decode_seek_table,
    encode_sealed_index,
    encode_seek_table,
    seek_table_bytes,
)
from wald.segments.index_builder import SegmentIndexBuilder
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, FindIndex, RawFile, ScannedBatch, SegmentEnd

FRAME_BYTES = (1 << 20) + (1 << 16)  # 1 MiB, plus the headers of two half-MiB batches
LEVEL = 3
_BLOCK_BYTES = 128 << 10  # zstd decompresses the blocks before a damaged block


def decompress_start(stored: bytes, max_bytes: int) -> tuple[bytes, str]:
    """Return up to ``max_bytes`` raw bytes of a frame, and the problem if there are fewer, or ""."""
    parts, raw_bytes = [], 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as stream:
            while raw_bytes < max_bytes and (part := stream.read(min(_BLOCK_BYTES, max_bytes - raw_bytes))):
                parts.append(part)
                raw_bytes += len(part)
            if raw_bytes == max_bytes:
                stream.read(1)  # compares the checksum after the last byte
    except zstandard.ZstdError as error:
        return b"".join(parts), f"the frame cannot be decompressed ({error})"
    return b"".join(parts), "" if raw_bytes == max_bytes else "the frame is truncated"


class FrameWriter:
    """Writer of one sealed segment. Callers first add a frame's batches to ``builder``."""

    def __init__(self, target: int, disk: Disk, builder: SegmentIndexBuilder, level: int = LEVEL) -> None:
        self.raw_bytes = 0
        self.sha256 = hashlib.sha256()
        self.stored_bytes = 0
        self._target = target
        self._disk = disk
        self._builder = builder
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

    def add(self, data: Buffer) -> None:
        self.sha256.update(data)
        start = self.stored_bytes
        self._write(self._compressor.compress(data))
        self._end_frame(start, len(data))

    def add_long(self, raw: RawFile, length: int) -> None:
        """Add the next ``length`` bytes of ``raw`` as one frame, in constant memory."""
        stream = self._compressor.compressobj(size=length)
        start, end = self.stored_bytes, self.raw_bytes + length
        for offset in range(self.raw_bytes, end, FRAME_BYTES):
            part = raw.read(offset, min(FRAME_BYTES, end - offset))
            self.sha256.update(part)
            self._write(stream.compress(part))
        self._write(stream.flush())
        self._end_frame(start, length)

    def finish(self, index: SealedIndex) -> None:
        """Write index and seek table."""
        index_frame = encode_sealed_index(index, self._builder.table, self._builder.peers)
        sizes = [(frame.compressed_bytes, frame.raw_bytes) for frame in self._builder.frames]
        self._write(index_frame, encode_seek_table([*sizes, (len(index_frame), 0)]))

    def _write(self, *data: Buffer) -> None:
        self.stored_bytes += self._disk.write(self._target, data, self.stored_bytes)

    def _end_frame(self, start: int, raw_bytes: int) -> None:
        self._builder.end_frame(start, self.stored_bytes - start, self.raw_bytes, raw_bytes)
        self.raw_bytes += raw_bytes


@dataclass(frozen=True, slots=True)
class CompressedSegment:
    """Result of :func:`compress_segment`."""

    index: SealedIndex
    stored_bytes: int
    gaps: list[DamagedBytes]


def compress_segment(
    source: int,
    target: int,
    disk: Disk,
    *,
    index: FindIndex = lambda: None,
    level: int = LEVEL,
    frame_bytes: int = FRAME_BYTES,
) -> CompressedSegment:
    """Write the sealed form of a complete raw segment to an empty file, which the caller syncs.

    Damaged bytes are kept, even at the end. The sparse ``index`` helps to find batches after damage. Memory: a few
    MiB, and about 60 bytes per batch.
    """
    raw = RawFile(source, index=index)
    header = raw.header()
    builder = SegmentIndexBuilder(header.base_sequence)
    writer = FrameWriter(target, disk, builder, level)
    gaps: list[DamagedBytes] = []
    for part, length in _raw_parts(raw, builder, frame_bytes):
        if isinstance(part, ScannedBatch):
            writer.add_long(raw, length)
        elif isinstance(part, DamagedBytes):
            gaps.append(part)
            for start in range(part.offset, part.end, frame_bytes):
                writer.add(raw.read(start, min(frame_bytes, part.end - start)))
        else:
            writer.add(part)
    damage = [(gap.offset, gap.length) for gap in gaps]
    builder.sort_routes()
    sealed = builder.index(header, writer.raw_bytes, damage, sha256=writer.sha256.digest())
    writer.finish(sealed)
    return CompressedSegment(sealed, writer.stored_bytes, gaps)


def index_raw(source: int) -> SealedIndex:
    """Return the index of a complete raw segment, with one frame and no digest."""
    raw = RawFile(source)
    header = raw.header()
    builder = SegmentIndexBuilder(header.base_sequence)
    damage: list[tuple[int, int]] = []
    raw_bytes = 0
    for part, length in _raw_parts(raw, builder, FRAME_BYTES):
        if isinstance(part, DamagedBytes):
            damage.append((raw_bytes, length))
        raw_bytes += length
    return builder.index(header, raw_bytes, damage)


def _raw_parts(
    raw: RawFile, builder: SegmentIndexBuilder, window_bytes: int
) -> Iterator[tuple[memoryview | ScannedBatch | DamagedBytes, int]]:
    """Yield windows of whole batches, batches longer than a window, and damage, each with its length."""
    offset = 0
    while True:
        window = raw.read(offset, window_bytes)
        if length := builder.add_window(window, offset, raw.salt):
            yield memoryview(window)[:length], length
            offset += length
            continue
        if offset >= raw.limit:
            return
        # begin at the previous batch, which determines the sequences to accept
        scan = raw.scan(start=builder.last_position or FIRST_BATCH)
        item = next(item for item in scan if item.offset >= offset or isinstance(item, SegmentEnd))
        if isinstance(item, SegmentEnd):
            if not item.garbage_bytes:
                return
            item = DamagedBytes(offset, raw.limit - offset, item.reason)
        elif isinstance(item, ScannedBatch):
            builder.add(item.offset, item.header, item.route, raw.control_payload(item))
        yield item, item.end - offset
        offset = item.end


def read_seek_table(path: Path, descriptor: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the seek table's offset, and each frame's stored and raw bytes. The last frame is the index."""
    size = os.fstat(descriptor).st_size
    offset = max(0, size - SEEK_FOOTER.size)
    try:
        length = seek_table_bytes(os.pread(descriptor, SEEK_FOOTER.size, offset))
        if length > size:
            raise BadSealed(f"the file was truncated: its seek table alone has {length} bytes")
        offset = size - length
        return offset, decode_seek_table(os.pread(descriptor, length, offset), file_bytes=size)
    except BadSealed as error:
        raise damaged(path, str(error), offset) from error


class SealedFile:
    """Open sealed segment. Only :meth:`readable_start` is thread-safe.

    Methods raise Damaged if the bytes have changed since sealing.
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
        """Decompress a frame."""
        frame = self.index.frames[number]
        stored = self._read(frame.offset, frame.compressed_bytes)
        try:
            # zstd allocates the claimed length, so check the claim first.
            if zstandard.frame_content_size(stored) != frame.raw_bytes:
                raise damaged(self.path, f"frame {number} does not contain {frame.raw_bytes} bytes", frame.offset)
            if not self._is_plausible(frame, stored):
                reason = f"frame {number} claims {frame.raw_bytes} bytes, but is not a batch of that length"
                raise damaged(self.path, reason, frame.offset)
            return self._decompressor.decompress(stored, max_output_size=frame.raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise damaged(self.path, f"frame {number} cannot be decompressed ({error})", frame.offset) from error

    def batches(self, number: int, data: bytes) -> Batches:
        begin = 0 if number else FIRST_BATCH
        return Batches(data, begin, position=self.index.frames[number].raw_offset, salt=self.index.salt)

    def readable_start(self, number: int) -> bytes:
        """Return a frame's raw bytes before damage; only batch checksums can verify them."""
        frame = self.index.frames[number]
        stored = self._read(frame.offset, frame.compressed_bytes)
        with suppress(zstandard.ZstdError):
            if self._is_plausible(frame, stored):
                return decompress_start(stored, frame.raw_bytes)[0]
        return b""

    def _is_plausible(self, frame: Frame, stored: bytes) -> bool:
        """Return True if the claimed length is normal, or that of a single batch."""
        if frame.raw_bytes <= FRAME_BYTES:
            return True
        with zstandard.ZstdDecompressor().stream_reader(stored) as stream:  # the file's decompressor may be in use
            header = decode_header(stream.read(HEADER.size), 0, seed(self.index.salt, frame.raw_offset))
        return header is not None and header.total_bytes == frame.raw_bytes

    def sha256(self) -> bytes:
        """Hash all raw bytes, in constant memory."""
        digest = hashlib.sha256()
        for number in range(len(self.index.frames)):
            for part in self._frame_parts(number):
                digest.update(part)
        return digest.digest()

    def damage(self) -> list[tuple[Frame, Damaged]]:
        """Verify all frames in constant memory; return each changed frame with its error."""
        damage = []
        digest = hashlib.sha256()
        for number, frame in enumerate(self.index.frames):
            try:
                for part in self._frame_parts(number):
                    digest.update(part)
            except Damaged as error:
                damage.append((frame, error))
            except OSError as error:
                damage.append((frame, damaged(self.path, error.strerror or str(error), frame.offset)))
        if not damage and digest.digest() != self.index.sha256:
            reason = f"the sha256 is {digest.hexdigest()}, but the index says {self.index.sha256.hex()}"
            return [(frame, damaged(self.path, reason)) for frame in self.index.frames]
        return damage

    def _frame_parts(self, number: int) -> Iterator[bytes]:
        frame = self.index.frames[number]
        if frame.raw_bytes <= FRAME_BYTES:
            yield self.frame(number)
            return
        with os.fdopen(self._descriptor, "rb", closefd=False) as file:
            file.seek(frame.offset)
            stream = self._decompressor.stream_reader(file)
            rest_bytes = frame.raw_bytes
            try:
                while rest_bytes and (part := stream.read(min(FRAME_BYTES, rest_bytes))):
                    yield part
                    rest_bytes -= len(part)
                stream.read(1)  # compares the checksum
            except zstandard.ZstdError as error:
                raise damaged(self.path, f"frame {number} cannot be decompressed ({error})", frame.offset) from error
        if rest_bytes:
            raise damaged(self.path, f"frame {number} is truncated", frame.offset)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_index(self) -> SealedIndex:
        table_offset, (*frame_sizes, (index_bytes, _)) = read_seek_table(self.path, self._descriptor)
        offset = table_offset - index_bytes
        try:
            index = decode_sealed_index(self._read(offset, index_bytes))
        except BadSealed as error:
            raise damaged(self.path, str(error), offset) from error
        frames = index.frames
        if frame_sizes != list(zip(frames.compressed_bytes, frames.raw_bytes, strict=True)):
            raise damaged(self.path, "the seek table contradicts the index", table_offset)
        if [*frames.offsets, offset] != list(accumulate(frames.compressed_bytes, initial=0)):
            raise damaged(self.path, "the index has wrong frame offsets", offset)
        return index

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def damaged(path: Path, reason: str, offset: int = 0) -> Damaged:
    return Damaged(f"{path}: offset {offset}: {reason}", case="sealed-segment-damaged", path=path)
