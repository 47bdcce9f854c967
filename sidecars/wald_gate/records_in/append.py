"""POST of records: the body goes to the daemon in parts as it arrives, and the answer reports the durable records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import combinations
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from wald.client.session import Durable
from wald.errors import InvalidInput, WaldError
from wald.work.snapshot import Unprocessed
from wald_gate.call import JSON, NDJSON, Call, wait_seconds
from wald_gate.limits import ALLOWANCE
from wald_gate.problems import HttpError, problem
from wald_gate.records_in import keys
from wald_gate.records_in.bodies import BARE_BODIES, BODIES, Payload, Sizes, expanded
from wald_gate.records_in.publisher import parts_of
from wald_gate.shapes import GroupName, Shape, Stored, WaitTime, encoded

_WAIT = "30s"
_CHARSETS = ("", "utf-8", "utf8", "us-ascii", "ascii")

IDEMPOTENCY_KEY: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": r'^"([\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])+"$|^[\x21\x23-\x7e]+$',
    "description": "A name for this request, so that it is stored once even if it is sent again.",
}
Lines = Annotated[str, Meta(min_length=1)]
_TIME_LIMIT = 1 << 63
_Hex = Annotated[str, Meta(pattern="^([0-9A-Fa-f]{2})*$")]
_Base64 = Annotated[str, Meta(pattern="^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")]
_WITHIN_64_BITS = "^(1[7-9]|2[01])"  # in nanoseconds: little more than these centuries
_Text = Annotated[str, Meta(extra_json_schema={"format": "date-time", "pattern": _WITHIN_64_BITS})]
_OTHER_UNITS: dict[str, Any] = {"not": {"minimum": 1, "maximum": 10**17}}
_Time = Annotated[int, Meta(ge=-_TIME_LIMIT, le=_TIME_LIMIT - 1, extra_json_schema=_OTHER_UNITS)] | _Text | None
_TimeNs = Annotated[int, Meta(ge=-_TIME_LIMIT, le=_TIME_LIMIT - 1)] | _Text | None
_Due = Annotated[int, Meta(ge=10**18, le=_TIME_LIMIT - 1)] | _Text | None
_APART = (("value", "value_hex", "value_base64"), ("key", "key_hex", "key_base64"), ("time", "event_time_ns"))
_CLASHES = [{"required": pair} for names in _APART for pair in combinations(names, 2)]


class NewRecord(Shape):
    """Record, as a line of ``wald append --jsonl``. Fields that the log assigns are ignored.

    The text of a value that is not a string is stored unchanged. Numbers of times are in nanoseconds since 1970.
    """

    value: Any = None
    value_hex: _Hex | UnsetType = UNSET
    value_base64: _Base64 | UnsetType = UNSET
    key: str | None = None
    key_hex: _Hex | UnsetType = UNSET
    key_base64: _Base64 | UnsetType = UNSET
    time: _Time = None
    event_time_ns: _TimeNs = None
    not_before: _Due = None
    headers: dict[str, str] | None = None
    sequence: Any = None
    route: Any = None
    append_time_ns: Any = None
    append_time: Any = None
    event_time: Any = None
    sender: Any = None
    terminated: Any = None


_Record = Annotated[NewRecord, Meta(extra_json_schema={"not": {"anyOf": _CLASHES}})]
Records = Annotated[list[_Record], Meta(min_length=1)]
"""A JSON array. The gate also accepts a single object, a choice that generated clients cannot express."""


class Query(Shape, rename={"as_": "as"}):
    """Query parameters.

    Attributes:
        as_: ``value`` if each JSON value of the body is the value of a record, instead of an object with its fields.
        wait_processed: the work group that is to process the records before the answer.
        wait: how long to wait for that group once the records are durable; by default 30 s.
    """

    as_: Literal["value"] | UnsetType = UNSET
    wait_processed: GroupName | UnsetType = UNSET
    wait: WaitTime | UnsetType = UNSET


class _Progress:
    """Durable records of a request, and those that a group has still to process if the client waits for one."""

    def __init__(self, call: Call, unprocessed: Unprocessed | None) -> None:
        self._call = call
        self.unprocessed = unprocessed
        self.stored: Stored | None = None

    def add(self, durable: Durable, payload_bytes: int, *, is_new: bool = True) -> None:
        state, records = self._call.state, durable.last - durable.first + 1
        if is_new:
            state.counts.count_stored(records, payload_bytes)
        state.following.look()
        before = self.stored or Stored(durable.first, durable.last, 0)
        self.stored = Stored(before.first, durable.last, before.count + records)
        if self.unprocessed is not None:
            self.unprocessed.add(*durable)


async def append(call: Call) -> Response:
    """Store the records of a body; answer 200 once all are durable, and processed if the client waits for a group.

    An error reports which records before it are stored.
    """
    query, processed = call.query(Query), call.state.processed
    seconds, group = wait_seconds(query.wait or _WAIT), query.wait_processed
    if query.wait is not UNSET and group is UNSET:
        raise InvalidInput("wait is for wait_processed", hint=f"?wait_processed=GROUP&wait={query.wait}")
    progress = _Progress(call, None if group is UNSET else await processed.expected(call.route, group))
    try:
        with call.state.limits.keeping() as kept:
            payloads = _payloads(call, kept.keep, bare=query.as_ is not UNSET)
            key = keys.key_of(call.request.headers.getlist(keys.HEADER), call.client.name, call.route)
            if key is None:
                is_replay = False
                async for payload in payloads:
                    durable = await call.state.daemon.publish(call.route, payload.data, columns=payload.columns)
                    progress.add(durable, len(payload.data))
            else:
                is_replay = await _store_once(call, key, payloads, progress)
            if progress.stored is None:
                raise InvalidInput("the body has no record", hint="curl --data-binary @FILE; --data drops newlines")
        if progress.unprocessed is not None:
            await processed.wait(call.request, progress.unprocessed, seconds)
    except WaldError as error:
        return problem(call.shown(error), stored=progress.stored)
    headers = {keys.REPLAYED: "true"} if is_replay else {}
    return Response(encoded(progress.stored), headers=headers, media_type=JSON)


async def _store_once(call: Call, key: bytes, payloads: AsyncIterator[Payload], progress: _Progress) -> bool:
    """Store the parts that are not stored under the key yet; return True if all are."""
    async with call.state.idempotent.request(key) as request:
        async for part, is_last in parts_of(payloads):
            durable, is_new = await request.publish(call.route, part, is_last=is_last)
            progress.add(durable, len(part), is_new=is_new)
        return request.is_replay


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
            f"{call.media_type or 'no media type'}: {' or '.join(bodies)} is accepted",
            hint="curl -H 'Content-Type: text/plain' --data-binary @FILE",
        )
    if (charset := call.charset) not in _CHARSETS:
        raise HttpError(415, "charset", f"charset={charset[:40]}: only UTF-8 is accepted", hint="iconv -t UTF-8")
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
    """Count the parts against the client's limit of bytes per second."""
    async for part in parts:
        call.request.scope[ALLOWANCE].count_bytes(len(part))
        yield part
