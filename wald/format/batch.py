"""Batches, the unit of the log: consecutive records of one route under one header (docs/format.md, "A batch").

The body's checksum covers padding. The checksums of header and trailer start from a seed, so that no payload contains a
valid batch, and a batch is valid only at its own position. A batch never spans segments. A line longer than the pipe
becomes a record in several pieces: its sequence belongs to the batch with the first, and every segment with a piece
lists it.
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
assert _FIELDS.size == HEADER.size - 8  # the bytes under the header checksum
_MAGIC_AND_CHECKSUM = struct.Struct("<4sI")
TRAILER = struct.Struct("<II")
_MAX_U32 = (1 << 32) - 1
_ZEROS = bytes(64)
ALIGNMENT = 8

Buffer = bytes | bytearray | memoryview

PAYLOAD_MAX_BYTES = 1 << 30  # limits the allocation if a header is damaged


class Encoding(IntEnum):
    """Encoding of a payload."""

    CONTROL = 0
    LINES = 1
    COLUMNS = 2


class Flag(IntFlag):
    """Flags of a batch."""

    NONE = 0
    CONTINUES = 1  # begins inside a record; producer_sequence contains its sequence
    CONTINUED = 2  # ends inside a record
    UNTERMINATED = 4
    CONTROL = 8  # the payload is a log state or peer (wald.format.log_state); with DROPPED, zeros
    BARRIER = 16  # written after a sync of all earlier bytes of the segment
    DROPPED = 32  # with CONTROL: replaces batches that shrinking dropped


# Plain integers, because enums are too slow for every batch.
_CONTINUES, _CONTINUED, _CONTROL = int(Flag.CONTINUES), int(Flag.CONTINUED), int(Flag.CONTROL)
_DROPPED, _IN_PIECES = int(Flag.DROPPED), int(Flag.CONTINUES | Flag.CONTINUED)
_COLUMNS = int(Encoding.COLUMNS)
_HEADER_BYTES, _TRAILER_BYTES = HEADER.size, TRAILER.size
FRAMING_BYTES = _HEADER_BYTES + _TRAILER_BYTES


class BatchHeader(NamedTuple):
    """Decoded header of a batch; a tuple, which is fast to create."""

    body_checksum: int
    payload_bytes: int
    base_sequence: int
    append_time_ns: int  # never decreases between two clock steps
    producer_id: int  # 0: none
    producer_sequence: int  # or a continued record: see Flag.CONTINUES
    count: int  # type: ignore[assignment]  # records that begin in the batch
    epoch: int  # low 32 bits
    encoding: int
    flags: int
    route_bytes: int
    peer: int = 0  # number of the sender: see wald.format.log_state

    @property
    def payload_offset(self) -> int:
        return _HEADER_BYTES + padded(self.route_bytes)

    @property
    def total_bytes(self) -> int:
        return FRAMING_BYTES + (self.route_bytes + 7 & -8) + (self.payload_bytes + 7 & -8)

    @property
    def end_sequence(self) -> int:
        return self.base_sequence + self.count

    @property
    def continues_sequence(self) -> int:
        """Record whose next piece begins the payload; 0 if the payload begins with a new record."""
        return self.producer_sequence if self.flags & _CONTINUES else 0

    @property
    def last_sequence(self) -> int:
        """Last record with a byte in the batch; ``base_sequence - 1`` if the batch has no records."""
        return self.end_sequence - 1 if self.count else self.continues_sequence or self.base_sequence - 1

    @property
    def open_sequence(self) -> int:
        """Record that the route's next batch continues; 0 if the last record is complete."""
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
        return self.flags & (_CONTROL | _DROPPED) == _CONTROL and not self.peer


