"""A batch: consecutive records of one route under one header and one checksum, with its length at both ends.

    offset  size  field
         0     4  magic              WBAT; four zeros mean "nothing more here" (segments are preallocated)
         4     4  header checksum    crc32c of bytes 8..64 from the seed on: the length is trusted before the body
         8     4  body checksum      crc32c of the whole body, padding included
        12     4  payload length     bytes
        16     8  base sequence      of the first record that begins here
        24     8  append time        ns since 1970, never decreasing within a log
        32     8  producer id        0: none
        40     8  producer sequence  with a producer: number of this batch; else: see CONTINUES
        48     4  count              records that begin here, 32 bits
        52     4  epoch              low 32 bits of the daemon's life that wrote it
        56     1  encoding           0 control, 1 lines, 2 columns
        57     1  flags
        58     2  route length
        60     4  reserved           zero

The body is the route's name, zeros up to a multiple of 8, the payload, zeros up to a multiple of 8. The trailer
follows: the batch's length from its first byte to the next batch's (4), and the crc32c of these four bytes from the
seed on (4). So damage is crossed from either side: forwards by the headers, backwards by the trailers.

The seed is the batch's position in the segment divided by 8, exclusive-or the segment's salt (32 bits, as a crc32c that
goes on). What a producer puts into a payload is therefore no batch: it does not know the salt. And a batch is none at
any other place than its own.

A batch lies in one segment. A record is numbered where it begins, so a record in several pieces (a line longer than the
pipe) is found by seeking to its sequence and reading on, and a segment that holds a piece of it lists its sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from functools import cache
from typing import NamedTuple

from crc32c import crc32c

from wald.format.names import ROUTE_MAX_LENGTH

MAGIC = b"WBAT"
HEADER = struct.Struct("<4sIIIQqQQIIBBHI")
assert HEADER.size == 64
_FIELDS = struct.Struct("<IIQqQQIIBBH4x")
assert _FIELDS.size == HEADER.size - 8  # what the header checksum covers
_LEAD = struct.Struct("<4sI")
TRAILER = struct.Struct("<II")
_MASK = (1 << 32) - 1
_ZEROS = bytes(64)
ALIGNMENT = 8

Buffer = bytes | bytearray | memoryview

PAYLOAD_MAX_BYTES = 1 << 30  # a length no header of ours exceeds, so a damaged one cannot ask for more


class Encoding(IntEnum):
    """How a payload holds its records."""

    CONTROL = 0
    LINES = 1
    COLUMNS = 2


class Flag(IntFlag):
    """What a reader must know before it splits the payload."""

    NONE = 0
    CONTINUES = 1
    """The payload starts inside a record that began earlier; the producer sequence field holds its sequence."""
    CONTINUED = 2
    """The last record goes on in the route's next batch."""
    UNTERMINATED = 4
    """The last record ends here without a newline (end of input)."""
    CONTROL = 8
    """State for recovery: no record, no sequence; readers pass over it."""
    BARRIER = 16
    """Everything before it in the segment was synced before it was written."""


# Plain numbers, because flags are slow to combine, and every batch that is read comes along here.
_CONTINUES, _CONTINUED, _CONTROL = int(Flag.CONTINUES), int(Flag.CONTINUED), int(Flag.CONTROL)
_COLUMNS = int(Encoding.COLUMNS)
_HEADER_BYTES, _TRAILER_BYTES = HEADER.size, TRAILER.size
OUTSIDE_BYTES = _HEADER_BYTES + _TRAILER_BYTES  # of a batch, around its body


class BatchHeader(NamedTuple):
    """The decoded 64 bytes; a tuple, because one is made for every batch that is read.

    Where speed matters a plain tuple of the same fields stands for it (:data:`Fields`).
    """

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
        """The sequence of the record the payload starts in the middle of; 0 if it does not."""
        return self.producer_sequence if self.flags & _CONTINUES else 0

    @property
    def last_sequence(self) -> int:
        """The largest sequence this batch holds a byte of; below ``base_sequence`` if there is none."""
        return self.end_sequence - 1 if self.count else self.continues_sequence or self.base_sequence - 1

    @property
    def open_sequence(self) -> int:
        """The sequence of the record that goes on in the route's next batch; 0 if none does."""
        if not self.flags & _CONTINUED:
            return 0
        return self.end_sequence - 1 if self.count else self.continues_sequence

    @property
    def is_control(self) -> bool:
        return self.flags & _CONTROL != 0


