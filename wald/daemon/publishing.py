"""A whole payload, checked and handed to the turn: how many records it has, and what its producer is answered."""

from __future__ import annotations

from stringzilla import count as count_bytes

from wald.daemon.arena import Arena
from wald.daemon.spooling import Spooling
from wald.daemon.turn import Ticket, Turn
from wald.format.columns import BadColumns
from wald.format.columns import decode as decode_columns
from wald.format.control import Written
from wald.format.framing import Code, ProtocolError, Publish, encode_err
from wald.store.writer import Route

Answer = bytes | Ticket
"""A reply, or a claim on one that the commit makes good."""

_NEWLINE = ord("\n")


def ok(first: int, last: int) -> bytes:
    """The reply to what is durable."""
    return b"OK %d %d\n" % (first, last)


def publish_whole(turn: Turn, arena: Arena, route: Route, request: Publish, body: int) -> Answer:
    """Hand a whole payload to the turn."""
    end = body + request.payload_bytes
    payload = arena.view[body:end]
    try:
        if request.columns:
            return _answer(turn.publish(request, route, payload, _records(decode_columns(payload).count)))
        if not payload or payload[-1] != _NEWLINE:
            raise ProtocolError(Code.BAD_LINES, "the payload must end in a newline")
        count = int(count_bytes(payload, b"\n"))
        if request.producer_id:
            return _answer(turn.publish(request, route, payload, count))
        return turn.publish_lines(route, payload, count)
    except BadColumns as error:
        return encode_err(Code.BAD_COLUMNS, str(error))
    except ProtocolError as error:  # the payload has been read: nothing to pass over
        return encode_err(error.code, error.words)


def publish_spooled(turn: Turn, spooling: Spooling) -> Answer:
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
    return _answer(turn.publish(request, spooling.route, None, count, spooling.spool()))


def _records(count: int) -> int:
    if count == 0:
        raise BadColumns("no record")
    return count


def _answer(result: Ticket | Written) -> Answer:
    return result if isinstance(result, Ticket) else ok(result.first, result.last)
