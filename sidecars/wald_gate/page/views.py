"""The overview, routes and groups, the history, the login form, and the table of pages.

The HTML may change at any time, so programs must not rely on it; they use ``/v1``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Literal, NamedTuple, get_args
from urllib.parse import parse_qs, urlencode

import msgspec
from msgspec import Meta
from starlette.responses import Response

from wald.checking.audit_report import DeletionAudit, Event
from wald.errors import InvalidInput, NotFound
from wald.format.names import HANDOVER_SUFFIX, LEDGERS, check_route
from wald.format.times import utc
from wald.hints import command_line
from wald.retention.backlog import GroupBacklog
from wald.retention.cursors import CursorState
from wald.status.history import CLOCK, CLOCK_STEP, LIVES, READABLE, deed, excerpt
from wald.status.rates import Amount, Row
from wald.status.retention import WorkCounts, advice
from wald.work.group import DEAD_LETTER
from wald_gate.auth.tokens import Right
from wald_gate.call import Call, Verb
from wald_gate.page.frame import HTML, Facts, asset, bare, failed, live_page, only_frame, page, redirect
from wald_gate.page.records import find, record, records, value
from wald_gate.page.snapshot import PageSnapshot, Walk
from wald_gate.page.strip import Look, Mark, Piece, strip
from wald_gate.problems import HttpError, without_path
from wald_gate.shapes import Shape


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """Dead letters of a route in one dead-letter route.

    It is read from journals and cursors. The origin of a dead letter is only in the record, so all that wait on the
    route are counted, even those of other routes.
    """

    route: str
    groups: list[str]  # groups of the other route
    giving_up: int  # records that are becoming dead letters
    exists: bool
    unread: int | None  # lag of its group that is furthest behind
    last: int | None
    command: str  # redrives its records to their routes


def dead_letters(call: Call, route: str, walk: Walk) -> Iterator[DeadLetterSummary]:
    """Yield the dead-letter routes of a route that the client may read and that exist or are about to."""
    goals: dict[str, list[str]] = {}
    for row in walk.rows:
        if row.route == route and row.state is not CursorState.ABSENT:
            for goal in _goals(call, walk, row) - {route}:
                goals.setdefault(goal, []).append(row.group)
    for goal in sorted(filter(call.client.may_read, goals)):
        groups, there = goals[goal], [row for row in walk.rows if row.route == goal]
        giving_up = sum(
            walk.work[route, each].giving_up_to.count(goal) for each in groups if (route, each) in walk.work
        )
        exists = call.state.log.root.has_route(goal)
        if exists or giving_up:
            unread = max((row.lag_records for row in there), default=None)
            command = command_line(call.root, f"redrive {goal}", program="wald-drain")
            last = there[0].last_sequence if there else None
            yield DeadLetterSummary(goal, groups, giving_up, exists, unread, last, command)


def _goals(call: Call, walk: Walk, row: Row) -> set[str]:
    """Return the routes that may have dead letters of a group; none for a group without workers."""
    key = row.route, row.group
    if work := walk.work.get(key):
        return {call.state.groups.dead_letter(*key), *work.giving_up_to}
    is_drained = key in walk.by_name and walk.by_name[key].cursor.path.with_suffix(HANDOVER_SUFFIX).exists()
    return {DEAD_LETTER} if is_drained else set()


_ROWS = 100  # on one page: as many as can be read
_HOLDINGS = 30
_CURSOR_WORDS = {
    CursorState.ABSENT: "no cursor",
    CursorState.UNREADABLE: "cursor unreadable",
    CursorState.LINKED: "cursor is a link",
    CursorState.FOREIGN: "cursor of another log",
    CursorState.BEYOND: "cursor beyond the head",
}
Sort = Literal["route", "last", "in", "groups", "lag", "oldest", "out", "held", "leased", "waiting", "dead"]


class Query(Shape):
    """Query of the view; ``find`` is a part of the name of a route or group."""

    find: Annotated[str, Meta(max_length=127)] = ""
    sort: Sort = "held"
    page: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


@dataclass(frozen=True, slots=True)
class Line:
    """A route, summed up over its groups."""

    route: str
    groups: list[str]
    last: int | None
    received: float | None
    processed: float | None
    lag: int  # of the group that is furthest behind
    oldest: float | None
    held: int  # pinned bytes of the group that pins most
    leased: int  # records of its work groups
    waiting: int
    dead: int
    signs: list[str]  # special states

    def has(self, wanted: str) -> bool:
        return any(wanted.lower() in name.lower() for name in (self.route, *self.groups))

    def rank(self, sort: Sort) -> tuple[float, int]:
        """Return the sort key of the line, the largest first."""
        if sort == "groups":
            return len(self.groups), 0
        value = getattr(self, {"in": "received", "out": "processed"}.get(sort, sort)) or 0
        return value, self.lag if sort == "held" else 0


class Remedy(NamedTuple):
    """The reason for a pin, and a command that removes it; ``lost`` describes what is lost for good."""

    said: str
    command: str = ""
    lost: str = ""


async def routes(call: Call) -> Response:
    query = call.query(Query)

    def facts(picture: PageSnapshot) -> Facts:
        every = lines(picture, call.client.may_read)
        found = sorted((line for line in every if line.has(query.find)), key=lambda line: line.route)
        if query.sort != "route":
            found.sort(key=lambda line: line.rank(query.sort), reverse=True)
        pages = max(1, -(-len(found) // _ROWS))
        page = min(query.page, pages)
        return {
            "query": query,
            "count": len(every),
            "found": len(found),
            "page": page,
            "pages": pages,
            "lines": found[(page - 1) * _ROWS : page * _ROWS],
            "address": lambda **changed: _address(query, changed),
        }

    return await live_page(call, "routes.html", facts)


async def route(call: Call) -> Response:
    name, log = call.route, call.state.log
    if not await call.read(log.root.has_route, name):
        raise NotFound(f"there is no route {name}", hint="/routes lists them")

    def facts(picture: PageSnapshot) -> Facts:
        walk = picture.walk
        rows = [row for row in walk.rows if row.route == name]
        groups = [(row, walk.by_name.get((name, row.group)), walk.work.get((name, row.group))) for row in rows]
        holdings = ((row.group, run) for row, _, work in groups if work for run in work.first)
        return {
            "name": name,
            "line": _line(name, rows, picture) if rows else None,
            "groups": groups,
            "letters": list(dead_letters(call, name, walk)),
            "holdings": list(islice(holdings, _HOLDINGS)),
            "held": sum(work.leased + work.waiting for _, _, work in groups if work),
            "ways": [way for row, group, _ in groups if group for way in remedies(call, row, group)],
        }

    return await live_page(call, "route.html", facts)


def lines(picture: PageSnapshot, may_read: Callable[[str], bool]) -> list[Line]:
    of_route: dict[str, list[Row]] = {}
    for row in picture.walk.rows:
        if may_read(row.route):
            of_route.setdefault(row.route, []).append(row)
    return [_line(name, found, picture) for name, found in of_route.items()]


def _line(name: str, rows: Sequence[Row], picture: PageSnapshot) -> Line:
    work = [picture.walk.work.get((name, row.group), WorkCounts()) for row in rows]
    processed = [row.processed_per_second for row in rows if row.processed_per_second is not None]
    return Line(
        name,
        [row.group for row in rows if row.state is not CursorState.ABSENT],
        rows[0].last_sequence,
        rows[0].received_per_second,
        sum(processed) if processed else None,
        max(row.lag_records for row in rows),
        max((row.oldest_seconds for row in rows if row.oldest_seconds is not None), default=None),
        max(row.held_bytes for row in rows),
        sum(each.leased for each in work),
        sum(each.waiting for each in work),
        sum(len(each.giving_up_to) for each in work),
        list(dict.fromkeys(_signs(name, rows, picture))),
    )


def _signs(name: str, rows: Sequence[Row], picture: PageSnapshot) -> Iterator[str]:
    if rows[0].retired:
        yield "retired"
    if any(over.get("route") == name for over in picture.daemon.answer.get("over_quota") or ()):
        yield "over its quota"
    for row in rows:
        if not row.retired and row.state in _CURSOR_WORDS:
            yield _CURSOR_WORDS[row.state]
        if (work := picture.walk.work.get((name, row.group))) is not None:
            yield "journal damaged" if work.unusable else "work group"


def remedies(call: Call, row: Row, group: GroupBacklog) -> Iterator[Remedy]:
    root, cursor = call.root, group.cursor
    if group.retired:
        return
    for said, command in advice(root, cursor):
        yield Remedy(without_path(said, call.state.log.root), command)
    if not group.pinned_segments:
        return
    is_one = group.pinned_segments == 1
    what, hold = ("1 segment", "holds") if is_one else (f"{group.pinned_segments} segments", "hold")
    if cursor.state is CursorState.ABSENT:
        said = f"No group has a cursor on {cursor.route}, so everything it ever received is kept: {what}."
        setting = command_line(root, f"cursor set {cursor.route} SEQUENCE")
        yield Remedy(f"{said} Once it has been read up to a record, set a cursor there", setting)
        said, retiring = f"If nothing will read {cursor.route}, retire it", f"route retire {cursor.route}"
        lost = "Its records are deleted over time, read or not, and cannot be recovered."
        yield Remedy(said, command_line(root, retiring), lost)
        return
    said = f"{cursor.group} has processed {cursor.route} up to record {cursor.effective}, and {what} {hold} later"
    showing = command_line(root, f"cursor show {cursor.route} --group {cursor.group}")
    yield Remedy(f"{said} records. To show those", showing)
    if not cursor.of_work_group:
        feeding = f"feed {cursor.route} --group {cursor.group} -- COMMAND"
        yield Remedy("If no reader runs for it, start one", command_line(root, feeding, program="wald-drain"))
    if row.last_sequence:
        yield Remedy(
            f"Declare all records of {cursor.route} processed for {cursor.group}",
            command_line(root, f"cursor set {cursor.route} {row.last_sequence} --group {cursor.group}"),
            f"{cursor.group} never gets the records from {cursor.effective + 1} to {row.last_sequence} that it has not "
            "processed. They are deleted once no other group needs them, and cannot be recovered.",
        )


def _address(query: Query, changed: Mapping[str, object]) -> str:
    """Return the address of the same view with a changed query."""
    return f"?{urlencode(msgspec.to_builtins(msgspec.structs.replace(query, **changed)))}"


_LINES = 20  # of the table of cursors, which has one for each mark at least


async def overview(call: Call) -> Response:
    """The view at ``/``; only admins see routes."""
    return await live_page(call, "overview.html", lambda picture: _facts(call, picture))


def _facts(call: Call, picture: PageSnapshot) -> Facts:
    shown = {"may_see": call.client.admin, "problem": call.words(picture.problem)}
    if not call.client.admin:
        return shown
    walk, pieces = picture.walk, picture.pieces
    named = [each for each in walk.by_name.values() if not each.retired]
    groups = {
        f"{each.cursor.route}/{each.cursor.group}": each
        for each in named
        if each.cursor.state is not CursorState.ABSENT
    }
    head = picture.activity.sequence if picture.activity else None
    cursors = [(name, each.cursor.effective) for name, each in groups.items()]
    drawn = strip(pieces, head, cursors, walk.archived.of_gone)
    out = [row.processed_per_second for row in walk.rows if row.processed_per_second is not None]
    kinds = {look: _amount(piece for piece in pieces if piece.look is look) for look in Look}
    return shown | {
        "strip": drawn,
        "kinds": {look: amount for look, amount in kinds.items() if amount.segments},
        "held": _amount(piece for piece in pieces if piece.held),
        "archived": _amount(piece for piece in pieces if piece.is_archived),
        "partly_archived": _amount(piece for piece in pieces if piece.is_partly_archived),
        "archived_gone": sum(last - first + 1 for first, last in walk.archived.gone),
        "lines": _lines(drawn.marks, groups),
        "groups": len(groups),
        "without": len(named) - len(groups),
        "out": sum(out) if out else None,
        "spark": _spark(picture.records_per_second),
    }


def _amount(pieces: Iterable[Piece]) -> Amount:
    found = list(pieces)
    return Amount(sum(piece.segments for piece in found), sum(piece.stored_bytes for piece in found))


def _lines(marks: Sequence[Mark], groups: Mapping[str, GroupBacklog]) -> list[tuple[int, str, GroupBacklog]]:
    """Return the groups furthest behind, first one of each mark and then others, with their marks."""
    lines = [(mark.number, name, groups[name]) for mark in marks for name in mark.names]
    lines.sort(key=_lag)
    firsts = {mark: name for mark, name, _ in reversed(lines)}
    lines.sort(key=lambda line: firsts[line[0]] != line[1])
    return sorted(lines[:_LINES], key=_lag)


def _lag(line: tuple[int, str, GroupBacklog]) -> tuple[int, str]:
    return -line[2].lag.records, line[1]


def _spark(rates: Sequence[float | None]) -> str:
    """Return the points of a line in a box of 120 × 24, the newest on the right."""
    most = max((rate for rate in rates if rate), default=0.0) or 1.0
    shift = 120 - len(rates)
    return " ".join(f"{shift + at},{23 - 21 * (rate or 0.0) / most:.1f}" for at, rate in enumerate(rates))


COUNT = 100
"""Of events on a page."""
_AT_MOST = 5000  # events that are looked at for a page
Kind = Literal["all", "cuts", "deletions", "archives", "lives", "losses", "rest"]
_KINDS: Mapping[str, Kind] = {
    "cut": "cuts",
    "sealed": "cuts",
    "reclaimed": "deletions",
    "shrunk": "deletions",
    "kept": "deletions",
    "begun": "archives",
    "archived": "archives",
    "finished": "archives",
    "abandoned": "archives",
    "started": "lives",
    "ended": "lives",
    CLOCK_STEP: "lives",
    "lost": "losses",
    "skipped": "losses",
    "repaired": "losses",
    "identified": "losses",
}
_NAMES = {"all": "everything", "cuts": "cuts and seals", "rest": "all else", "lives": "starts, ends and clock steps"}
_PLACE = re.compile(r"(\w{1,20}):([0-9]{1,18})")


class HistoryQuery(Shape):
    """Query of the view; ``before`` is the end of an excerpt, as ``segments:12,reclaim:3``."""

    what: Kind = "all"
    route: Annotated[str, Meta(max_length=127)] = ""
    before: Annotated[str, Meta(max_length=200)] = ""


async def history(call: Call) -> Response:
    query = call.query(HistoryQuery)
    route = check_route(query.route) if query.route else None
    before = _places(query.before)
    story = DeletionAudit(call.state.log.root)
    shared: Facts = {
        "query": query,
        "kinds": {kind: _NAMES.get(kind, kind) for kind in get_args(Kind)},
        "kind_of": _kind,
        "deed": lambda event: deed(event, READABLE),
        "cursors_of": _cursors,
    }

    def wanted(event: Event) -> bool:
        return query.what in ("all", _kind(event)) and (route is None or route in event.routes)

    def facts(_: PageSnapshot | None = None) -> Facts:
        found = excerpt(story, before, wanted=wanted, count=COUNT, at_most=_AT_MOST)
        days: dict[str, list[Event]] = {}
        for event in found.events:
            days.setdefault(utc(event.at_ns)[:10], []).append(event)
        ends = None if found.before is None else [f"{_short(name)}:{at}" for name, at in found.before.items()]
        return shared | {"days": days, "found": found, "older": ends and ",".join(ends)}

    if before:
        return await page(call, "history.html", await call.read(facts))
    return await live_page(call, "history.html", facts)


def _kind(event: Event) -> Kind:
    return _KINDS.get(str(event.entry.get("event")), "rest")


def _cursors(event: Event) -> list[tuple[str, str]]:
    """Return the positions of the cursors at a deletion: group and route, and the position."""
    found = []
    for held in event.entry.get("dropped", event.entry.get("routes")) or ():
        if not isinstance(held, dict):
            continue
        if held.get("retired"):
            found.append((str(held.get("route")), "retired"))
        cursors = held.get("cursors")
        for group, at in cursors.items() if isinstance(cursors, dict) else ():
            where, last = READABLE.number(at), READABLE.number(held.get("last"))
            found.append((f"{held.get('route')}/{group}", f"at {where}, its last record there {last}"))
    return found


def _short(ledger: str) -> str:
    return ledger.partition(".")[0]


def _places(given: str) -> dict[str, int]:
    names = {_short(name): name for name in (*LEDGERS, CLOCK, LIVES)}
    places = {}
    for part in filter(None, given.split(",")):
        match = _PLACE.fullmatch(part)
        if match is None or match[1] not in names:
            raise InvalidInput(f"before={part[:40]}: is not a position in the history", hint="/history")
        places[names[match[1]]] = int(match[2])
    return places


_FORM = "application/x-www-form-urlencoded"
_FORM_BYTES, _FORM_FIELDS = 4 << 10, 8


async def form(call: Call) -> Response:
    return bare(call, "login.html", {"wrong": False})


async def log_in(call: Call) -> Response:
    """Start a session for the typed token, or show the form again."""
    if (media_type := call.content_type[0]) != _FORM:
        raise HttpError(415, "media-type", f"{media_type or 'no media type'}: the body must be a form")
    body = await call.request.read(_FORM_BYTES, "a form")
    try:
        fields = parse_qs(body.decode("ascii", "replace"), max_num_fields=_FORM_FIELDS)
    except ValueError:
        raise InvalidInput("the form has too many fields", hint="token=…") from None
    token = fields.get("token", [""])[0].strip()
    response = redirect(call.request, "")
    try:
        call.state.admission.begin(call.request, response, token)
    except HttpError as error:
        if error.status != 401:
            raise
        return bare(call, "login.html", {"wrong": True}, status=401)
    return response


async def log_out(call: Call) -> Response:
    response = redirect(call.request, "login")
    call.state.admission.end(call.request, response)
    return response


_GET, _POST = "GET", "POST"
_page = partial(Verb, answers={HTML: None}, failed=failed)


PAGES: tuple[Verb, ...] = (
    _page(_GET, "/", "overview", "The log at a glance.", Right.KNOWN, overview),
    _page(_GET, "/records", "browse", "Records of a route.", Right.KNOWN, records),
    _page(_GET, "/record", "find_record", "Redirect from a typed sequence to its page.", Right.KNOWN, find),
    _page(_GET, "/records/{sequence}", "record", "A record, or its fate.", Right.KNOWN, record),
    _page(_GET, "/records/{sequence}/value", "value", "The bytes of a record, as a file.", Right.KNOWN, value),
    _page(_GET, "/history", "history", "What happened to the log.", Right.ADMIN, history),
    _page(_GET, "/routes", "route_table", "The routes, and how far behind they are.", Right.KNOWN, routes),
    _page(_GET, "/routes/{route}", "route", "A route with its groups, what it pins, and why.", Right.READ, route),
    _page(_GET, "/live", "live", "Live changes of the frame of every page.", Right.KNOWN, only_frame),
    _page(_GET, "/login", "login", "The login form.", Right.NONE, form),
    _page(_POST, "/login", "log_in", "Start a session.", Right.NONE, log_in),
    _page(_POST, "/logout", "log_out", "End a session.", Right.NONE, log_out),
    _page(_GET, "/assets/{name}", "asset", "The style sheet and the script.", Right.NONE, asset),
)
