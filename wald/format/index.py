"""Sparse index of a raw segment: a 64-byte header (as a segment's, other magic), then 24 bytes per entry.

    u64 sequence     base sequence of a batch
    u64 position     its offset in the raw segment
    i64 append time  ns since 1970

Entries grow in all three. The file is a hint: not synced, without checksums, and whoever uses it checks the batch it
lands on. Anything after the last whole, growing entry is ignored.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass, field

from wald.format.segment import HEADER, INDEX_MAGIC, BadHeader, SegmentHeader, decode_header, encode_header

ENTRY = struct.Struct("<QQq")
assert ENTRY.size == 24
INTERVAL_BYTES = 64 * 1024  # one entry at most per this much of the segment: a seek reads no more than that twice


@dataclass(slots=True)
class SparseIndex:
    """The entries in memory, as three columns; and the segment's salt, None if nobody tells it."""

    sequences: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    salt: int | None = None

    def position_of_sequence(self, sequence: int) -> int:
        """The offset of an indexed batch at or before the one with ``sequence``; the first batch's if none is."""
        return self._position(bisect_right(self.sequences, sequence))

    def position_of_time(self, time_ns: int) -> int:
        """The offset of an indexed batch from which a scan meets every record appended at ``time_ns`` or later."""
        return self._position(bisect_right(self.times_ns, time_ns - 1))

    def _position(self, after: int) -> int:
        return self.positions[after - 1] if after else HEADER.size


def encode_entry(sequence: int, position: int, append_time_ns: int) -> bytes:
    """One entry's 24 bytes."""
    return ENTRY.pack(sequence, position, append_time_ns)


def encode_index_header(header: SegmentHeader) -> bytes:
    """The first 64 bytes of the index of the segment with ``header``."""
    return encode_header(header, INDEX_MAGIC)


def decode_index(data: bytes, *, log_id: bytes, base_sequence: int) -> SparseIndex | None:
    """The usable entries of an index file; None if it is not the index of that segment."""
    try:
        header = decode_header(data, INDEX_MAGIC)
    except BadHeader:
        return None
    if (header.log_id, header.base_sequence) != (log_id, base_sequence):
        return None
    index = SparseIndex(salt=header.salt)
    whole = HEADER.size + (len(data) - HEADER.size) // ENTRY.size * ENTRY.size
    last = (base_sequence, HEADER.size - 1, -(1 << 63))
    for sequence, position, time_ns in ENTRY.iter_unpack(data[HEADER.size : whole]):
        if sequence < last[0] or position <= last[1] or time_ns < last[2]:
            break
        last = (sequence, position, time_ns)
        index.sequences.append(sequence)
        index.positions.append(position)
        index.times_ns.append(time_ns)
    return index