Fields = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""The fields of a :class:`BatchHeader`, in their order."""


def padded(length: int) -> int:
    """``length`` rounded up to the alignment of a batch's parts."""
    return (length + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def seed(salt: int, position: int) -> int:
    """What the checksums of header and trailer start from, in a batch at ``position`` of a segment with ``salt``."""
    return (salt ^ position >> 3) & _MASK


def route_prefix(route: bytes) -> bytes:
    """The part of the body before the payload: the route's name and its padding."""
    return route + _ZEROS[: padded(len(route)) - len(route)]


def encode(header: Fields, prefix: bytes, payload: Sequence[Buffer], seed: int) -> list[Buffer]:
    """The buffers of one batch, ready for a gather-write; the payload is not copied.

    Args:
        header: with the body's checksum (:func:`checksum_body`).
        prefix: :func:`route_prefix` of the route.
        payload: buffers of together ``header.payload_bytes`` bytes.
        seed: :func:`seed` of the place it will be written to.
    """
    payload_bytes = header[1]
    assert payload_bytes <= PAYLOAD_MAX_BYTES, "no reader would believe the length"
    fields = _FIELDS.pack(*header)
    tail = _ZEROS[: -payload_bytes & 7]
    length = (OUTSIDE_BYTES + len(prefix) + payload_bytes + len(tail)).to_bytes(4, "little")
    head = _LEAD.pack(MAGIC, crc32c(fields, seed)) + fields + prefix
    return [head, *payload, tail + length + crc32c(length, seed).to_bytes(4, "little")]


def trailer(total_bytes: int, seed: int) -> bytes:
    """What a batch of ``total_bytes`` ends in."""
    return TRAILER.pack(total_bytes, crc32c(total_bytes.to_bytes(4, "little"), seed))


def padding(payload_bytes: int) -> bytes:
    """What stands between a payload and the next batch."""
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
    magic, checksum, _, payload_bytes, _, _, _, _, count, _, encoding, flags, route_bytes, reserved = fields
    if magic != MAGIC or crc32c(data[offset + 8 : offset + _HEADER_BYTES], seed) != checksum:
        return None
    sane = (
        reserved == 0
        and payload_bytes <= PAYLOAD_MAX_BYTES
        and count <= payload_bytes  # a record that begins here has a byte here
        and route_bytes <= ROUTE_MAX_LENGTH
        and encoding <= _COLUMNS
        and (encoding == 0) == (flags & _CONTROL != 0)
    )
    return BatchHeader._make(fields[2:-1]) if sane else None


def mended_header(opening: bytes, seed: int) -> BatchHeader | None:
    """What these 64 bytes were before one or two bits of them changed; None if that is not what happened.

    A crc32c of so few bytes differs in six bits at least from that of any other, so it tells which two have changed
    (Koopman, "32-Bit Cyclic Redundancy Codes for Internet Applications", 2002). Bytes that never were a header may be
    taken for one, so whoever uses it needs a second witness: the trailer.
    """
    if len(opening) < HEADER.size:
        return None
    _, checksum = _LEAD.unpack_from(opening)
    wrong = checksum ^ crc32c(opening[8:], seed)
    changed = bytearray(MAGIC + opening[len(MAGIC) :])
    for bit in _bits_behind(wrong):
        changed[bit >> 3] ^= 1 << (bit & 7)
    return decode_header(bytes(changed), 0, seed)


def _bits_behind(wrong: int) -> tuple[int, ...]:
    """The one or two bits that make a header's checksum wrong in this way; none if it takes more of them."""
    bits = _bit_behind()
    if wrong in bits:
        return (bits[wrong],)
    return next(((bit, bits[wrong ^ part]) for part, bit in bits.items() if wrong ^ part in bits), ())


@cache
def _bit_behind() -> dict[int, int]:
    """By what a header's checksum is wrong when one bit of bytes 4..64 is → which one, counted from the first byte."""
    bits = {1 << bit: 32 + bit for bit in range(32)}
    plain = crc32c(bytes(HEADER.size - 8))
    for bit in range(8 * (HEADER.size - 8)):
        changed = bytearray(HEADER.size - 8)
        changed[bit >> 3] = 1 << (bit & 7)
        bits[crc32c(changed) ^ plain] = 64 + bit
    return bits


def begin_of(closing: bytes | memoryview, end: int, salt: int) -> int | None:
    """The position of the batch that ends in these 8 bytes; None if they are no trailer.

    Args:
        end: the position behind it.
    """
    if len(closing) != TRAILER.size:
        return None
    length, checksum = TRAILER.unpack(closing)
    begin = end - int(length)
    if length % ALIGNMENT or begin < 0 or crc32c(closing[:4], seed(salt, begin)) != checksum:
        return None
    return begin


def salt_of(opening: bytes, position: int) -> int:
    """The salt with which the checksum of the header at ``position`` holds; any bytes have one, right or wrong.

    Whoever uses it needs a second witness: a body checksum that holds, say.
    """
    _, checksum = _LEAD.unpack_from(opening)
    return seed(_start(opening[8 : HEADER.size], checksum), position)


def _start(data: bytes, checksum: int) -> int:
    """What a crc32c of ``data`` that comes to ``checksum`` started from: each of its steps can be taken back."""
    table = _steps()
    state = checksum ^ _MASK
    for byte in reversed(data):
        index, step = table[state >> 24]
        state = (state ^ step) << 8 & _MASK | index ^ byte
    return state ^ _MASK


@cache
def _steps() -> list[tuple[int, int]]:
    """The table of a bytewise crc32c, by the highest byte of its entries: no two have the same."""
    steps = [(crc32c(bytes([index]), _MASK) ^ _MASK, index) for index in range(256)]
    return [(index, step) for step, index in sorted(steps)]
