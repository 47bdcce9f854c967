"""The view of records: some of a route from a position on, with links to older and newer ones; or the newest, live."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from markupsafe import Markup
from msgspec import Meta
from starlette.responses import RedirectResponse, Response

from wald.errors import InvalidInput, NotFound
from wald.format.names import check_route
from wald.format.records import Record
from wald.format.times import nanoseconds, parse_position_option
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.latest import start_of_latest
from wald.reading.reader import read_without_waiting
from wald.reading.selection import Start
from wald.segments.seek import end_of, sequence_since
from wald.segments.view import View
from wald.status.schema import local_now
from wald_gate.call import Call
from wald_gate.page.frame import HEADERS, Facts, base_of, live_page, page
from wald_gate.page.picture import Picture
from wald_gate.page.values import line
from wald_gate.problems import HttpError, problem, without_path
from wald_gate.rights.clients import Client, Right
from wald_gate.shapes import Shape

COUNT = 50
"""Of records on a page."""
_NAMED = ("earliest", "end")
_NOTES = 5
_SEGMENTS = 1000  # that are looked at for a page: a rare route may be in few of very many


class Query(Shape, rename={"from_": "from"}):
    """Which records.

    Attributes:
        route: "": every route.
        from_: earliest, end, a sequence or a time; "": the newest records.
        before: the newest ones below this sequence, in place of ``from``.
        follow: whether to go on with the newest ones.
    """

    route: Annotated[str, Meta(max_length=127)] = ""
    from_: Annotated[str, Meta(max_length=64)] = ""
    before: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)] | None = None
    follow: Literal["0", "1"] = "0"


async def records(call: Call) -> Response:
    """The view at ``/records``."""
    query = call.query(Query)
    route = check_route(query.route) if query.route else None
    known = await call.read(_readable, call)
    facts: dict[str, Any] = {"query": query, "route": route, "routes": known, "count": COUNT, "wrong": ""}
    if route is None and not call.client.admin:
        return await page(call, "records.html", facts | {"excerpt": None})
    require_readable(call.client, route)
    log = call.state.log
    if query.follow == "1":
        newest = Newest(log, route)

        def live(_: Picture) -> Facts:
            return facts | {"excerpt": newest.read_on()}

        return await live_page(call, "records.html", live)
    try:
        found = await call.walk(excerpt(log, route, query))
    except (InvalidInput, NotFound) as error:  # the form stays, with what was typed
        status = problem(error).status_code
        return await page(
            call, "records.html", facts | {"excerpt": None, "wrong": call.words(error.message)}, status=status
        )
    return await page(call, "records.html", facts | {"excerpt": found})


async def find(call: Call) -> Response:
    """From the number that was typed to the page of that record."""
    return RedirectResponse(f"{base_of(call.request)}records/{call.query(Find).sequence}", 303, HEADERS)


class Find(Shape):
    """A number that was typed into a form."""

    sequence: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


def require_readable(client: Client, route: str | None) -> None:
    """Refuse who may not read a route; None: any route.

    Raises:
        HttpError: 403.
    """
    if not (client.admin if route is None else client.may_read(route)):
        right = Right.ADMIN if route is None else Right.READ
        raise HttpError(403, "not-permitted", f"{client.name} may not see this: it needs {right.of(route)}")


@dataclass(frozen=True)
class Row:
    """A record in a line of the table: the beginnings of its key and its value."""

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
    """Some consecutive records of a route.

    Attributes:
        rows: in the order of the log; of those that are followed, the newest first.
        notes: what is missing of them, and why.
        older: in front of which sequence there may be others, newer: from which on; None: there are none.
        searched: if there are few, because they are rare: which sequences were looked through.
        arrived: of those that are followed, how many have come since the excerpt before.
    """

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    older: int | None = None
    newer: int | None = None
    searched: tuple[int, int] | None = None
    arrived: int = 0

    @property
    def first(self) -> int:
        return min((row.sequence for row in self.rows), default=0)

    @property
    def last(self) -> int:
        return max((row.sequence for row in self.rows), default=0)


class Newest:
    """The newest records of a route, read on again and again."""

    def __init__(self, log: Log, route: str | None) -> None:
        self._log = log
        self._route = route
        self._next = 0  # the record behind those that were read, to begin with after an error
        self._onward: Generator[Batch | int | None] | None = None  # keeps the pieces of records that have not ended
        self._notes: list[str] = []
        self._rows: dict[int, Row] = {}  # in the order in which they have ended

    def read_on(self) -> Excerpt:
        """Read the records that have become durable. Of many, decode the last ones, and count the others."""
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
        for record in (record for batch in last for record in _newest_of(batch)):
            self._rows.pop(record.sequence, None)  # it is read again after an error
            self._rows[record.sequence] = Row.of(record)
        for sequence in [*self._rows][:-COUNT]:
            del self._rows[sequence]
        return arrived


def _newest_of(batch: Batch) -> Iterator[Record]:
    newest = batch.between(batch.last_sequence - COUNT + 1, batch.last_sequence)
    return iter(()) if newest is None else newest.records()


def excerpt(log: Log, route: str | None, query: Query) -> Generator[None, None, Excerpt]:
    """Read the records of a page; yields on the way, for :meth:`Call.walk`."""
    view, notes = log.view(), list[str]()
    if query.from_ in ("", "end") or query.before is not None:
        last = end_of(view) - 1 if query.before is None else min(query.before, end_of(view)) - 1
        first = _latest(view, route, last)
        rows = (yield from _rows(log, view, route, first, last, notes)) if last > 0 else []
        has_older = bool(view.segments) and first > view.segments[0].base_sequence
        searched = (first, last) if has_older and len(rows) < COUNT else None
        newer = None if query.before is None else last + 1
        return Excerpt(rows, notes, first if has_older else None, newer, searched)
    start: Start = (
        "earliest" if query.from_ == "earliest" else parse_position_option("from", query.from_, local_now(), _NAMED)
    )
    begin = (
        start if isinstance(start, int) else 1 if isinstance(start, str) else sequence_since(view, nanoseconds(start))
    )
    beyond = _segment_of(view, begin) + _SEGMENTS
    last = view.segments[beyond].base_sequence - 1 if beyond < len(view.segments) else end_of(view) - 1
    rows = yield from _rows(log, view, route, start, last if begin <= last else None, notes)
    ends = begin > last or last == end_of(view) - 1
    newer = rows[-1].sequence + 1 if len(rows) == COUNT else None if ends else last + 1
    searched = (begin, last) if not ends and len(rows) < COUNT else None
    older = None if start == "earliest" else rows[0].sequence if rows else begin
    return Excerpt(rows, notes, older, newer, searched)


def _latest(view: View, route: str | None, last: int) -> int:
    """Where the newest records up to ``last`` begin, as far as they are in the segments that are looked at."""
    if not view.segments:
        return 1
    lowest = view.segments[max(0, _segment_of(view, last) - _SEGMENTS)].base_sequence
    return start_of_latest(view, route, COUNT, last=last, first=lowest)


def _segment_of(view: View, sequence: int) -> int:
    """The place of the segment that holds a record."""
    return max(0, bisect_right(view.segments, sequence, key=lambda segment: segment.base_sequence) - 1)


def _rows(
    log: Log, view: View, route: str | None, start: Start, last: int | None, notes: list[str]
) -> Generator[None, None, list[Row]]:
    """The first records of a selection; yields on the way to the next one, which may be the whole log."""
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
    """Read what can be read, and note the first things that cannot."""

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


def _readable(call: Call) -> list[str]:
    return [route for route in call.state.log.routes() if call.client.may_read(route)]
