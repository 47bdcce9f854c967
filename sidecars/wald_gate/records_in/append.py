"""POST of records: the body goes to the daemon in parts as it arrives, and the answer reports the durable records."""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from wald.client.session import Durable
from wald.errors import InvalidInput, WaldError
from wald.work.snapshot import Unprocessed
from wald_gate.call import NDJSON, Call, wait_seconds
from wald_gate.limits import MemoryReservation
from wald_gate.problems import HttpError, problem
from wald_gate.records_in import keys
from wald_gate.records_in.bodies import BODIES, BODY_LARGER, JsonLines, TextLines, expander, too_large
from wald_gate.records_in.publisher import KeyedRequest
from wald_gate.responses import Json
from wald_gate.shapes import GroupName, Shape, Stored, WaitTime

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
    """Query parameters."""

    as_: Literal["value"] | UnsetType = UNSET  # each JSON value of the body is the value of a record
    wait_processed: GroupName | UnsetType = UNSET  # the work group that is to process the records before the answer
    wait: WaitTime | UnsetType = UNSET  # for that group, once the records are durable


class _Append:
    """Request whose records are stored as they arrive; ``unprocessed`` is None if the client waits for no group."""

    def __init__(self, call: Call, memory: MemoryReservation, unprocessed: Unprocessed | None, *, bare: bool) -> None:
        self._call = call
        self._route = call.route
        self._unprocessed = unprocessed
        self.stored: Stored | None = None
        cut, limits = _cut_of(call, bare=bare), call.state.limits
        encoding = call.request.headers.get("content-encoding", "").strip().lower()
        self._cut = cut(limits.settings, memory, call.state.threads, bare=bare)
        self._expand = expander(encoding)
        self._is_compressed = encoding not in ("", "identity")
        self._left = limits.settings.body_max_bytes

    async def store(self, keyed: KeyedRequest | None) -> None:
        """Store the body, under a key or without one."""
        cut, request, chunk = self._cut, self._call.request, None
        while chunk != b"":
            chunk = b"" if request.is_read else await request.chunk(is_counted=not self._is_compressed)
            for part in self._expand(chunk):
                self._left -= len(part)
                if self._left < 0:
                    raise too_large("the body", self._call.state.limits.settings.body_max_bytes, BODY_LARGER)
                if self._is_compressed and request.allowance is not None:
                    request.allowance.sent_bytes -= len(part)
                for division in cut.feed(part):
                    await self._store(division, keyed)
        for division in await cut.end():
            await self._store(division, keyed)

    async def _store(self, division: bytes, keyed: KeyedRequest | None) -> None:
        cut, is_blank = self._cut, True
        for payload in await cut.payloads(division):
            is_blank = False
            if keyed is not None:
                await keyed.add(payload, columns=cut.columns)
            else:
                durable = await self._call.state.daemon.publish(self._route, payload, columns=cut.columns)
                self.add(durable, len(payload), is_new=True)
        if is_blank:  # nothing was awaited, and a compressed body may have a million blank lines in a few packets
            await asyncio.sleep(0)

    def add(self, durable: Durable, payload_bytes: int, is_new: bool) -> None:
        """Count durable records; ``is_new`` is False if an earlier request stored them."""
        state, records = self._call.state, durable.last - durable.first + 1
        if is_new:
            state.counts.count_stored(records, payload_bytes)
        state.following.look()
        if self.stored is None:
            self.stored = Stored(durable.first, durable.last, records)
        else:
            self.stored.last = durable.last
            self.stored.count += records
        if self._unprocessed is not None:
            self._unprocessed.add(*durable)


async def append(call: Call) -> Response:
    """Store the records of a body; answer 200 once all are durable, and processed if the client waits for a group.

    An error reports which records before it are stored.
    """
    query, state, is_replay = call.query(Query), call.state, False
    group, seconds = query.wait_processed, wait_seconds(query.wait or _WAIT)
    if query.wait is not UNSET and group is UNSET:
        raise InvalidInput("wait needs wait_processed", hint=f"?wait_processed=GROUP&wait={query.wait}")
    unprocessed = None if group is UNSET else await state.processed.expected(call.route, group)
    with MemoryReservation(state.limits) as memory:
        appended = _Append(call, memory, unprocessed, bare=query.as_ is not UNSET)
        key = keys.key_of(call.request.headers.getlist(keys.HEADER), call.client.name, call.route)
        try:
            if key is None:
                await appended.store(None)
            else:
                async with state.idempotent.request(key, call.route, appended.add) as keyed:
                    await appended.store(keyed)
                    await keyed.finish()
                is_replay = keyed.is_replay
            if appended.stored is None:
                raise InvalidInput("the body has no record", hint="curl --data-binary @FILE; --data drops newlines")
            memory.give_back()
            if unprocessed is not None:
                await state.processed.wait(call.request, unprocessed, seconds)
        except WaldError as error:
            return problem(call.shown(error), stored=appended.stored)
    return Json(appended.stored, headers={keys.REPLAYED: "true"} if is_replay else None)


def _cut_of(call: Call, *, bare: bool) -> type[TextLines]:
    """Return the class that divides the body, by its media type; InvalidInput or HttpError 415 if there is none."""
    media_type, charset = call.content_type
    cut = BODIES.get(media_type)
    if cut is None:
        known = [name for name, each in BODIES.items() if not bare or issubclass(each, JsonLines)]
        raise HttpError(
            415,
            "media-type",
            f"{media_type or 'no media type'}: {' or '.join(known)} is accepted",
            hint="curl -H 'Content-Type: text/plain' --data-binary @FILE",
        )
    if bare and not issubclass(cut, JsonLines):
        raise InvalidInput(
            f"as=value is not for {media_type}", hint=f"Content-Type: {NDJSON}, or the request without as=value"
        )
    if charset not in _CHARSETS:
        raise HttpError(415, "charset", f"charset={charset[:40]}: only UTF-8 is accepted", hint="iconv -t UTF-8")
    return cut
