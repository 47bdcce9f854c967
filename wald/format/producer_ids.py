"""The producer id that a batch has in the log, made from the id that a client gives and the user that it runs as."""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b

_OWNED = struct.Struct("<IQ")


@lru_cache(maxsize=1024)
def id_in_log(user_id: int, producer_id: int) -> int:
    """The producer id that the log has for a user's ``producer_id`` (0: none).

    Every reader of segments can see it. It does not reveal what it was made of, and another user cannot make it.
    """
    if not producer_id:
        return 0
    return int.from_bytes(blake2b(_OWNED.pack(user_id, producer_id), digest_size=8).digest()) or 1
