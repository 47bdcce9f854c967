"""How many payload bytes of a route a group has not read: what the segments held at the start, and what came since.

The bytes are kept in stretches of records, of which there are few. A stretch that is read in part counts by the share
of its records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from wald.errors import Damaged, NotFound
from wald.format.sealed import BadSealed
from wald.format.tables import RouteTable
from wald.store.files.directory import Root, Segment
from wald.store.retention.cursors import Cursor, cursors_of
from wald.store.retention.pins import segment_index
from wald.store.segments.view import View, read_view

STRETCHES_MAX = 128


@dataclass(slots=True)
class Stretch:
    """The records of a route from ``first`` to ``last``; ``base`` is that of the segment of the last one."""

    base: int
    first: int
    last: int
    payload_bytes: int

    def joined(self, following: Stretch) -> Stretch:
        return Stretch(following.base, self.first, following.last, self.payload_bytes + following.payload_bytes)

    def behind(self, floor: int) -> Stretch:
        """What of it is behind ``floor``, if anything is."""
        if floor < self.first:
            return self
        payload_bytes = self.payload_bytes * (self.last - floor) // (self.last - self.first + 1)
        return Stretch(self.base, floor + 1, self.last, payload_bytes)


class Unread:
    """One route.

    Attributes:
        payload_bytes: that were not known to be read at the last :meth:`drop`, and what came since.
    """

    def __init__(self) -> None:
        self.payload_bytes = 0
        self._stretches: list[Stretch] = []

    def add(self, stretch: Stretch) -> None:
        """Count records behind those that are known."""
        self.payload_bytes += stretch.payload_bytes
        self._stretches.append(stretch)
        if len(self._stretches) > STRETCHES_MAX:
            pairs = zip(self._stretches[:-1:2], self._stretches[1:-1:2], strict=True)
            self._stretches = [*(one.joined(other) for one, other in pairs), self._stretches[-1]]

    def follow(self, older: Unread) -> None:
        """Count what came before this as well."""
        newer, self._stretches, self.payload_bytes = self._stretches, older._stretches, older.payload_bytes
        for stretch in newer:
            self.add(stretch)

    def drop(self, floor: int, is_there: Callable[[int], bool] | None = None) -> None:
        """Count no more what is read up to ``floor``, or stood in a segment that is not there any more."""
        kept = (stretch.behind(floor) for stretch in self._stretches if stretch.last > floor)
        self._stretches = [stretch for stretch in kept if is_there is None or is_there(stretch.base)]
        self.payload_bytes = sum(stretch.payload_bytes for stretch in self._stretches)


def slowest(root: Root, route: str, *, log_id: bytes, head_sequence: int) -> Cursor | None:
    """The cursor that has read least of a route, and counts; None if the route is retired or gone."""
    if root.retired(route).exists():
        return None
    try:
        cursors = cursors_of(root, route, log_id=log_id, head_sequence=head_sequence)
    except NotFound:
        return None
    return min(cursors, key=lambda cursor: cursor.effective)


def unread_before(
    root: Root, routes: Iterable[str], *, log_id: bytes, before: int, stopping: Callable[[], bool]
) -> dict[str, Unread]:
    """What complete segments hold of ``routes`` that a group has not read; segments that cannot be read do not count.

    Args:
        before: the base of the active segment.
        stopping: whether the answer is not wanted any more.
    """
    cursors = {route: slowest(root, route, log_id=log_id, head_sequence=before - 1) for route in routes}
    floors = {route: cursor.effective for route, cursor in cursors.items() if cursor is not None}
    found = {route: Unread() for route in floors}
    least = min(floors.values(), default=before)
    with suppress(Damaged):
        view = read_view(root, log_id)
        for segment, following in pairwise((*view.segments, None)):
            assert segment is not None
            end = before if following is None else following.base_sequence
            if stopping() or segment.base_sequence >= before:
                break
            if end - 1 > least:
                _add(found, view, segment, floors)
    return found


def _add(found: dict[str, Unread], view: View, segment: Segment, floors: dict[str, int]) -> None:
    with suppress(Damaged, BadSealed, OSError):  # wald verify reports it
        index = view.follow(segment, lambda there: segment_index(there, view.log_id))
        for entry in RouteTable.of(index.routes):
            floor = floors.get(entry.route)
            if floor is not None and entry.last > floor:
                stretch = Stretch(segment.base_sequence, entry.first, entry.last, entry.payload_bytes)
                found[entry.route].add(stretch.behind(floor))
