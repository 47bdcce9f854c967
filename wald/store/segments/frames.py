"""The frames of a sealed segment, written one after the other."""

from __future__ import annotations

import hashlib

import zstandard

from wald.format.batch import Buffer
from wald.format.sealed import encode_seek_table
from wald.format.tables import Frame
from wald.store.files.disk import Disk
from wald.store.segments.contents import Span
from wald.store.segments.raw import RawFile

FRAME_BYTES = (1 << 20) + (1 << 16)  # 1 MiB, and room for the headers of two half-MiB batches that fill it
LEVEL = 3


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
