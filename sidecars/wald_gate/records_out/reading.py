"""Records out: reading for one response, in chunks of the format that the client accepts.

Threads read one chunk ahead of the client. The next record of a rare route may be at the other end of the log, so a
thread reads for a short time only, and waiting clients take turns.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from wald.errors import InvalidInput, NotFound, WaldError
from wald.format.names import DEFAULT_GROUP, check_group
from wald.format.times import is_absolute, nanoseconds, parse_position_option
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.reading.selection import Start, Stop
from wald.retention.missing import Missing
from wald.status.schema import local_now
from wald_gate.call import ANY, NDJSON, Call, State, wait_seconds
from wald_gate.groups.hosting import require_group
from wald_gate.problems import HttpError
from wald_gate.records_out.threads import STEP_SECONDS, Watch
from wald_gate.responses import LEVEL, SILENT_SECONDS, UNBUFFERED, Stream, wants_gzip, while_there
from wald_gate.shapes import GroupName, Shape, WaitTime

if TYPE_CHECKING:
    import pyarrow as pa

_GZIP = 31  # zlib: a gzip header, and a window of 32 KiB


class Form:
    """Format of one response; a heartbeat of b"" means that the format has no heartbeat."""

    media_type: str
    heartbeat = b"\n"

    def write(self, batches: Sequence[Batch]) -> bytes:
        raise NotImplementedError

    def alive(self, _sequence: int | None) -> bytes:
        """Return a heartbeat; ``_sequence`` is the last one that was sent."""
        return self.heartbeat

    def end(self) -> bytes:
        return b""


class Raw(Form):
    """Value and newline of each record. The heartbeat is an empty line, which looks like an empty record."""

    media_type = "application/octet-stream"

    def write(self, batches: Sequence[Batch]) -> bytes:
        return b"".join(batch.raw() for batch in batches)


class Ndjson(Form):
    """A JSON object per line, as ``wald read --jsonl`` writes it, with bytes that are not text in base64."""

    media_type = "application/x-ndjson"

    def write(self, batches: Sequence[Batch]) -> bytes:
        return "".join(f"{record.to_json(form='base64')}\n" for batch in batches for record in batch.records()).encode()


class Json(Form):
    """A JSON array of the objects of :class:`Ndjson`. A heartbeat is white space between them."""

    media_type = "application/json"
    _before = "["

    def write(self, batches: Sequence[Batch]) -> bytes:
        found = ",\n".join(record.to_json(form="base64") for batch in batches for record in batch.records())
        before, self._before = self._before, ",\n"
        return f"{before}{found}".encode()

    def end(self) -> bytes:
        return b"[]\n" if self._before == "[" else b"]\n"


class Events(Form):
    """Server-Sent Events (HTML, section 9.2): the id is the sequence, so that a browser resumes there."""

    media_type = "text/event-stream"
    heartbeat = b": nothing new\n"

    def alive(self, sequence: int | None) -> bytes:
        """Return a heartbeat with the id after which to resume.

        An id without data is not an event, but a browser keeps it (HTML, section 9.2.6). So it misses nothing if the
        connection breaks before the first event, and does not ask for reclaimed records after a long silence.
        """
        return self.heartbeat + (b"" if sequence is None else b"id: %d\n" % sequence) + b"\n"

    def write(self, batches: Sequence[Batch]) -> bytes:
        return "".join(
            f"id: {record.sequence}\ndata: {record.to_json(form='base64')}\n\n"
            for batch in batches
            for record in batch.records()
        ).encode()


class Arrow(Form):
    """Stream of Arrow's IPC format; needs ``wald[arrow]``."""

    media_type = "application/vnd.apache.arrow.stream"
    heartbeat = b""

    def __init__(self) -> None:
        try:
            import pyarrow as pa
        except ModuleNotFoundError:
            hint = "in a clone of wald, where the gate is: pip install '.[arrow]'"
            raise HttpError(406, "not-acceptable", "the gate has no pyarrow", hint=hint) from None

        from wald.reading.arrow import schema

        self._sink = BytesIO()
        self._writer: pa.RecordBatchStreamWriter = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), schema)

    def write(self, batches: Sequence[Batch]) -> bytes:
        from wald.reading.arrow import record_batches

        for each in record_batches(batches):
            self._writer.write_batch(each)
        return self._written()

    def end(self) -> bytes:
        self._writer.close()
        return self._written()

    def _written(self) -> bytes:
        written = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return written


