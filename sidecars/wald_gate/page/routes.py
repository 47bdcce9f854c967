"""Routes and groups: lag, pins and their causes, dead letters, and the commands that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlencode

import msgspec
from msgspec import Meta
from starlette.responses import Response

from wald.errors import NotFound
from wald.format.names import HANDOVER_SUFFIX
from wald.hints import command_line
from wald.retention.backlog import GroupBacklog
from wald.retention.cursors import CursorState
from wald.status.rates import Row
from wald.status.retention import WorkCounts, advice
from wald.work.group import DEAD_LETTER
from wald_gate.call import Call
from wald_gate.page.frame import Facts, live_page
from wald_gate.page.snapshot import PageSnapshot, Walk
from wald_gate.problems import without_path
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
