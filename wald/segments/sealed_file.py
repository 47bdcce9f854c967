"""Writing and reading of sealed segments, frame by frame.

The frames of a sealed segment: written one after the other, and what is left of a damaged one.

Frames of a sealed segment, each decompressed while the one before it is used.

Sealed segments: a raw segment made into a seekable ``.zst``, and its frames read back.

A frame holds whole batches or damaged bytes, never both, and ends before the batch that would make it longer than
``FRAME_BYTES``; a longer batch has a frame to itself. Damaged bytes are kept as they are and listed in the index.
Every frame is compressed and decompressed in one call with its size known on both sides: a stream of the ``zstandard``
package ends quietly where a file is truncated, and a call without sizes stops after the first frame.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

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
from wald.segments.index_builder import SegmentIndexBuilder, Span, read_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

FRAME_BYTES = (1 << 20) + (1 << 16)  # 1 MiB, and room for the headers of two half-MiB batches that fill it
LEVEL = 3
_PART_BYTES = 128 << 10  # a block of zstd: what is in front of a damaged one decompresses


def beginning(stored: bytes, wanted: int) -> tuple[bytes, str]:
    """The first ``wanted`` bytes of what a frame holds, as far as it decompresses; and what is wrong; "": nothing."""
    parts, got = [], 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as stream:
            while got < wanted and (part := stream.read(min(_PART_BYTES, wanted - got))):
                parts.append(part)
                got += len(part)
            if got == wanted:
                stream.read(1)  # behind the last byte it compares the checksum
    except zstandard.ZstdError as error:
        return b"".join(parts), f"a frame does not decompress ({error})"
    return b"".join(parts), "" if got == wanted else "the frame is cut short"


class FrameWriter:
    """Writes the frames of one sealed segment, and what ends it.

    Attributes:
        entries: the frames written so far; ``raw_bytes`` in all, whose digest is ``sha256``.
    """

    def __init__(self, target: int, disk: Disk, level: int) -> None:
        self.entries: list[Frame] = []
        self.raw_bytes = 0
        self.sha256 = hashlib.sha256()
        self._stored_bytes = 0
        self._target = target
        self._disk = disk
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

    def add(self, data: Buffer, span: Span) -> None:
        """Add the next bytes as one frame."""
        stored = self._compressor.compress(data)
        self.sha256.update(data)
        self._disk.write(self._target, [stored], self._stored_bytes)
        self._enter(len(stored), len(data), span)

    def add_long(self, raw: RawFile, length: int, span: Span) -> None:
        """Add the next ``length`` bytes of ``raw`` as one frame without holding them: a batch may be very long."""
        stream = self._compressor.compressobj(size=length)
        start, written = self.raw_bytes, 0
        for offset in range(start, start + length, FRAME_BYTES):
            part = raw.read(offset, min(FRAME_BYTES, start + length - offset))
            self.sha256.update(part)
            written += self._disk.write(self._target, [stream.compress(part)], self._stored_bytes + written)
        written += self._disk.write(self._target, [stream.flush()], self._stored_bytes + written)
        self._enter(written, length, span)

    def _enter(self, stored_bytes: int, raw_bytes: int, span: Span) -> None:
        frame = Frame(
            offset=self._stored_bytes,
            compressed_bytes=stored_bytes,
            raw_offset=self.raw_bytes,
            raw_bytes=raw_bytes,
            first_sequence=span.first_sequence,
            next_sequence=span.next_sequence,
            earliest_ns=span.earliest_ns,
            latest_ns=span.latest_ns,
            routes=span.routes,
        )
        self.entries.append(frame)
        self._stored_bytes += stored_bytes
        self.raw_bytes += raw_bytes

    def finish(self, index_frame: bytes) -> int:
        """Write what ends the file; returns the file's length."""
        sizes = [(frame.compressed_bytes, frame.raw_bytes) for frame in self.entries]
        seek_table = encode_seek_table([*sizes, (len(index_frame), 0)])
        return self._stored_bytes + self._disk.write(self._target, [index_frame, seek_table], self._stored_bytes)


