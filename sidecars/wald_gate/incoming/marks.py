"""Marks: what is stored under a key says so in the log, in a header of its first record.

    wald.idempotency    KEY/PART, the key in hexadecimal; of the last part of a body KEY/PART/last

So the log alone says what of a request is stored, and which sequences it has got. A mark counts only in a batch of
the ids under which gates of this user store (:class:`Slots`): no producer can forge one, and headers that were
copied from one record to another mean nothing.
"""

from __future__ import annotations

import json
import os
import re
from hashlib import blake2b
from typing import NamedTuple

from wald.client.payloads import encode_headers
from wald.format.log_state import stored_producer_id
from wald.format.records import BadColumns, first_headers, with_first_headers
from wald.reading.assembler import Batch

HEADER = "wald.idempotency"
SLOTS = 256  # ids, of the 1,024 that the daemon remembers; each has one request under way
_MARK = re.compile(r"([0-9a-f]{32})/([1-9][0-9]{0,8})(?:/last)?")


class Part(NamedTuple):
    """A part of a body that is in the log: its sequences, and a digest of its records, its number, and whether more
    parts follow.
    """

    first: int
    last: int
    digest: bytes


class Marked(NamedTuple):
    """What a batch with a mark says."""

    key: bytes
    number: int
    part: Part


def marked(payload: bytes, key: bytes, number: int, *, is_last: bool) -> bytes:
    """The columns ``payload`` with the mark of part ``number`` (from 1 on) of the request with this key."""
    headers = first_headers(payload)
    every = json.loads(headers) if headers else {}
    every[HEADER] = f"{key.hex()}/{number}{'/last' if is_last else ''}"
    return with_first_headers(payload, encode_headers(every))


def digest_of(payload: bytes | memoryview) -> bytes:
    """The digest of a payload with its mark."""
    return blake2b(payload, digest_size=16).digest()


def mark_in(batch: Batch) -> Marked | None:
    """What a batch says; None if it has no mark."""
    if not batch.is_columns or batch.skipped:
        return None
    try:
        headers = first_headers(batch.payload)
        found = _MARK.fullmatch(json.loads(headers)[HEADER]) if headers else None
    except (BadColumns, ValueError, LookupError, TypeError, RecursionError):
        return None
    if found is None:
        return None
    part = Part(batch.first_sequence, batch.last_sequence, digest_of(batch.payload))
    return Marked(bytes.fromhex(found[1]), int(found[2]), part)


class Slots:
    """The producer ids under which gates of this user store what has a key, in the log with this id.

    There are few of them, so that the many keys do not make the daemon forget other producers. Each key has its slot.

    Attributes:
        ids: as they are sent to the daemon.
    """

    def __init__(self, log_id: bytes) -> None:
        self.ids = [
            int.from_bytes(blake2b(b"%d" % slot, key=log_id, digest_size=8).digest()) or 1 for slot in range(SLOTS)
        ]
        self._slots = {stored_producer_id(os.geteuid(), producer_id): slot for slot, producer_id in enumerate(self.ids)}

    def of_key(self, key: bytes) -> int:
        """The slot of a key."""
        return key[0]

    def of_producer(self, id_of_batch: int) -> int | None:
        """The slot of a batch, by the producer id in its header; None if it is of another producer."""
        return self._slots.get(id_of_batch)
