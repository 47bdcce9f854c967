"""Verbs for cursors: how far a group has processed a route, with the refusals of ``wald cursor``."""

from __future__ import annotations

from starlette.responses import Response

from wald.errors import Damaged, NotFound, Refused
from wald.store.retention.cursors import Cursor, CursorState, require_no_remains
from wald_gate import shapes
from wald_gate.call import Call
from wald_gate.verbs import JSON


async def get(call: Call) -> Response:
    """The cursor of a group."""
    cursor = await call.state.in_thread(call.state.log.cursor, call.route, call.group)
    if cursor.state is CursorState.ABSENT:
        raise NotFound(cursor.message, hint=f"PUT {call.request.url.path} makes it")
    if cursor.state is not CursorState.VALID:
        raise Damaged(f"{cursor.message}; it counts as nothing processed", hint='PUT it with "rewind": true')
    return _answer(cursor)


async def put(call: Call) -> Response:
    """Declare up to where a group has processed a route; on disk when it is answered."""
    wanted = await call.body(shapes.NewCursor)

    def move() -> Cursor:
        log = call.state.log
        require_no_remains(log.root, log.cursor(call.route, call.group))
        try:
            return log.set_cursor(call.route, wanted.sequence, call.group, rewind=wanted.rewind)
        except Refused as error:
            head = log.head()
            raise Refused(error.message, hint=_way(call, wanted, 0 if head is None else head.sequence)) from None

    return _answer(await call.state.in_thread(move))


def _way(call: Call, wanted: shapes.NewCursor, head: int) -> str:
    """What a client may do about a cursor that was not moved."""
    if wanted.sequence > head:
        return "GET /v1/head shows the last durable record"
    if wanted.rewind:
        return f"who runs the gate can remove the work group: wald group remove {call.route} {call.group}"
    return f'{{"sequence": {wanted.sequence}, "rewind": true}} moves it all the same'


def _answer(cursor: Cursor) -> Response:
    found = shapes.Cursor(cursor.sequence, cursor.state.value, cursor.message)
    return Response(shapes.encoded(found), media_type=JSON)
