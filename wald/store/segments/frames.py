"""The frames of a sealed segment: written one after the other, and what is left of a damaged one."""

from __future__ import annotations

import hashlib

import zstandard

from wald.format.batch import Buffer
from wald.format.seek_table import encode_seek_table
from wald.format.tables import Frame
from wald.store.files.disk import Disk
from wald.store.segments.contents import Span
from wald.store.segments.raw import RawFile

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
