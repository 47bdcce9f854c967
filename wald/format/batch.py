"""Encoding and parsing of batches, the unit of the log.

A batch: consecutive records of one route under one header and one checksum, with its length at both ends.

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
        60     4  peer               the process that sent it, see :mod:`wald.format.log_state`; 0: not known

The body is the name of the route, zeros up to a multiple of 8, the payload, and zeros up to a multiple of 8. The
trailer follows it: the length of the batch from its first byte to the next batch (4 bytes), and the crc32c of these 4
bytes, started from the seed (4 bytes). So a reader gets past damage in both directions: forwards by the headers,
backwards by the trailers.

The seed is (position of the batch in the segment / 8) XOR (salt of the segment), and is used as the crc32c of preceding
bytes. So the bytes of a payload are never taken for a batch, because a producer does not know the salt, and a batch is
valid only at its own position.

A batch never spans segments. A record has its sequence where it begins. A record in several pieces (a line longer than
the pipe) is found by seeking to its sequence and reading on. A segment that holds a piece of it lists its sequence.

Parsing of batches: what stands at an offset of a buffer, and the batches that follow each other from there on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum, IntFlag
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
    """The payload has no record and no sequence: it is the state of the log (:mod:`wald.format.log_state`), a peer, or
    with DROPPED a range of dropped batches."""
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
FRAMING_BYTES = _HEADER_BYTES + _TRAILER_BYTES  # of a batch, around its body


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
        return FRAMING_BYTES + (self.route_bytes + 7 & -8) + (self.payload_bytes + 7 & -8)

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


def encode_batch(header: BatchHeader, prefix: bytes, payload: Sequence[Buffer], seed: int) -> list[Buffer]:
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
    length = (FRAMING_BYTES + len(prefix) + payload_bytes + len(tail)).to_bytes(4, "little")
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


def batch_begin(closing: bytes | memoryview, end: int, salt: int) -> int | None:
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


BODY_DAMAGED = "the body's checksum is wrong"
TRAILER_DAMAGED = "the trailer is wrong"
_PARSING_HEADER_BYTES, _PARSING_TRAILER_BYTES = HEADER.size, TRAILER.size
_PARSING_ZEROS = bytes(_PARSING_HEADER_BYTES)
_PARSING_CONTROL, _PARSING_COLUMNS = int(Flag.CONTROL), int(Encoding.COLUMNS)  # enums are slow
_IN_PIECES = int(Flag.CONTINUES | Flag.CONTINUED)
_OUTLINE = struct.Struct("<4s8xI41xBH")  # of a header: magic, payload length, flags, route length
assert _OUTLINE.size == 60

HeaderFields = tuple[bytes, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The 64 bytes of a header as :data:`wald.format.batch.HEADER` unpacks them."""


class ParseOutcome(Enum):
    """What stands at an offset."""

    WHOLE = "whole"
    END = "end"  # no bytes left, or preallocated zeros
    TORN = "torn"  # the input ends before the batch does
    DAMAGED = "damaged"  # the bytes are there and are wrong


class Parsed(NamedTuple):
    """The result of :func:`parse`; ``header`` is there if the checksum of the header is right."""

    outcome: ParseOutcome
    header: BatchHeader | None = None
    reason: str = ""


class StoredBatch(NamedTuple):
    """A batch in memory: it stands at ``at`` in ``data``, and at ``position`` in the raw segment."""

    data: bytes
    at: int
    position: int
    header: BatchHeader
    route: str

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.position + self.header.total_bytes

    @property
    def payload(self) -> memoryview:
        """The payload, without a copy."""
        return payload_of(self.data, self.at, self.header)


def parse_batch(data: bytes | memoryview, offset: int, seed: int) -> Parsed:
    """What stands at ``offset`` of ``data``. All checksums are checked. It raises nothing, whatever the bytes."""
    view = memoryview(data)[offset:]
    parsed = parse_header(view[:_PARSING_HEADER_BYTES], len(view), seed)
    header = parsed.header
    if header is None or parsed.outcome is not ParseOutcome.WHOLE:
        return parsed
    end = header.total_bytes
    begin = end - _PARSING_TRAILER_BYTES
    if crc32c(view[_PARSING_HEADER_BYTES:begin]) != header.body_checksum:
        return Parsed(ParseOutcome.DAMAGED, header, BODY_DAMAGED)
    length, checksum = TRAILER.unpack_from(view, begin)
    if length != end or crc32c(view[begin : begin + 4], seed) != checksum:
        return Parsed(ParseOutcome.DAMAGED, header, TRAILER_DAMAGED)
    return parsed


