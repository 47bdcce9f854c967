"""Sealed segments: a raw segment made into a seekable ``.zst``, and its frames read back.

A frame holds whole batches or damaged bytes, never both, and ends before the batch that would make it longer than
``FRAME_BYTES``; a longer batch has a frame to itself. Damaged bytes are kept as they are and listed in the index.
Every frame is compressed and decompressed in one call with its size known on both sides: a stream of the ``zstandard``
package ends quietly where a file is truncated, and a call without sizes stops after the first frame.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

import zstandard
from crc32c import crc32c

from wald.errors import Damaged
from wald.format.batch import HEADER, MAGIC, PAYLOAD_MAX_BYTES, TRAILER, Encoding, Flag
from wald.format.index import SparseIndex
from wald.format.names import ROUTE_MAX_LENGTH
from wald.format.sealed import (
    SEEK_FOOTER,
    BadSealed,
    BatchTable,
    Frame,
    RouteEntry,
    SealedIndex,
    decode_index,
    decode_seek_table,
    encode_index,
    encode_seek_table,
    seek_table_bytes,
    store_batches,
)
from wald.store.disk import Disk
from wald.store.indexes import read_index
from wald.store.raw import FIRST_BATCH, Gap, RawFile, Scanned, Tail
from wald.store.regular import open_file, open_regular

FRAME_BYTES = (1 << 20) + (1 << 16)  # 1 MiB, and room for the headers of two half-MiB batches that fill it
LEVEL = 3
_NO_TIME = ((1 << 63) - 1, -(1 << 63))  # earliest and latest of no batch: neutral under min and max
_HINT = "wald verify lists what is affected; restore the file from an archive or a backup"

_COLUMNS, _CONTROL, _CONTINUES = int(Encoding.COLUMNS), int(Flag.CONTROL), int(Flag.CONTINUES)  # enums are slow


@dataclass(frozen=True, slots=True)
class Compressed:
    """What :func:`compress_segment` wrote: ``stored_bytes`` in all; the damage in it, with reasons."""

    index: SealedIndex
    stored_bytes: int
    gaps: list[Gap]


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
    contents = _Contents(header.base_sequence, header.salt)
    frames = _Frames(target, disk, level)
    gaps: list[Gap] = []
    while True:
        offset = frames.raw_bytes
        window = memoryview(raw.read(offset, frame_bytes))
        if whole := contents.walk(window, offset):
            frames.add(window[:whole], contents.take())
            continue
        found = _judge(raw, offset, contents)
        if found is None:
            break
        if isinstance(found, Scanned):
            contents.add_scanned(found)
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
        frames=frames.entries,
        routes=contents.routes(),
        sha256=frames.sha256.digest(),
        damage=[(gap.offset, gap.length) for gap in gaps],
    )
    return Compressed(index, frames.finish(encode_index(index, contents.table)), gaps)


def index_raw(source: int) -> SealedIndex:
    """What the index of a complete raw segment's sealed form would say, but for a digest; one frame stands for all.

    Raises:
        BadHeader: the source does not begin with a segment header.
        OSError: reading failed.
    """
    raw = RawFile(source)
    header = raw.header()
    contents = _Contents(header.base_sequence, header.salt)
    gaps: list[Gap] = []
    offset = 0
    while True:
        if whole := contents.walk(memoryview(raw.read(offset, FRAME_BYTES)), offset):
            offset += whole
            continue
        found = _judge(raw, offset, contents)
        if found is None:
            break
        if isinstance(found, Scanned):
            contents.add_scanned(found)
            offset += found.header.total_bytes
        else:
            gaps.append(found)
            offset += found.length
    span = contents.take()
    times_ns = (span.earliest_ns, span.latest_ns)
    return SealedIndex(
        log_id=header.log_id,
        base_sequence=header.base_sequence,
        next_sequence=contents.next_sequence,
        raw_bytes=offset,
        epoch=header.epoch,
        salt=header.salt,
        frames=[Frame(0, 0, 0, offset, span.first_sequence, span.next_sequence, *times_ns, span.routes)],
        routes=contents.routes(),
        sha256=b"",
        damage=[(gap.offset, gap.length) for gap in gaps],
        stored_batches=store_batches(contents.table),
    )


class SealedFile:
    """An open sealed segment; for one thread at a time.

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

    def _is_one_batch(self, stored: bytes, raw_bytes: int) -> bool:
        """Whether a frame begins like a batch of about this length; only a batch has a frame longer than most."""
        opening = self._decompressor.stream_reader(stored).read(HEADER.size)
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
        for number, frame in enumerate(self.index.frames):
            if frame.raw_bytes <= FRAME_BYTES:
                digest.update(self.frame(number))
                continue
            with open_file(self.path) as file:
                file.seek(frame.offset)
                stream = self._decompressor.stream_reader(file)
                left = frame.raw_bytes
                try:
                    while left and (part := stream.read(min(FRAME_BYTES, left))):
                        digest.update(part)
                        left -= len(part)
                except zstandard.ZstdError as error:
                    raise self._damaged(frame.offset, f"frame {number} does not decompress ({error})") from error
        return digest.digest()

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
            index = decode_index(self._read(offset, index_bytes))
        except BadSealed as error:
            raise self._damaged(offset, str(error)) from error
        if listed != [(frame.compressed_bytes, frame.raw_bytes) for frame in index.frames]:
            raise self._damaged(size - table_bytes, "the seek table and the index disagree about the frames")
        places = [frame.offset for frame in index.frames] + [offset]
        if places != list(accumulate((frame.compressed_bytes for frame in index.frames), initial=0)):
            raise self._damaged(offset, "the index is wrong about where the frames are")
        return index

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def _damaged(self, offset: int, reason: str) -> Damaged:
        return Damaged(f"{self.path}: offset {offset}: {reason}", hint=_HINT)


