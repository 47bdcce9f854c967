"""Reading: batches from a place on, through sealed, cut and active segments, each durable record once and in order.

    start   "earliest"  the oldest record there is          "end"     what comes after the head
            "cursor"    after what a group has processed    a number  that record
            a datetime  the first record appended then or later; none yet if there is none
    stop    a number: the last record wanted                a datetime: records appended before it are wanted

A range of sequences includes both of its ends wherever wald reports, stores or takes one (``first`` and ``last``), so
that a range that was printed can be typed back. A time is a moment between records; no record is the last one at it.

Records that were reclaimed are an error where a start was named, a sequence or a time, and where a cursor is in front
of them; from "earliest" on, or for a group without a cursor, they are passed over. ``on_missing`` decides otherwise.
Damage is an error too, or told to ``on_damage``, and what follows it is read; so is what is in no segment although no
ledger says that it was reclaimed, from record 1 on.

Following polls the head: one 160-byte read, after 1 ms at first and then ever more rarely, up to 50 ms. File events
would help little: those that a segment raises come before the data in it is durable, and on a file system that another
machine writes to there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from wald.errors import Damaged, InvalidInput, NotFound, command_line
from wald.format.head import Head
from wald.format.names import DEFAULT_GROUP
from wald.format.times import nanoseconds
from wald.store.files.directory import Listing, Root, list_segments
from wald.store.reading.batches import Batch, Broken, Joiner
from wald.store.reading.walk import Hole, Lost, Walk
from wald.store.retention.cursors import CursorState, read_cursor
from wald.store.retention.history import History
from wald.store.retention.missing import Missing, OnMissing, Wanted, count, policy
from wald.store.segments.head import Bound, look, lost_head, read_head
from wald.store.segments.opened import Passed, Whole
from wald.store.segments.seeking import end_sequence, sequence_since

Named = Literal["earliest", "end", "cursor"]
Start = Named | int | datetime
"""Where reading begins: the oldest record, behind the head, behind what a group has processed, a sequence, a time."""

Stop = int | datetime
"""Where reading ends: with this sequence, or in front of the first record appended at this time or later."""

POLL_FIRST_SECONDS = 0.001
POLL_LAST_SECONDS = 0.050  # 20 polls a second of some 10 µs each: nothing on the CPU
_NO_SEQUENCE = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted, in numbers.

    Attributes:
        first: the lowest sequence wanted of any route; ``floors`` has routes that begin elsewhere.
        last: the highest; with a time limit too, whichever comes first ends it.
        from_ns, until_ns: append times, from ≤ t < until.
        earliest: whether nobody has named a start: it begins with what there is.
        floors: of each route, where it begins behind a cursor; ``fresh`` are those without one, which begin as above.
        group: whose cursors these are.
    """

    routes: frozenset[str] | None
    first: int
    floors: dict[str, int] = field(default_factory=dict)
    last: int = _NO_SEQUENCE
    from_ns: int = -(1 << 63)
    until_ns: int = (1 << 63) - 1
    earliest: bool = False
    fresh: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP

    def floor(self, route: str) -> int:
        return self.floors.get(route, self.first)


def read_batches(
    root: Root,
    *,
    log_id: bytes,
    route: str | None,
    start: Start,
    stop: Stop | None,
    group: str,
    limit: int | None,
    follow: bool,
    cancel: threading.Event | None,
    on_damage: Callable[[Damaged], None] | None,
    on_missing: OnMissing,
    on_wait: Callable[[], None] | None,
) -> Iterator[Batch]:
    """Batches of whole records, from ``start`` on; without ``follow`` up to the head as it is now.

    Arguments and errors are those of :meth:`wald.log.Log.batches`.
    """
    selection = _select(root, log_id, route, start, stop, group)
    if limit is not None and limit < 0:
        raise InvalidInput(f"a limit of {limit} records", hint="--limit takes 0 or more")
    reading = _Reading(root, log_id, selection, on_damage, policy(on_missing))
    found = reading.batches(follow=follow, cancel=cancel or threading.Event(), on_wait=on_wait)
    return found if limit is None else _limited(found, limit)


def read_span(
    root: Root,
    *,
    log_id: bytes,
    routes: frozenset[str] | None,
    first: int,
    last: int,
    bound: Bound,
    loss: bool = False,
    on_damage: Callable[[Damaged], None] | None = None,
) -> Iterator[Batch]:
    """Batches with the records ``first`` to ``last`` of ``routes`` (None: all).

    Args:
        bound: as an earlier look gave it, maybe on another machine; the head is not asked again.
        loss: whether what RECLAIM has removed may be missing.

    Raises:
        NotFound: RECLAIM has removed some of them since, and none may be missing.
        Damaged: something cannot be read, and there is no ``on_damage`` to tell.
    """
    selection = Selection(routes, first, last=last)
    on_missing = policy("skip" if loss else "error")
    reading = _Reading(root, log_id, selection, on_damage, on_missing)
    return reading.batches(follow=False, cancel=threading.Event(), bound=bound)


