"""The peer of a batch: the process that sent it, as the kernel reported it when the process connected.

The header of a batch has the number of its peer, which holds within the segment:

    0       not known: a program without the daemon wrote the batch
    1       the FIFO of the route, which does not say who writes to it
    2       the stdin of the daemon
    others  a process on the socket. Batch number x 8 of the segment introduced it: a CONTROL batch with the same number

The payload of the batch that introduces a peer is one line of JSON with the keys ``user``, ``pid`` and ``process`` (the
command name; "" where it could not be read). It stands in front of the first batch of the peer in the segment, and
was written together with it. So a segment says of itself who sent what is in it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

NOT_KNOWN, FIFO, STDIN = 0, 1, 2
POSITION_MAX = (1 << 35) - 8  # its number has 32 bits


class BadPeer(ValueError):
    """The payload introduces no peer."""


class Peer(NamedTuple):
    """A process that has sent batches. A tuple, because one is looked up for every batch that is written.

    Attributes:
        user: the id of its user.
        pid: its number, as in the daemon's own /proc.
        process: the name of its command when it first sent a record on the connection; "": not known.
    """

    user: int
    pid: int
    process: str


@lru_cache(maxsize=256)  # for the length, and again for the batch
def encode_peer(peer: Peer) -> bytes:
    """Return the payload that introduces ``peer``."""
    line = {"user": peer.user, "pid": peer.pid, "process": peer.process}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def decode_peer(payload: bytes | memoryview) -> Peer:
    """The peer that a payload introduces.

    Raises:
        BadPeer: it introduces none.
    """
    try:
        line = json.loads(bytes(payload))
        return Peer(int(line["user"]), int(line["pid"]), str(line["process"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadPeer(f"no peer: {error}") from error


def number_of(position: int) -> int:
    """The number of the peer that is introduced at ``position``, which is not above POSITION_MAX."""
    return position >> 3


def position_of(number: int) -> int:
    """Where in the raw segment the peer is introduced that has this number."""
    return number << 3