def parse_header(opening: bytes | memoryview, left_bytes: int, seed: int) -> Parsed:
    """What the first 64 bytes of a batch say; WHOLE does not cover the body and the trailer.

    Args:
        opening: 64 bytes, or fewer if the input ends before.
        left_bytes: the length of the input from the first byte of ``opening`` on.
    """
    header = decode_header(opening, 0, seed)
    if header is None:
        if opening == _PARSING_ZEROS[: len(opening)]:
            return Parsed(ParseOutcome.END)
        if len(opening) < _PARSING_HEADER_BYTES and MAGIC.startswith(opening[: len(MAGIC)]):
            return Parsed(ParseOutcome.TORN, reason=f"{left_bytes} bytes of a header of {_PARSING_HEADER_BYTES}")
        return Parsed(ParseOutcome.DAMAGED, reason="no valid batch header")
    if left_bytes < header.total_bytes:
        return Parsed(ParseOutcome.TORN, header, f"{left_bytes} bytes of a batch of {header.total_bytes}")
    return Parsed(ParseOutcome.WHOLE, header)


class Batches:
    """The whole batches that follow each other in a buffer. To be iterated once.

    Args:
        data: bytes of a raw segment.
        at: where in ``data`` the first batch begins.
        position: where in the segment ``data`` begins.
        salt: of the segment.
        verified: whether a checksum of all of ``data`` was checked. Then bodies and trailers are not checked again.

    Attributes:
        end: where in ``data`` the batches iterated so far end.
    """

    def __init__(self, data: bytes, at: int = 0, *, position: int, salt: int, verified: bool = False) -> None:
        self.data = data
        self.end = at
        self.position = position
        self.salt = salt
        self._verified = verified

    def __iter__(self) -> Iterator[StoredBatch]:
        data, position = self.data, self.position
        routes: dict[bytes, str] = {}
        for at, end, fields in whole_batches(
            data, self.end, position=position, salt=self.salt, verified=self._verified
        ):
            self.end = end
            name = data[at + _PARSING_HEADER_BYTES : at + _PARSING_HEADER_BYTES + fields[12]]
            route = routes.get(name)
            if route is None:
                route = routes[name] = name.decode("ascii", "replace")
            yield StoredBatch(data, at, position + at, BatchHeader._make(fields[2:]), route)

    @property
    def rest(self) -> Parsed:
        """What stands at :attr:`end` after the iteration; its outcome is END where the buffer ends."""
        return parse_batch(self.data, self.end, seed(self.salt, self.position + self.end))


def whole_batches(
    data: bytes, at: int, *, position: int, salt: int, verified: bool = False
) -> Iterator[tuple[int, int, HeaderFields]]:
    """Offset, end and header of each whole batch from ``at`` on, arguments as for :class:`Batches`.

    It checks what :func:`parse` checks, and is several times as fast because it makes no objects.
    """
    unpack, unpack_trailer, view, data_bytes = HEADER.unpack_from, TRAILER.unpack_from, memoryview(data), len(data)
    while at + 64 <= data_bytes:
        fields = unpack(data, at)
        magic, header_crc, body_crc, length, _, _, _, _, count, _, encoding, flags, name, _ = fields
        body, place = at + 64, (salt ^ position + at >> 3) & 0xFFFFFFFF  # the seed, without a call
        if magic != MAGIC or crc32c(data[at + 8 : body], place) != header_crc:
            return
        if not count <= length <= PAYLOAD_MAX_BYTES or name > ROUTE_MAX_LENGTH or encoding > _PARSING_COLUMNS:
            return
        if (flags & _PARSING_CONTROL == 0) != (encoding != 0):
            return
        tail = body + (name + 7 & -8) + (length + 7 & -8)
        end = tail + 8
        if end > data_bytes:
            return
        if not verified:
            if crc32c(view[body:tail]) != body_crc:
                return
            total = end - at
            if unpack_trailer(data, tail) != (total, crc32c(total.to_bytes(4, "little"), place)):
                return
        yield at, end, fields
        at = end


def holds_pieces(data: bytes, at: int) -> bool:
    """Whether a batch from ``at`` on has a piece of a record that goes on in another, which nothing else shows.

    No checksum is checked. The answer is True, too, if these are not whole batches up to the end of ``data``.
    """
    unpack, end = _OUTLINE.unpack_from, len(data)
    while at + _PARSING_HEADER_BYTES <= end:
        magic, payload_bytes, flags, route_bytes = unpack(data, at)
        if magic != MAGIC or flags & _IN_PIECES:
            return True
        at += FRAMING_BYTES + (route_bytes + 7 & -8) + (payload_bytes + 7 & -8)
    return at != end


def route_of(data: bytes | memoryview, offset: int, header: BatchHeader) -> str:
    """The route named in the body of the batch at ``offset``."""
    start = offset + HEADER.size
    return bytes(data[start : start + header.route_bytes]).decode("ascii", "replace")


def payload_of(data: bytes | memoryview, offset: int, header: BatchHeader) -> memoryview:
    """The payload of the batch at ``offset``, without a copy."""
    start = offset + header.payload_offset
    return memoryview(data)[start : start + header.payload_bytes]