class ReadAhead:
    """
    Args:
        frame: the raw bytes of a frame by its number. From the second one on it is called in one other thread only.
    """

    def __init__(self, frame: Callable[[int], bytes]) -> None:
        self._frame = frame
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[bytes]] | None = None

    def load(self, number: int, following: int | None) -> bytes:
        """One frame; from the second on, ``following``, which will be wanted next, is decompressed meanwhile."""
        if self._pool is None:
            data = self._frame(number)
            if following is not None:
                from concurrent.futures import ThreadPoolExecutor  # 10 ms, which reading one record need not take

                self._pool = ThreadPoolExecutor(1, "wald-read-ahead")
            return data
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and ahead[0] == number
        loading = ahead[1] if ahead is not None and known else self._pool.submit(self._frame, number)
        if following is not None:
            self._ahead = (following, self._pool.submit(self._frame, following))
        return loading.result()

    def close(self) -> None:
        """Return when the thread has ended."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Compressed:
    """What :func:`compress_segment` wrote: ``stored_bytes`` in all; the damage in it, with reasons."""

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
    """Write the sealed form of a complete raw segment; neither descriptor is synced or closed.

    Memory: a few MiB, and about 60 bytes per batch.

    Args:
        source: of the raw segment, which ends where nothing but zeros follows its last batch. Other bytes found there
            are damage, and kept up to the end of the file.
        target: of an empty file.
        index_path: of the sparse index, which helps to find what is whole behind damage.
        frame_bytes: what a frame of several batches holds at most; not below that of a segment header.

    Raises:
        BadHeader: the source does not begin with a segment header.
        OSError: reading or writing failed.
    """

    def sparse_index() -> SparseIndex | None:
        return None if index_path is None else read_index(index_path, header.log_id, header.base_sequence)

    raw = RawFile(source, index=sparse_index)
    header = raw.header()
    contents = SegmentIndexBuilder(header.base_sequence, header.salt)
    frames = FrameWriter(target, disk, level)
    gaps: list[DamagedBytes] = []
    while True:
        offset = frames.raw_bytes
        window = raw.read(offset, frame_bytes)
        if whole := contents.walk(window, offset):
            frames.add(memoryview(window)[:whole], contents.take())
            continue
        found = _scanned_at(raw, offset, contents)
        if found is None:
            break
        if isinstance(found, ScannedBatch):
            contents.add(found.offset, found.header, found.route, raw.control_payload(found))
            frames.add_long(raw, found.header.total_bytes, contents.take())
            continue
        gaps.append(found)
        end = offset + found.length
        for start in range(offset, end, frame_bytes):
            frames.add(raw.read(start, min(frame_bytes, end - start)), contents.take())
    index = SealedIndex(
        log_id=header.log_id,
        base_sequence=header.base_sequence,
        next_sequence=contents.next_sequence,
        raw_bytes=frames.raw_bytes,
        epoch=header.epoch,
        salt=header.salt,
        frames=contents.in_order(frames.entries),
        routes=contents.routes(),
        sha256=frames.sha256.digest(),
        damage=[(gap.offset, gap.length) for gap in gaps],
        shrunk=contents.relieved(),
        writer=header.writer,
    )
    return Compressed(index, frames.finish(encode_sealed_index(index, contents.table, contents.peers)), gaps)


def index_raw(source: int) -> SealedIndex:
    """What the index of a complete raw segment's sealed form would say, but for a digest; one frame stands for all.

    Raises:
        BadHeader: the source does not begin with a segment header.
        OSError: reading failed.
    """
    raw = RawFile(source)
    header = raw.header()
    contents = SegmentIndexBuilder(header.base_sequence, header.salt)
    gaps: list[DamagedBytes] = []
    offset = 0
    while True:
        if whole := contents.walk(raw.read(offset, FRAME_BYTES), offset):
            offset += whole
            continue
        found = _scanned_at(raw, offset, contents)
        if found is None:
            break
        if isinstance(found, ScannedBatch):
            contents.add(found.offset, found.header, found.route)
            offset += found.header.total_bytes
        else:
            gaps.append(found)
            offset += found.length
    damage = [(gap.offset, gap.length) for gap in gaps]
    return contents.index(log_id=header.log_id, epoch=header.epoch, raw_bytes=offset, damage=damage, sha256=b"")


class SealedFile:
    """An open sealed segment; for one thread at a time, but for :meth:`beginning`.

    Opening checks that the file is all there and that its index and its seek table agree; each frame is checked when
    it is read. What comes back is what was sealed, or an error.

    Attributes:
        stored_bytes: the length of the file.

    Raises:
        Damaged: truncated, changed, or never a sealed segment; the message names path and offset.
        OSError: it cannot be opened.
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
        """The raw bytes of one frame.

        Raises:
            Damaged: the file does not hold them any more.
        """
        frame = self.index.frames[number]
        stored = self._read(frame.offset, frame.compressed_bytes)
        try:
            # The frame's own claim is what memory is asked for, so it is checked first.
            if zstandard.frame_content_size(stored) != frame.raw_bytes:
                raise self._damaged(frame.offset, f"frame {number} does not claim {frame.raw_bytes} bytes")
            if frame.raw_bytes > FRAME_BYTES and not self._is_one_batch(stored, frame.raw_bytes):
                raise self._damaged(frame.offset, f"frame {number} claims {frame.raw_bytes} bytes, but is no batch")
            return self._decompressor.decompress(stored, max_output_size=frame.raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._damaged(frame.offset, f"frame {number} does not decompress ({error})") from error

    def batches(self, number: int, data: bytes) -> Batches:
        """Return the batches in ``data``, the raw bytes of a frame or the first of them."""
        begin = 0 if number else FIRST_BATCH
        return Batches(data, begin, position=self.index.frames[number].raw_offset, salt=self.index.salt)

    def beginning(self, number: int) -> bytes:
        """What a damaged frame holds in front of the damage; it is to be checked batch by batch.

        Another thread may be in :meth:`frame` meanwhile: a reader that meets damage has asked for the next one already.
        """
        frame = self.index.frames[number]
        stored = self._read(frame.offset, frame.compressed_bytes)
        if frame.raw_bytes > FRAME_BYTES:
            try:
                if not self._is_one_batch(stored, frame.raw_bytes):
                    return b""
            except zstandard.ZstdError:
                return b""
        return beginning(stored, frame.raw_bytes)[0]

    @staticmethod
    def _is_one_batch(stored: bytes, raw_bytes: int) -> bool:
        """Whether a frame begins like a batch of about this length; only a batch has a frame longer than most."""
        with zstandard.ZstdDecompressor().stream_reader(stored) as stream:  # not the file's: see beginning()
            opening = stream.read(HEADER.size)
        if len(opening) < HEADER.size:
            return False
        magic, _, _, payload_bytes, *_ = HEADER.unpack(opening)
        return bool(
            magic == MAGIC and payload_bytes <= PAYLOAD_MAX_BYTES and 0 < raw_bytes - payload_bytes < FRAME_BYTES
        )

    def sha256(self) -> bytes:
        """The digest of all raw bytes, in constant memory, however long a batch is.

        Raises:
            Damaged: the file does not hold them any more.
        """
        digest = hashlib.sha256()
        for number in range(len(self.index.frames)):
            for part in self._parts(number):
                digest.update(part)
        return digest.digest()

    def damage(self) -> list[tuple[Frame, Damaged]]:
        """Every frame that does not hold any more what was sealed, and what is wrong with it; in constant memory."""
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
        """The raw bytes of one frame, in pieces."""
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
                stream.read(1)  # behind the last byte it compares the checksum
            except zstandard.ZstdError as error:
                raise self._damaged(frame.offset, f"frame {number} does not decompress ({error})") from error
        if left:
            raise self._damaged(frame.offset, f"frame {number} is cut short")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        frames = FrameTable.of(index.frames)
        if listed != list(zip(frames.compressed_bytes, frames.raw_bytes, strict=True)):
            raise self._damaged(size - table_bytes, "the seek table and the index disagree about the frames")
        if [*frames.offsets, offset] != list(accumulate(frames.compressed_bytes, initial=0)):
            raise self._damaged(offset, "the index is wrong about where the frames are")
        return index

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def _damaged(self, offset: int, reason: str) -> Damaged:
        return Damaged(
            f"{self.path}: offset {offset}: {reason}",
            case="sealed-segment-damaged",
            path=self.path,
        )


def _scanned_at(raw: RawFile, offset: int, contents: SegmentIndexBuilder) -> ScannedBatch | DamagedBytes | None:
    """What the scan finds at ``offset``; None at the end of the segment."""
    if offset >= raw.limit:
        return None
    # The scan starts at the batch before, because what it believes depends on that.
    scan = raw.scan(start=contents.last_position or FIRST_BATCH)
    found = next(found for found in scan if found.offset >= offset or isinstance(found, SegmentEnd))
    if isinstance(found, SegmentEnd):
        return DamagedBytes(offset, raw.limit - offset, found.reason) if found.garbage_bytes else None
    return found