@dataclass(frozen=True, slots=True)
class _Span:
    """What the batches of one frame hold, as :class:`wald.format.sealed.Frame` has it."""

    first_sequence: int
    next_sequence: int
    earliest_ns: int
    latest_ns: int
    routes: tuple[int, ...]


class _Frames:
    """The frames written so far."""

    def __init__(self, target: int, disk: Disk, level: int) -> None:
        self.entries: list[Frame] = []
        self.raw_bytes = 0
        self.sha256 = hashlib.sha256()
        self._stored_bytes = 0
        self._target = target
        self._disk = disk
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

    def add(self, data: bytes | memoryview, span: _Span) -> None:
        stored = self._compressor.compress(data)
        self.sha256.update(data)
        self._disk.write(self._target, [stored], self._stored_bytes)
        self._enter(len(stored), len(data), span)

    def add_long(self, raw: RawFile, length: int, span: _Span) -> None:
        """Add the next ``length`` bytes of ``raw`` as one frame without holding them: a batch may be very long."""
        stream = self._compressor.compressobj(size=length)
        start, written = self.raw_bytes, 0
        for offset in range(start, start + length, FRAME_BYTES):
            part = raw.read(offset, min(FRAME_BYTES, start + length - offset))
            self.sha256.update(part)
            written += self._disk.write(self._target, [stream.compress(part)], self._stored_bytes + written)
        written += self._disk.write(self._target, [stream.flush()], self._stored_bytes + written)
        self._enter(written, length, span)

    def _enter(self, stored_bytes: int, raw_bytes: int, span: _Span) -> None:
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


@dataclass(slots=True)
class _Tally:
    """A :class:`wald.format.sealed.RouteEntry` being counted."""

    id: int
    first: int
    last: int
    count: int = 0
    payload_bytes: int = 0


