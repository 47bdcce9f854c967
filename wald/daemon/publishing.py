"""A whole payload, checked and handed to the turn: how many records it has, and what its producer is answered."""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b

from stringzilla import count as count_bytes

from wald.daemon.arena import Arena
from wald.daemon.spooling import Spooling
from wald.daemon.turn import Ticket, Turn
from wald.format.columns import BadColumns
from wald.format.columns import decode as decode_columns
from wald.format.protocol import Code, ProtocolError, Publish, encode_err
from wald.format.state import Written
from wald.store.writing.writer import Route

Answer = bytes | Ticket
"""A reply, or a claim on one that the commit makes good."""

_NEWLINE = ord("\n")
_OWNED = struct.Struct("<IQ")


@lru_cache(maxsize=1024)
def id_in_log(user_id: int, producer_id: int) -> int:
    """The producer id that the log has for a user's ``producer_id`` (0: none).

    It is read by whoever may read segments; what it was made of cannot be found out, and another user cannot make it.
    """
    if not producer_id:
        return 0
    return int.from_bytes(blake2b(_OWNED.pack(user_id, producer_id), digest_size=8).digest()) or 1


def ok(first: int, last: int) -> bytes:
    """The reply to what is durable."""
    return b"OK %d %d\n" % (first, last)


def publish_whole(turn: Turn, arena: Arena, user_id: int, route: Route, request: Publish, body: int) -> Answer:
    """Hand a user's whole payload to the turn; it begins at ``body`` of the arena."""
    end = body + request.payload_bytes
    payload = arena.view[body:end]
    try:
        if request.columns:
            count = _records(decode_columns(payload).count)
            return _answer(turn.publish(request, id_in_log(user_id, request.producer_id), route, payload, count))
        if not payload or payload[-1] != _NEWLINE:
            raise ProtocolError(Code.BAD_LINES, "the payload must end in a newline")
        count = int(count_bytes(payload, b"\n"))
        if request.producer_id:
            return _answer(turn.publish(request, id_in_log(user_id, request.producer_id), route, payload, count))
        return turn.publish_lines(route, payload, count)
    except BadColumns as error:
        return encode_err(Code.BAD_COLUMNS, str(error))
    except ProtocolError as error:  # the payload has been read: nothing to pass over
        return encode_err(error.code, error.words)


def publish_spooled(turn: Turn, spooling: Spooling, user_id: int) -> Answer:
    """Hand a user's payload, whole in its file, to the turn.

    Raises:
        ProtocolError: it is malformed, or :meth:`Turn.publish` refuses it.
    """
    request = spooling.request
    if request.columns:
        try:
            count = _records(spooling.columns_count())
        except BadColumns as error:
            raise ProtocolError(Code.BAD_COLUMNS, str(error)) from None
    elif spooling.ends_in_newline:
        count = spooling.newlines
    else:
        raise ProtocolError(Code.BAD_LINES, "the payload must end in a newline")
    producer_id = id_in_log(user_id, request.producer_id)
    return _answer(turn.publish(request, producer_id, spooling.route, None, count, spooling))


def _records(count: int) -> int:
    if count == 0:
        raise BadColumns("no record")
    return count


def _answer(result: Ticket | Written) -> Answer:
    return result if isinstance(result, Ticket) else ok(result.first, result.last)
