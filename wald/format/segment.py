"""The 64 bytes that open every raw segment, and (under another magic) every sparse index.

    offset  size  field
         0     8  magic          WALDSEG1 or WALDIDX1
         8     4  checksum       crc32c of bytes 12..64
        12     2  version        1
        14     2  header size    64
        16    16  log id         uuid of the log, as bytes
        32     8  base sequence  the first record that can be in the file
        40     8  epoch          of the life of the daemon that made the file
        48     8  created at     ns since 1970, signed
        56     4  salt           of the batches' checksums, see :mod:`wald.format.batch`; random, one for each segment
        60     4  writer         the version of wald that made the file, see :func:`pack_version`; 0: not known

Segments are preallocated. A magic of zeros means that nothing was written yet.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from wald.format.checksum import crc32c

SEGMENT_MAGIC = b"WALDSEG1"
INDEX_MAGIC = b"WALDIDX1"
VERSION = 1

HEADER = struct.Struct("<8sIHH16sQQqII")
assert HEADER.size == 64
_CHECKED_FROM = 12  # the checksum covers what follows it


class BadHeader(ValueError):
    """These bytes are not a valid header."""


class NewerVersion(BadHeader):
    """A header of a version that this program does not know."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The decoded 64 bytes."""

    log_id: bytes
    base_sequence: int
    epoch: int
    created_at_ns: int
    salt: int
    version: int = VERSION
    writer: int = 0


def encode_header(header: SegmentHeader, magic: bytes = SEGMENT_MAGIC) -> bytes:
    """The 64 bytes of ``header``."""
    packed = HEADER.pack(
        magic,
        0,
        header.version,
        HEADER.size,
        header.log_id,
        header.base_sequence,
        header.epoch,
        header.created_at_ns,
        header.salt,
        header.writer,
    )
    return packed[:8] + struct.pack("<I", crc32c(packed[_CHECKED_FROM:])) + packed[_CHECKED_FROM:]


def decode_header(data: bytes | memoryview, magic: bytes = SEGMENT_MAGIC) -> SegmentHeader:
    """The header in the first 64 bytes of ``data``.

    Raises:
        BadHeader: too short, another magic, a wrong checksum or a newer version.
    """
    if len(data) < HEADER.size:
        raise BadHeader(f"{len(data)} bytes are too few for a header of {HEADER.size}")
    found, checksum, version, header_bytes, log_id, base, epoch, created, salt, writer = HEADER.unpack_from(data)
    if found != magic:
        raise BadHeader(f"the magic is {found!r}, not {magic!r}")
    if crc32c(data[_CHECKED_FROM : HEADER.size]) != checksum:
        raise BadHeader("the header's checksum is wrong")
    if version > VERSION:
        raise NewerVersion(f"version {version} is newer than the {VERSION} this program reads")
    if header_bytes != HEADER.size:
        raise BadHeader(f"a header of {header_bytes} bytes in version {version}")
    return SegmentHeader(log_id, base, epoch, created, salt, version, writer)


def pack_version(text: str) -> int:
    """A version of wald in 32 bits: 8 for the first number, 8 for the second, 16 for the third."""
    major, minor, patch = (int(number) for number in text.split(".")[:3])
    return major << 24 | minor << 16 | patch


def version_text(packed: int) -> str:
    """The version that :func:`pack_version` packed; "" for 0: the file does not say."""
    return f"{packed >> 24}.{packed >> 16 & 0xFF}.{packed & 0xFFFF}" if packed else ""