class _Contents:
    """What the batches met so far hold: the batch table, the routes, the next sequence."""

    def __init__(self, base_sequence: int, salt: int) -> None:
        self.next_sequence = base_sequence
        self._salt = salt
        self.last_position = 0  # of the last whole batch; 0: none yet
        self.table = BatchTable()
        self._taken = 0
        self._tallies: dict[bytes, _Tally] = {}

    def walk(self, window: memoryview, origin: int) -> int:
        """Add the plain whole batches that ``window`` begins with; returns where they end in it.

        This is :meth:`wald.store.raw.RawFile.scan` for the case that is nearly every case, several times as fast
        because it makes no objects. Whatever is not a plain whole batch is left to the scan.

        Args:
            origin: where the window begins in the segment; at 0 it begins with the segment header.
        """
        unpack, add, window_bytes, salt = HEADER.unpack_from, self._add, len(window), self._salt
        unpack_trailer = TRAILER.unpack_from
        at = 0 if origin else FIRST_BATCH
        while at + 64 <= window_bytes:
            magic, header_crc, body_crc, length, base, time_ns, _, number, count, _, encoding, flags, name, reserved = (
                unpack(window, at)
            )
            body, place = at + 64, (salt ^ origin + at >> 3) & 0xFFFFFFFF  # the seed, without a call
            if magic != MAGIC or crc32c(window[at + 8 : body], place) != header_crc:
                break
            tail = body + (name + 7 & -8) + (length + 7 & -8)
            end = tail + TRAILER.size
            if end > window_bytes or crc32c(window[body:tail]) != body_crc:
                break
            told, checksum = unpack_trailer(window, tail)
            if told != end - at or crc32c(window[tail : tail + 4], place) != checksum:
                break
            if (
                reserved
                or base < self.next_sequence
                or count > length
                or name > ROUTE_MAX_LENGTH
                or encoding > _COLUMNS
            ):
                break
            if (flags & _CONTROL != 0) != (encoding == 0):
                break
            self.last_position = origin + at
            if encoding:
                add(origin + at, bytes(window[body : body + name]), base, count, time_ns, flags, number, length)
            at = end
        return at

    def add_scanned(self, batch: Scanned) -> None:
        """Add a batch that the scan found."""
        header = batch.header
        self.last_position = batch.offset
        if not header.is_control:
            self._add(
                batch.offset,
                batch.route.encode(),
                header.base_sequence,
                header.count,
                header.append_time_ns,
                header.flags,
                header.producer_sequence,
                header.payload_bytes,
            )

    def take(self) -> _Span:
        """The span of the batches added since the last call."""
        start, self._taken = self._taken, len(self.table)
        if start == self._taken:
            return _Span(self.next_sequence, self.next_sequence, *_NO_TIME, ())
        table = self.table
        begun = (base for base, count in zip(table.bases[start:], table.counts[start:], strict=True) if count)
        times = table.times_ns[start:]
        routes = tuple(sorted(set(table.routes[start:])))
        return _Span(next(begun, self.next_sequence), self.next_sequence, min(times), max(times), routes)

    def routes(self) -> list[RouteEntry]:
        """The table of routes, in the order of their ids."""
        return [
            RouteEntry(name.decode("ascii", "replace"), tally.count, tally.first, tally.last, tally.payload_bytes)
            for name, tally in self._tallies.items()
        ]

    def _add(
        self,
        position: int,
        route: bytes,
        base: int,
        count: int,
        time_ns: int,
        flags: int,
        continues: int,
        payload_bytes: int,
    ) -> None:
        tally = self._tallies.get(route)
        if tally is None:
            tally = self._tallies[route] = _Tally(len(self._tallies), base, base - 1)
        table = self.table
        table.positions.append(position)
        table.bases.append(base)
        table.counts.append(count)
        table.routes.append(tally.id)
        table.times_ns.append(time_ns)
        tally.payload_bytes += payload_bytes
        if count:
            if not tally.count:
                tally.first = base
            tally.count += count
            end = base + count
            tally.last = end - 1
            if end > self.next_sequence:
                self.next_sequence = end
        elif flags & _CONTINUES:
            tally.last = continues
            if not tally.count:
                tally.first = continues


def _judge(raw: RawFile, offset: int, contents: _Contents) -> Scanned | Gap | None:
    """What the scan finds at ``offset``; None at the end of the segment."""
    if offset >= raw.limit:
        return None
    # The scan starts at the batch before, because what it believes depends on that.
    scan = raw.scan(start=contents.last_position or FIRST_BATCH)
    found = next(found for found in scan if found.offset >= offset or isinstance(found, Tail))
    if isinstance(found, Tail):
        return Gap(offset, raw.limit - offset, found.reason) if found.garbage_bytes else None
    return found
