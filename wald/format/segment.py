"""Header and sparse index of a raw segment (docs/format.md, "A raw segment").

Raw segments and sparse indexes have the same header, apart from the magic. The sparse index is a hint: readers check
the batch at each position. A payload may imitate a batch, so readers never use an entry with a wrong checksum.
Positions, sequences and append times ascend; the first entry out of order ends the index.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from wald.format.checksum import crc32c

SEGMENT_MAGIC = b"WALDSEG1"
SPARSE_MAGIC = b"WALDIDX1"
VERSION = 1

SEGMENT_HEADER = struct.Struct("<8sIHH16sQQqII")
assert SEGMENT_HEADER.size == 64
_CHECKSUM_START = 12  # the checksum covers the rest


class BadHeader(ValueError):
    """The header is invalid."""


class NewerVersion(BadHeader):
    """The header's version is newer than this program."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Header of a raw segment or sparse index."""

    log_id: bytes
    base_sequence: int
    epoch: int
    created_at_ns: int
    salt: int
    version: int = VERSION
    writer: int = 0  # pack_version() of the creator; 0: unknown


def encode_segment_header(header: SegmentHeader, magic: bytes = SEGMENT_MAGIC) -> bytes:
    fields = header.log_id, header.base_sequence, header.epoch, header.created_at_ns, header.salt, header.writer
    packed = SEGMENT_HEADER.pack(magic, 0, header.version, SEGMENT_HEADER.size, *fields)
    return packed[:8] + struct.pack("<I", crc32c(packed[_CHECKSUM_START:])) + packed[_CHECKSUM_START:]


def decode_segment_header(data: bytes | memoryview, magic: bytes = SEGMENT_MAGIC) -> SegmentHeader:
    if len(data) < SEGMENT_HEADER.size:
        raise BadHeader(f"{len(data)} bytes are too few for a {SEGMENT_HEADER.size}-byte header")
    stored_magic, checksum, version, size, log_id, base, epoch, created, salt, writer = SEGMENT_HEADER.unpack_from(data)
    if stored_magic != magic:
        raise BadHeader(f"the magic is {stored_magic!r}, not {magic!r}")
    if crc32c(data[_CHECKSUM_START : SEGMENT_HEADER.size]) != checksum:
        raise BadHeader("the header's checksum is wrong")
    if version > VERSION:
        raise NewerVersion(f"version {version} is newer than the {VERSION} this program reads")
    if size != SEGMENT_HEADER.size:
        raise BadHeader(f"the header has {size} bytes, not the {SEGMENT_HEADER.size} of version {version}")
    return SegmentHeader(log_id, base, epoch, created, salt, version, writer)


def pack_version(text: str) -> int:
    """Pack a version of wald into 8, 8 and 16 bits."""
    major, minor, patch = (int(number) for number in text.split(".")[:3])
    return major << 24 | minor << 16 | patch


def version_text(packed: int) -> str:
    """Invert :func:`pack_version`; "" for 0 (unknown)."""
    return f"{packed >> 24}.{packed >> 16 & 0xFF}.{packed & 0xFFFF}" if packed else ""


_SPARSE_FIELDS = struct.Struct("<QQq")
SPARSE_ENTRY = struct.Struct("<24sII")
assert SPARSE_ENTRY.size == 32
SPARSE_INTERVAL_BYTES = 64 * 1024  # a seek reads about one interval


@dataclass(slots=True)
class SparseIndex:
    """Sequence, position and append time of each indexed batch, and the segment's salt (None if unknown)."""

    entries: list[tuple[int, int, int]] = field(default_factory=list)
    salt: int | None = None


def encode_sparse_entry(sequence: int, position: int, append_time_ns: int) -> bytes:
    fields = _SPARSE_FIELDS.pack(sequence, position, append_time_ns)
    return SPARSE_ENTRY.pack(fields, crc32c(fields), 0)


def decode_sparse_entries(data: bytes) -> Iterator[tuple[int, int, int] | None]:
    """Yield sequence, position and append time of each complete entry; None for a damaged entry."""
    end = len(data) - max(0, len(data) - SEGMENT_HEADER.size) % SPARSE_ENTRY.size
    for fields, checksum, _ in SPARSE_ENTRY.iter_unpack(data[SEGMENT_HEADER.size : end]):
        yield _SPARSE_FIELDS.unpack(fields) if crc32c(fields) == checksum else None


def decode_sparse_index(data: bytes, *, log_id: bytes | None, base_sequence: int) -> SparseIndex | None:
    """Return the valid entries; None if the header is damaged or names another segment or log.

    A ``log_id`` of None accepts any log.
    """
    try:
        header = decode_segment_header(data, SPARSE_MAGIC)
    except BadHeader:
        return None
    if header.base_sequence != base_sequence or log_id not in (None, header.log_id):
        return None
    index = SparseIndex(salt=header.salt)
    previous = (base_sequence, SEGMENT_HEADER.size - 1, -(1 << 63))
    for entry in decode_sparse_entries(data):
        if entry is None:
            continue
        sequence, position, time_ns = entry
        if sequence < previous[0] or position <= previous[1] or time_ns < previous[2]:
            break
        previous = entry
        index.entries.append(entry)
    return index
