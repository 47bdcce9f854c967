"""Verbs that say what the log is, as the commands of their names do, and the two that change it: ROUTE ADD and CUT."""

from __future__ import annotations

import time
from collections.abc import Generator

from starlette.responses import Response

from wald.errors import InvalidInput, NotFound
from wald.log import Log
from wald.retention.backlog import Backlog
from wald.retention.progress import read_progress
from wald.status.retention import explanation
from wald.status.schema import Explained, Head, Routes, Where
from wald_gate.call import Call
from wald_gate.shapes import SEQUENCE_MAX, encoded
from wald_gate.verbs import listing

JSON = "application/json"


async def routes(call: Call) -> Response:
    """The routes that the client may read, and how far their groups have come."""

    def read() -> Routes:
        log = call.state.log
        return Routes.of(log.root, [each for each in read_progress(log.view()) if call.client.may_read(each.route)])

    return _answer(call.seen(await call.read(read)))


async def add_route(call: Call) -> Response:
    """Make a route; it is none that there is one already."""
    await call.state.daemon.command("ROUTE", "ADD", call.route)
    return _answer({"route": call.route})


async def head(call: Call) -> Response:
    """How far the log is durable."""
    return _answer(call.seen(await call.state.head.result()))


def read_head(log: Log) -> Head:
    """Return how far the log is durable.

    Raises:
        NotFound: no record is durable yet.
    """
    found = log.head()
    if found is None:
        raise NotFound(f"{log.root.head}: no record is durable yet", hint="POST a record")
    return Head.of(log.root, found)


async def where(call: Call) -> Response:
    """What became of a record."""
    given = call.request.path_params["sequence"]
    if not (given.isascii() and given.isdecimal() and len(given) < 20):
        raise InvalidInput(f"{given[:40]!r} is not a sequence", hint="/v1/where/250")
    if int(given) > SEQUENCE_MAX:
        raise InvalidInput(f"{given} is above {SEQUENCE_MAX}, the highest possible sequence", hint="/v1/where/250")
    found = await call.read(call.state.log.where, int(given))
    return _answer(Where.of(found))


async def explain(call: Call) -> Response:
    """Say which cursor pins which bytes, in an array or an object a line."""
    media_type, listed = listing(call)
    found = await call.walk(explained(call.state.log))
    return Response(await call.read(listed, found), media_type=media_type)


def explained(log: Log) -> Generator[None, None, list[Explained]]:
    """Explain a log; yields after each object, for :meth:`Call.walk`: segments may be very many."""
    found = []
    for each in explanation(log, Backlog(log.view()), time.time_ns()):
        found.append(each)
        yield
    return found


async def cut(call: Call) -> Response:
    """Cut the active segment; nothing is cut if it has no record yet."""
    what, segment = (await call.state.daemon.command("CUT")).split()
    return _answer({"cut": what == "cut", "segment": int(segment)})


def _answer(fields: object) -> Response:
    return Response(encoded(fields), media_type=JSON)
