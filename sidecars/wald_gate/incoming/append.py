"""Records in: the body of a request goes to the daemon as it comes, and the answer says what is on disk."""

from __future__ import annotations

from starlette.responses import Response

from wald.errors import InvalidInput, WaldError
from wald_gate.call import Call
from wald_gate.incoming.bodies import BODIES, Sizes, expanded
from wald_gate.problems import HttpError, problem
from wald_gate.shapes import Stored, encoded
from wald_gate.verbs import JSON


async def append(call: Call) -> Response:
    """Store the records of a body; 200 once all of them are on disk.

    An error says what is stored of those before it.
    """
    cut = BODIES.get(call.media_type)
    if cut is None:
        raise HttpError(415, "media-type", f"{call.media_type or 'no media type'}: {' or '.join(BODIES)} is taken here")
    limits, counts = call.state.limits, call.state.counts
    sizes = Sizes(limits.settings.body_max_bytes, limits.settings.record_max_bytes)
    encoding = call.request.headers.get("content-encoding", "").strip().lower()
    stored: Stored | None = None
    try:
        async for payload in cut(expanded(limits.chunks(call.request), encoding, sizes), sizes):
            durable = await call.state.daemon.publish(call.route, payload.data, columns=payload.columns)
            call.state.following.move(durable.last)
            count = durable.last - durable.first + 1 + (stored.count if stored else 0)
            counts.stored_records += durable.last - durable.first + 1
            counts.stored_bytes += len(payload.data)
            stored = Stored(stored.first if stored else durable.first, durable.last, count)
    except WaldError as error:
        return problem(error, stored=stored)
    if stored is None:
        raise InvalidInput("the body has no record", hint="curl --data-binary @FILE; --data drops newlines")
    return Response(encoded(stored), media_type=JSON)
