"""The overview, the history, the login form, and the table of pages.

The HTML may change at any time, so programs must not rely on it; they use ``/v1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, get_args
from urllib.parse import parse_qs

from msgspec import Meta
from starlette.responses import Response

from wald.checking.audit_report import DeletionAudit, Event
from wald.errors import InvalidInput
from wald.format.names import LEDGERS, check_route
from wald.format.times import utc
from wald.retention.backlog import GroupBacklog
from wald.retention.cursors import CursorState
from wald.status.history import CLOCK, CLOCK_STEP, LIVES, READABLE, deed, excerpt
from wald.status.rates import Amount
from wald_gate.auth.tokens import Right
from wald_gate.call import Call, Verb
from wald_gate.page.frame import HTML, Facts, asset, bare, failed, live_page, only_frame, page, redirect
from wald_gate.page.records import find, record, records, value
from wald_gate.page.routes import route, routes
from wald_gate.page.snapshot import PageSnapshot
from wald_gate.page.strip import Look, Mark, Piece, strip
from wald_gate.problems import HttpError
from wald_gate.shapes import Shape

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
