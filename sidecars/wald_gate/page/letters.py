"""Where records of a route go that its groups give up, and how many, as far as that is known without reading them.

A journal says what is being given up now. What was given up before is on a route for dead letters, perhaps with those
of other routes: where one is from stands in the record alone, so all that wait there are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wald.format.names import HANDOVER_SUFFIX
from wald.hints import command_line
from wald.retention.cursors import CursorState
from wald.status.rates import Row
from wald.work.group import DEAD_LETTER
from wald_gate.call import Call
from wald_gate.page.picture import Walk


@dataclass(frozen=True, slots=True)
class Letters:
    """A route for dead letters.

    Attributes:
        groups: those of the other route whose records go there.
        giving_up: records of these that are to become dead letters, and are none yet.
        exists: whether there is such a route by now.
        unread: its records that the group of it which is furthest behind has not processed; None: not known.
        last: its last record; None: not known.
        command: puts its records back to where they are from.
    """

    route: str
    groups: tuple[str, ...]
    giving_up: int
    exists: bool
    unread: int | None
    last: int | None
    command: str


def letters(call: Call, route: str, walk: Walk, rows: Sequence[Row]) -> Iterator[Letters]:
    """Those of a route's groups, by name, which the client may read, and which exist or are about to."""
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
        yield Letters(
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
