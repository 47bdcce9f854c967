"""Zstandard frame boundaries and the seek table at the end of a sealed segment.

Where each Zstandard frame ends, by its own headers (RFC 8878, section 3) and without an index.

A frame says in its header how long its content is, and each of its blocks how long it is itself; so headers are all
that has to be read.

The seek table that ends a sealed segment, so that other programs find its frames.

It is the last skippable frame, as the "Zstandard Seekable Format" has it (version 0.1.0, contrib/seekable_format in the
zstd sources). It lists the index frame with decompressed size 0, because other readers of that format require that
every frame is listed.

    u32 0x184D2A5E, u32 content length; for each frame u32 compressed bytes, u32 decompressed bytes;
    u32 number of frames, u8 descriptor 0, u32 0x8F92EAB1
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zstandard

from wald.format.sealed_index import SKIPPABLE, BadSealed

_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_HEADER_MAX_BYTES = 18
_BLOCK_MAX_BYTES = 128 << 10
_RAW, _RLE, _COMPRESSED = range(3)
_CHECKSUM_BYTES = 4


class BadFrame(ValueError):
    """There is no frame here, or its headers are damaged."""


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """The lengths of a frame, by its headers.

    Attributes:
        stored_bytes: of the frame in the file; more than there are if the file was cut short.
        raw_bytes: of its content; 0: a skippable frame.
    """

    stored_bytes: int
    raw_bytes: int

    @property
    def skippable(self) -> bool:
        return not self.raw_bytes


def span_at(read: Callable[[int, int], bytes], offset: int) -> FrameSpan:
    """The frame that begins at ``offset``.

    Args:
        read: (offset, length) → up to so many bytes.

    Raises:
        BadFrame: there is no frame, or it does not say how long it is.
    """
    opening = read(offset, _HEADER_MAX_BYTES)
    if int.from_bytes(opening[:4], "little") in _SKIPPABLE_MAGIC and len(opening) >= 8:
        return FrameSpan(8 + int.from_bytes(opening[4:8], "little"), 0)
    if not opening.startswith(_MAGIC):
        raise BadFrame("no frame begins here")
    try:
        parameters = zstandard.get_frame_parameters(opening)
        end = offset + zstandard.frame_header_size(opening)
    except zstandard.ZstdError as error:
        raise BadFrame(f"the frame's header is not whole ({error})") from error
    if parameters.content_size in (0, zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise BadFrame("the frame's header does not say how long its content is")
    last = False
    while not last:
        header = read(end, 3)
        if len(header) < 3:
            raise BadFrame("the frame is cut short")
        bits = int.from_bytes(header, "little")
        last, kind, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        if kind > _COMPRESSED or length > _BLOCK_MAX_BYTES:
            raise BadFrame("a block's header is damaged")
        end += 3 + (1 if kind == _RLE else length)
    return FrameSpan(end + _CHECKSUM_BYTES * parameters.has_checksum - offset, parameters.content_size)


SEEK_TABLE_MAGIC = 0x184D2A5E
SEEKABLE_MAGIC = 0x8F92EAB1
SEEK_ENTRY = struct.Struct("<II")
SEEK_FOOTER = struct.Struct("<IBI")
assert SEEK_FOOTER.size == 9


def encode_seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """The seek table of frames given as (compressed, decompressed) bytes, the index frame included."""
    body = b"".join(SEEK_ENTRY.pack(*entry) for entry in frames)
    footer = SEEK_FOOTER.pack(len(frames), 0, SEEKABLE_MAGIC)
    return SKIPPABLE.pack(SEEK_TABLE_MAGIC, len(body) + len(footer)) + body + footer


def seek_table_bytes(footer: bytes) -> int:
    """How long the seek table is that ends in these 9 bytes.

    Raises:
        BadSealed: they are not the end of a seek table of ours.
    """
    if len(footer) != SEEK_FOOTER.size:
        raise BadSealed("the file is too short for a seek table")
    count, descriptor, magic = SEEK_FOOTER.unpack(footer)
    if magic != SEEKABLE_MAGIC or descriptor != 0:
        raise BadSealed("the file does not end in a seek table: it is truncated or not sealed by wald")
    return SKIPPABLE.size + int(count) * SEEK_ENTRY.size + SEEK_FOOTER.size


def decode_seek_table(table: bytes, *, file_bytes: int) -> list[tuple[int, int]]:
    """The (compressed, decompressed) bytes of each frame, the index frame last.

    Raises:
        BadSealed: the frames do not add up to the file.
    """
    if len(table) < SKIPPABLE.size + SEEK_FOOTER.size or len(table) != seek_table_bytes(table[-SEEK_FOOTER.size :]):
        raise BadSealed("the seek table's length is wrong")
    if SKIPPABLE.unpack_from(table) != (SEEK_TABLE_MAGIC, len(table) - SKIPPABLE.size):
        raise BadSealed("the seek table's frame header is wrong")
    frames = list(SEEK_ENTRY.iter_unpack(table[SKIPPABLE.size : -SEEK_FOOTER.size]))
    if not frames or frames[-1][1] != 0 or sum(stored for stored, _ in frames) + len(table) != file_bytes:
        raise BadSealed("the seek table's frames do not add up to the file: bytes are missing")
    return frames
