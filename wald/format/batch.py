"""A batch: consecutive records of one route under one header and one checksum, with its length at both ends.

    offset  size  field
         0     4  magic              WBAT; four zeros mean that nothing follows (segments are preallocated)
         4     4  header checksum    crc32c of bytes 8..64 from the seed on; checked before the length is used
         8     4  body checksum      crc32c of the whole body, padding included
        12     4  payload length     bytes
        16     8  base sequence      of the first record that begins here
        24     8  append time        ns since 1970, never decreasing between two clock steps
        32     8  producer id        0: none
        40     8  producer sequence  with a producer: the number of this batch; otherwise: see CONTINUES
        48     4  count              records that begin here, 32 bits
        52     4  epoch              of the life of the daemon that wrote it, its low 32 bits
        56     1  encoding           0 control, 1 lines, 2 columns
        57     1  flags              see :class:`Flag`
        58     2  route length
        60     4  peer               the process that sent it, see :mod:`wald.format.peers`; 0: not known

The body is the name of the route, zeros up to a multiple of 8, the payload, and zeros up to a multiple of 8. The
trailer follows it: the length of the batch from its first byte to the next batch (4 bytes), and the crc32c of these 4
bytes, started from the seed (4 bytes). So a reader gets past damage in both directions: forwards by the headers,
backwards by the trailers.

The seed is (position of the batch in the segment / 8) XOR (salt of the segment), and is used as the crc32c of preceding
bytes. So the bytes of a payload are never taken for a batch, because a producer does not know the salt, and a batch is
valid only at its own position.

A batch never spans segments. A record has its sequence where it begins. A record in several pieces (a line longer than
the pipe) is found by seeking to its sequence and reading on. A segment that holds a piece of it lists its sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

from wald.format.checksum import crc32c
from wald.format.names import ROUTE_MAX_LENGTH

MAGIC = b"WBAT"
HEADER = struct.Struct("<4sIIIQqQQIIBBHI")
assert HEADER.size == 64
_FIELDS = struct.Struct("<IIQqQQIIBBHI")
assert _FIELDS.size == HEADER.size - 8  # what the header checksum covers
_LEAD = struct.Struct("<4sI")
TRAILER = struct.Struct("<II")
_MASK = (1 << 32) - 1
_ZEROS = bytes(64)
ALIGNMENT = 8

Buffer = bytes | bytearray | memoryview

PAYLOAD_MAX_BYTES = 1 << 30  # no valid header has a larger length, so a damaged one cannot cause a larger allocation


class Encoding(IntEnum):
    """How a payload holds its records."""

    CONTROL = 0
    LINES = 1
    COLUMNS = 2


class Flag(IntFlag):
    """What a reader must know before it splits the payload into records."""

    NONE = 0
    CONTINUES = 1
    """The payload begins in the middle of a record. The field producer sequence holds the sequence of that record."""
    CONTINUED = 2
    """The last record continues in the next batch of the route."""
    UNTERMINATED = 4
    """The last record ends here without a newline (end of input)."""
    CONTROL = 8
    """The payload has no record and no sequence: it is the state of the log (:mod:`wald.format.state`), or with a peer
    who that is (:mod:`wald.format.peers`), or DROPPED, too."""
    BARRIER = 16
    """Everything before this batch in the segment was synced before this batch was written."""
    DROPPED = 32
    """With CONTROL: in the place of batches that relief has dropped. As long as they were; its payload is zeros. Its
    base sequence and count cover their records, its append time is that of the last of them."""


# Plain numbers, because enums are slow and these are used for every batch.
_CONTINUES, _CONTINUED, _CONTROL = int(Flag.CONTINUES), int(Flag.CONTINUED), int(Flag.CONTROL)
_DROPPED = int(Flag.DROPPED)
_COLUMNS = int(Encoding.COLUMNS)
_HEADER_BYTES, _TRAILER_BYTES = HEADER.size, TRAILER.size
OUTSIDE_BYTES = _HEADER_BYTES + _TRAILER_BYTES  # of a batch, around its body


class BatchHeader(NamedTuple):
    """The decoded 64 bytes. A tuple, because one is made for every batch."""

    body_checksum: int
    payload_bytes: int
    base_sequence: int
    append_time_ns: int
    producer_id: int
    producer_sequence: int
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    epoch: int  # low 32 bits
    encoding: int
    flags: int
    route_bytes: int
    peer: int = 0

    @property
    def payload_offset(self) -> int:
        """Bytes from the batch's first byte to its payload."""
        return HEADER.size + padded(self.route_bytes)

    @property
    def trailer_offset(self) -> int:
        """Bytes from the batch's first byte to the end of its body."""
        return self.total_bytes - TRAILER.size

    @property
    def total_bytes(self) -> int:
        """Bytes from the batch's first byte to the next batch's."""
        return OUTSIDE_BYTES + (self.route_bytes + 7 & -8) + (self.payload_bytes + 7 & -8)

    @property
    def end_sequence(self) -> int:
        """The sequence after the last record that begins here."""
        return self.base_sequence + self.count

    @property
    def continues_sequence(self) -> int:
        """The sequence of the record in whose middle the payload begins; 0 if there is none."""
        return self.producer_sequence if self.flags & _CONTINUES else 0

    @property
    def last_sequence(self) -> int:
        """The largest sequence of which this batch holds a byte; ``base_sequence - 1`` if there is none."""
        return self.end_sequence - 1 if self.count else self.continues_sequence or self.base_sequence - 1

    @property
    def open_sequence(self) -> int:
        """The sequence of the record that continues in the next batch of the route; 0 if there is none."""
        if not self.flags & _CONTINUED:
            return 0
        return self.end_sequence - 1 if self.count else self.continues_sequence

    @property
    def is_control(self) -> bool:
        return self.flags & _CONTROL != 0

    @property
    def is_dropped(self) -> bool:
        return self.flags & _DROPPED != 0

    @property
    def is_state(self) -> bool:
        """Whether the payload is the state of the log."""
        return self.flags & (_CONTROL | _DROPPED) == _CONTROL and not self.peer


