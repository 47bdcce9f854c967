"""The overview, the login form, and the table of pages.

Pages return HTML that changes whenever it can be improved, so no program may rely on it; programs use ``/v1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qs

from starlette.responses import RedirectResponse, Response

from wald.errors import InvalidInput
from wald.retention.backlog import GroupBacklog
from wald.retention.cursors import CursorState
from wald_gate.auth.clients import Right
from wald_gate.call import Call, Verb
from wald_gate.page.frame import HEADERS, HTML, Facts, asset, bare, base_of, failed, live_page, only_frame
from wald_gate.page.history import history
from wald_gate.page.records import find, record, records, value
from wald_gate.page.routes import route, routes
from wald_gate.page.snapshot import Archived, PageSnapshot
from wald_gate.page.strip import Look, Mark, Piece, strip
from wald_gate.problems import HttpError

_LINES = 20  # of the table of cursors, which has one for each mark at least


@dataclass(frozen=True, slots=True)
class Kind:
    """Segments with the same appearance."""

    look: Look
    segments: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A group in the table of cursors, with its mark on the strip."""

    mark: int
    name: str
    processed: int
    lag: int


async def overview(call: Call) -> Response:
    """The view at ``/``; only admins see routes."""
    return await live_page(call, "overview.html", lambda picture: _facts(call, picture))


def _facts(call: Call, picture: PageSnapshot) -> Facts:
    problem = call.words(picture.problem)
    if not call.client.admin:
        return {"may_see": False, "picture": picture, "problem": problem}
    walk = picture.walk
    named = [each for each in walk.by_name.values() if not each.retired] if walk else []
    counting = [each for each in named if each.cursor.state is not CursorState.ABSENT]
    cursors = [(_name(each), each.cursor.effective) for each in counting]
    seen = picture.activity
    archived = walk.archived if walk else Archived()
    drawn = strip(picture.pieces, seen.sequence if seen else None, cursors, archived.of_gone)
    rows = walk.inventory.rows if walk and walk.inventory else ()
    out = [row.processed_per_second for row in rows if row.processed_per_second is not None]
    return {
        "may_see": True,
        "picture": picture,
        "problem": problem,
        "strip": drawn,
        "kinds": _kinds(picture.pieces),
        "held": Kind(Look.SEALED, *_sums([piece for piece in picture.pieces if piece.held])),
        "archived": Kind(Look.SEALED, *_sums([piece for piece in picture.pieces if piece.is_archived])),
        "partly_archived": Kind(Look.SEALED, *_sums([each for each in picture.pieces if each.is_partly_archived])),
        "archived_gone": sum(last - first + 1 for first, last in archived.gone),
        "lines": _lines(drawn.marks, counting),
        "groups": len(counting),
        "without": len(named) - len(counting),
        "out": sum(out) if out else None,
        "spark": _spark(picture.rates),
    }


def _name(group: GroupBacklog) -> str:
    return f"{group.cursor.route}/{group.cursor.group}"


def _lines(marks: Sequence[Mark], groups: Sequence[GroupBacklog]) -> list[Line]:
    """Return the groups that are furthest behind, first of each mark and then of all."""
    of_name = {_name(each): each for each in groups}
    lines = [
        Line(mark.number, name, of_name[name].cursor.effective, of_name[name].lag.records)
        for mark in marks
        for name in mark.names
    ]
    lines.sort(key=lambda line: (-line.lag, line.name))
    firsts = {line.mark: line for line in reversed(lines)}
    lines.sort(key=lambda line: line is not firsts[line.mark])
    return sorted(lines[:_LINES], key=lambda line: (-line.lag, line.name))


def _kinds(pieces: Sequence[Piece]) -> list[Kind]:
    counts: Counter[Look] = Counter()
    sizes: Counter[Look] = Counter()
    for piece in pieces:
        counts[piece.look] += piece.segments
        sizes[piece.look] += piece.stored_bytes
    return [Kind(look, counts[look], sizes[look]) for look in Look if counts[look]]


def _sums(pieces: Sequence[Piece]) -> tuple[int, int]:
    return sum(piece.segments for piece in pieces), sum(piece.stored_bytes for piece in pieces)


def _spark(rates: Sequence[float | None]) -> str:
    """Return the points of a line in a box of 120 × 24, the newest at its right."""
    most = max((rate for rate in rates if rate), default=0.0) or 1.0
    shift = 120 - len(rates)
    return " ".join(f"{shift + at},{23 - 21 * (rate or 0.0) / most:.1f}" for at, rate in enumerate(rates))


_FORM = "application/x-www-form-urlencoded"
_FORM_BYTES, _FORM_FIELDS = 4 << 10, 8


async def form(call: Call) -> Response:
    """The login form."""
    return bare(call, "login.html", {"wrong": False})


async def log_in(call: Call) -> Response:
    """Start a session for the typed token, or show the form again."""
    if call.media_type != _FORM:
        raise HttpError(415, "media-type", f"{call.media_type or 'no media type'}: this takes a form")
    body = await call.state.limits.read(call.request, "a form", _FORM_BYTES)
    try:
        fields = parse_qs(body.decode("ascii", "replace"), max_num_fields=_FORM_FIELDS)
    except ValueError:
        raise InvalidInput("the form has too many fields", hint="token=…") from None
    token = fields.get("token", [""])[0].strip()
    response = RedirectResponse(base_of(call.request), 303, HEADERS)
    try:
        call.state.sessions.begin(call.request, response, token)
    except HttpError as error:
        if error.status != 401:
            raise
        return bare(call, "login.html", {"wrong": True}, status=401)
    return response


async def log_out(call: Call) -> Response:
    """End the session."""
    response = RedirectResponse(base_of(call.request) + "login", 303, HEADERS)
    call.state.sessions.end(call.request, response)
    return response


_GET, _POST = "GET", "POST"
_page = partial(Verb, answers={HTML: None}, failed=failed)


PAGES: tuple[Verb, ...] = (
    _page(_GET, "/", "overview", "The log at a glance.", Right.KNOWN, overview),
    _page(_GET, "/records", "browse", "Records of a route.", Right.KNOWN, records),
    _page(_GET, "/record", "find_record", "From a sequence that was typed to its page.", Right.KNOWN, find),
    _page(_GET, "/records/{sequence}", "record", "A record, or what became of it.", Right.KNOWN, record),
    _page(_GET, "/records/{sequence}/value", "value", "The bytes of a record, as a file.", Right.KNOWN, value),
    _page(_GET, "/history", "history", "What happened to the log.", Right.ADMIN, history),
    _page(_GET, "/routes", "route_table", "The routes, and how far behind they are.", Right.KNOWN, routes),
    _page(_GET, "/routes/{route}", "route", "A route with its groups, and why it pins what.", Right.READ, route),
    _page(_GET, "/live", "live", "What changes in the frame of every page.", Right.KNOWN, only_frame),
    _page(_GET, "/login", "login", "Where a token is typed.", Right.NONE, form),
    _page(_POST, "/login", "log_in", "A session for a token.", Right.NONE, log_in),
    _page(_POST, "/logout", "log_out", "The end of a session.", Right.NONE, log_out),
    _page(_GET, "/assets/{name}", "asset", "The style and the script.", Right.NONE, asset),
)
