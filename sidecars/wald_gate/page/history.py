"""The view of history: events from the ledgers, newest first, with the rule that allowed each deletion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta
from starlette.responses import Response

from wald.checking.audit_report import DeletionAudit, Event
from wald.errors import InvalidInput
from wald.format.names import LEDGERS, check_route
from wald.format.times import utc
from wald.status.history import CLOCK, CLOCK_STEP, LIVES, READABLE, Excerpt, deed, excerpt
from wald_gate.call import Call
from wald_gate.page.frame import Facts, live_page, page
from wald_gate.page.snapshot import PageSnapshot
from wald_gate.shapes import Shape

COUNT = 100
"""Of events on a page."""
_AT_MOST = 5000  # events that are looked at for a page
_CURSORS = 20  # that are shown of a deletion
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
    """The view at ``/history``."""
    query = call.query(Query)
    wanted = _filter(query.what, check_route(query.route) if query.route else None)
    before = _places(query.before)
    story = DeletionAudit(call.state.log.root)
    shared: dict[str, Any] = {"query": query, "kinds": {kind: _NAMES.get(kind, kind) for kind in get_args(Kind)}}

    def facts(_: PageSnapshot | None = None) -> Facts:
        found = excerpt(story, before, wanted=wanted, count=COUNT, at_most=_AT_MOST)
        return shared | {"days": _days(found), "found": found, "older": _written(found.before)}

    if before:
        return await page(call, "history.html", await call.read(facts))
    return await live_page(call, "history.html", facts)


@dataclass(frozen=True)
class Item:
    """An event on the page.

    Attributes:
        cursors: of a deletion: group and route, and the position of the cursor.
        allowed: None if it is not a deletion, or was undone.
    """

    id: str
    at_ns: int
    name: str
    kind: str
    deed: str
    rule: str
    cursors: list[tuple[str, str]]
    cursors_left: int
    allowed: bool | None
    lost: int
    errors: tuple[str, ...]

    @classmethod
    def of(cls, event: Event) -> Item:
        cursors = list(_cursors(event))
        ruling = event.ruling
        name = str(event.entry.get("event"))
        return cls(
            f"e-{event.ledger.partition('.')[0]}-{event.number}",
            event.at_ns,
            name,
            _KINDS.get(name, "rest"),
            deed(event, READABLE),
            str(event.entry.get("rule", "")),
            cursors[:_CURSORS],
            len(cursors[_CURSORS:]),
            None if ruling is None else not ruling.errors,
            0 if ruling is None else ruling.unread_records,
            () if ruling is None else ruling.errors,
        )


def _filter(kind: Kind, route: str | None) -> Callable[[Event], bool]:
    def wanted(event: Event) -> bool:
        is_kind = kind in ("all", _KINDS.get(str(event.entry.get("event")), "rest"))
        return is_kind and (route is None or route in event.routes)

    return wanted


def _days(found: Excerpt) -> list[tuple[str, list[Item]]]:
    """Group events by day."""
    days: dict[str, list[Item]] = {}
    for event in found.events:
        days.setdefault(utc(event.at_ns)[:10], []).append(Item.of(event))
    return list(days.items())


def _cursors(event: Event) -> list[tuple[str, str]]:
    """Return the positions of the cursors at a deletion."""
    if event.ruling is None:
        return []
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


def _places(given: str) -> dict[str, int]:
    """Parse the end of an excerpt."""
    names = {name.partition(".")[0]: name for name in (*LEDGERS, CLOCK, LIVES)}
    places = {}
    for part in filter(None, given.split(",")):
        match = _PLACE.fullmatch(part)
        if match is None or match[1] not in names:
            raise InvalidInput(f"before={part[:40]}: is not a position in the history", hint="/history")
        places[names[match[1]]] = int(match[2])
    return places


def _written(before: Mapping[str, int] | None) -> str | None:
    return None if before is None else ",".join(f"{name.partition('.')[0]}:{at}" for name, at in before.items())
