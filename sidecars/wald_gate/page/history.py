"""The view of history: events from the ledgers, newest first, with the rule that allowed each deletion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from msgspec import Meta
from starlette.responses import Response

from wald.checking.audit_report import DeletionAudit, Event
from wald.errors import InvalidInput
from wald.format.names import LEDGERS, check_route
from wald.format.times import utc
from wald.status.history import CLOCK, CLOCK_STEP, LIVES, READABLE, deed, excerpt
from wald_gate.call import Call
from wald_gate.page.frame import Facts, live_page, page
from wald_gate.page.snapshot import PageSnapshot
from wald_gate.shapes import Shape

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


class Query(Shape):
    """Query of the view; ``before`` is the end of an excerpt, as ``segments:12,reclaim:3``."""

    what: Kind = "all"
    route: Annotated[str, Meta(max_length=127)] = ""
    before: Annotated[str, Meta(max_length=200)] = ""


async def history(call: Call) -> Response:
    query = call.query(Query)
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
    """Parse the end of an excerpt."""
    names = {_short(name): name for name in (*LEDGERS, CLOCK, LIVES)}
    places = {}
    for part in filter(None, given.split(",")):
        match = _PLACE.fullmatch(part)
        if match is None or match[1] not in names:
            raise InvalidInput(f"before={part[:40]}: is not a position in the history", hint="/history")
        places[names[match[1]]] = int(match[2])
    return places
