"""The transfers file: bytes on their way from a pipe to the log.

The bytes stay in the pipe until they are on disk, so for a moment they are in both places. A slot is written before the
batch; with it, the daemon's next start knows exactly whether the bytes have left the pipe.

    offset  size  field
         0     4  checksum      crc32c of bytes 4..192
         4     4  bytes         0: the slot is empty
         8     8  segment       base sequence of the batch's segment
        16     8  position      of the batch in that segment
        24     1  first byte    of the bytes in the pipe
        25     1  zero
        26     2  route length
        28   128  route
       156     4  zeros
       160     8  inode         of the pipe
       168    24  zeros
       192     1  mark          before the transfer: the first byte XOR 0xFF; after it: the first byte
       193    63  unused

Slot n begins at n x 256. One readv(2) removes all the bytes from the pipe and stores the first of them in ``mark``.
Linux does not interrupt a read whose bytes are available, so whenever the process is killed, the mark tells whether
all bytes or none have left the pipe. See ``wald.daemon.pipes``.
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
    """Bytes that a batch contains and a pipe may still contain.

    Attributes:
        inode: of the pipe: a route can have had several, and a FIFO can be moved.
    """

    route: str
    inode: int
    taken_bytes: int
    segment: int
    position: int
    first: int


def encode_transfer(transfer: Transfer) -> bytes:
    """Encode a slot up to and including the mark, before the transfer."""
    name = transfer.route.encode("ascii")
    body = _SLOT.pack(
        transfer.taken_bytes, transfer.segment, transfer.position, transfer.first, len(name), name, transfer.inode
    )
    return struct.pack("<I", crc32c(body)) + body + bytes([transfer.first ^ 0xFF])


def decode_transfer(slot: bytes) -> tuple[Transfer, bool] | None:
    """Return a slot's transfer, and True if the bytes have left the pipe; None if the slot is empty or half-written."""
    if len(slot) <= MARK_OFFSET or struct.unpack_from("<I", slot)[0] != crc32c(slot[4:MARK_OFFSET]):
        return None
    taken_bytes, segment, position, first, length, name, inode = _SLOT.unpack_from(slot, 4)
    if taken_bytes == 0 or length > ROUTE_MAX_LENGTH:
        return None
    route = name[:length].decode("ascii", "replace")
    return Transfer(route, inode, taken_bytes, segment, position, first), slot[MARK_OFFSET] == first
