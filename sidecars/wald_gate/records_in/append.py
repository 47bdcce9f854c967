"""POST of records: the body goes to the daemon in parts as it arrives, and the answer reports the durable records.

A body is never completely in memory: chunks ─▶ decompressed ─▶ whole lines ─▶ payloads of about 128 KiB

text/plain                 each line is a record
application/x-ndjson       each line is an object, as ``wald append --jsonl`` takes it
application/json           the body is one such object, or an array of them
application/octet-stream   all of it is one record
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from itertools import chain, combinations
from typing import Annotated, Any, Literal

import msgspec
import zstandard
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from wald.client.payloads import column_payloads, json_payloads
from wald.client.session import Durable
from wald.errors import InvalidInput, WaldError
from wald.format.protocol import FRAME_MAX_BYTES
from wald.work.snapshot import Unprocessed
from wald_gate.call import NDJSON, Call, wait_seconds
from wald_gate.limits import MemoryReservation
from wald_gate.problems import HttpError, problem
from wald_gate.records_in import keys
from wald_gate.records_in.publisher import KeyedRequest
from wald_gate.responses import Json
from wald_gate.settings import LimitSettings
from wald_gate.shapes import GroupName, Shape, Stored, WaitTime

_BLANK = b" \t\r\n"
_ON_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # only between tokens: a JSON string cannot contain them
_ELEMENT_BYTES = 100  # of memory, while a document is split
_SHORT_BYTES = 16 << 10  # of a document that is split without a thread
_GZIP = 31  # zlib: a gzip header, and a window of 32 KiB
_GZIP_STEP_BYTES = 1 << 10  # of input, which makes 1 MiB at most
_ZSTD_STEP_BYTES = 256  # of input: a block of 4 bytes may stand for 128 KiB, so a step makes 8 MiB at most
_ZSTD_WINDOW_BYTES = 8 << 20  # what RFC 8878 asks decoders to support
_LARGER = "send it in several records; record_max_bytes in [limits] of the gate"
BODY_LARGER = "send it in several requests; body_max_bytes in [limits] of the gate"


Expand = Callable[[bytes], Iterable[bytes]]
"""Decompresses a chunk in parts of bounded size; b"" ends the body. Raises InvalidInput for damage or a truncation."""


def expander(encoding: str) -> Expand:
    """Return a function that decompresses a body; raise HttpError 415 for an unknown encoding."""
    if encoding not in _ENCODINGS:
        known = ", ".join(filter(None, _ENCODINGS))
        message = f"Content-Encoding {encoding[:40]!r} is not supported"
        raise HttpError(415, "encoding", message, hint=f"supported: {known}")
    return _ENCODINGS[encoding]()


class TextLines:
    """Divides text into lines, one per record; the last one may lack its newline.

    With ``bare``, each JSON value of the body is the value of a record. Long lines are parsed in separate threads,
    because the gate connects to the daemon in asyncio's threads.
    """

    columns = False  # the payloads are lines

    def __init__(
        self, limits: LimitSettings, memory: MemoryReservation, threads: Executor, *, bare: bool = False
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._threads = threads
        self._bare = bare
        self._held = bytearray()
        self._searched = 0  # bytes of it, without a newline

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield up to 128 KiB of whole lines at a time, or one longer line. The parts depend on the body alone."""
        held, limit = self._held, self._limits.record_max_bytes
        held += part
        if len(held) < FRAME_MAX_BYTES:
            return
        start = 0
        while len(held) - start >= FRAME_MAX_BYTES:
            within = start + FRAME_MAX_BYTES
            end = held.rfind(b"\n", start, within) + 1 or held.find(b"\n", max(self._searched, within)) + 1
            if (end or len(held)) - start > max(limit + 1, FRAME_MAX_BYTES):
                raise too_large("a line", limit, _LARGER)
            if not end:
                break
            yield _checked(bytes(held[start:end]), limit)
            start = end
        del held[:start]
        self._memory.keep(len(held))
        self._searched = len(held)

    async def end(self) -> Iterable[bytes]:
        return self._rest()

    def _rest(self) -> Iterator[bytes]:
        held = bytes(self._held)
        if held:
            yield _checked(held if held.endswith(b"\n") else held + b"\n", self._limits.record_max_bytes)

    async def payloads(self, lines: bytes) -> Iterable[bytes]:
        return (lines,)


