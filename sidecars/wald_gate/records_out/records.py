"""Records out: the query of a request for records, and its response."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from datetime import datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from wald.errors import InvalidInput, NotFound
from wald.format.names import DEFAULT_GROUP, check_group
from wald.format.times import is_absolute, nanoseconds, parse_position_option
from wald.reading.selection import Start
from wald.status.schema import local_now
from wald_gate.call import ANY, NDJSON, Call, wait_seconds
from wald_gate.groups.hosting import require_group
from wald_gate.problems import HttpError
from wald_gate.records_out.reading import BY_MEDIA_TYPE, FORMS, Events, Form, Gzipped, Ndjson, Raw, Reading, Wanted
from wald_gate.responses import SILENT_SECONDS, UNBUFFERED, Stream, wants_gzip, while_there
from wald_gate.shapes import GroupName, Shape, WaitTime

_HEADERS = {"Cache-Control": "no-store"}
_QUICK_SECONDS = 0.05  # that most reads take less than, so that nothing else needs to watch the connection
_EARLY_SECONDS = 0.01  # a timer of uvloop may fire this early, before a heartbeat is due
_SEQUENCE = re.compile(r"[0-9]{1,19}")
_NAMED = ("earliest", "end", "cursor")
_PART = r"(\.[0-9]{1,6})? ?"
_AGO = f"^([0-9]{{1,9}}{_PART}[sm]|[0-9]{{1,7}}{_PART}h|[0-9]{{1,5}}{_PART}d|[0-9]{{1,4}}{_PART}w)( ago)?$"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_CLOCK = f"{_HOUR_AND_MINUTE}(:[0-5][0-9])?"
_DAY = (
    "((19[7-9][0-9]|20[0-9]{2})-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    "|20([02468][048]|[13579][26])-02-29)"
)
_ZONE = f"(Z|[+-]{_HOUR_AND_MINUTE})"
_TIME = rf"T{_HOUR_AND_MINUTE}(:[0-5][0-9](\.[0-9]{{1,9}})?)?"
_POSITION = (  # docs/reading.md, "Times"; a single pattern, because generated clients cannot use a choice of them
    rf"^0*[1-9][0-9]{{0,18}}$|^{_DAY}({_TIME}{_ZONE}?)?$|{_AGO}|^now$|^(today|yesterday)( {_CLOCK})?$|^{_CLOCK}$"
)
_Start = Annotated[str, Meta(max_length=64, extra_json_schema={"pattern": f"^(earliest|end|cursor)$|{_POSITION}"})]
_Stop = Annotated[str, Meta(max_length=64, extra_json_schema={"pattern": _POSITION})]


class Query(Shape, rename={"from_": "from"}):
    """Query of a request for records."""

    from_: _Start = "earliest"  # earliest, end, cursor, a sequence or a time
    to: _Stop | UnsetType = UNSET  # a sequence, inclusive, or a time, exclusive
    limit: Annotated[int, Meta(ge=0, le=1 << 62)] | UnsetType = UNSET
    format: Literal["raw", "ndjson", "json", "events", "arrow"] | UnsetType = UNSET
    group: GroupName | UnsetType = UNSET  # of ``from=cursor``
    wait: WaitTime = "0s"  # how long to wait for the first record, as "30s"
    follow: Literal["0", "1"] = "0"  # continue with records that are appended later
    heartbeat: Literal["0", "1"] | UnsetType = UNSET  # unset: of forms in which one does not look like a record


async def records(call: Call) -> Response:
    query = call.query(Query)
    form: Form = (FORMS[query.format] if query.format else _accepted(call))()
    follow = query.follow == "1" or (isinstance(form, Events) and query.to is UNSET and query.limit is UNSET)
    wanted = _wanted(call, query, is_events=isinstance(form, Events))
    if wanted.start == "cursor":
        instead = "; ?from=earliest reads without one"  # not all records without being asked for them
        await call.state.in_thread(require_group, call.state.log, wanted.route, wanted.group, more=instead)
    seconds = wait_seconds(query.wait)
    headers = _HEADERS | (UNBUFFERED if follow or seconds else {"Vary": "Accept, Accept-Encoding"})
    if not (follow or seconds or isinstance(form, Events)) and wants_gzip(call.request):
        form, headers = Gzipped(form), headers | {"Content-Encoding": "gzip"}
    ending = ExitStack()
    call.request.at_end = ending.close
    watch = ending.enter_context(call.state.following.watching(wanted.route)) if follow or seconds else None
    reading = Reading(call.state, call.payer, wanted, form, watch)
    ending.callback(reading.close)
    beats = bool(form.heartbeat and (follow or seconds) and query.heartbeat != "0")
    if isinstance(form, Raw) and query.heartbeat is UNSET:
        beats = False
    silent = SILENT_SECONDS if beats else None
    try:
        first = await reading.chunk(_QUICK_SECONDS)  # so that an error of the request becomes its answer
        if first is None:
            first = await while_there(call.request, reading.chunk(silent))
    except NotFound as error:
        raise NotFound(error.message, hint="?from=end&follow=1 waits for the next record") from None
    until = time.monotonic() + seconds
    if seconds and first == b"" and not follow:
        first = await while_there(call.request, _first(reading, seconds, silent))
        call.reauthorize()
    chunks = _chunks(call, reading, first, None if follow else until, beats=beats)
    return Stream(chunks, form.media_type, headers)


async def _chunks(
    call: Call, reading: Reading, first: bytes | None, until: float | None, *, beats: bool
) -> AsyncGenerator[bytes]:
    """Yield the records as they arrive; ``until`` is the deadline for the first ones, None to follow the log."""
    form, follow = reading.form, until is None
    if isinstance(form, Events):
        yield form.alive(reading.begins_behind)
    while until is not None and not first and beats and not reading.is_over:
        if (seconds := until - time.monotonic()) <= _EARLY_SECONDS:
            break
        if first is not None:
            reading.sent = reading.last  # nothing was found up to there
        yield form.alive(reading.sent)
        first = await _first(reading, seconds, SILENT_SECONDS, first)
        call.reauthorize()
    if until is not None and first is None:
        first = await reading.chunk(SILENT_SECONDS)  # no heartbeat is due because the wait ends during a read
    found = reading.chunks(first, follow=follow, edition=call.edition, silent_seconds=SILENT_SECONDS)
    async with aclosing(found):
        async for chunk in found:
            yield chunk or (form.alive(reading.sent) if beats else b"")


async def _first(reading: Reading, seconds: float, silent: float | None, first: bytes | None = b"") -> bytes | None:
    """Return the first records; b"" if none arrive in time, None if a read is still running then.

    ``silent`` is a shorter limit, after which a heartbeat is due; None: wait for a running read. ``first`` is None if a
    read is running.
    """
    end = time.monotonic() + (seconds if silent is None else min(seconds, silent))
    while first is None or (first == b"" and await reading.more(end - time.monotonic())):
        # Records of another route may have moved the head.
        first = await reading.chunk(None if silent is None else max(end - time.monotonic(), 0))
        if first is None:
            break
    return first


def _wanted(call: Call, query: Query, *, is_events: bool) -> Wanted:
    if query.group is not UNSET and query.from_ != "cursor":
        raise InvalidInput("group is only for from=cursor", hint=f"?from=cursor&group={query.group}")
    last = call.request.headers.get("last-event-id", "")
    if last and not _SEQUENCE.fullmatch(last):
        raise InvalidInput(
            f"Last-Event-ID {last[:40]!r} is not a sequence", hint="the id of the last event received, or none"
        )
    now, since_ns = local_now(), None
    start: Start
    match query.from_:
        case "earliest" | "end" | "cursor" as start:
            pass
        case position:
            start = parse_position_option("from", position, now, _NAMED)
    if last and is_events:
        if isinstance(start, datetime) and is_absolute(query.from_):  # it may be in the future
            since_ns = nanoseconds(start)
        start = int(last) + 1  # the id is 0 before the first event
    stop = None if query.to is UNSET else parse_position_option("to", query.to, now)
    limit = None if query.limit is UNSET else query.limit
    return Wanted(call.route, start, stop, check_group(query.group or DEFAULT_GROUP), limit, since_ns)


def _accepted(call: Call) -> type[Form]:
    """Return the first available form that the client accepts."""
    for media_type in call.accepts:
        if media_type in ANY or media_type in BY_MEDIA_TYPE:
            return BY_MEDIA_TYPE.get(media_type, Ndjson)
    message = f"Accept: {', '.join(call.accepts)[:80]}: none of {', '.join(BY_MEDIA_TYPE)}"
    raise HttpError(406, "not-acceptable", message, hint=f"Accept: {NDJSON}")
