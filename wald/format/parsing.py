"""Parsing of batches: what stands at an offset of a buffer, and the batches that follow each other from there on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from wald.format.batch import (
    HEADER,
    MAGIC,
    OUTSIDE_BYTES,
    PAYLOAD_MAX_BYTES,
    TRAILER,
    BatchHeader,
    Encoding,
    Flag,
    decode_header,
    seed,
)
from wald.format.checksum import crc32c
from wald.format.names import ROUTE_MAX_LENGTH

BODY_DAMAGED = "the body's checksum is wrong"
TRAILER_DAMAGED = "the trailer is wrong"
_HEADER_BYTES, _TRAILER_BYTES = HEADER.size, TRAILER.size
_ZEROS = bytes(_HEADER_BYTES)
_CONTROL, _COLUMNS = int(Flag.CONTROL), int(Encoding.COLUMNS)  # enums are slow
_IN_PIECES = int(Flag.CONTINUES | Flag.CONTINUED)
_OUTLINE = struct.Struct("<4s8xI41xBH")  # of a header: magic, payload length, flags, route length
assert _OUTLINE.size == 60

HeaderFields = tuple[bytes, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The 64 bytes of a header as :data:`wald.format.batch.HEADER` unpacks them."""


class Outcome(Enum):
    """What stands at an offset."""

    WHOLE = "whole"
    END = "end"  # no bytes left, or preallocated zeros
    TORN = "torn"  # the input ends before the batch does
    DAMAGED = "damaged"  # the bytes are there and are wrong


class Parsed(NamedTuple):
    """The result of :func:`parse`; ``header`` is there if the checksum of the header is right."""

    outcome: Outcome
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


def parse(data: bytes | memoryview, offset: int, seed: int) -> Parsed:
    """What stands at ``offset`` of ``data``. All checksums are checked. It raises nothing, whatever the bytes."""
    view = memoryview(data)[offset:]
    parsed = parse_header(view[:_HEADER_BYTES], len(view), seed)
    header = parsed.header
    if header is None or parsed.outcome is not Outcome.WHOLE:
        return parsed
    end = header.total_bytes
    begin = end - _TRAILER_BYTES
    if crc32c(view[_HEADER_BYTES:begin]) != header.body_checksum:
        return Parsed(Outcome.DAMAGED, header, BODY_DAMAGED)
    length, checksum = TRAILER.unpack_from(view, begin)
    if length != end or crc32c(view[begin : begin + 4], seed) != checksum:
        return Parsed(Outcome.DAMAGED, header, TRAILER_DAMAGED)
    return parsed


def parse_header(opening: bytes | memoryview, left_bytes: int, seed: int) -> Parsed:
    """What the first 64 bytes of a batch say; WHOLE does not cover the body and the trailer.

    Args:
        opening: 64 bytes, or fewer if the input ends before.
        left_bytes: the length of the input from the first byte of ``opening`` on.
    """
    header = decode_header(opening, 0, seed)
    if header is None:
        if opening == _ZEROS[: len(opening)]:
            return Parsed(Outcome.END)
        if len(opening) < _HEADER_BYTES and MAGIC.startswith(opening[: len(MAGIC)]):
            return Parsed(Outcome.TORN, reason=f"{left_bytes} bytes of a header of {_HEADER_BYTES}")
        return Parsed(Outcome.DAMAGED, reason="no valid batch header")
    if left_bytes < header.total_bytes:
        return Parsed(Outcome.TORN, header, f"{left_bytes} bytes of a batch of {header.total_bytes}")
    return Parsed(Outcome.WHOLE, header)


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
            name = data[at + _HEADER_BYTES : at + _HEADER_BYTES + fields[12]]
            route = routes.get(name)
            if route is None:
                route = routes[name] = name.decode("ascii", "replace")
            yield StoredBatch(data, at, position + at, BatchHeader._make(fields[2:]), route)

    @property
    def rest(self) -> Parsed:
        """What stands at :attr:`end` after the iteration; its outcome is END where the buffer ends."""
        return parse(self.data, self.end, seed(self.salt, self.position + self.end))


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
        if not count <= length <= PAYLOAD_MAX_BYTES or name > ROUTE_MAX_LENGTH or encoding > _COLUMNS:
            return
        if (flags & _CONTROL == 0) != (encoding != 0):
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
    while at + _HEADER_BYTES <= end:
        magic, payload_bytes, flags, route_bytes = unpack(data, at)
        if magic != MAGIC or flags & _IN_PIECES:
            return True
        at += OUTSIDE_BYTES + (route_bytes + 7 & -8) + (payload_bytes + 7 & -8)
    return at != end


def route_of(data: bytes | memoryview, offset: int, header: BatchHeader) -> str:
    """The route named in the body of the batch at ``offset``."""
    start = offset + HEADER.size
    return bytes(data[start : start + header.route_bytes]).decode("ascii", "replace")


def payload_of(data: bytes | memoryview, offset: int, header: BatchHeader) -> memoryview:
    """The payload of the batch at ``offset``, without a copy."""
    start = offset + header.payload_offset
    return memoryview(data)[start : start + header.payload_bytes]