class JsonLines(TextLines):
    """Divides lines that are JSON objects, or with ``bare`` values."""

    columns = True
    _number = 1

    async def payloads(self, lines: bytes) -> Iterable[bytes]:
        payloads: Iterable[bytes] = json_payloads(lines, "the body", self._number, None, bare=self._bare)
        self._number += lines.count(b"\n")
        if len(lines) > FRAME_MAX_BYTES:  # a single one; json releases the GIL often enough to answer others
            return await asyncio.get_running_loop().run_in_executor(self._threads, list, payloads)
        return payloads


class JsonDocument(JsonLines):
    """Divides a body that is a JSON object or an array of them, or with ``bare`` of values."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        self._held += part
        if len(self._held) > self._limits.json_max_bytes:
            hint = "Content-Type: application/x-ndjson takes more"
            raise too_large("a JSON document", self._limits.json_max_bytes, hint)
        self._memory.keep(len(self._held))
        return iter(())

    async def end(self) -> Iterable[bytes]:
        document = bytes(self._held)
        self._held.clear()
        self._memory.keep(len(document) + _ELEMENT_BYTES * document.count(b","))  # every few bytes may be a record
        if len(document) > _SHORT_BYTES:
            lines = await asyncio.get_running_loop().run_in_executor(self._threads, _on_lines, document)
        else:
            lines = _on_lines(document)
        return chain(super().feed(lines), self._rest())


def _on_lines(document: bytes) -> bytes:
    """Return the elements of an array, or the document itself, one per line."""
    try:
        if document.lstrip(_BLANK).startswith(b"["):
            found = msgspec.json.decode(document, type=list[msgspec.Raw])
        else:
            found = [msgspec.json.decode(document, type=msgspec.Raw)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", hint="Content-Type: application/x-ndjson, for lines") from None
    return b"".join(bytes(each).translate(_ON_ONE_LINE) + b"\n" for each in found)


class SingleRecord(TextLines):
    """Stores the whole body as one record."""

    columns = True

    def feed(self, part: bytes) -> Iterator[bytes]:
        self._held += part
        if len(self._held) > self._limits.record_max_bytes:
            raise too_large("the record", self._limits.record_max_bytes, _LARGER)
        self._memory.keep(len(self._held))
        return iter(())

    async def end(self) -> Iterable[bytes]:
        whole = bytes(self._held)
        self._held.clear()  # its memory, before there is a payload of the same size
        return (whole,)

    async def payloads(self, whole: bytes) -> Iterable[bytes]:
        return column_payloads([whole])


BODIES: Mapping[str, type[TextLines]] = {
    "text/plain": TextLines,
    "application/x-ndjson": JsonLines,
    "application/ndjson": JsonLines,
    "application/jsonl": JsonLines,
    "application/json": JsonDocument,
    "application/octet-stream": SingleRecord,
}
"""Classes that divide a body into records, by its media type."""


def _checked(lines: bytes, limit: int) -> bytes:
    """Return the lines; raise HttpError 413 if one is too long. Each step skips lines of up to that length."""
    start = 0
    while len(lines) - start > limit + 1:
        start = lines.rfind(b"\n", start, start + limit + 1) + 1
        if not start:
            raise too_large("a line", limit, _LARGER)
    return lines


def too_large(what: str, limit: int, hint: str) -> HttpError:
    return HttpError(413, "too-large", f"{what} is larger than {limit} bytes", hint=hint)


def _members(name: str, step_bytes: int, begin: Callable[[], Any], error: type[Exception]) -> Expand:
    """Decompress gzip members (RFC 1952) or zstd frames (RFC 8878), of which a body may have several."""
    member, has_begun = begin(), False

    def expand(chunk: bytes) -> Iterator[bytes]:
        nonlocal member, has_begun
        if not chunk and has_begun:
            raise InvalidInput(f"the {name} body is truncated", hint="send it again")
        for start in range(0, len(chunk), step_bytes):
            step = chunk[start : start + step_bytes]
            while step:
                has_begun = True
                try:
                    part = member.decompress(step)
                except error as reason:
                    raise InvalidInput(f"the body is not {name}: {reason}", hint=f"Content-Encoding: {name}") from None
                step = b""
                if member.eof:
                    step, member, has_begun = member.unused_data, begin(), False
                if part:
                    yield part

    return expand


def _identity() -> Expand:
    return lambda chunk: (chunk,) if chunk else ()


def _zstd() -> Expand:
    frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)  # of one body: its frames share state
    begin = partial(frames.decompressobj, read_across_frames=False)
    return _members("zstd", _ZSTD_STEP_BYTES, begin, zstandard.ZstdError)


_gzip = partial(_members, "gzip", _GZIP_STEP_BYTES, partial(zlib.decompressobj, _GZIP), zlib.error)
_ENCODINGS: Mapping[str, Callable[[], Expand]] = {
    "": _identity,
    "identity": _identity,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "zstd": _zstd,
}


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
_WITHIN_64_BITS = "^(1[7-9]|2[01])"  # years 1700 to 2199, nearly all that fit
_Text = Annotated[str, Meta(extra_json_schema={"format": "date-time", "pattern": _WITHIN_64_BITS})]
_OTHER_UNITS: dict[str, Any] = {"not": {"minimum": 1, "maximum": 10**17}}
_Time = Annotated[int, Meta(ge=-_TIME_LIMIT, le=_TIME_LIMIT - 1, extra_json_schema=_OTHER_UNITS)] | _Text | None
_TimeNs = Annotated[int, Meta(ge=-_TIME_LIMIT, le=_TIME_LIMIT - 1)] | _Text | None
_Due = Annotated[int, Meta(ge=10**18, le=_TIME_LIMIT - 1)] | _Text | None
_APART = (("value", "value_hex", "value_base64"), ("key", "key_hex", "key_base64"), ("time", "event_time_ns"))
_CLASHES = [{"required": pair} for names in _APART for pair in combinations(names, 2)]


class NewRecord(Shape):
    """Record with the fields of a line of ``wald append --jsonl``. Fields that the log assigns are ignored.

    If a value is not a string, its JSON text is stored unchanged. Numeric times are in nanoseconds since 1970.
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
    """Request whose records are stored as they arrive; ``unprocessed`` is None unless the client waits for a group."""

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
    """Store the records of a body; answer 200 once all are durable and, if the client waits for a group, processed.

    An error response reports which earlier records are stored.
    """
    query, state, is_replay = call.query(Query), call.state, False
    group, seconds = query.wait_processed, wait_seconds(query.wait or _WAIT)
    if query.wait is not UNSET and group is UNSET:
        raise InvalidInput("wait needs wait_processed", hint=f"?wait_processed=GROUP&wait={query.wait}")
    unprocessed = None if group is UNSET else await state.processed.expected(call.route, group)
    memory = MemoryReservation(state.limits)
    call.request.at_end = memory.give_back
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
    """Return the class that divides a body of this media type; raise InvalidInput or HttpError 415 if there is none."""
    media_type, charset = call.content_type
    cut = BODIES.get(media_type)
    if cut is None:
        known = [name for name, each in BODIES.items() if not bare or issubclass(each, JsonLines)]
        message = f"{media_type or 'no media type'}: {' or '.join(known)} is accepted"
        raise HttpError(415, "media-type", message, hint="curl -H 'Content-Type: text/plain' --data-binary @FILE")
    if bare and not issubclass(cut, JsonLines):
        raise InvalidInput(
            f"as=value does not apply to {media_type}", hint=f"Content-Type: {NDJSON}, or the request without as=value"
        )
    if charset not in _CHARSETS:
        raise HttpError(415, "charset", f"charset={charset[:40]}: only UTF-8 is accepted", hint="iconv -t UTF-8")
    return cut