class _Reading:
    """One way through the log for one consumer."""

    def __init__(
        self,
        root: Root,
        log_id: bytes,
        selection: Selection,
        on_damage: Callable[[Damaged], None] | None,
        on_missing: Callable[[Missing], None],
    ) -> None:
        self._root = root
        self._log_id = log_id
        self._selection = selection
        self._on_damage = on_damage
        self._on_missing = on_missing
        self._history = History(root)
        self._joiner = Joiner()

    def batches(
        self,
        *,
        follow: bool,
        cancel: threading.Event,
        on_wait: Callable[[], None] | None = None,
        bound: Bound | None = None,
    ) -> Generator[Batch]:
        selection = self._selection
        bound, listing = look(self._root) if bound is None else (bound, list_segments(self._root))
        if not selection.earliest:  # what is released is still there for who needs it
            listing = listing.with_released()
        lowest = min([selection.first, *selection.floors.values()])
        walk = Walk(self._root, self._log_id, listing, sequence=lowest, routes=selection.routes)
        try:
            while True:
                back: Listing | None = None
                for met in walk.advance(bound, listing):
                    if isinstance(met, Whole):
                        last = self._last(met)
                        yield from self._take(met, walk.segment, last)
                        if met.header.end_sequence > last and not self._joiner.waits:
                            return
                    elif isinstance(met, Passed):
                        if met.next_sequence > selection.last and not self._joiner.waits:
                            return
                    elif isinstance(met, Lost):
                        self._tell_lost(met)
                    elif (back := self._tell_hole(met, behind=walk.segment)) is not None:
                        walk.close()
                        listing = back
                        walk = Walk(self._root, self._log_id, back, sequence=met.first, routes=selection.routes)
                        break
                if back is not None:
                    continue
                if not follow and bound.lost and selection.last > (bound.sequence or 0):
                    self._report(lost_head(self._root, bound))
                if not follow or not self._await_change(bound, cancel, on_wait):
                    return
                bound, listing = look(self._root)
        finally:
            walk.close()

    def _last(self, whole: Whole) -> int:
        """The last sequence wanted, as far as ``whole`` lets one know."""
        selection = self._selection
        if whole.header.append_time_ns >= selection.until_ns:
            return min(selection.last, whole.header.base_sequence - 1)
        return selection.last

    def _take(self, whole: Whole, segment: int, last: int) -> Iterator[Batch]:
        selection = self._selection
        if selection.routes is not None and whole.route not in selection.routes:
            return
        for done in self._joiner.take(whole, segment, selection.floor(whole.route), last):
            if isinstance(done, Broken):
                self._tell(f"{self._root.segments}: record {done.sequence} has lost a piece", done.sequence)
            elif done.append_time_ns >= selection.from_ns:
                yield done

    def _await_change(self, seen: Bound, cancel: threading.Event, on_wait: Callable[[], None] | None) -> bool:
        """Return when the head has moved; False if ``cancel`` was set instead."""
        delay = POLL_FIRST_SECONDS
        while not _moved(self._root, seen):
            if on_wait is not None:
                on_wait()
            if cancel.wait(delay):
                return False
            delay = min(2 * delay, POLL_LAST_SECONDS)
        return not cancel.is_set()

    def _tell_lost(self, lost: Lost) -> None:
        begun = self._joiner.abandon()
        missing = _range(lost.first, lost.last) if lost.first <= min(lost.last, self._selection.last) else ""
        begun_words = ", ".join(f"record {sequence}" for sequence in begun)
        words = " and ".join(part for part in (begun_words, missing) if part)
        if words:
            self._tell(f"{lost.message}; {words} cannot be read", max(lost.last, *begun, 0))
        elif lost.wholly and lost.first <= self._selection.last:
            self._tell(lost.message, 0)

    def _tell_hole(self, hole: Hole, *, behind: int) -> Listing | None:
        """Tell of what is not there; or return the segments as they are by now, if some of it is there again.

        They were named as reclaimed when they were looked for, and the ledger has taken that back before it was read.

        Args:
            behind: base of the segment in front of the hole.
        """
        first, last = hole.first, min(hole.last, self._selection.last)
        try:
            lost = list(self._history.unexplained(first, last))
            if lost:
                listing = list_segments(self._root).with_released()
                if any(behind < segment.base_sequence <= hole.last for segment in listing.segments):
                    return listing
                lost = list(self._history.unexplained(first, last))  # and deleted, maybe, since it was read
            missing = self._missing(first, last)
        except Damaged as error:  # of the ledger that should say so
            self._joiner.abandon()
            self._report(error)
            return None
        self._joiner.abandon()
        for begin, end in lost:
            self._tell(f"{self._root.segments}: no segment holds {_range(begin, end)}, and no ledger says why", end)
        if missing is not None:
            self._on_missing(missing)
        return None

    def _missing(self, first: int, last: int) -> Missing | None:
        """What was reclaimed of the records ``first`` to ``last`` that are wanted; None if nothing was."""
        selection = self._selection
        wanted = Wanted(self._floor, selection.routes, first, last, selection.from_ns, selection.until_ns)
        counted = count(self._history.gone(first, last), wanted)
        if not counted.records:
            return None
        ours = (counted.routes or selection.floors.keys()) & (selection.floors.keys() - selection.fresh)
        route = next(iter(selection.routes)) if selection.routes and len(selection.routes) == 1 else None
        return Missing(
            self._root.path,
            counted.first,
            counted.last,
            counted.records,
            counted.exact,
            route,
            frozenset(ours) or counted.routes,
            asked=bool(ours) or not (selection.earliest or selection.floors),
            group=selection.group if ours else None,
            archive=self._history.archive_of(route, first, last),
            ends=counted.ends,
        )

    def _floor(self, route: str) -> int:
        """The first sequence wanted of a route, which a group may have processed meanwhile."""
        selection = self._selection
        if route not in selection.floors or route in selection.fresh:
            return selection.floor(route)
        last = look(self._root)[0].sequence
        head_sequence = _NO_SEQUENCE if last is None else last
        cursor = read_cursor(self._root, route, selection.group, log_id=self._log_id, head_sequence=head_sequence)
        return max(selection.floor(route), cursor.effective + 1)

    def _tell(self, message: str, last: int) -> None:
        """
        Args:
            last: the last record that is lost; 0: none is.
        """
        hint = f"{command_line(self._root.path, 'verify')} lists all damage"
        selection = self._selection
        if last and selection.floors and selection.routes is not None:  # it began at a cursor
            (route,) = selection.routes
            going_on = command_line(self._root.path, f"cursor set {route} {last} --group {selection.group}")
            hint += f"; {going_on} goes on behind it"
        self._report(Damaged(message, hint=hint))

    def _report(self, error: Damaged) -> None:
        if self._on_damage is None:
            raise error
        self._on_damage(error)


