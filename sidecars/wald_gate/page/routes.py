"""Routes and groups: lag, pins and their causes, dead letters, and the commands that help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

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
    """A dead-letter route of another route.

    It is read from journals and cursors. The origin of a dead letter is only in the record, so all that wait on the
    route
    are counted, even those of other routes.

    Attributes:
        groups: groups of the other route.
        giving_up: records that are becoming dead letters.
        unread: lag of its group that is furthest behind.
        command: returns its records to their routes.
    """

    route: str
    groups: tuple[str, ...]
    giving_up: int
    exists: bool
    unread: int | None
    last: int | None
    command: str


def dead_letters(call: Call, route: str, walk: Walk, rows: Sequence[Row]) -> Iterator[DeadLetterSummary]:
    """Yield the dead-letter routes of a route that the client may read and that exist or are about to."""
    of_route = [row for row in rows if row.route == route and row.state is not CursorState.ABSENT]
    goals: dict[str, list[str]] = {}
    for row in of_route:
        for goal in sorted(_goals(call, walk, row) - {route}):
            goals.setdefault(goal, []).append(row.group)
    for goal in sorted(filter(call.client.may_read, goals)):
        known = [walk.work[route, group] for group in goals[goal] if (route, group) in walk.work]
        giving_up = sum(work.giving_up_to.count(goal) for work in known)
        exists = call.state.log.root.has_route(goal)
        if not (exists or giving_up):
            continue
        there = [row for row in rows if row.route == goal]
        yield DeadLetterSummary(
            goal,
            tuple(goals[goal]),
            giving_up,
            exists,
            max((row.lag_records for row in there), default=None),
            there[0].last_sequence if there else None,
            command_line(call.root, f"redrive {goal}", program="wald-drain"),
        )


def _goals(call: Call, walk: Walk, row: Row) -> set[str]:
    """Return the routes that may have dead letters of a group; none if it is only a cursor."""
    key = row.route, row.group
    if work := walk.work.get(key):
        return {call.state.groups.dead_letter(*key), *work.giving_up_to}
    is_drained = key in walk.by_name and walk.by_name[key].cursor.path.with_suffix(HANDOVER_SUFFIX).exists()
    return {DEAD_LETTER} if is_drained else set()


_ROWS = 100  # on one page: as many as can be read
_HOLDINGS = 30
_NO_WORK = WorkCounts(0, 0, 0, False)
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
    """A route, summed up over its groups.

    Attributes:
        lag, oldest: of the group that is furthest behind.
        held: pinned bytes of the group that pins most.
        leased, waiting, dead: records of its work groups.
        signs: special states.
    """

    route: str
    groups: tuple[str, ...]
    last: int | None
    received: float | None
    processed: float | None
    lag: int
    oldest: float | None
    held: int
    leased: int
    waiting: int
    dead: int
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """The reason for a pin, and a command against it; ``lost`` is the permanent cost."""

    said: str
    command: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """Records that are leased to a worker, or not due if it is None; ``until_ns`` is the end of that."""

    group: str
    first: int
    last: int
    worker: str | None
    until_ns: int | None
    tries: int
    reason: str = ""


_KEYS: Mapping[str, Callable[[Line], Any]] = {
    "route": lambda line: line.route,
    "last": lambda line: -(line.last or 0),
    "in": lambda line: -(line.received or 0.0),
    "groups": lambda line: -len(line.groups),
    "lag": lambda line: -line.lag,
    "oldest": lambda line: -(line.oldest or 0.0),
    "out": lambda line: -(line.processed or 0.0),
    "held": lambda line: (-line.held, -line.lag),
    "leased": lambda line: -line.leased,
    "waiting": lambda line: -line.waiting,
    "dead": lambda line: -line.dead,
}


async def routes(call: Call) -> Response:
    """The view at ``/routes``."""
    query = call.query(Query)

    def facts(picture: PageSnapshot) -> Facts:
        every = lines(picture, call.client.may_read)
        found = [line for line in every if _is_found(line, query.find.lower())]
        found.sort(key=lambda line: (_KEYS[query.sort](line), line.route))
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
            "is_counted": picture.walk is not None,
            "age": _age(picture.walk),
        }

    return await live_page(call, "routes.html", facts)


async def route(call: Call) -> Response:
    """The view of one route with its groups."""
    name, log = call.route, call.state.log
    if not await call.read(log.root.has_route, name):
        raise NotFound(f"there is no route {name}", hint="/routes lists them")

    def facts(picture: PageSnapshot) -> Facts:
        walk = picture.walk
        rows = [row for row in _rows(walk) if row.route == name]
        (line,) = _lines(rows, walk) or (None,)
        groups = [(row, *_of_group(walk, row)) for row in rows]
        return {
            "name": name,
            "line": line,
            "groups": groups,
            "letters": list(dead_letters(call, name, walk, _rows(walk))) if walk is not None else [],
            "age": _age(walk),
            "holdings": list(islice(holdings((row.group, work) for row, _, work in groups if work), _HOLDINGS)),
            "held": sum(work.leased + work.waiting for _, _, work in groups if work),
            "ways": [way for row, group, _ in groups if group for way in remedies(call, row, group)],
            "is_counted": walk is not None,
        }

    return await live_page(call, "route.html", facts)


def lines(picture: PageSnapshot, may_read: Callable[[str], bool]) -> list[Line]:
    """Return a line for each readable route."""
    return _lines([row for row in _rows(picture.walk) if may_read(row.route)], picture.walk)


def remedies(call: Call, row: Row, group: GroupBacklog) -> Iterator[Remedy]:
    """Yield the reasons for the pins of a group and what to do."""
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
        yield Remedy(
            f"No group has a cursor on {cursor.route}, so everything it ever received is kept: {what}. After it has "
            "been read up to a record, say so",
            command_line(root, f"cursor set {cursor.route} SEQUENCE"),
        )
        yield Remedy(
            f"If nothing will read {cursor.route}, retire it",
            command_line(root, f"route retire {cursor.route}"),
            "Its records are deleted by and by, read or not. Nothing brings them back.",
        )
        return
    yield Remedy(
        f"{cursor.group} has processed {cursor.route} up to record {cursor.effective}, and {what} {hold} records "
        "behind that. Its unprocessed records",
        command_line(root, f"cursor show {cursor.route} --group {cursor.group}"),
    )
    if not cursor.of_work_group:
        feeding = f"feed {cursor.route} --group {cursor.group} -- COMMAND"
        yield Remedy("If nothing reads for it, this does", command_line(root, feeding, program="wald-drain"))
    if row.last_sequence:
        yield Remedy(
            f"Declare all records of {cursor.route} processed for {cursor.group}",
            command_line(root, f"cursor set {cursor.route} {row.last_sequence} --group {cursor.group}"),
            f"{cursor.group} never gets the records from {cursor.effective + 1} to {row.last_sequence} that it has not "
            "processed, and as soon as no other group needs them they are deleted. Nothing brings them back.",
        )


def holdings(groups: Iterable[tuple[str, WorkCounts]]) -> Iterator[Holding]:
    """Yield the first leased and delayed records of work groups."""
    for group, work in groups:
        for out in work.first_leased:
            yield Holding(group, out.first, out.last, out.worker, out.until_ns, out.tries)
        for due in work.first_waiting:
            yield Holding(group, due.first, due.last, None, due.due_ns, due.tries, due.reason)


def _rows(walk: Walk | None) -> Sequence[Row]:
    return walk.inventory.rows if walk is not None and walk.inventory is not None else ()


def _age(walk: Walk | None) -> float:
    """Return the age of the newest walk in seconds."""
    return walk.inventory.age_seconds if walk is not None and walk.inventory is not None else 0.0


def _of_group(walk: Walk | None, row: Row) -> tuple[GroupBacklog | None, WorkCounts | None]:
    if walk is None:
        return None, None
    key = row.route, row.group
    return walk.by_name.get(key), walk.work.get(key)


def _lines(rows: Iterable[Row], walk: Walk | None) -> list[Line]:
    of_route: dict[str, list[Row]] = {}
    for row in rows:
        of_route.setdefault(row.route, []).append(row)
    return [_line(name, found, walk) for name, found in of_route.items()]


def _line(name: str, rows: Sequence[Row], walk: Walk | None) -> Line:
    assert walk is not None
    work = [walk.work.get((name, row.group), _NO_WORK) for row in rows]
    processed = [row.processed_per_second for row in rows if row.processed_per_second is not None]
    oldest = [row.oldest_seconds for row in rows if row.oldest_seconds is not None]
    return Line(
        name,
        tuple(row.group for row in rows if row.state is not CursorState.ABSENT),
        rows[0].last_sequence,
        rows[0].received_per_second,
        sum(processed) if processed else None,
        max(row.lag_records for row in rows),
        max(oldest, default=None),
        max(row.held_bytes for row in rows),
        sum(each.leased for each in work),
        sum(each.waiting for each in work),
        sum(each.giving_up for each in work),
        tuple(dict.fromkeys(_signs(name, rows, walk))),
    )


def _signs(name: str, rows: Sequence[Row], walk: Walk) -> Iterator[str]:
    if rows[0].retired:
        yield "retired"
    for over in walk.facts.daemon.answer.get("over_quota") or ():
        if over.get("route") == name:
            yield "over its quota"
    for row in rows:
        if not row.retired and row.state in _CURSOR_WORDS:
            yield _CURSOR_WORDS[row.state]
        if (name, row.group) in walk.work:
            yield "work group" if not walk.work[name, row.group].unusable else "journal damaged"


def _is_found(line: Line, wanted: str) -> bool:
    return not wanted or wanted in line.route.lower() or any(wanted in group.lower() for group in line.groups)


def _address(query: Query, changed: Mapping[str, object]) -> str:
    """Return the address of the same view with a changed query."""
    parameters = {"find": query.find, "sort": query.sort, "page": query.page, **changed}
    defaults = {"find": "", "sort": Query().sort, "page": 1}
    kept = {name: value for name, value in parameters.items() if value != defaults[name]}
    return f"?{urlencode(kept)}"
