"""What each route in a segment says to its deletion, where routes have limits of their own.

Of a route it matters how many of its records and bytes are in newer segments. That is counted from the newest segment
on, and kept where the route passes one of its limits: what is older is beyond that limit too. So memory does not grow
with the number of segments.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from wald.files.listing import Segment
from wald.format.sealed_index import RouteEntry, RouteTable
from wald_reclaim.policy import Limits, RouteFacts, Verdict, judge_route


class _Amount(NamedTuple):
    """Payload bytes and records of one route."""

    payload_bytes: int = 0
    records: int = 0

    def plus(self, payload_bytes: int, records: int) -> _Amount:
        return _Amount(self.payload_bytes + payload_bytes, self.records + records)


class _Mark(NamedTuple):
    """A segment at which a route passes a limit, and what it has after that segment and from it on."""

    base: int
    after: _Amount
    held: _Amount


class Routes:
    """The routes that have limits, in the complete segments of a log.

    Args:
        remembered_max: the most numbers, of eight bytes each, to keep of what segments hold; others are read again.
    """

    def __init__(self, limits: Limits, *, remembered_max: int = 1 << 19) -> None:
        self._limits = limits
        self._remembered_max = remembered_max
        self._least_age_ns = min(
            (each.max_age_ns for each in (limits.others, *limits.of_routes.values()) if each.max_age_ns is not None),
            default=math.inf,
        )
        limited = frozenset(name for name, each in limits.of_routes.items() if each.counts)
        self._limited = None if limits.others.counts else limited.__contains__
        """Whether something must be counted of a route; None: of every one."""
        self._counts = limits.others.counts or bool(limited)
        self._counted: list[tuple[int, int]] = []
        self._marks: dict[str, list[_Mark]] = {}
        self._newest_mark = 0
        self._numbers: dict[str, int] = {}
        self._remembered: dict[tuple[int, int], array[int]] = {}
        self._remembered_numbers = 0

    def count(self, segments: Sequence[tuple[Segment, int]], held_by: Callable[[Segment], RouteTable]) -> None:
        """Take in what the complete segments hold, if they are others than the last time.

        Args:
            segments: with the bytes of their files, newest first.
            held_by: returns what one of them holds.
        """
        counted = [(segment.base_sequence, stored_bytes) for segment, stored_bytes in segments]
        if not self._counts or counted == self._counted:
            return
        self._forget_all_but(set(counted))
        self._marks, self._newest_mark, self._counted = {}, 0, counted
        totals: dict[int, _Amount] = {}
        for (segment, _), key in zip(segments, counted, strict=True):
            amounts = self._remembered.get(key)
            if amounts is None:
                amounts = self._remember(key, held_by(segment))
            names = list(self._numbers)
            for number, payload_bytes, records in zip(amounts[::3], amounts[1::3], amounts[2::3], strict=True):
                after = totals.get(number, _Amount())
                held = totals[number] = after.plus(payload_bytes, records)
                self._mark(names[number], _Mark(segment.base_sequence, after, held))

    def concerns(self, base: int, age_ns: int, log: Verdict | None) -> bool:
        """Whether a route may be beyond a limit in the segment, so that each route has to be asked."""
        past = log is not None or base <= self._newest_mark or age_ns > self._least_age_ns
        return past and self._limits.by_route

    def may_let_go(self, route: str, base: int, age_ns: int, log: Verdict | None) -> bool:
        """Whether the route may agree that unread records go with the segment; only a no is certain."""
        limits = self._limits.of(route)
        if self._mark_of(route, base) is not None:
            return True
        return limits.expire and (log is not None or (limits.max_age_ns is not None and age_ns > limits.max_age_ns))

    def verdicts(
        self,
        base: int,
        age_ns: int,
        log: Verdict | None,
        held: Iterable[RouteEntry],
        unread: Mapping[str, int],
    ) -> dict[str, Verdict]:
        """The verdict of each route in a segment.

        Args:
            log: the limit of the log that the segment exceeds.
            held: what it holds.
            unread: for each route that a group has not read, the number of records.
        """
        verdicts = {}
        for entry in held:
            mark = self._mark_of(entry.route, base)
            newer = _Amount() if mark is None else mark.after if mark.base == base else mark.held
            facts = RouteFacts(
                age_ns=age_ns,
                payload_bytes=entry.payload_bytes,
                records=entry.count,
                newer_bytes=newer.payload_bytes,
                newer_records=newer.records,
                read=entry.route not in unread,
                unread_bytes=share_of_bytes(entry, unread.get(entry.route, 0)),
            )
            verdicts[entry.route] = judge_route(facts, self._limits.of(entry.route), log)
        return verdicts

    def _mark(self, route: str, mark: _Mark) -> None:
        """Keep a mark if the route passes a limit there."""
        limits = self._limits.of(route)
        if limits.exceeded(*mark.after) != limits.exceeded(*mark.held):
            self._marks.setdefault(route, []).append(mark)
            self._newest_mark = max(self._newest_mark, mark.base)

    def _mark_of(self, route: str, base: int) -> _Mark | None:
        """The last mark of the route that is not older than the segment; newer limits are passed there as well."""
        return next((mark for mark in reversed(self._marks.get(route, ())) if mark.base >= base), None)

    def _remember(self, key: tuple[int, int], table: RouteTable) -> array[int]:
        amounts = array("Q")
        wanted = map(self._limited, table.names) if self._limited is not None else [True] * len(table)
        rows = zip(table.names, table.payload_bytes, table.counts, strict=True)
        for name, payload_bytes, count in compress(rows, wanted):
            amounts.extend((self._numbers.setdefault(name, len(self._numbers)), payload_bytes, count))
        if self._remembered_numbers + len(amounts) <= self._remembered_max:
            self._remembered[key] = amounts
            self._remembered_numbers += len(amounts)
        return amounts

    def _forget_all_but(self, keys: Collection[tuple[int, int]]) -> None:
        self._remembered = {key: amounts for key, amounts in self._remembered.items() if key in keys}
        self._remembered_numbers = sum(map(len, self._remembered.values()))


def share_of_bytes(entry: RouteEntry, records: int) -> int:
    """The payload bytes of so many of the records of an entry, by their average."""
    return entry.payload_bytes * records // entry.count if entry.count else 0
