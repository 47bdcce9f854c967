"""Records on the page: an excerpt of a route, its newest records live, and the page of one sequence."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Literal, get_args

import msgspec
from markupsafe import Markup
from msgspec import Meta
from starlette.responses import Response

from wald.errors import InvalidInput, NotFound, WaldError
from wald.format.names import check_route
from wald.format.records import Record
from wald.format.times import nanoseconds, parse_position_option
from wald.log import Log
from wald.reading.assembler import Batch, Sender
from wald.reading.latest import start_of_latest
from wald.reading.lookup import Whereabouts
from wald.reading.reader import read_without_waiting
from wald.reading.selection import Start
from wald.segments.seek import end_of, sequence_since
from wald.segments.view import State, View
from wald.status.schema import Where, local_now
from wald_gate.auth.tokens import Right
from wald_gate.call import Call
from wald_gate.page.frame import Facts, live_page, marked, page, redirect
from wald_gate.problems import HttpError, problem, without_path
from wald_gate.shapes import Sequence, Shape

ValueForm = Literal["text", "json", "hex"]
FORMS: tuple[ValueForm, ...] = get_args(ValueForm)
SHOWN_BYTES = 16 << 10
LINE_BYTES = 160
_LINE_HEX = 48
HEADERS_SHOWN = 50
_DEPTH = 40  # of JSON; each line is indented, so deep nesting multiplies the size
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_ROW = 16
_PRINTED = range(0x20, 0x7F)


@dataclass(frozen=True, slots=True)
class Shown:
    """A value in one form; ``note`` is the reason if it is not the requested one."""

    form: ValueForm
    html: Markup
    size: int
    of: int
    note: str = ""


def shown(value: bytes, wanted: ValueForm | None = None) -> Shown:
    """Return a value or its beginning; by default JSON for an object or array, text for UTF-8, else hex."""
    part, note = value[:SHOWN_BYTES], ""
    if wanted in ("json", None):
        laid_out, note = _laid_out(value)
        if laid_out is not None and (wanted or value.lstrip()[:1] in (b"{", b"[")):
            return Shown("json", marked(laid_out, keep="\n"), len(value), len(value))
    if wanted == "hex" or (wanted is None and not _is_text(part)):
        return Shown("hex", Markup("{}").format(_dump(part)), len(part), len(value))
    text, size = _text(part, whole=len(part) == len(value))
    return Shown("text", marked(text, keep="\n"), size, len(value), note if wanted else "")


def line(value: bytes) -> Markup:
    """Return the beginning of a value on one line, in hexadecimal if it is not text."""
    if not _is_text(value[:LINE_BYTES]):
        more = "…" if len(value) > _LINE_HEX else ""
        return Markup('<span class="quiet">{}{}</span>').format(value[:_LINE_HEX].hex(" "), more)
    text, size = _text(value[:LINE_BYTES], whole=len(value) <= LINE_BYTES)
    return marked(text) + (Markup('<span class="quiet">…</span>') if size < len(value) else "")


def headers(data: bytes | None) -> tuple[list[tuple[str, str]], int]:
    """Return the first headers and the number of all; malformed headers have no name."""
    if not data:
        return [], 0
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return [("", _text(data[:SHOWN_BYTES], whole=True)[0])], 1
    first = list(found.items())[:HEADERS_SHOWN]
    return [(name[:SHOWN_BYTES], value[:SHOWN_BYTES]) for name, value in first], len(found)


def _is_text(part: bytes) -> bool:
    text, _ = _text(part, whole=False)
    return "\0" not in text and not any("\udc80" <= character <= "\udcff" for character in text)


def _text(part: bytes, *, whole: bool) -> tuple[str, int]:
    """Return text, with lone surrogates (PEP 383) for bytes that are not UTF-8, and its number of bytes.

    If it is not ``whole``, an incomplete last character is left out.
    """
    if not whole:
        for cut in range(1, min(4, len(part) + 1)):
            if part[-cut] >= 0xC0:  # a character begins here
                length = 2 + (part[-cut] >= 0xE0) + (part[-cut] >= 0xF0)
                part = part[:-cut] if length > cut else part
                break
    return part.decode(errors="surrogateescape"), len(part)


def _laid_out(value: bytes) -> tuple[str | None, str]:
    """Return JSON with one element per line and unchanged numbers and strings; or None, and the reason."""
    if len(value) > SHOWN_BYTES:
        return None, f"It is too long to format as JSON: more than {SHOWN_BYTES} bytes."
    try:
        compact = msgspec.json.format(value, indent=-1)
        compact.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, "It is not JSON."
    depth = deepest = 0
    for byte in _STRING.sub(b"", compact):
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    if deepest > _DEPTH:
        return None, f"It is nested too deeply to format as JSON: more than {_DEPTH} levels."
    return msgspec.json.format(value, indent=2).decode(), ""


def _dump(part: bytes) -> str:
    """Return sixteen bytes per line, with their offset and printable ASCII."""
    lines = []
    for at in range(0, len(part), _ROW):
        row = part[at : at + _ROW]
        printed = "".join(chr(byte) if byte in _PRINTED else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):{3 * _ROW - 1}}  {printed}")
    return "\n".join(lines)


_DOWNLOAD = {"Cache-Control": "no-store", "Content-Security-Policy": "sandbox"}


class ValueQuery(Shape, rename={"form": "as"}):
    """Query for the form of a value."""

    form: ValueForm | None = None


@dataclass(frozen=True)
class Found:
    """Facts about a sequence; ``record`` is None if it is not in the log or unreadable."""

    where: Whereabouts
    record: Record | None = None
    sender: Sender | None = None
    problem: str = ""


async def record(call: Call) -> Response:
    query = call.query(ValueQuery)
    found = await _found(call)
    message = call.words(found.problem or found.where.message)
    facts: Facts = {"found": found, "forms": FORMS, "message": message, "where": Where.of(found.where)}
    if found.record is not None:
        names, count = headers(found.record.headers)
        facts |= {
            "headers": names,
            "headers_left": count - len(names),
            "key": None if found.record.key is None else line(found.record.key),
            "value": await call.read(shown, found.record.value, query.form),
        }
    return await page(call, "record.html", facts)


async def value(call: Call) -> Response:
    """Return the bytes of a value as a download that no browser renders as a page."""
    found = await _found(call)
    sequence = found.where.sequence
    if found.record is None:
        message = f"record {sequence}: {found.problem or found.where.message}"
        raise NotFound(message, hint=f"/records/{sequence} shows what became of it")
    disposition = {"Content-Disposition": f'attachment; filename="record-{sequence}"'}
    return Response(found.record.value, 200, _DOWNLOAD | disposition, "application/octet-stream")


async def _found(call: Call) -> Found:
    """Read the record in the path. Clients that may not read its route are refused without naming it."""
    given, log, client = call.request.path_params["sequence"], call.state.log, call.client
    try:
        sequence = msgspec.convert(given, Sequence, strict=False)
    except msgspec.ValidationError:
        raise InvalidInput(f"{given[:40]!r} is not a sequence", hint="/records/250") from None
    where = await call.read(log.where, sequence)
    may_read = client.admin or (where.route is not None and client.may_read(where.route))
    if not may_read and where.state is not State.NEVER_ISSUED:
        message = f"{client.name} may not see this: it needs the right to read the route of record {given}"
        raise HttpError(403, "not-permitted", message)
    return await call.walk(read_record(log, where))


def read_record(log: Log, where: Whereabouts) -> Generator[None, None, Found]:
    """Read a record; yields before the end of a long one, for :meth:`Call.walk`."""
    if not where.durable:
        return Found(where)
    route = where.route if where.route is not None and log.root.has_route(where.route) else None
    first = where.sequence
    try:
        for batch in read_without_waiting(log.view(), route=route, start=first, stop=first, on_missing="skip"):
            if isinstance(batch, Batch):
                return Found(where, next(batch.records()), log.sender(batch))
            if batch is not None:
                break
            yield
    except WaldError as error:
        return Found(where, problem=error.message)
    return Found(where)


COUNT = 50
"""Of records on a page."""
_NAMED = ("earliest", "end")
_NOTES = 5
_SEGMENTS = 1000  # searched for a page: a rare route may be in only a few of many segments


class Query(Shape, rename={"from_": "from"}):
    """Query of the view."""

    route: Annotated[str, Meta(max_length=127)] = ""  # "": every route
    from_: Annotated[str, Meta(max_length=64)] = ""  # earliest, end, a sequence or a time; "": the newest records
    before: Sequence | None = None  # the newest records below this sequence
    follow: Literal["0", "1"] = "0"  # show new records as they arrive


async def records(call: Call) -> Response:
    query, log, client = call.query(Query), call.state.log, call.client
    route, status = check_route(query.route) if query.route else None, 200
    known = await call.read(lambda: [route for route in log.routes() if client.may_read(route)])
    facts: Facts = {"query": query, "route": route, "routes": known, "count": COUNT, "wrong": "", "excerpt": None}
    if route is not None and not client.may_read(route):
        raise HttpError(403, "not-permitted", f"{client.name} may not see this: it needs {Right.READ.of(route)}")
    if route is not None or client.admin:
        if query.follow == "1":
            newest = Newest(log, route)
            return await live_page(call, "records.html", lambda _: facts | {"excerpt": newest.read_on()})
        try:
            facts["excerpt"] = await call.walk(excerpt(log, route, query))
        except (InvalidInput, NotFound) as error:  # the form keeps the typed text
            facts["wrong"], status = call.words(error.message), problem(error).status_code
    return await page(call, "records.html", facts, status=status)


async def find(call: Call) -> Response:
    """Redirect from a typed number to the page of that record."""
    return redirect(call.request, f"records/{call.query(Find).sequence}")


class Find(Shape):
    """A sequence typed into a form."""

    sequence: Sequence


@dataclass(frozen=True)
class Row:
    """A record in the table: the beginnings of its key and value."""

    sequence: int
    route: str
    append_time_ns: int
    key: Markup | None
    value: Markup
    size: int

    @classmethod
    def of(cls, record: Record) -> Row:
        key = None if record.key is None else line(record.key)
        return cls(record.sequence, record.route, record.append_time_ns, key, line(record.value), len(record.value))


@dataclass(frozen=True)
class Excerpt:
    """Consecutive records of a route."""

    rows: list[Row]  # in the order of the log; if live, the newest first
    notes: list[str] = field(default_factory=list)  # missing records
    older: int | None = None  # position of the next excerpt in that direction, if any
    newer: int | None = None
    searched: tuple[int, int] | None = None  # first and last sequence that were searched for rare records
    arrived: int = 0  # if live, number of new records

    @property
    def first(self) -> int:
        return min((row.sequence for row in self.rows), default=0)

    @property
    def last(self) -> int:
        return max((row.sequence for row in self.rows), default=0)


class Newest:
    """The newest records of a route, updated by reading further."""

    def __init__(self, log: Log, route: str | None) -> None:
        self._log = log
        self._route = route
        self._next = 0  # the record behind those that were read, to begin with after an error
        self._onward: Generator[Batch | int | None] | None = None  # keeps the pieces of records that have not ended
        self._notes: list[str] = []
        self._rows: dict[int, Row] = {}  # in the order in which they ended

    def read_on(self) -> Excerpt:
        """Read new durable records; if there are many, decode the last ones and count the others."""
        self._notes.clear()
        is_first = not self._next
        try:
            arrived = self._read_on()
        except Exception:
            self._onward = None  # an error has ended it
            raise
        return Excerpt([*reversed(self._rows.values())], [*self._notes], arrived=0 if is_first else arrived)

    def _read_on(self) -> int:
        if self._onward is None:
            view = self._log.view()
            first = self._next or _latest(view, self._route, end_of(view) - 1)
            self._onward = _onward(self._log, view, self._route, first, None, self._notes)
        last = deque[Batch]()  # with the last records
        held = arrived = 0
        for found in self._onward:
            if isinstance(found, Batch):
                last.append(found)
                held += found.count
                arrived += found.count
                while held - last[0].count >= COUNT:
                    held -= last.popleft().count
            elif found is not None:
                self._next = found + 1
                break
        for batch in last:
            newest = batch.between(batch.last_sequence - COUNT + 1, batch.last_sequence)
            for record in newest.records() if newest is not None else ():
                self._rows.pop(record.sequence, None)  # it is read again after an error
                self._rows[record.sequence] = Row.of(record)
        for sequence in [*self._rows][:-COUNT]:
            del self._rows[sequence]
        return arrived


def excerpt(log: Log, route: str | None, query: Query) -> Generator[None, None, Excerpt]:
    """Read the records of a page; yields in between, for :meth:`Call.walk`."""
    view, notes = log.view(), list[str]()
    if query.from_ in ("", "end") or query.before is not None:
        last = end_of(view) - 1 if query.before is None else min(query.before, end_of(view)) - 1
        first = _latest(view, route, last)
        rows = (yield from _rows(log, view, route, first, last, notes)) if last > 0 else []
        has_older = bool(view.segments) and first > view.segments[0].base_sequence
        searched = (first, last) if has_older and len(rows) < COUNT else None
        newer = None if query.before is None else last + 1
        return Excerpt(rows, notes, first if has_older else None, newer, searched)
    start: Start = "earliest"
    if query.from_ != "earliest":
        start = parse_position_option("from", query.from_, local_now(), _NAMED)
    begin = start if isinstance(start, int) else 1
    if isinstance(start, datetime):
        begin = sequence_since(view, nanoseconds(start))
    beyond = _segment_of(view, begin) + _SEGMENTS
    last = view.segments[beyond].base_sequence - 1 if beyond < len(view.segments) else end_of(view) - 1
    rows = yield from _rows(log, view, route, start, last if begin <= last else None, notes)
    ends = begin > last or last == end_of(view) - 1
    newer = rows[-1].sequence + 1 if len(rows) == COUNT else None if ends else last + 1
    searched = (begin, last) if not ends and len(rows) < COUNT else None
    older = None if start == "earliest" else rows[0].sequence if rows else begin
    return Excerpt(rows, notes, older, newer, searched)


def _latest(view: View, route: str | None, last: int) -> int:
    """Return the first of the newest records up to ``last``, within the limit of searched segments."""
    if not view.segments:
        return 1
    lowest = view.segments[max(0, _segment_of(view, last) - _SEGMENTS)].base_sequence
    return start_of_latest(view, route, COUNT, last=last, first=lowest)


def _segment_of(view: View, sequence: int) -> int:
    return max(0, bisect_right(view.segments, sequence, key=lambda segment: segment.base_sequence) - 1)


def _rows(
    log: Log, view: View, route: str | None, start: Start, last: int | None, notes: list[str]
) -> Generator[None, None, list[Row]]:
    """Read the first records of a selection; yields in between, because it may read the whole log."""
    rows: list[Row] = []
    for found in _onward(log, view, route, start, last, notes):
        if isinstance(found, Batch):
            batch = found.between(found.first_sequence, found.first_sequence + COUNT - len(rows) - 1)
            assert batch is not None
            rows += map(Row.of, batch.records())
        elif found is not None:
            break
        if len(rows) == COUNT:
            break
        yield
    return rows


def _onward(
    log: Log, view: View, route: str | None, start: Start, last: int | None, notes: list[str]
) -> Generator[Batch | int | None]:
    """Read readable records, and note the first problems."""

    def note(message: str) -> None:
        if len(notes) < _NOTES:
            notes.append(without_path(message, log.root))

    return read_without_waiting(
        view,
        route=route,
        start=start,
        stop=last,
        on_missing=lambda missing: note(missing.message()),
        on_damage=lambda error: note(error.message),
    )