class Gzipped(Form):
    """Another format, compressed with gzip. A client can decompress each part when it arrives."""

    heartbeat = b""

    def __init__(self, form: Form) -> None:
        self.media_type = form.media_type
        self._form = form
        self._gzip = zlib.compressobj(LEVEL, wbits=_GZIP)

    def write(self, batches: Sequence[Batch]) -> bytes:
        return self._gzip.compress(self._form.write(batches)) + self._gzip.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._gzip.compress(self._form.end()) + self._gzip.flush()


FORMS: Mapping[str, type[Raw | Ndjson | Json | Events | Arrow]] = {
    "raw": Raw,
    "ndjson": Ndjson,
    "json": Json,
    "events": Events,
    "arrow": Arrow,
}
BY_MEDIA_TYPE = {form.media_type: form for form in FORMS.values()} | {"text/plain": Raw}
"""Formats by the media type of an Accept header."""


_CHUNK_BYTES = 256 << 10  # of values
_CHUNK_RECORDS = 4096  # JSON may take eighty times as much as a value
_OVER = -1  # in place of a sequence: no further record can match
_LATE_NS = 2_000_000_000  # maximum time from a record's append time until it is durable


@dataclass(frozen=True)
class Wanted:
    """The requested records; ``since_ns`` excludes those appended earlier."""

    route: str
    start: Start
    stop: Stop | None = None
    group: str = DEFAULT_GROUP
    limit: int | None = None
    since_ns: int | None = None

    def missing(self, missing: Missing) -> None:
        """Raise HttpError 410 if requested records were deleted."""
        if not missing.asked:
            return
        following = missing.last + 1
        if self.start == "cursor":
            moving = f'{{"sequence": {missing.last}}} to /v1/routes/{self.route}/cursors/{self.group}'
            hint = f"PUT {moving} skips them; ?from=earliest reads the first available ones"
        else:
            hint = f"?from={following} continues after them; ?from=earliest reads the first available ones"
        code = "lost" if missing.lost else "reclaimed"
        raise HttpError(410, code, missing.message(), hint=hint, more={"next": following})