def padded(length: int) -> int:
    """Round ``length`` up to a multiple of 8."""
    return (length + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def seed(salt: int, position: int) -> int:
    """Return the initial checksum value for a header and trailer."""
    return (salt ^ position >> 3) & _MAX_U32


def route_prefix(route: bytes) -> bytes:
    """Return the beginning of the body: the padded route."""
    return route + _ZEROS[: padded(len(route)) - len(route)]


def encode_batch(header: BatchHeader, prefix: bytes, payload: Sequence[Buffer], seed: int) -> list[Buffer]:
    """Return one batch as buffers for a gather-write, without copying the payload.

    ``header`` must contain the checksum of the body.
    """
    payload_bytes = header[1]
    assert payload_bytes <= PAYLOAD_MAX_BYTES, "the payload is too long"
    fields = _FIELDS.pack(*header)
    padding = _ZEROS[: -payload_bytes & 7]
    length = (FRAMING_BYTES + len(prefix) + payload_bytes + len(padding)).to_bytes(4, "little")
    start = _MAGIC_AND_CHECKSUM.pack(MAGIC, crc32c(fields, seed)) + fields + prefix
    return [start, *payload, padding + length + crc32c(length, seed).to_bytes(4, "little")]


def checksum_body(prefix: bytes, payload: Sequence[Buffer], payload_bytes: int) -> int:
    """Return the checksum of the body, padding included."""
    checksum = crc32c(prefix)
    for part in payload:
        checksum = crc32c(part, checksum)
    padding_bytes = -payload_bytes & 7
    return crc32c(_ZEROS[:padding_bytes], checksum) if padding_bytes else checksum


def control_header(
    payload: bytes, base_sequence: int, append_time_ns: int, epoch: int, *, count: int = 0, flags: int = _CONTROL
) -> BatchHeader:
    checksum, encoding = checksum_body(b"", [payload], len(payload)), int(Encoding.CONTROL)
    fields = checksum, len(payload), base_sequence, append_time_ns, 0, 0, count, epoch & _MAX_U32, encoding, flags, 0
    return BatchHeader(*fields)


def decode_header(data: bytes | memoryview, offset: int, seed: int) -> BatchHeader | None:
    """Decode the header at ``offset``; None if its checksum or a field is invalid."""
    if len(data) - offset < _HEADER_BYTES:
        return None
    fields = HEADER.unpack_from(data, offset)
    magic, checksum, _, payload_bytes, _, _, _, _, count, _, encoding, flags, route_bytes, _ = fields
    if magic != MAGIC or crc32c(data[offset + 8 : offset + _HEADER_BYTES], seed) != checksum:
        return None
    is_valid = (
        payload_bytes <= PAYLOAD_MAX_BYTES
        and count <= payload_bytes  # each record has a byte
        and route_bytes <= ROUTE_MAX_LENGTH
        and encoding <= _COLUMNS
        and (encoding == 0) == (flags & _CONTROL != 0)
    )
    return BatchHeader._make(fields[2:]) if is_valid else None


def batch_start(trailer: bytes | memoryview, end: int, salt: int) -> int | None:
    """Return the position of the batch whose ``trailer`` ends at ``end``; None if the trailer is invalid."""
    if len(trailer) != _TRAILER_BYTES:
        return None
    length, checksum = TRAILER.unpack(trailer)
    start = end - int(length)
    if length % ALIGNMENT or start < 0 or crc32c(trailer[:4], seed(salt, start)) != checksum:
        return None
    return start


BODY_DAMAGED = "the body's checksum is wrong"
TRAILER_DAMAGED = "the trailer is invalid"
_OUTLINE = struct.Struct("<4s8xI41xBH")  # magic, payload length, flags, route length
assert _OUTLINE.size == 60

HeaderFields = tuple[bytes, int, int, int, int, int, int, int, int, int, int, int, int, int]


class ParseOutcome(Enum):
    """Kind of bytes at an offset."""

    WHOLE = "whole"
    END = "end"  # end of the input, or preallocated zeros
    TORN = "torn"  # the input ends inside the batch
    DAMAGED = "damaged"


class ParseResult(NamedTuple):
    """Result of parsing. ``header`` is None if it is invalid."""

    outcome: ParseOutcome
    header: BatchHeader | None = None
    reason: str = ""


class StoredBatch(NamedTuple):
    """An intact batch in a buffer."""

    data: bytes
    offset: int  # in ``data``
    position: int  # in the raw segment
    header: BatchHeader
    route: str

    @property
    def end(self) -> int:
        return self.position + self.header.total_bytes

    @property
    def payload(self) -> memoryview:
        start = self.offset + self.header.payload_offset
        return memoryview(self.data)[start : start + self.header.payload_bytes]


def parse_batch(data: bytes | memoryview, offset: int, seed: int) -> ParseResult:
    """Parse the batch at ``offset`` and verify every checksum. Return damage, never raise it."""
    view = memoryview(data)[offset:]
    parsed = parse_header(view[:_HEADER_BYTES], len(view), seed)
    header = parsed.header
    if header is None or parsed.outcome is not ParseOutcome.WHOLE:
        return parsed
    total_bytes = header.total_bytes
    body_end = total_bytes - _TRAILER_BYTES
    if crc32c(view[_HEADER_BYTES:body_end]) != header.body_checksum:
        return ParseResult(ParseOutcome.DAMAGED, header, BODY_DAMAGED)
    length, checksum = TRAILER.unpack_from(view, body_end)
    if length != total_bytes or crc32c(view[body_end : body_end + 4], seed) != checksum:
        return ParseResult(ParseOutcome.DAMAGED, header, TRAILER_DAMAGED)
    return parsed


def parse_header(data: bytes | memoryview, available_bytes: int, seed: int) -> ParseResult:
    """Parse a header without checking the body. WHOLE only means that the batch fits into ``available_bytes``."""
    header = decode_header(data, 0, seed)
    if header is None:
        if data == _ZEROS[: len(data)]:
            return ParseResult(ParseOutcome.END)
        if len(data) < _HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]):
            return ParseResult(ParseOutcome.TORN, reason=f"the header has {available_bytes} of {_HEADER_BYTES} bytes")
        return ParseResult(ParseOutcome.DAMAGED, reason="no valid batch header")
    if available_bytes < header.total_bytes:
        reason = f"the batch has {available_bytes} of {header.total_bytes} bytes"
        return ParseResult(ParseOutcome.TORN, header, reason)
    return ParseResult(ParseOutcome.WHOLE, header)


