"""Which records are wanted: a start and a stop as sequences and times.

    start   "earliest"  the oldest record there is          "end"     what comes after the head
            "cursor"    after what a group has processed    a number  that record
            a datetime  the first record appended then or later; none yet if there is none
    stop    a number: the last record wanted                a datetime: records appended before it are wanted

A range of sequences includes both of its ends wherever wald reports, stores or takes one (``first`` and ``last``), so
that a range that was printed can be typed back. A time is a moment between records; no record is the last one at it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import DEFAULT_GROUP
from wald.format.times import nanoseconds
from wald.store.retention.cursors import CursorState, read_cursor
from wald.store.segments.head import lost_head
from wald.store.segments.seeking import end_of, sequence_since, sequence_until
from wald.store.segments.view import View

Named = Literal["earliest", "end", "cursor"]
Start = Named | int | datetime
"""Where reading begins: the oldest record, behind the head, behind what a group has processed, a sequence, a time."""

Stop = int | datetime
"""Where reading ends: with this sequence, or in front of the first record appended at this time or later."""

NO_SEQUENCE = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted, in numbers.

    Attributes:
        first: the lowest sequence wanted of any route; ``floors`` has routes that begin elsewhere.
        last: the highest; with a time limit too, whichever comes first ends it.
        from_ns, until_ns: append times, from ≤ t < until.
        earliest: whether no start was named: reading begins with the oldest record there is.
        floors: of each route, where it begins behind a cursor; ``fresh`` are those without one, which begin as above.
        group: whose cursors these are.
    """

    routes: frozenset[str] | None
    first: int
    floors: dict[str, int] = field(default_factory=dict)
    last: int = NO_SEQUENCE
    from_ns: int = -(1 << 63)
    until_ns: int = (1 << 63) - 1
    earliest: bool = False
    fresh: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP

    def floor(self, route: str) -> int:
        return self.floors.get(route, self.first)


def select(view: View, route: str | None, start: Start, stop: Stop | None, group: str) -> Selection:
    if route is not None:
        view.root.require_route(route)
    routes = None if route is None else frozenset([route])
    last = _positive(stop) if isinstance(stop, int) else NO_SEQUENCE
    selection = replace(_begin(view, routes, start, group), last=last)
    if isinstance(stop, datetime):
        selection = replace(selection, until_ns=nanoseconds(stop))
    _check_order(view, start, stop)
    return selection


def _check_order(view: View, start: Start, stop: Stop | None) -> None:
    """Refuse a sequence and a time between which no record can lie, whatever is appended later."""
    with suppress(Damaged):  # then it is not known
        match start, stop:
            case int(), datetime():
                first = sequence_until(view, nanoseconds(stop))
                if first <= start < end_of(view):
                    raise InvalidInput(
                        f"record {start} was appended at {stop.isoformat()} or later: the end is before the start",
                        case="start-appended-after-the-end",
                        first=first,
                    )
            case datetime(), int():
                last = sequence_since(view, nanoseconds(start)) - 1
                if stop <= last:
                    raise InvalidInput(
                        f"record {stop} was appended before {start.isoformat()}: the end is before the start",
                        case="stop-appended-before-the-start",
                        last=last,
                    )


def _begin(view: View, routes: frozenset[str] | None, start: Start, group: str) -> Selection:
    """A selection without an end."""
    if isinstance(start, datetime):
        time_ns = nanoseconds(start)
        return Selection(routes, sequence_since(view, time_ns), from_ns=time_ns)
    if start == "earliest":
        return Selection(routes, 1, earliest=True)
    if start == "end":
        return Selection(routes, end_of(view))
    if start == "cursor":
        return _after_cursors(view, routes, group)
    if not isinstance(start, int):
        raise InvalidInput(f"invalid start: {start!r}", case="start-unknown")
    end = end_of(view)
    if _positive(start) > end:
        if view.bound.lost:
            raise lost_head(view.root, view.bound)
        path = view.root.path
        what = " ".join(["", *(routes or ())])
        raise NotFound(
            f"{path}: record {start} was never issued; the last one is {end - 1}",
            case="record-not-issued",
            root=path,
            routes=what,
        )
    return Selection(routes, start)


def _after_cursors(view: View, routes: frozenset[str] | None, group: str) -> Selection:
    root, end = view.root, end_of(view)
    floors, fresh = {}, set()
    for name in sorted(routes) if routes is not None else root.route_names():
        cursor = read_cursor(root, name, group, log_id=view.log_id, head_sequence=end - 1)
        if cursor.state is CursorState.VALID:
            floors[name] = cursor.sequence + 1
        elif cursor.state is CursorState.ABSENT:
            floors[name] = 1
            fresh.add(name)
        else:
            raise Damaged(
                f"{cursor.message}; the processed records are unknown",
                case="cursor-unusable",
                root=root.path,
                route=name,
                group=group,
            )
    return Selection(routes, min(floors.values(), default=end), floors, fresh=frozenset(fresh), group=group)


def _positive(sequence: int) -> int:
    if sequence < 1:
        raise InvalidInput(f"{sequence} is not a sequence", case="sequence-below-one")
    return sequence
