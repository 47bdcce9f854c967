"""The transfers file: bytes on their way from a pipe to the log.

The bytes stay in the pipe until they are on disk. A slot (docs/format.md, "The transfers") tells the next start whether
they have left the pipe: one readv(2) removes all of them and stores the first byte in the slot's mark, which was that
byte XOR 0xFF. Linux does not interrupt a read whose bytes are available, so all bytes or none have left.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from wald.format.checksum import crc32c
from wald.format.names import ROUTE_MAX_LENGTH

SLOT_BYTES = 256
MARK_OFFSET = 192
_SLOT = struct.Struct("<IQQBxH128s4xQ24x")
assert _SLOT.size == MARK_OFFSET - 4


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that are in a batch and may still be in the pipe."""

    route: str
    inode: int  # of the pipe: a route's FIFO can be moved or replaced
    payload_bytes: int
    segment: int
    position: int
    first_byte: int


def encode_transfer(transfer: Transfer) -> bytes:
    """Encode a slot, up to and including the mark, while the bytes are in the pipe."""
    name = transfer.route.encode("ascii")
    place = transfer.payload_bytes, transfer.segment, transfer.position, transfer.first_byte
    body = _SLOT.pack(*place, len(name), name, transfer.inode)
    return struct.pack("<I", crc32c(body)) + body + bytes([transfer.first_byte ^ 0xFF])


def decode_transfer(slot: bytes) -> tuple[Transfer, bool] | None:
    """Return the transfer, and True if its bytes have left the pipe; None for an empty or torn slot."""
    if len(slot) <= MARK_OFFSET or struct.unpack_from("<I", slot)[0] != crc32c(slot[4:MARK_OFFSET]):
        return None
    payload_bytes, segment, position, first_byte, length, name, inode = _SLOT.unpack_from(slot, 4)
    if payload_bytes == 0 or length > ROUTE_MAX_LENGTH:
        return None
    route = name[:length].decode("ascii", "replace")
    return Transfer(route, inode, payload_bytes, segment, position, first_byte), slot[MARK_OFFSET] == first_byte
