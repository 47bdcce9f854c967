"""The seek table that ends a sealed segment, so that other programs find its frames.

It is the last skippable frame, as the "Zstandard Seekable Format" has it (version 0.1.0, contrib/seekable_format in the
zstd sources). It lists the index frame with decompressed size 0, because other readers of that format require that
every frame is listed.

    u32 0x184D2A5E, u32 content length; for each frame u32 compressed bytes, u32 decompressed bytes;
    u32 number of frames, u8 descriptor 0, u32 0x8F92EAB1
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from wald.format.sealed import SKIPPABLE, BadSealed

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
