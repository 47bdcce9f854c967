"""Whether the log has every record of a time, and where those are that it does not have; for ``wald where --since``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from wald.errors import Damaged, Partial
from wald.format.times import nanoseconds, utc
from wald.hints import command_line
from wald.log import Log
from wald.retention.history import History
from wald.retention.missing import Missing
from wald.status.schema import time_fields


@dataclass(slots=True)
class Coverage:
    """What the log has of a route between two times, and what it does not have.

    Attributes:
        records: that are here, from ``first`` to ``last``; None if there is none.
        missing: what was removed or given up, each with whether a bundle holds all of it.
        damage: what cannot be read; it may hold records of this time.
        is_past: whether the time is over, so that no more records can come.
    """

    route: str | None
    since: datetime
    until: datetime
    is_past: bool
    records: int = 0
    first: int | None = None
    last: int | None = None
    missing: list[tuple[Missing, bool]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if all of it is here; as for a record that is lost, or that was reclaimed."""
        if self.damage or any(missing.lost for missing, _ in self.missing):
            return Damaged.exit_code
        return Partial.exit_code if self.missing else 0


def coverage(log: Log, route: str | None, since: datetime, until: datetime, *, now_ns: int) -> Coverage:
    """
    Raises:
        NotFound: no such route.
    """
    found = Coverage(route, since, until, nanoseconds(until) <= now_ns)
    missing: list[Missing] = []

    def damaged(error: Damaged) -> None:
        found.damage.append(error.message)

    for batch in log.batches(route, since, until, on_missing=missing.append, on_damage=damaged):
        found.records += batch.count
        found.first = found.first or batch.first_sequence
        found.last = batch.last_sequence
    history = History(log.root)
    for each in missing:
        routes = each.routes if route is None else {route}
        ends = {name: each.last_of_route.get(name, each.last) for name in routes}
        kept = bool(routes) and all(history.all_archived(name, each.first, last) for name, last in ends.items())
        found.missing.append((each, kept))
    return found


def text(log: Log, found: Coverage) -> Iterator[str]:
    """The answer in lines."""
    of = f"route {found.route}" if found.route else "all routes"
    span = f"{_moment(found.since)} to {_moment(found.until)} of {of}"
    count = f"{found.records} record{'s' * (found.records != 1)}"
    here = f"{count}, {found.first} to {found.last}" if found.records else "no record"
    if not found.missing and not found.damage:
        end = "" if found.is_past else "; the time is not over, and more may come"
        yield f"{span}: all here: {here}{end}"
        return
    yield f"{span}: not all here: {here}"
    for missing, kept in found.missing:
        yield f"  {missing.message()}"
        if kept:
            yield f"  all of these are in the archive {missing.archive}"
            yield f"  hint: {_restoring(missing, found.route)}"
        elif missing.archive:
            yield f"  some of these may be in the archive {missing.archive}"
            yield f"  hint: {_restoring(missing, found.route)}"
        else:
            yield "  no bundle has these"
            yield f"  hint: {command_line(log.root.path, f'where {missing.first}')} says why"
    yield from (f"  damaged: {message}" for message in found.damage)


def fields(found: Coverage) -> dict[str, object]:
    """The same as JSON."""
    missing = [
        {
            "first": each.first,
            "last": each.last,
            "records": each.records,
            "exact": each.exact,
            "archived": kept,
            "archive": each.archive,
            "lost": each.lost,
            "message": each.message(),
        }
        for each, kept in found.missing
    ]
    return {
        "route": found.route,
        **time_fields("since", nanoseconds(found.since)),
        **time_fields("until", nanoseconds(found.until)),
        "complete": found.exit_code == 0,
        "past": found.is_past,
        "records": found.records,
        "first": found.first,
        "last": found.last,
        "missing": missing,
        "damage": found.damage,
    }


def _restoring(missing: Missing, route: str | None) -> str:
    name = route or next(iter(sorted(missing.routes)), "ROUTE")
    last = missing.last_of_route.get(name, missing.last)
    return f"wald-archive restore {missing.archive} {name} --from {missing.first} --to {last}"


def _moment(time: datetime) -> str:
    return utc(nanoseconds(time))
