"""Model of ``docs/retention.md`` in plain lists: deleted segments, lost records, and the result of shrinks.

It is written from the documentation without code of wald-reclaim, and keeps nothing between passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from wald.files.uptime import Moment
from wald_reclaim.policy import Limits

Record = tuple[int, str, int]
"""Its sequence, its route, and the bytes of its payload."""
Batches = list[list[Record]]


@dataclass
class OnRecord:
    """Last ledger line about a segment's deletion: its time, and the routes that lose unread records."""

    since: Moment
    losing: frozenset[str]


@dataclass
class Held:
    """A sealed segment.

    Attributes:
        batches: each of one route; shrinking drops whole ones.
        whole: the batches of its old form, which an interrupted shrink has left in addition to the new one.
        recorded: the ledger line of a deletion that was interrupted before the rename.
    """

    base: int
    batches: Batches
    stored_bytes: int
    whole: Batches | None = None
    recorded: OnRecord | None = None

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch]

    def of(self, route: str) -> list[Record]:
        return [record for record in self.records if record[1] == route]

    def routes(self) -> list[str]:
        return sorted({route for _, route, _ in self.records})


@dataclass
class Released:
    """A segment in its grace period."""

    held: Held
    line: OnRecord
    deleting: bool = False


@dataclass
class Model:
    """The log as lists."""

    complete: list[Held] = field(default_factory=list)
    released: list[Released] = field(default_factory=list)
    cursors: dict[tuple[str, str], int] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    """Routes without a directory."""
    archived: dict[str, int] = field(default_factory=dict)
    """Up to which record each route is in bundles."""
    lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """Lost records of each deleted segment."""
    ages_ns: dict[int, int] = field(default_factory=dict)
    """Age of each segment that the ledgers prove now."""

    def floor(self, route: str) -> int:
        """Return the last record of a route that every group has read."""
        if route in self.retired:
            return 1 << 64
        return min((at for (of, _), at in self.cursors.items() if of == route and route not in self.gone), default=0)

    def unread(self, held: Held, route: str) -> int:
        """Return the records of a route that at least one group has not read."""
        return sum(sequence > self.floor(route) for sequence, _, _ in held.of(route))

    def unread_routes(self, held: Held) -> dict[str, int]:
        return {route: unread for route in held.routes() if (unread := self.unread(held, route))}

    def newer(self, held: Held) -> list[Held]:
        return [other for other in self.complete if other.base > held.base]

    def in_bundles(self, records: Iterable[Record]) -> bool:
        return all(
            sequence <= self.archived.get(route, 0) for sequence, route, _ in records if route not in self.retired
        )

    def goes(self, held: Held, limits: Limits) -> bool:
        """Return True if every route agrees, and no minimum retention keeps its read records."""
        answers = [self.answer(held, route, limits) for route in held.routes()]
        if limits.require_archived and not self.in_bundles(held.records):
            return False
        return "needed" not in answers and ("read" not in answers or not self.is_kept(held, limits))

    def is_kept(self, held: Held, limits: Limits) -> bool:
        """Return True if it is young, or within the newest bytes."""
        young = limits.min_age_ns is not None and self.ages_ns[held.base] < limits.min_age_ns
        newer_bytes = sum(other.stored_bytes for other in self.newer(held))
        return young or (limits.keep_bytes is not None and newer_bytes < limits.keep_bytes)

    def is_beyond_the_log(self, held: Held, limits: Limits) -> bool:
        """Return True if it is beyond a limit of the whole log."""
        from_it_on = [held, *self.newer(held)]
        return any(
            limit is not None and there > limit
            for there, limit in [
                (self.ages_ns[held.base], limits.max_age_ns),
                (sum(other.stored_bytes for other in from_it_on), limits.max_bytes),
                (sum(len(other.records) for other in from_it_on), limits.max_records),
            ]
        )

    def answer(self, held: Held, route: str, limits: Limits) -> str:
        """Return the answer of a route: "needed", "read", or "beyond"."""
        own = limits.of(route)
        newer = [record for other in self.newer(held) for record in other.of(route)]
        beyond = self.is_beyond_the_log(held, limits) or any(
            limit is not None and there > limit
            for there, limit in [
                (self.ages_ns[held.base], own.max_age_ns),
                (sum(size for _, _, size in newer + held.of(route)), own.max_bytes),
                (len(newer) + len(held.of(route)), own.max_records),
            ]
        )
        unread = self.unread(held, route)
        if not unread:
            return "beyond" if beyond else "read"
        if beyond and own.expire:
            return "beyond"
        share = sum(size for _, _, size in held.of(route)) * unread // len(held.of(route))
        unread_bytes = sum(size for _, _, size in newer) + share
        return "beyond" if own.pinned_max_bytes is not None and unread_bytes > own.pinned_max_bytes else "needed"

    def look(self, limits: Limits, now: Moment, grace_ns: int, *, compact: bool) -> list[tuple[Held, list[Batches]]]:
        """Make a pass; return the segments to shrink, each with its possible results."""
        self.finish_shrinks()
        going = [held for held in self.complete if self.goes(held, limits)]
        shrinkable = [held for held in self.complete if held not in going and self.is_shrinkable(held, limits)]
        for held in self.complete:
            line = held.recorded or OnRecord(now, frozenset(self.unread_routes(held)))
            held.recorded = None
            if held in going:
                self.released.append(Released(held, line))
        self.complete = [held for held in self.complete if held not in going]
        for waiting in list(self.released):
            self.look_again(waiting, limits, now, grace_ns)
        return [(held, self.shrinks(held, limits)) for held in shrinkable] if compact else []

    def look_again(self, waiting: Released, limits: Limits, now: Moment, grace_ns: int) -> None:
        """Restore a released segment, delete it, or let it wait."""
        unread, line = self.unread_routes(waiting.held), waiting.line
        archived = not limits.require_archived or self.in_bundles(waiting.held.records)
        if not archived or not all(route in line.losing and limits.may_lose(route) for route in unread):
            self.released.remove(waiting)
            self.complete = sorted([*self.complete, waiting.held], key=lambda held: held.base)
        elif waiting.deleting or now.boot != line.since.boot or now.boottime_ns - line.since.boottime_ns >= grace_ns:
            self.released.remove(waiting)
            self.lost[waiting.held.base] = unread

    def finish_shrinks(self) -> None:
        """Finish an interrupted shrink unless a group needs a dropped record."""
        for held in self.complete:
            if held.whole is not None:
                dropped = [batch for batch in held.whole if batch not in held.batches]
                if any(batch[-1][0] > self.floor(batch[0][1]) for batch in dropped):
                    held.batches = held.whole
                held.whole = None

    def is_shrinkable(self, held: Held, limits: Limits) -> bool:
        """Return True if only unread records pin it."""
        if not any(self.answer(held, route, limits) == "needed" for route in held.routes()):
            return False
        return self.is_beyond_the_log(held, limits) or not self.is_kept(held, limits)

    def shrinks(self, held: Held, limits: Limits) -> list[Batches]:
        """Return the possible results: two if a cursor is between two records of an archived route."""
        return [self.shrink(held, limits, between=between) for between in (True, False)]

    def shrink(self, held: Held, limits: Limits, *, between: bool) -> Batches:
        """Return the result; ``between`` counts the position of a cursor as a record."""
        left = []
        for route in held.routes():
            records, floor = held.of(route), min(self.floor(route), held.of(route)[-1][0])
            due = max((sequence for sequence, _, _ in records if sequence <= floor), default=0)
            waits = limits.require_archived and route not in self.retired and due > 0
            if waits and self.archived.get(route, 0) < (floor if between else due):
                floor = 0
            left += [batch for batch in held.batches if batch[0][1] == route and batch[-1][0] > floor]
        left.sort()
        return left if self.pays(held, left) else held.batches

    def pays(self, held: Held, left: Batches) -> bool:
        """Return True if it frees half of the file and 16 KiB, estimated from the share of each route's records."""
        total = sum(size for _, _, size in held.records)
        stays = 0
        for route in held.routes():
            kept = sum(len(batch) for batch in left if batch[0][1] == route)
            stays += sum(size for _, _, size in held.of(route)) * kept // len(held.of(route))
        going = total - stays
        return 2 * going >= total and going * held.stored_bytes >= total * 16384


def proven_age_ns(base: int, sealed: list[dict[str, Any]], own: list[dict[str, Any]], now: Moment) -> int:
    """Return the longer age of the segment that the two ledgers prove."""

    def shows(line: dict[str, Any]) -> bool:
        if line["event"] == "seen":
            return bool(line["through"] >= base)
        return bool(line["event"] == "sealed" and line["base"] == base)

    return max(_passed([line for line in lines if "boot" in line], shows, now) for lines in (sealed, own))


def _passed(lines: list[dict[str, Any]], shows: Any, now: Moment) -> int:
    first = next((number for number, line in enumerate(lines) if shows(line)), None)
    if first is None:
        return 0
    moments = [Moment(line["boot"], line["boottime"]) for line in lines[first:]]
    return sum(
        later.boottime_ns - earlier.boottime_ns
        for earlier, later in zip(moments, [*moments[1:], now], strict=True)
        if earlier.boot == later.boot
    )