def padded(length: int) -> int:
    """``length`` rounded up to a multiple of 8."""
    return (length + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def seed(salt: int, position: int) -> int:
    """From what the checksums of header and trailer start, in a batch at ``position`` of a segment with ``salt``."""
    return (salt ^ position >> 3) & _MASK


def route_prefix(route: bytes) -> bytes:
    """The part of the body before the payload: the route's name and its padding."""
    return route + _ZEROS[: padded(len(route)) - len(route)]


def encode(header: BatchHeader, prefix: bytes, payload: Sequence[Buffer], seed: int) -> list[Buffer]:
    """The buffers of one batch, ready for a gather-write; the payload is not copied.

    Args:
        header: with the body's checksum (:func:`checksum_body`).
        prefix: :func:`route_prefix` of the route.
        payload: buffers of together ``header.payload_bytes`` bytes.
        seed: :func:`seed` of the place it will be written to.
    """
    payload_bytes = header[1]
    assert payload_bytes <= PAYLOAD_MAX_BYTES, "a longer payload is not valid"
    fields = _FIELDS.pack(*header)
    tail = _ZEROS[: -payload_bytes & 7]
    length = (OUTSIDE_BYTES + len(prefix) + payload_bytes + len(tail)).to_bytes(4, "little")
    head = _LEAD.pack(MAGIC, crc32c(fields, seed)) + fields + prefix
    return [head, *payload, tail + length + crc32c(length, seed).to_bytes(4, "little")]


def trailer(total_bytes: int, seed: int) -> bytes:
    """The trailer of a batch of ``total_bytes``."""
    return TRAILER.pack(total_bytes, crc32c(total_bytes.to_bytes(4, "little"), seed))


def padding(payload_bytes: int) -> bytes:
    """The zeros between a payload and the trailer."""
    return _ZEROS[: -payload_bytes & (ALIGNMENT - 1)]


def checksum_body(prefix: bytes, payload: Sequence[Buffer], payload_bytes: int) -> int:
    """The checksum of the body with this :func:`route_prefix` and this payload, the padding included."""
    checksum = crc32c(prefix)
    for part in payload:
        checksum = crc32c(part, checksum)
    tail = padding(payload_bytes)
    return crc32c(tail, checksum) if tail else checksum


def decode_header(data: bytes | memoryview, offset: int, seed: int) -> BatchHeader | None:
    """The header at ``offset`` of ``data``; None unless magic, checksum and every field hold."""
    if len(data) - offset < _HEADER_BYTES:
        return None
    fields = HEADER.unpack_from(data, offset)
    magic, checksum, _, payload_bytes, _, _, _, _, count, _, encoding, flags, route_bytes, _ = fields
    if magic != MAGIC or crc32c(data[offset + 8 : offset + _HEADER_BYTES], seed) != checksum:
        return None
    sane = (
        payload_bytes <= PAYLOAD_MAX_BYTES
        and count <= payload_bytes  # each record that begins here has a byte here
        and route_bytes <= ROUTE_MAX_LENGTH
        and encoding <= _COLUMNS
        and (encoding == 0) == (flags & _CONTROL != 0)
    )
    return BatchHeader._make(fields[2:]) if sane else None


def begin_of(closing: bytes | memoryview, end: int, salt: int) -> int | None:
    """The position of the batch that ends with these 8 bytes; None if they are not a trailer.

    Args:
        end: the position behind the batch.
    """
    if len(closing) != TRAILER.size:
        return None
    length, checksum = TRAILER.unpack(closing)
    begin = end - int(length)
    if length % ALIGNMENT or begin < 0 or crc32c(closing[:4], seed(salt, begin)) != checksum:
        return None
    return begin
