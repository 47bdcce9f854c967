"""Selection of records: routes, start, stop.

Ranges of sequences include both ends everywhere in wald (``first`` and ``last``), so that a printed range can be typed.
A datetime starts at, or stops before, the first record appended at that time or later, even a future record.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import DEFAULT_GROUP, SEQUENCE_MAX
from wald.format.times import nanoseconds
from wald.retention.cursors import CursorState, read_cursor
from wald.segments.durable_end import lost_head
from wald.segments.seek import end_of, sequence_since, sequence_until
from wald.segments.view import View

NamedStart = Literal["earliest", "end", "cursor"]
Start = NamedStart | int | datetime
"""Start of reading: the oldest record, after the head, after a group's processed records, a sequence, or a time."""

Stop = int | datetime
"""End of reading: this sequence, or before the first record appended at this time or later."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection of records by route, sequence and time."""

    routes: frozenset[str] | None
    first: int  # lowest sequence of routes without a floor
    floors: dict[str, int] = field(default_factory=dict)  # route → sequence after the cursor of ``group``
    last: int = SEQUENCE_MAX  # ``until_ns`` may end earlier
    from_ns: int = -(1 << 63)  # append times: from ≤ t < until
    until_ns: int = (1 << 63) - 1
    from_earliest: bool = False
    new_routes: frozenset[str] = frozenset()  # without a cursor, and therefore read from 1
    group: str = DEFAULT_GROUP

    def floor(self, route: str) -> int:
        return self.floors.get(route, self.first)


def select(view: View, route: str | None, start: Start, stop: Stop | None, group: str) -> Selection:
    if route is not None:
        view.root.require_route(route)
    routes = None if route is None else frozenset([route])
    last = _require_positive(stop) if isinstance(stop, int) else SEQUENCE_MAX
    selection = replace(_select_start(view, routes, start, group), last=last)
    if isinstance(stop, datetime):
        selection = replace(selection, until_ns=nanoseconds(stop))
    _check_order(view, start, stop)
    return selection


def _check_order(view: View, start: Start, stop: Stop | None) -> None:
    """Raise InvalidInput if no record can ever be between a sequence and a time."""
    with suppress(Damaged):  # damage hides the order
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


def _select_start(view: View, routes: frozenset[str] | None, start: Start, group: str) -> Selection:
    if isinstance(start, datetime):
        time_ns = nanoseconds(start)
        return Selection(routes, sequence_since(view, time_ns), from_ns=time_ns)
    if start == "earliest":
        return Selection(routes, 1, from_earliest=True)
    if start == "end":
        return Selection(routes, end_of(view))
    if start == "cursor":
        return _after_cursors(view, routes, group)
    if not isinstance(start, int):
        raise InvalidInput(f"invalid start: {start!r}", case="start-unknown")
    end = end_of(view)
    if _require_positive(start) > end:
        if view.bound.head_lost:
            raise lost_head(view.root, view.bound)
        path = view.root.path
        arguments = " ".join(["", *(routes or ())])
        raise NotFound(
            f"{path}: record {start} was never issued; the last one is {end - 1}",
            case="record-not-issued",
            root=path,
            routes=arguments,
        )
    return Selection(routes, start)


def _after_cursors(view: View, routes: frozenset[str] | None, group: str) -> Selection:
    root, end = view.root, end_of(view)
    floors, new_routes = {}, set()
    for name in sorted(routes) if routes is not None else root.route_names():
        cursor = read_cursor(root, name, group, log_id=view.log_id, head_sequence=end - 1)
        if cursor.state is CursorState.VALID:
            floors[name] = cursor.sequence + 1
        elif cursor.state is CursorState.ABSENT:
            floors[name] = 1
            new_routes.add(name)
        else:
            raise Damaged(
                f"{cursor.message}; it is unknown which records have been processed",
                case="cursor-unusable",
                root=root.path,
                route=name,
                group=group,
            )
    return Selection(routes, min(floors.values(), default=end), floors, new_routes=frozenset(new_routes), group=group)


def _require_positive(sequence: int) -> int:
    if sequence < 1:
        raise InvalidInput(f"{sequence} is not a sequence", case="sequence-below-one")
    return sequence
