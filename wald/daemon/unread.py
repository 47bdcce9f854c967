"""How many payload bytes of a route a group has not read: what the segments held at the start, and what came since.

The bytes are kept in stretches of records, of which there are few. A stretch that is read in part counts by the share
of its records. What is read of the active segment, of which there is no index yet, is kept too: a cursor may be moved
back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from wald.errors import Damaged, NotFound
from wald.format.sealed import BadSealed
from wald.format.tables import RouteTable
from wald.store.files.directory import Root
from wald.store.files.listing import Segment
from wald.store.retention.cursors import Cursor, SlowestCursor
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
        return self._part(max(self.first, floor + 1), self.last)

    def up_to(self, floor: int) -> Stretch:
        """What of it is not, if anything is."""
        return self._part(self.first, min(self.last, floor))

    def _part(self, first: int, last: int) -> Stretch:
        payload_bytes = self.payload_bytes * (last - first + 1) // (self.last - self.first + 1)
        return Stretch(self.base, first, last, payload_bytes)


class Unread:
    """One route.

    Attributes:
        floor: up to which record nothing is counted.
        payload_bytes: that were not known to be read at the last :meth:`drop`, and what came since.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.payload_bytes = 0
        self._stretches: list[Stretch] = []
        self._read: list[Stretch] = []

    def add(self, stretch: Stretch) -> None:
        """Count records behind those that are known."""
        self.payload_bytes += stretch.payload_bytes
        _append(self._stretches, stretch)

    def follow(self, older: Unread, before: int) -> None:
        """Count what ``older`` has of the records before ``before``, and of those from it on what is known here."""
        newer = [*self._read, *self._stretches]
        self.floor, self._stretches, self.payload_bytes = older.floor, older._stretches, older.payload_bytes
        self._read = []
        for stretch in newer:
            if stretch.last >= before:
                self.add(stretch.behind(before - 1))
        self.drop(self.floor, before)

    def drop(self, floor: int, kept_from: int, is_there: Callable[[int], bool] | None = None) -> None:
        """Stop counting records up to ``floor``, and those of segments that no longer exist.

        Args:
            kept_from: the base of the first segment of which a later count needs what is read, too.
        """
        self.floor = max(self.floor, floor)
        self._read = [stretch for stretch in self._read if stretch.base >= kept_from]
        for stretch in self._stretches:
            if stretch.base >= kept_from and stretch.first <= floor:
                _append(self._read, stretch.up_to(floor))
        unread = (stretch.behind(floor) for stretch in self._stretches if stretch.last > floor)
        self._stretches = [stretch for stretch in unread if is_there is None or is_there(stretch.base)]
        self.payload_bytes = sum(stretch.payload_bytes for stretch in self._stretches)


def _append(stretches: list[Stretch], stretch: Stretch) -> None:
    """Append to a list; one that gets long is joined to half as many."""
    stretches.append(stretch)
    if len(stretches) > STRETCHES_MAX:
        pairs = zip(stretches[:-1:2], stretches[1:-1:2], strict=True)
        stretches[:] = [*(one.joined(other) for one, other in pairs), stretches[-1]]


def slowest(
    root: Root, route: str, *, log_id: bytes, head_sequence: int, known: SlowestCursor | None = None
) -> Cursor | None:
    """Return the slowest cursor of a route that counts; None if the route is retired or gone.

    Args:
        known: the result of earlier calls for this route.
    """
    if root.retired(route).exists():
        return None
    try:
        return (known or SlowestCursor()).look(root, route, log_id=log_id, head_sequence=head_sequence)
    except NotFound:
        return None


def unread_before(
    root: Root, routes: Iterable[str], *, log_id: bytes, before: int, head_sequence: int, stopping: Callable[[], bool]
) -> dict[str, Unread]:
    """What complete segments hold of ``routes`` that a group has not read; segments that cannot be read do not count.

    Args:
        before: the base of the active segment.
        stopping: whether the answer is not wanted any more.
    """
    cursors = {route: slowest(root, route, log_id=log_id, head_sequence=head_sequence) for route in routes}
    floors = {route: cursor.effective for route, cursor in cursors.items() if cursor is not None}
    found = {route: Unread(floor) for route, floor in floors.items()}
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
