"""Records in: the body of a request goes to the daemon as it comes, and the answer says what is on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response

from wald.client.session import Durable
from wald.errors import InvalidInput, WaldError
from wald_gate.call import Call
from wald_gate.incoming import keys
from wald_gate.incoming.bodies import BODIES, Payload, Sizes, expanded
from wald_gate.incoming.repeats import parts_of
from wald_gate.problems import HttpError, problem
from wald_gate.shapes import Stored, encoded
from wald_gate.verbs import JSON


async def append(call: Call) -> Response:
    """Store the records of a body; 200 once all of them are on disk.

    An error says what is stored of those before it.
    """
    payloads = _payloads(call)
    key = keys.key_of(call.request.headers.getlist(keys.HEADER), call.client.name, call.route)
    if key is None:
        return await _answer(call, _stored(call, payloads))
    async with call.state.repeats.request(key) as request:

        async def stored() -> AsyncIterator[Durable]:
            async for part, is_last in parts_of(payloads):
                durable, is_new = await request.publish(call.route, part, is_last=is_last)
                if is_new:
                    call.state.counts.count_stored(durable.last - durable.first + 1, len(part))
                yield durable

        answer = await _answer(call, stored())
        if answer.status_code == 200 and request.is_replay:
            answer.headers[keys.REPLAYED] = "true"
        return answer


def _payloads(call: Call) -> AsyncIterator[Payload]:
    cut = BODIES.get(call.media_type)
    if cut is None:
        raise HttpError(415, "media-type", f"{call.media_type or 'no media type'}: {' or '.join(BODIES)} is taken here")
    limits = call.state.limits
    sizes = Sizes(limits.settings.body_max_bytes, limits.settings.record_max_bytes)
    encoding = call.request.headers.get("content-encoding", "").strip().lower()
    return cut(expanded(limits.chunks(call.request), encoding, sizes), sizes)


async def _stored(call: Call, payloads: AsyncIterator[Payload]) -> AsyncIterator[Durable]:
    async for payload in payloads:
        durable = await call.state.daemon.publish(call.route, payload.data, columns=payload.columns)
        call.state.counts.count_stored(durable.last - durable.first + 1, len(payload.data))
        yield durable


async def _answer(call: Call, durables: AsyncIterator[Durable]) -> Response:
    stored: Stored | None = None
    try:
        async for durable in durables:
            call.state.following.move(durable.last)
            count = durable.last - durable.first + 1 + (stored.count if stored else 0)
            stored = Stored(stored.first if stored else durable.first, durable.last, count)
    except WaldError as error:
        return problem(error, stored=stored)
    if stored is None:
        raise InvalidInput("the body has no record", hint="curl --data-binary @FILE; --data drops newlines")
    return Response(encoded(stored), media_type=JSON)
