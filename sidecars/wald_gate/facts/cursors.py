"""Verbs for cursors: how far a group has processed a route, with the refusals of ``wald cursor``."""

from __future__ import annotations

import json
import os

from starlette.responses import Response

from wald.errors import Damaged, Refused
from wald.retention.cursor_moves import start_position
from wald.retention.cursors import Cursor, CursorState, reject_leftover_journal
from wald_gate import shapes
from wald_gate.call import Call
from wald_gate.groups.making import require_group
from wald_gate.verbs import JSON


async def get(call: Call) -> Response:
    """The cursor of a group."""
    await call.state.in_thread(require_group, call.state.log, call.route, call.group)
    cursor = await call.state.in_thread(call.state.log.cursor, call.route, call.group)
    if cursor.state is not CursorState.VALID:
        raise Damaged(f"{cursor.message}; no record counts as processed", hint='PUT it with "rewind": true')
    return _answer(cursor)


async def put(call: Call) -> Response:
    """Declare up to where a group has processed a route; on disk when it is answered."""
    wanted = await call.body(shapes.CursorPosition)

    def move() -> Cursor:
        log = call.state.log
        before = log.cursor(call.route, call.group)
        reject_leftover_journal(log.root, before)
        if before.state is CursorState.ABSENT and not call.client.admin:
            _require_few(call)
        head = log.head()
        durable = 0 if head is None else head.sequence
        sequence = _sequence(call, wanted.sequence, durable)
        try:
            return log.set_cursor(call.route, sequence, call.group, rewind=wanted.rewind)
        except Refused as error:
            raise Refused(error.message, hint=_way(call, wanted, sequence, durable)) from None

    return _answer(await call.state.in_thread(move))


def _require_few(call: Call) -> None:
    """Refuse another group on a route that has many: each group pins the records that it has not processed.

    Raises:
        Refused: the route has reached the limit for groups made by clients.
    """
    directory, most = call.state.log.root.cursor_directory(call.route), call.state.limits.settings.groups_per_route
    groups = sum(name.endswith(".cursor") for name in os.listdir(directory)) if directory.is_dir() else 0
    if groups >= most:
        raise Refused(
            f"route {call.route} has {groups} groups; clients without admin rights may create groups only up to {most}",
            hint="DELETE a group that is not needed; groups_per_route in [limits] of the gate's file of settings",
        )


def _sequence(call: Call, wanted: int | str, head: int) -> int:
    """Up to where a group has processed its route, in a number."""
    if isinstance(wanted, int):
        return wanted
    return head if wanted == "end" else start_position(call.state.log.view(), call.route, call.group)[0]


def _way(call: Call, wanted: shapes.CursorPosition, sequence: int, head: int) -> str:
    """What a client may do about a cursor that was not moved."""
    if sequence > head:
        return "GET /v1/head shows the last durable record"
    if wanted.rewind:
        return f"who runs the gate can remove the work group: wald group remove {call.route} {call.group}"
    return f'{{"sequence": {json.dumps(wanted.sequence)}, "rewind": true}} moves it all the same'


def _answer(cursor: Cursor) -> Response:
    found = shapes.Cursor(cursor.sequence, cursor.state.value, cursor.message)
    return Response(shapes.encoded(found), media_type=JSON)