class Batches:
    """Single-use iterator over the batches in ``data`` that stops at the first damaged or torn batch.

    ``position`` is that of ``data`` in the raw segment. If ``verified``, the caller has verified all of ``data``, so
    bodies and trailers need no check.
    """

    def __init__(self, data: bytes, start: int = 0, *, position: int, salt: int, verified: bool = False) -> None:
        self.data = data
        self.end = start  # offset in ``data`` after the last batch yielded
        self.position = position
        self.salt = salt
        self._verified = verified

    def __iter__(self) -> Iterator[StoredBatch]:
        data, position = self.data, self.position
        routes: dict[bytes, str] = {}
        for offset, end, fields in whole_batches(
            data, self.end, position=position, salt=self.salt, verified=self._verified
        ):
            self.end = end
            name = data[offset + _HEADER_BYTES : offset + _HEADER_BYTES + fields[12]]
            route = routes.get(name)
            if route is None:
                route = routes[name] = name.decode("ascii", "replace")
            yield StoredBatch(data, offset, position + offset, BatchHeader._make(fields[2:]), route)

    @property
    def rest(self) -> ParseResult:
        """Result of parsing at :attr:`end`: why the iterator stopped."""
        return parse_batch(self.data, self.end, seed(self.salt, self.position + self.end))


def whole_batches(
    data: bytes, offset: int, *, position: int, salt: int, verified: bool = False
) -> Iterator[tuple[int, int, HeaderFields]]:
    """Yield offset, end and header of each batch. Faster than :class:`Batches`, which creates objects."""
    unpack, unpack_trailer, view, data_bytes = HEADER.unpack_from, TRAILER.unpack_from, memoryview(data), len(data)
    while offset + 64 <= data_bytes:
        fields = unpack(data, offset)
        magic, header_crc, body_crc, payload_bytes, _, _, _, _, count, _, encoding, flags, route_bytes, _ = fields
        body, seed = offset + 64, (salt ^ position + offset >> 3) & 0xFFFFFFFF  # the function seed(), inlined
        if magic != MAGIC or crc32c(data[offset + 8 : body], seed) != header_crc:
            return
        if not count <= payload_bytes <= PAYLOAD_MAX_BYTES or route_bytes > ROUTE_MAX_LENGTH or encoding > _COLUMNS:
            return
        if (flags & _CONTROL == 0) != (encoding != 0):
            return
        trailer = body + (route_bytes + 7 & -8) + (payload_bytes + 7 & -8)
        end = trailer + 8
        if end > data_bytes:
            return
        if not verified:
            if crc32c(view[body:trailer]) != body_crc:
                return
            total_bytes = end - offset
            if unpack_trailer(data, trailer) != (total_bytes, crc32c(total_bytes.to_bytes(4, "little"), seed)):
                return
        yield offset, end, fields
        offset = end


def holds_pieces(data: bytes, offset: int) -> bool:
    """Return True if ``data`` contains a piece of a record or is not batches, without verifying checksums."""
    unpack, end = _OUTLINE.unpack_from, len(data)
    while offset + _HEADER_BYTES <= end:
        magic, payload_bytes, flags, route_bytes = unpack(data, offset)
        if magic != MAGIC or flags & _IN_PIECES:
            return True
        offset += FRAMING_BYTES + (route_bytes + 7 & -8) + (payload_bytes + 7 & -8)
    return offset != end
