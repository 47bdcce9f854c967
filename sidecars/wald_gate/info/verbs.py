"""Verbs about the log and the gate: routes, head, where, explain, cut and cursors; healthz, readyz and metrics."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator

import prometheus_client
from starlette.responses import Response

from wald.errors import Damaged, InvalidInput, Refused
from wald.exposition import TEXT_FORMAT, render
from wald.log import Log
from wald.retention.backlog import Backlog
from wald.retention.cursor_moves import start_position
from wald.retention.cursors import Cursor, CursorState, reject_leftover_journal
from wald.retention.progress import read_progress
from wald.status.retention import explanation
from wald.status.schema import Explained, Routes, Where
from wald_gate import shapes
from wald_gate.call import Call, listing
from wald_gate.groups.hosting import require_group
from wald_gate.info.monitoring import Word, of_gate
from wald_gate.problems import HttpError
from wald_gate.responses import Json
from wald_gate.shapes import SEQUENCE_MAX, Health


async def routes(call: Call) -> Response:
    """Return the routes that the client may read, with the progress of their groups."""

    def read() -> Routes:
        log = call.state.log
        return Routes.of(log.root, [each for each in read_progress(log.view()) if call.client.may_read(each.route)])

    return Json(call.seen(await call.read(read)))


async def add_route(call: Call) -> Response:
    """Create a route; idempotent."""
    await call.state.daemon.command("ROUTE", "ADD", call.route)
    return Json({"route": call.route})


async def head(call: Call) -> Response:
    return Json(call.seen(await call.state.head.result()))


async def where(call: Call) -> Response:
    given = call.request.path_params["sequence"]
    if not (given.isascii() and given.isdecimal() and len(given) < 20):
        raise InvalidInput(f"{given[:40]!r} is not a sequence", hint="/v1/where/250")
    if int(given) > SEQUENCE_MAX:
        raise InvalidInput(f"{given} is above {SEQUENCE_MAX}, the highest possible sequence", hint="/v1/where/250")
    found = await call.read(call.state.log.where, int(given))
    return Json(Where.of(found))


async def explain(call: Call) -> Response:
    media_type, listed = listing(call)
    found = await call.walk(explained(call.state.log))
    return Response(await call.read(listed, found), media_type=media_type)


def explained(log: Log) -> Generator[None, None, list[Explained]]:
    """Explain a log; yields after each object, for :meth:`Call.walk`, as there may be many segments."""
    found = []
    for each in explanation(log, Backlog(log.view()), time.time_ns()):
        found.append(each)
        yield
    return found


async def cut(call: Call) -> Response:
    """Cut the active segment, unless it is empty."""
    what, segment = (await call.state.daemon.command("CUT")).split()
    return Json({"cut": what == "cut", "segment": int(segment)})


async def get_cursor(call: Call) -> Response:
    await call.state.in_thread(require_group, call.state.log, call.route, call.group)
    cursor = await call.state.in_thread(call.state.log.cursor, call.route, call.group)
    if cursor.state is not CursorState.VALID:
        raise Damaged(f"{cursor.message}; no record counts as processed", hint='PUT it with "rewind": true')
    return _cursor_answer(cursor)


async def put_cursor(call: Call) -> Response:
    """Move the cursor of a group; it is on disk when the answer comes."""
    wanted = await call.body(shapes.CursorPosition)

    def move() -> Cursor:
        log = call.state.log
        before = log.cursor(call.route, call.group)
        reject_leftover_journal(log.root, before)
        if before.state is CursorState.ABSENT and not call.client.admin:
            _require_few(call)
        head = log.head()
        durable = 0 if head is None else head.sequence
        sequence = durable if wanted.sequence == "end" else wanted.sequence
        if isinstance(sequence, str):
            sequence = start_position(log.view(), call.route, call.group)[0]
        try:
            return log.set_cursor(call.route, sequence, call.group, rewind=wanted.rewind)
        except Refused as error:
            raise Refused(error.message, hint=_advice(call, wanted, sequence, durable)) from None

    return _cursor_answer(await call.state.in_thread(move))


def _require_few(call: Call) -> None:
    """Refuse a new group on a route with many groups: each pins the records that it has not processed."""
    directory, most = call.state.log.root.cursor_directory(call.route), call.state.limits.settings.groups_per_route
    groups = sum(name.endswith(".cursor") for name in os.listdir(directory)) if directory.is_dir() else 0
    if groups >= most:
        raise Refused(
            f"route {call.route} has {groups} groups; clients without admin rights may create groups only up to {most}",
            hint="DELETE an unneeded group, or raise groups_per_route in [limits] of the gate's config file",
        )


def _advice(call: Call, wanted: shapes.CursorPosition, sequence: int, head: int) -> str:
    if sequence > head:
        return "GET /v1/head shows the last durable record"
    if wanted.rewind:
        return f"the gate's operator can remove the work group: wald group remove {call.route} {call.group}"
    return f'{{"sequence": {json.dumps(wanted.sequence)}, "rewind": true}} moves it anyway'


def _cursor_answer(cursor: Cursor) -> Response:
    return Json(shapes.Cursor(cursor.sequence, cursor.state.value, cursor.message))


_process = prometheus_client.CollectorRegistry(auto_describe=False)
prometheus_client.ProcessCollector(registry=_process)


async def healthz(_: Call) -> Response:
    """Liveness: the event loop responds."""
    return Json(Health("ok"))


async def readyz(call: Call) -> Response:
    """Readiness: the log is readable and its daemon responds.

    The gate stays ready when the disk is full: readers free the space.
    """
    found = await call.state.readiness.now()
    if found.word is Word.NOT_READY:
        raise HttpError(503, "not-ready", found.why, hint="the gate's stderr has the details")
    return Json(Health(found.word.value, found.why))


async def metrics(call: Call) -> Response:
    state = call.state
    word = (await state.readiness.now()).word
    log_id = state.log.identity.log_id.hex()
    groups, leases = state.groups.count, state.groups.waiting.count
    counted = list(
        of_gate(state.counts, state.pool, state.daemon.published, word, log_id, groups=groups, leases=leases)
    )
    text = await state.in_thread(lambda: render(counted) + prometheus_client.generate_latest(_process))
    return Response(text, media_type=TEXT_FORMAT)