class Reading:
    """One client's read; without a watch for new records, it ends at the end of the log."""

    def __init__(self, state: State, client: str, wanted: Wanted, form: Form, watch: Watch | None = None) -> None:
        self._state = state
        self._client = client
        self._watch = watch
        self._arrived: int | None = None  # first record that may have arrived since reading last resumed
        self._wanted = wanted
        self.form = form
        self._error: WaldError | OSError | None = None  # ends the read, after the records found before it
        self._found = self._find()
        self._reads = threading.Lock()
        self._left = wanted.limit
        self._is_at_end = False  # of the log at the latest check
        self._is_over = False  # nothing more can be wanted
        self.begins_behind: int | None = None  # the sequence before the first wanted record, once one was searched
        self.last = 0  # the last sequence that was read
        self.sent: int | None = None  # by chunks(); None before the first record or the end of the log
        self._records = 0
        self._pending: asyncio.Task[bytes] | None = None  # the chunk that is being read

    @property
    def is_over(self) -> bool:
        """True if all wanted records have arrived, or the gate is ending."""
        return self._is_complete() or self._state.following.is_over

    async def chunk(self, seconds: float | None = None) -> bytes | None:
        """Return the next records; b"" at the end of the log; None if the search took too long.

        After None, the search continues, and the next call waits for its result.
        """
        if self._pending is None:
            if self._watch is not None:
                first = self._watch.clear()
                # Several chunks may come from one view of the log; what arrived before any of them is after that view.
                self._arrived = first if self._arrived is None else min(first, self._arrived)
            self._pending = asyncio.create_task(self._chunk())
        await asyncio.wait((self._pending,), timeout=seconds)
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    async def _chunk(self) -> bytes:
        while (chunk := await self.step()) is None:
            pass
        return chunk

    async def step(self) -> bytes | None:
        before, counts = self._records, self._state.counts
        chunk = await self._state.readers.run(self._client, self._read)
        counts.sent_records += self._records - before
        counts.sent_bytes += len(chunk)
        return chunk or (b"" if self._is_at_end or self._left == 0 else None)

    async def more(self, seconds: float | None) -> bool:
        """Wait at the end of the log; return False after a timeout, or if no more records are wanted."""
        if self._watch is None or self._is_complete() or (seconds is not None and seconds <= 0):
            return False
        return await self._watch.wait(seconds)

    async def chunks(
        self, first: bytes | None, *, follow: bool, edition: int, silent_seconds: float
    ) -> AsyncGenerator[bytes]:
        """Yield the records, starting with ``first`` of :meth:`chunk`; b"" after each ``silent_seconds`` without any.

        With ``follow``, continue at the end of the log until the rights have another ``edition``; the client may then
        ask again. Without it, the response is completed: an early end would look like the end of the log.
        """
        counts, rights = self._state.counts, self._state.rights
        counts.streams += follow
        if first is not None:
            self.sent = self.begins_behind if first else self.last
        try:
            chunk = first
            while True:
                while chunk != b"" and (not follow or rights.edition == edition):
                    if chunk:
                        self.sent = self.last
                    yield chunk or b""
                    chunk = b"" if chunk and self._is_at_end else await self.chunk(silent_seconds)
                if not follow or rights.edition != edition or self.is_over:
                    break
                self.sent = self.last  # every chunk that was read was returned
                if not await self.more(silent_seconds):
                    yield b""
                chunk = await self.chunk(silent_seconds)
            if end := self.form.end():
                yield end
        finally:
            counts.streams -= follow

    def close(self) -> None:
        """Close the read once no thread uses it; a cancelled response may leave a thread running."""
        if self._pending is not None and not self._pending.cancel() and not self._pending.cancelled():
            self._pending.exception()  # read, so that asyncio does not report it
        self._state.readers.submit(self._close)

    def _close(self) -> None:
        with self._reads:
            self._found.close()

    def _read(self) -> bytes:
        with self._reads:
            batches = self._next() if self._error is None else []
            if self._error is not None and not batches:
                raise self._error
            return self.form.write(batches) if batches else b""

    def _next(self) -> list[Batch]:
        batches: list[Batch] = []
        size, left = 0, _CHUNK_RECORDS
        until = time.monotonic() + STEP_SECONDS
        self._is_at_end = False
        while size < _CHUNK_BYTES and left > 0 and self._left != 0:
            try:
                found = next(self._found, _OVER)
            except (WaldError, OSError) as error:
                self._error = error
                break
            if found is None:
                if time.monotonic() > until:
                    break
                continue
            if isinstance(found, Batch):
                behind, last = found.first_sequence - 1, found.last_sequence
                batches.append(found)
                size += len(found.payload)
                left -= found.count
                self._records += found.count
                self._left = None if self._left is None else self._left - found.count
            else:
                self._is_at_end, self._is_over = True, found == _OVER
                behind = last = max(self.last, found)
            self.begins_behind = behind if self.begins_behind is None else self.begins_behind
            self.last = max(self.last, last)
            if self._is_at_end:
                break
        return batches

    def _find(self) -> Generator[Batch | int | None]:
        """Search the log once; batches are split so that chunks stay short, and end at the limit."""
        wanted = self._wanted
        onward = read_without_waiting(
            self._state.log.view(),
            route=wanted.route,
            start=wanted.start,
            stop=wanted.stop,
            group=wanted.group,
            since_ns=wanted.since_ns,
            on_missing=wanted.missing,
            resume_at=self._resume_at,
        )
        with closing(onward):
            for found in onward:
                if not isinstance(found, Batch):
                    yield found
                    continue
                first = found.first_sequence
                while first <= found.last_sequence:
                    count = _CHUNK_RECORDS if self._left is None else min(_CHUNK_RECORDS, self._left)
                    part = found.between(first, first + count - 1)
                    assert part is not None
                    yield part
                    first += count

    def _resume_at(self) -> int:
        """Return the first record to check after the end of a view; 0 if it may be any."""
        first, self._arrived = self._arrived, None
        return first or 0

    def _is_complete(self) -> bool:
        stop = self._wanted.stop
        if self._left == 0 or self._is_over:
            return True
        if isinstance(stop, datetime):
            return time.time_ns() > nanoseconds(stop) + _LATE_NS
        return stop is not None and self.last >= stop


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
        instead = "; ?from=earliest reads without one"  # all records must be requested explicitly
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
        raise InvalidInput("group requires from=cursor", hint=f"?from=cursor&group={query.group}")
    last = call.request.headers.get("last-event-id", "")
    if last and not _SEQUENCE.fullmatch(last):
        raise InvalidInput(
            f"Last-Event-ID {last[:40]!r} is not a sequence", hint="send the id of the last event, or no header"
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
    message = f"Accept: {', '.join(call.accepts)[:80]}: the gate offers only {', '.join(BY_MEDIA_TYPE)}"
    raise HttpError(406, "not-acceptable", message, hint=f"Accept: {NDJSON}")
