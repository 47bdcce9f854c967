"""Records that a reader asked for and that were reclaimed.

Records that were asked for and are reclaimed, or lost: how many, whether that is an error, and how to come by them.

A ledger's line about a reclaimed segment gives the sequences of each route in it, and its times. Where it does not,
the segment may have held what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from wald.errors import InvalidInput, NotFound
from wald.format.sealed_index import RouteEntry

POLICIES = ("error", "skip")


def lasts_of(held: Iterable[RouteEntry]) -> dict[str, int]:
    """Return the last sequence of each route."""
    lasts: dict[str, int] = {}
    for each in held:
        lasts[each.route] = max(each.last, lasts.get(each.route, 0))
    return lasts


class ReclaimedSegment(NamedTuple):
    """A reclaimed segment by the ledgers; None where they do not give its routes or its times."""

    first: int
    last: int
    routes: tuple[RouteEntry, ...] | None = None
    earliest_ns: int | None = None
    latest_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Wanted records that are not there any more.

    Attributes:
        root: of the log.
        first, last: between which sequences they were.
        records: how many; at most so many where not ``exact``.
        route: the route that was read; None: all.
        routes: those with records among them, as far as is known.
        last_of_route: the last record of each of them, no later than it can be.
        asked: whether these records were asked for: by a sequence, by a time, or by a cursor in front of them.
        group: the group of that cursor; None: no cursor.
        archive: where bundles of them are; None if the ledger knows of none.
        lost: why they are lost, when they were given up, and where their bytes are; "": they were reclaimed.
    """

    root: Path
    first: int
    last: int
    records: int
    exact: bool
    route: str | None
    routes: frozenset[str]
    asked: bool
    group: str | None = None
    archive: str | None = None
    last_of_route: dict[str, int] = field(default_factory=dict)
    lost: str = ""

    def message(self) -> str:
        """What is missing, as a sentence."""
        span = f"record {self.first}" if self.first == self.last else f"records {self.first} to {self.last}"
        count = f"{'' if self.exact else 'up to '}{self.records} {'record' if self.records == 1 else 'records'}"
        of = "" if self.route is None else f" of route {self.route}"
        are = "is" if self.records == 1 else "are"
        if self.lost:
            return f"{self.root / 'segments'}: {span} lost: {count}{of} {are} missing; {self.lost}"
        return f"{self.root / 'segments'}: RECLAIM has removed {span}: {count}{of} {are} missing"

    def error(self, *, stop: str | None = None, form: str = "", command: tuple[str, str] | None = None) -> NotFound:
        """Return the error, with a hint for where archives have them, and how to continue with the others.

        Args:
            stop: the end as the reader gave it, a sequence or a time.
            form: of the output, as an option to be given again.
            command: the reader's command without ``wald`` and its root: before and after the range; None: ``read``.
        """
        route = self.route or next(iter(sorted(self.routes)), "ROUTE")
        return NotFound(
            self.message(),
            case="records-missing",
            root=self.root,
            first=self.first,
            last=self.last,
            route=route,
            group=self.group,
            archive=self.archive,
            archived=self.last_of_route.get(route, self.last),
            stop=stop,
            form=form,
            command=command or (f"read {self.route or ''}".rstrip(), ""),
        )


def unless_lost(missing: Missing) -> None:
    """Pass over what a repair has given up, as an operator has accepted that.

    Raises:
        NotFound: the records were reclaimed.
    """
    if not missing.lost:
        raise missing.error()


OnMissing = Literal["error", "skip"] | Callable[[Missing], None] | None


def policy(on_missing: OnMissing) -> Callable[[Missing], None]:
    """What to do about missing records, as a function; None: an error if they were asked for.

    Raises:
        InvalidInput: there is no such policy.
    """
    if callable(on_missing):
        return on_missing
    if on_missing is not None and on_missing not in POLICIES:
        raise InvalidInput(f"invalid on_missing: {on_missing!r}", case="on-missing-unknown")

    def judge(missing: Missing) -> None:
        if on_missing == "error" or (on_missing is None and missing.asked):
            raise missing.error()

    return judge


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of reclaimed segments was wanted.

    Attributes:
        floor: the first sequence wanted of a route.
        routes: None: all.
        first: the first of any route; ``last``: of all.
        from_ns, until_ns: append times, from ≤ t < until.
    """

    floor: Callable[[str], int]
    routes: frozenset[str] | None
    first: int
    last: int
    from_ns: int = -(1 << 63)
    until_ns: int = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Count:
    """How many records were wanted, of which routes, in which range; at most so many where not ``exact``.

    Attributes:
        last_of_route: of each route, the last.
    """

    first: int = 0
    last: int = 0
    records: int = 0
    exact: bool = True
    routes: frozenset[str] = frozenset()
    last_of_route: dict[str, int] = field(default_factory=dict)


def count(gone: Iterable[ReclaimedSegment], wanted: Wanted) -> Count:
    """What of ``gone`` was wanted."""
    total = Count()
    for segment in gone:
        if segment.latest_ns is not None and segment.latest_ns < wanted.from_ns:
            continue
        if segment.earliest_ns is not None and segment.earliest_ns >= wanted.until_ns:
            continue
        within = (
            segment.earliest_ns is not None
            and segment.latest_ns is not None
            and wanted.from_ns <= segment.earliest_ns
            and segment.latest_ns < wanted.until_ns
        )
        for held in _held(segment, wanted):
            first, last = max(held.first, wanted.floor(held.route)), min(held.last, wanted.last)
            if first > last:
                continue
            exact = (first, last) == (held.first, held.last) and held.count > 0 and (within or _timeless(wanted))
            records = min(held.count or last - first + 1, last - first + 1)
            total = replace(
                total,
                # A record of which it had only pieces began before the segment.
                first=min(total.first or wanted.last, max(segment.first, wanted.first), first),
                last=max(total.last, min(segment.last, wanted.last)),
                records=total.records + records,
                exact=total.exact and exact,
                routes=total.routes | ({held.route} if held.route else set()),
                last_of_route=total.last_of_route | {held.route: max(last, total.last_of_route.get(held.route, 0))},
            )
    return total


def _held(segment: ReclaimedSegment, wanted: Wanted) -> Iterable[RouteEntry]:
    """What it held of the wanted routes; where that is not known, maybe all of it."""
    if segment.routes is not None:
        return [held for held in segment.routes if wanted.routes is None or held.route in wanted.routes]
    if wanted.routes is None:
        return [RouteEntry("", 0, max(segment.first, wanted.first), segment.last)]
    return [RouteEntry(route, 0, segment.first, segment.last) for route in sorted(wanted.routes)[:1]]


def _timeless(wanted: Wanted) -> bool:
    return wanted.from_ns == -(1 << 63) and wanted.until_ns == (1 << 63) - 1
