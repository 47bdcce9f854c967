"""Records in: the body of a request goes to the daemon as it comes, and the answer says what is on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from wald.client.session import Durable
from wald.errors import InvalidInput, WaldError
from wald.work.snapshot import Unprocessed
from wald_gate.call import Call, wait_seconds
from wald_gate.incoming import keys
from wald_gate.incoming.bodies import BARE_BODIES, BODIES, Payload, Sizes, expanded
from wald_gate.incoming.repeats import parts_of
from wald_gate.limits import ALLOWANCE
from wald_gate.problems import HttpError, problem
from wald_gate.shapes import GroupName, Shape, Stored, WaitTime, encoded
from wald_gate.verbs import JSON, NDJSON

_WAIT = "30s"
_CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")


class Query(Shape, rename={"as_": "as"}):
    """The form of the records, and whether the answer waits until a group has processed them.

    Attributes:
        as_: ``value`` if each JSON value of the body is the value of a record, and not an object that has one.
        wait_processed: that group.
        wait: for how long, once the records are durable; 30 s if it is not said.
    """

    as_: Literal["value"] | UnsetType = UNSET
    wait_processed: GroupName | UnsetType = UNSET
    wait: WaitTime | UnsetType = UNSET


@dataclass
class _Storing:
    """The records of a request.

    Attributes:
        stored: what is durable of them.
        unprocessed: what of that a group has still to process, if the client waits for one.
    """

    unprocessed: Unprocessed | None
    stored: Stored | None = None

    def take(self, durable: Durable) -> None:
        """Take in that some of them are durable."""
        count = durable.last - durable.first + 1 + (self.stored.count if self.stored else 0)
        self.stored = Stored(self.stored.first if self.stored else durable.first, durable.last, count)
        if self.unprocessed is not None:
            self.unprocessed.add(*durable)


async def append(call: Call) -> Response:
    """Store the records of a body; 200 once all of them are on disk, and processed if the client says by which group.

    An error says what is stored of those before it.
    """
    query, processed = call.query(Query), call.state.processed
    seconds, group = wait_seconds(query.wait or _WAIT), query.wait_processed
    if query.wait is not UNSET and group is UNSET:
        raise InvalidInput("wait is for wait_processed", hint=f"?wait_processed=GROUP&wait={query.wait}")
    storing = _Storing(None if group is UNSET else await processed.expected(call.route, group))
    try:
        with call.state.limits.keeping() as kept:
            headers = await _store(call, storing, _payloads(call, kept.keep, bare=query.as_ is not UNSET))
        if storing.unprocessed is not None:
            await processed.wait(call.request, storing.unprocessed, seconds)
    except WaldError as error:
        return problem(call.shown(error), stored=storing.stored)
    return Response(encoded(storing.stored), headers=headers, media_type=JSON)


async def _store(call: Call, storing: _Storing, payloads: AsyncIterator[Payload]) -> dict[str, str]:
    """Store the records; returns headers of the answer."""
    key = keys.key_of(call.request.headers.getlist(keys.HEADER), call.client.name, call.route)
    if key is None:
        await _take(call, storing, _stored(call, payloads))
        return {}
    async with call.state.repeats.request(key) as request:

        async def stored() -> AsyncIterator[Durable]:
            async for part, is_last in parts_of(payloads):
                durable, is_new = await request.publish(call.route, part, is_last=is_last)
                if is_new:
                    call.state.counts.count_stored(durable.last - durable.first + 1, len(part))
                yield durable

        await _take(call, storing, stored())
        return {keys.REPLAYED: "true"} if request.is_replay else {}


def _payloads(call: Call, keep: Callable[[int], None], *, bare: bool) -> AsyncIterator[Payload]:
    bodies = BARE_BODIES if bare else BODIES
    if bare and call.media_type in BODIES and call.media_type not in bodies:
        raise InvalidInput(
            f"as=value is not for {call.media_type}", hint=f"Content-Type: {NDJSON}, or the request without as=value"
        )
    cut = bodies.get(call.media_type)
    if cut is None:
        raise HttpError(
            415,
            "media-type",
            f"{call.media_type or 'no media type'}: {' or '.join(bodies)} is taken here",
            hint="curl -H 'Content-Type: text/plain' --data-binary @FILE",
        )
    if (charset := call.charset) not in _CHARSETS:
        raise HttpError(415, "charset", f"charset={charset[:40]}: only UTF-8 is taken here", hint="iconv -t UTF-8")
    limits = call.state.limits
    sizes = Sizes(
        limits.settings.body_max_bytes,
        limits.settings.record_max_bytes,
        limits.settings.json_max_bytes,
        keep,
        call.state.threads,
    )
    encoding = call.request.headers.get("content-encoding", "").strip().lower()
    is_compressed = encoding not in ("", "identity")
    parts = expanded(limits.chunks(call.request, counted=not is_compressed), encoding, sizes)
    return cut(_counted(call, parts) if is_compressed else parts, sizes)


async def _counted(call: Call, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts, and count them against the client's limit of bytes per second."""
    async for part in parts:
        call.request.scope[ALLOWANCE].take_bytes(len(part))
        yield part


async def _stored(call: Call, payloads: AsyncIterator[Payload]) -> AsyncIterator[Durable]:
    async for payload in payloads:
        durable = await call.state.daemon.publish(call.route, payload.data, columns=payload.columns)
        call.state.counts.count_stored(durable.last - durable.first + 1, len(payload.data))
        yield durable


async def _take(call: Call, storing: _Storing, durables: AsyncIterator[Durable]) -> None:
    async for durable in durables:
        call.state.following.look()
        storing.take(durable)
    if storing.stored is None:
        raise InvalidInput("the body has no record", hint="curl --data-binary @FILE; --data drops newlines")
