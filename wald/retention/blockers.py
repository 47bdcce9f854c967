"""Consumer groups that pin a segment.

Which group holds back which segment: the rule of RECLAIM, as facts.

A segment may go when every cursor of every route that has records in it has reached the route's last record in it. So
an idle route that has read all it got holds back nothing, and a stuck one holds back just the segments it still needs.

    a retired route                        holds back nothing, nor do handovers from it
    a route without a cursor               holds back all it ever received: no group says that it has read it
    a cursor that cannot be trusted        the same (unreadable, linked, of another log, beyond the head)
    a route whose directory is gone        the same: its cursors are lost, not moved
    an unfinished handover to a route      counts as a cursor of the route (:mod:`wald.retention.handovers`)

The routes of the records that are lost in a damaged segment are not known. So each of its routes has to pass the last
of them, and a segment of which no record is left may not go at all. Where the index is lost and frames with it, the
line of the ledger about the sealing gives the routes; without that line the segment may not go either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
from operator import lt
from typing import NamedTuple, overload

from wald.errors import Damaged, NotFound
from wald.files.layout import Root
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.format.names import DEFAULT_GROUP, Kind
from wald.format.sealed_index import BadSealed, RouteEntry, RouteTable, SealedIndex
from wald.format.segment import BadHeader
from wald.retention.cursors import Cursor, CursorState, cursors_of
from wald.retention.handovers import HandoverPin, handover_pins
from wald.retention.history import History
from wald.segments.reader import Misplaced, check_name
from wald.segments.salvage import index_salvaged
from wald.segments.sealed_file import SealedFile, index_raw
from wald.segments.seek import end_sequence

DIRECTORY_GONE = "the directory of the route is gone, and its cursors with it"


class Pin(NamedTuple):
    """One group that holds back one segment: it has processed ``route`` up to ``at``, and needs ``needs`` to let go.

    Attributes:
        message: what is wrong with its cursor; "" if it is only behind.
    """

    route: str
    group: str
    at: int
    needs: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class CursorSnapshot:
    """How far every group of every route has got, as read at one moment.

    Attributes:
        cursors: of each route that has a directory; never empty.
        retired: the routes that hold back nothing.
        handovers: the pins of handovers, including unreadable ones.
    """

    cursors: dict[str, tuple[Cursor, ...]] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    handovers: tuple[HandoverPin, ...] = ()
    _gating: dict[str, list[tuple[str, int, str]]] = field(init=False, repr=False)
    _vectors: dict[str, dict[str, int]] = field(init=False, repr=False)
    _floors: dict[str, int] = field(init=False, repr=False)
    """What every group that counts has processed of each route."""
    _columns: dict[tuple[str, ...], tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """The same for the routes of the segment that was asked about last."""

    def __post_init__(self) -> None:
        gating = {
            route: [] if route in self.retired else [(c.group, c.effective, c.message) for c in cursors]
            for route, cursors in self.cursors.items()
        }
        for pin in self.handovers:
            for route, at in pin.positions.items() if pin.route not in self.retired else ():
                if route in gating and route not in self.retired:
                    message = pin.message if pin.problem else ""
                    gating[route].append((f"{pin.route}/{pin.group}", at, message))
        object.__setattr__(self, "_gating", gating)
        vectors = {route: {group: at for group, at, _ in groups} for route, groups in gating.items()}
        object.__setattr__(self, "_vectors", vectors)
        floors = {route: min((at for _, at, _ in groups), default=_NO_GROUP) for route, groups in gating.items()}
        object.__setattr__(self, "_floors", floors)

    def gating(self, route: str) -> list[tuple[str, int, str]]:
        """The groups that can hold back records of ``route``: name, up to where it has processed, what is wrong."""
        return self._gating.get(route, _LOST)

    def pins(self, routes: Sequence[RouteEntry]) -> Iterator[Pin]:
        """The groups that hold back a segment with ``routes`` in it; none if it may go."""
        table = RouteTable.from_entries(routes)
        for number in compress(range(len(table)), map(lt, self._column(table.names), table.lasts)):
            route, last = table.names[number], table.lasts[number]
            for group, at, message in self.gating(route):
                if at < last:
                    yield Pin(route, group, at, last, message)

    def _column(self, names: tuple[str, ...]) -> tuple[int, ...]:
        floors = self._columns.get(names)
        if floors is None:
            self._columns.clear()
            floors = self._columns[names] = tuple(map(self._floors.get, names, repeat(0)))
        return floors

    def waived(self, routes: Sequence[RouteEntry]) -> tuple[str, ...]:
        """The retired routes among ``routes`` that hold records in it which a group has not read."""
        table = RouteTable.from_entries(routes)
        retired = compress(zip(table.names, table.lasts, strict=True), map(self.retired.__contains__, table.names))
        return tuple(
            route for route, last in retired if any(cursor.effective < last for cursor in self.cursors.get(route, ()))
        )

    def still(self, pin: Pin) -> bool:
        """Whether ``pin``, found under earlier claims, holds back its segment under these."""
        return any(group == pin.group and at < pin.needs for group, at, _ in self.gating(pin.route))

    def lets_go(self, earlier: CursorSnapshot) -> bool:
        """Whether what no group held back under ``earlier`` claims is not held back under these."""
        routes = self._floors.keys() | earlier._floors.keys()
        return all(self._floors.get(route, 0) >= earlier._floors.get(route, 0) for route in routes)

    def troubles(self) -> list[str]:
        """Return the problems of cursors that pin segments, and of handover pins; a missing cursor is not a problem."""
        cursors = [
            cursor.message
            for route, cursors in self.cursors.items()
            if route not in self.retired
            for cursor in cursors
            if cursor.state not in (CursorState.VALID, CursorState.ABSENT)
        ]
        return cursors + [pin.message for pin in self.handovers if pin.problem and pin.route not in self.retired]

    def floor(self, route: str) -> int:
        """The record up to which every group that counts has processed ``route``; of a retired one, beyond any."""
        return self._floors.get(route, 0)

    def vector(self, route: str) -> dict[str, int]:
        """The cursor of each group of ``route``, as far as it counts."""
        return self._vectors.get(route, {})


@dataclass(frozen=True, slots=True)
class Holders:
    """The groups that can pin segments with certain routes, in columns: compared without a step for each route.

    Attributes:
        numbers: the number of each group's route among the routes; of the rest likewise one per group.
        groups: route and group; ``ats``: up to where it has processed; ``messages``: what is wrong with its cursor.
    """

    numbers: tuple[int, ...]
    groups: tuple[tuple[str, str], ...]
    ats: tuple[int, ...]
    messages: tuple[str, ...]

    def pins(self, routes: RouteTable) -> Blockers:
        """Those that hold back a segment."""
        return Blockers(self, bytes(map(lt, self.ats, map(routes.lasts.__getitem__, self.numbers))), routes.lasts)


def holders_of(claims: CursorSnapshot, names: Sequence[str]) -> Holders:
    """The groups that can hold back segments with the routes ``names``."""
    rows = [
        (number, (route, group), at, message)
        for number, route in enumerate(names)
        for group, at, message in claims.gating(route)
    ]
    return Holders(*zip(*rows, strict=True)) if rows else Holders((), (), (), ())


@dataclass(frozen=True, slots=True, eq=False)
class Blockers(Sequence[Pin]):
    """The pins of one segment, each made when it is read, because there may be thousands.

    Attributes:
        marks: for each group of ``holders`` 1 if it holds the segment back, 0 if not.
        lasts: the last record of each route in it.
    """

    holders: Holders
    marks: bytes
    lasts: Sequence[int]

    def __len__(self) -> int:
        return self.marks.count(1)

    def __iter__(self) -> Iterator[Pin]:
        holders = self.holders
        rows = zip(holders.numbers, holders.groups, holders.ats, holders.messages, strict=True)
        for number, (route, group), at, message in compress(rows, self.marks):
            yield Pin(route, group, at, self.lasts[number], message)

    @overload
    def __getitem__(self, number: int) -> Pin: ...
    @overload
    def __getitem__(self, number: slice) -> list[Pin]: ...
    def __getitem__(self, number: int | slice) -> Pin | list[Pin]:
        return list(self)[number]

    def groups(self) -> Iterator[tuple[str, str]]:
        """Route and group of each."""
        return compress(self.holders.groups, self.marks)

    def of_same_groups(self, other: Blockers) -> bool:
        """Whether the same groups hold back both segments."""
        if self.holders is other.holders:
            return self.marks == other.marks
        return len(self) == len(other) and set(self.groups()) == set(other.groups())


NO_PINS = Blockers(Holders((), (), (), ()), b"", ())


_LOST = [(DEFAULT_GROUP, 0, DIRECTORY_GONE)]
_NO_GROUP = 1 << 64  # no record is beyond it


def read_claims(root: Root, *, log_id: bytes) -> CursorSnapshot:
    """The claims as they are now.

    Raises:
        Damaged: the end of the log is not known, so neither is which cursors are beyond it.
    """
    head_sequence = end_sequence(root, log_id) - 1
    cursors: dict[str, tuple[Cursor, ...]] = {}
    retired = set()
    for route in root.route_names():
        if os.path.exists(root.retired(route)):  # False where it may not be read: then the route is not retired
            retired.add(route)
        try:
            found = cursors_of(root, route, log_id=log_id, head_sequence=head_sequence)
            if any(cursor.state is CursorState.BEYOND for cursor in found):
                # The head may have moved on since it was read, and a cursor after it.
                head_sequence = end_sequence(root, log_id) - 1
                found = cursors_of(root, route, log_id=log_id, head_sequence=head_sequence)
        except NotFound:
            continue  # removed this moment: without a directory it holds back everything
        cursors[route] = tuple(found)
    return CursorSnapshot(cursors, frozenset(retired), tuple(handover_pins(root, log_id)))


def segment_index(
    segment: Segment, log_id: bytes, *, on_damage: Callable[[Damaged], None] | None = None
) -> SealedIndex:
    """What a complete segment holds, sealed or not; one without a whole index is read from its beginning to its end.

    Args:
        on_damage: called with what is wrong with the index of a sealed one, whose frames are read instead.

    Raises:
        FileNotFoundError: it is gone.
        Damaged: nothing of it can be read, it is not what its name says, or a raw one is not whole, which only the
            sealer may judge.
    """
    if segment.kind.form is Kind.SEALED:
        try:
            return sealed_index(segment, log_id)
        except Misplaced:
            raise
        except Damaged as error:
            index = _salvaged(segment, log_id, error)
            if on_damage is not None:
                on_damage(error)
            return index
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
    return index


def _salvaged(segment: Segment, log_id: bytes, error: Damaged) -> SealedIndex:
    """What a sealed segment holds by its frames, because its index cannot be read."""
    try:
        return index_salvaged(segment, log_id, error)
    except FileNotFoundError:
        raise
    except OSError:
        raise error from None
    except Misplaced:
        raise
    except Damaged:
        raise Damaged(error.message, case="lost-routes-unknown", root=segment.path.parents[1]) from error


def with_lost(index: SealedIndex, segment: Segment, end: int | None, history: History, error: Damaged) -> SealedIndex:
    """What a sealed segment held, by ``index``, which was made of its frames, and by the ledger if frames are lost.

    Args:
        end: the base of the next one that is there; None: it is the newest.
        error: what is wrong with its own index.

    Returns:
        ``index`` if every frame is whole; else with the routes that it had when it was sealed, and without a digest.

    Raises:
        Damaged: there is no line about its sealing, so the routes of the lost records are not known.
    """
    if not index.damage and end is not None and _end(index, end, history) == index.next_sequence:
        return index
    try:
        held = history.sealed_routes(segment.base_sequence)
        sealed = history.sealed(segment.base_sequence)
    except Damaged as unknown:
        raise Damaged(
            f"{error.message}; {_FRAMES_LOST}: {unknown.message}",
            case="lost-routes-unknown",
            root=segment.path.parents[1],
        ) from error
    if held is None or sealed is None:
        message = f"{error.message}; {_FRAMES_LOST}: no line of segments.jsonl says whose records they held"
        raise Damaged(message, case="lost-routes-unknown", root=segment.path.parents[1]) from error
    following = int(sealed["last"]) + 1
    if not index.damage and index.next_sequence == following:
        return index
    whole = {entry.route: entry for entry in held}
    # In this order, because the batches that are left name their routes by number.
    routes = [_joined(entry, whole.pop(entry.route, entry)) for entry in index.routes] + list(whole.values())
    return replace(
        index,
        next_sequence=max(index.next_sequence, following),
        routes=routes,
        damage=index.damage or [(index.raw_bytes, 0)],
        sha256=b"",
    )


_FRAMES_LOST = "not all of its frames are there"


def _joined(left: RouteEntry, held: RouteEntry) -> RouteEntry:
    return held._replace(first=min(left.first, held.first), last=max(left.last, held.last))


def needs(index: SealedIndex, end: int, history: History) -> Sequence[RouteEntry]:
    """The routes of a complete segment, each with the last record that its cursors have to reach.

    Args:
        end: the base of the next one that is there.

    Raises:
        BadSealed: what is lost in a damaged one is not known, or nothing else is left of it.
    """
    if not index.damage or not (lost := _last_lost(index, _end(index, end, history))):
        return index.routes
    if not index.routes:
        raise BadSealed("all of its records are lost, and whose they were")
    return RouteTable.from_entries(index.routes).reaching(lost)


def _end(index: SealedIndex, end: int, history: History) -> int:
    """The base of the segment that came behind it; those between it and ``end`` may have been reclaimed."""
    with suppress(Damaged):
        if not any(history.unexplained(index.next_sequence, end - 1)):
            return index.next_sequence
    return end


def _last_lost(index: SealedIndex, end: int) -> int:
    """The last record up to ``end`` whose route is not known; 0 if there is none."""
    if sum(entry.count for entry in index.routes) == end - index.base_sequence:
        return 0  # whichever batches are lost, each route's last record is known
    table = index.batch_table()
    due, lost = index.base_sequence, 0
    for base, count in zip(table.bases, table.counts, strict=True):
        if base > due:
            lost = base - 1
        due = max(due, base + count)
    return end - 1 if due < end else lost


def sealed_index(segment: Segment, log_id: bytes) -> SealedIndex:
    """What a sealed segment holds, by its index.

    Raises:
        FileNotFoundError: it is gone.
        Damaged: that cannot be read, or is not what the name says; either way it does not count as read.
    """
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
