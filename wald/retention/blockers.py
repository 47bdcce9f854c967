"""Consumer groups that pin a segment: the rule of RECLAIM, as facts.

A segment may be deleted when every cursor of every route with records in it has reached the route's last record there.

    a retired route                        pins nothing, nor do handovers from it
    a route without a cursor               pins everything
    an invalid cursor                      pins everything
    a route whose directory is gone        pins everything: its cursors are lost
    an unfinished handover to a route      counts as a cursor (:mod:`wald.retention.handovers`)

A damaged segment may have lost records of any of its routes, so their cursors must pass the last lost record. If its
index and some frames are lost, the ledger's ``sealed`` line gives the routes; without that line, or any readable
record, the segment is never deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
from operator import lt
from typing import NamedTuple

from wald.errors import Damaged, NotFound
from wald.files.layout import Root
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.format.names import DEFAULT_GROUP, Kind
from wald.format.sealed_index import BadSealed, RouteTable, SealedIndex
from wald.format.segment import BadHeader
from wald.retention.cursors import Cursor, CursorState, read_cursors
from wald.retention.handovers import HandoverPin, handover_pins
from wald.retention.history import History
from wald.segments.reader import Misplaced, check_name
from wald.segments.salvage import index_salvaged
from wald.segments.sealed_file import SealedFile, index_raw
from wald.segments.seek import end_sequence

DIRECTORY_GONE = "the directory of the route is gone, and its cursors with it"
_GROUPS_OF_LOST_ROUTE = [(DEFAULT_GROUP, 0, DIRECTORY_GONE)]
_UNPINNED = 1 << 64  # beyond every record
_FRAMES_LOST = "some of its frames are lost"


class Pin(NamedTuple):
    """Group that pins a segment until its cursor moves from ``at`` to ``needs``."""

    route: str
    group: str
    at: int
    needs: int
    message: str = ""  # problem with the cursor, beyond being behind


class Holders(NamedTuple):
    """Groups that can pin segments with certain routes. Columns avoid a Python step per route and segment."""

    names: tuple[str, ...] = ()
    route_numbers: tuple[int, ...] = ()  # of each group's route
    groups: tuple[tuple[str, str], ...] = ()  # (route, group)
    positions: tuple[int, ...] = ()
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Blockers:
    """Pins of one segment. There may be thousands, so each is created only when read."""

    holders: Holders
    marks: bytes  # 1 for each of ``holders`` that pins the segment, else 0
    lasts: Sequence[int]  # by route

    def __len__(self) -> int:
        return self.marks.count(1)

    def __iter__(self) -> Iterator[Pin]:
        _, numbers, groups, positions, messages = self.holders
        for number, (route, group), at, message in compress(
            zip(numbers, groups, positions, messages, strict=True), self.marks
        ):
            yield Pin(route, group, at, self.lasts[number], message)

    def groups(self) -> Iterator[tuple[str, str]]:
        return compress(self.holders.groups, self.marks)

    def has_same_groups(self, other: Blockers) -> bool:
        if self.holders is other.holders:
            return self.marks == other.marks
        return len(self) == len(other) and set(self.groups()) == set(other.groups())


NO_BLOCKERS = Blockers(Holders(), b"", ())


@dataclass(slots=True, eq=False)
class CursorSnapshot:
    """Positions of all groups at one moment."""

    cursors: dict[str, tuple[Cursor, ...]] = field(default_factory=dict)  # by route with a directory; never empty
    retired: frozenset[str] = frozenset()
    handovers: tuple[HandoverPin, ...] = ()  # even unreadable ones
    _groups: dict[str, list[tuple[str, int, str]]] = field(init=False, repr=False)
    _floors: dict[str, int] = field(init=False, repr=False)
    # for the latest segment's routes, which neighbours usually share
    _holders: Holders = field(init=False, repr=False, default=Holders())
    _last_floors: tuple[tuple[str, ...], tuple[int, ...]] = field(init=False, repr=False, default=((), ()))

    def __post_init__(self) -> None:
        self._groups = {
            route: [] if route in self.retired else [(c.group, c.effective, c.message) for c in cursors]
            for route, cursors in self.cursors.items()
        }
        for pin in self.handovers:
            for route, at in pin.positions.items() if pin.route not in self.retired else ():
                if route in self._groups and route not in self.retired:
                    message = pin.message if pin.problem else ""
                    self._groups[route].append((f"{pin.route}/{pin.group}", at, message))
        self._floors = {
            route: min((at for _, at, _ in groups), default=_UNPINNED) for route, groups in self._groups.items()
        }

    def groups(self, route: str) -> list[tuple[str, int, str]]:
        """Return name, position and cursor problem of each group that can pin ``route``."""
        return self._groups.get(route, _GROUPS_OF_LOST_ROUTE)

    def positions(self, route: str) -> dict[str, int]:
        return {group: at for group, at, _ in self._groups.get(route, ())}

    def floor(self, route: str) -> int:
        """Return the last unpinned record; for a retired route, a number beyond every record."""
        return self._floors.get(route, 0)

    def pins(self, table: RouteTable) -> Iterator[Pin]:
        """Yield the pins of a segment with these routes."""
        names, floors = self._last_floors
        if names != table.names:
            floors = tuple(map(self._floors.get, table.names, repeat(0)))
            self._last_floors = table.names, floors
        for number in compress(range(len(table)), map(lt, floors, table.lasts)):
            route, last = table.names[number], table.lasts[number]
            for group, at, message in self.groups(route):
                if at < last:
                    yield Pin(route, group, at, last, message)

    def blockers(self, routes: RouteTable) -> Blockers:
        """Return the pins of a segment in columns, which consecutive segments with the same routes share."""
        if routes.names is not self._holders.names:
            rows = [
                (number, (route, group), at, message)
                for number, route in enumerate(routes.names)
                for group, at, message in self.groups(route)
            ]
            self._holders = Holders(routes.names, *zip(*rows, strict=True))
        needed = map(routes.lasts.__getitem__, self._holders.route_numbers)
        return Blockers(self._holders, bytes(map(lt, self._holders.positions, needed)), routes.lasts)

    def still_pins(self, pin: Pin) -> bool:
        return any(group == pin.group and at < pin.needs for group, at, _ in self.groups(pin.route))

    def pins_nothing_new(self, earlier: CursorSnapshot) -> bool:
        """Return True if this snapshot pins no segment that was unpinned in ``earlier``."""
        routes = self._floors.keys() | earlier._floors.keys()
        return all(self.floor(route) >= earlier.floor(route) for route in routes)

    def waived_routes(self, routes: RouteTable) -> tuple[str, ...]:
        """Return the retired routes with records that some group has not read."""
        retired = compress(zip(routes.names, routes.lasts, strict=True), map(self.retired.__contains__, routes.names))
        return tuple(
            route for route, last in retired if any(cursor.effective < last for cursor in self.cursors.get(route, ()))
        )

    def problems(self) -> list[str]:
        """Return the problems with cursors and handovers, except missing cursors."""
        cursors = [
            cursor.message
            for route, cursors in self.cursors.items()
            if route not in self.retired
            for cursor in cursors
            if cursor.state not in (CursorState.VALID, CursorState.ABSENT)
        ]
        return cursors + [pin.message for pin in self.handovers if pin.problem and pin.route not in self.retired]


def read_cursor_snapshot(root: Root, *, log_id: bytes) -> CursorSnapshot:
    """Read all cursors and handover pins; raise Damaged if the end of the log is unknown."""
    head_sequence = end_sequence(root, log_id) - 1
    cursors: dict[str, tuple[Cursor, ...]] = {}
    retired = set()
    for route in root.route_names():
        if os.path.exists(root.retired(route)):  # False without permission: then it counts as not retired
            retired.add(route)
        try:
            route_cursors = read_cursors(root, route, log_id=log_id, head_sequence=head_sequence)
            if any(cursor.state is CursorState.BEYOND for cursor in route_cursors):
                # head and cursor may have moved since the head was read
                head_sequence = end_sequence(root, log_id) - 1
                route_cursors = read_cursors(root, route, log_id=log_id, head_sequence=head_sequence)
        except NotFound:
            continue  # just removed: without cursors, it pins everything
        cursors[route] = tuple(route_cursors)
    return CursorSnapshot(cursors, frozenset(retired), tuple(handover_pins(root, log_id)))


def sealed_index(segment: Segment, log_id: bytes) -> SealedIndex:
    """Read a sealed index. Raise FileNotFoundError if the segment is gone, Damaged if the index is unusable."""
    try:
        with SealedFile(segment.path) as sealed:
            index = sealed.index
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(
            f"{segment.path}: {error.strerror or error}", case="file-unreadable", path=segment.path
        ) from error
    check_name(segment, log_id, index)
    return index


def segment_index(segment: Segment, log_id: bytes) -> tuple[SealedIndex, Damaged | None]:
    """Return the index of a complete segment; if it is damaged, an index rebuilt from frames, and the damage.

    Raise FileNotFoundError if the segment is gone, Damaged if it is unreadable, another segment, or damaged and raw
    (the sealer decides about that).
    """
    if segment.kind.form is Kind.SEALED:
        try:
            return sealed_index(segment, log_id), None
        except Misplaced:
            raise
        except Damaged as error:
            try:
                return index_salvaged(segment, log_id, error), error
            except (FileNotFoundError, Misplaced):
                raise
            except OSError:
                raise error from None
            except Damaged:
                raise _routes_unknown(segment, error.message) from error
    with open_file(segment.path) as source:
        try:
            index = index_raw(source.fileno())
        except BadHeader as error:
            raise Damaged(
                f"{segment.path}: offset 0: {error}", case="unsealed-segment-damaged", path=segment.path
            ) from error
    check_name(segment, log_id, index)
    for offset, length in index.damage:
        raise Damaged(
            f"{segment.path}: offset {offset}: {length} bytes are damaged",
            case="unsealed-segment-damaged",
            path=segment.path,
        )
    return index, None


def _routes_unknown(segment: Segment, message: str) -> Damaged:
    return Damaged(message, case="lost-routes-unknown", root=segment.path.parents[1])


def with_lost_routes(
    index: SealedIndex, segment: Segment, next_base: int | None, history: History, error: Damaged
) -> SealedIndex:
    """Add the routes of lost frames, which the ledger lists, to an ``index`` rebuilt from frames."""
    if not index.damage and next_base is not None and _original_end(index, next_base, history) == index.next_sequence:
        return index
    try:
        sealed_routes = history.sealed_routes(segment.base_sequence)
        sealed = history.sealing_of(segment.base_sequence)
    except Damaged as unknown:
        raise _routes_unknown(segment, f"{error.message}; {_FRAMES_LOST}: {unknown.message}") from error
    if sealed_routes is None or sealed is None:
        message = f"{error.message}; {_FRAMES_LOST}: segments.jsonl does not list the routes of their records"
        raise _routes_unknown(segment, message) from error
    end = int(sealed["last"]) + 1
    if not index.damage and index.next_sequence == end:
        return index
    missing = {entry.route: entry for entry in sealed_routes}
    routes = []
    for entry in index.routes:
        whole = missing.pop(entry.route, entry)
        routes.append(whole._replace(first=min(entry.first, whole.first), last=max(entry.last, whole.last)))
    return replace(
        index,
        next_sequence=max(index.next_sequence, end),
        routes=RouteTable.from_entries([*routes, *missing.values()]),  # in order: batches refer to routes by number
        damage=index.damage or [(index.raw_bytes, 0)],
        sha256=b"",
    )


def required_positions(index: SealedIndex, next_base: int, history: History) -> RouteTable:
    """Return the routes of a complete segment, each with the record that its cursors must reach.

    Raise BadSealed if all records of a damaged segment are lost, or the lost ones are unknown.
    """
    if not index.damage or not (last_lost := _last_lost_record(index, _original_end(index, next_base, history))):
        return index.routes
    if not index.routes:
        raise BadSealed("all of its records are lost, and their routes are unknown")
    return replace(index.routes, lasts=tuple(map(max, index.routes.lasts, repeat(last_lost))))


def _original_end(index: SealedIndex, next_base: int, history: History) -> int:
    """Return the base of the segment that originally followed; those before ``next_base`` may be reclaimed."""
    with suppress(Damaged):
        if not any(history.unexplained_spans(index.next_sequence, next_base - 1)):
            return index.next_sequence
    return next_base


def _last_lost_record(index: SealedIndex, next_base: int) -> int:
    """Return the last lost record with an unknown route, or 0."""
    if sum(entry.count for entry in index.routes) == next_base - index.base_sequence:
        return 0  # the routes of all records are known, even of lost batches
    table = index.batch_table()
    expected, last_lost = index.base_sequence, 0
    for base, count in zip(table.bases, table.counts, strict=True):
        if base > expected:
            last_lost = base - 1
        expected = max(expected, base + count)
    return next_base - 1 if expected < next_base else last_lost