def _moved(root: Root, seen: Bound) -> bool:
    try:
        head: Head | None = read_head(root)
    except Damaged:
        head = None
    if head is None:
        return look(root)[0] != seen
    return (head.segment, head.position) != (seen.segment, seen.position)


def _limited(batches: Generator[Batch], limit: int) -> Iterator[Batch]:
    left = limit
    with closing(batches):
        while left > 0 and (batch := next(batches, None)):
            trimmed = batch.between(batch.first_sequence, batch.first_sequence + left - 1)
            assert trimmed is not None
            left -= trimmed.count
            yield trimmed


def _select(root: Root, log_id: bytes, route: str | None, start: Start, stop: Stop | None, group: str) -> Selection:
    if route is not None:
        root.require_route(route)
    routes = None if route is None else frozenset([route])
    last = _positive(stop) if isinstance(stop, int) else _NO_SEQUENCE
    selection = replace(_begin(root, log_id, routes, start, group), last=last)
    return replace(selection, until_ns=nanoseconds(stop)) if isinstance(stop, datetime) else selection


def _begin(root: Root, log_id: bytes, routes: frozenset[str] | None, start: Start, group: str) -> Selection:
    """A selection without an end."""
    if isinstance(start, datetime):
        time_ns = nanoseconds(start)
        return Selection(routes, sequence_since(root, log_id, time_ns), from_ns=time_ns)
    if start == "earliest":
        return Selection(routes, 1, earliest=True)
    if start == "end":
        return Selection(routes, end_sequence(root, log_id))
    if start == "cursor":
        return _after_cursors(root, log_id, routes, group)
    if not isinstance(start, int):
        raise InvalidInput(f"no such start: {start!r}", hint="earliest, end, cursor, a sequence or a time")
    end = end_sequence(root, log_id)
    if _positive(start) > end:
        if (bound := look(root)[0]).lost:
            raise lost_head(root, bound)
        raise NotFound(
            f"{root.path}: record {start} was never issued; the last one is {end - 1}",
            hint=f"{command_line(root.path, 'read --from end --follow')} waits for the next",
        )
    return Selection(routes, start)


def _after_cursors(root: Root, log_id: bytes, routes: frozenset[str] | None, group: str) -> Selection:
    end = end_sequence(root, log_id)
    floors, fresh = {}, set()
    for name in sorted(routes) if routes is not None else root.route_names():
        cursor = read_cursor(root, name, group, log_id=log_id, head_sequence=end - 1)
        if cursor.state is CursorState.VALID:
            floors[name] = cursor.sequence + 1
        elif cursor.state is CursorState.ABSENT:
            floors[name] = 1
            fresh.add(name)
        else:
            raise Damaged(
                f"{cursor.message}; what was processed is not known",
                hint=command_line(root.path, f"cursor set {name} SEQUENCE --group {group} --rewind"),
            )
    return Selection(routes, min(floors.values(), default=end), floors, fresh=frozenset(fresh), group=group)


def _positive(sequence: int) -> int:
    if sequence < 1:
        raise InvalidInput(f"{sequence} is not a sequence", hint="the first record is number 1")
    return sequence


def _range(first: int, last: int) -> str:
    return f"record {first}" if first == last else f"records {first} to {last}"
