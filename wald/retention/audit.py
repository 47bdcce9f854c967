"""Audit of deletions, using only the ledgers.

The ``reclaimed`` line of a deletion must agree with the ``sealed`` line of the segment, and prove one of these for each
route:

    the route is retired                        {"route": …, "retired": true}
    every cursor has reached its last record    {"route": …, "last": 250, "cursors": {"processed": 250, …}}
    its records expire, read or unread          "rule": "max_age", "lost": {"<route>": 12}

A shrink needs the first or second proof, and its dropped and remaining records together must be the former contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wald.format.ledger_lines import Entry
from wald.format.sealed_index import RouteEntry
from wald.format.spans import BadRunLengths, Spans
from wald.retention.history import runs_of

EXPIRING = ("max_age", "max_bytes", "max_records", "pinned_max_bytes")
REPEATED = "another deletion has some of its records"


@dataclass(frozen=True, slots=True)
class Ruling:
    """Result of an audit."""

    base: int
    errors: tuple[str, ...] = ()  # why the deletion was not allowed, or is not proven to be
    notes: tuple[str, ...] = ()
    lost: int = 0  # records deleted unread, as the rule allows


class _Malformed(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class _Evidence:
    records: RouteEntry
    cursors: dict[str, int] | None  # None if retired
    rule: object

    @property
    def expires(self) -> bool:
        return self.rule in EXPIRING

    @property
    def slowest(self) -> int:
        """Last record that every group had read, or 0 without a cursor."""
        return self.records.last if self.cursors is None else min(self.cursors.values(), default=0)


def audit_deletion(line: Entry, sealed: Entry | None, *, exists: bool = False, deleted: Spans | None = None) -> Ruling:
    """Check that a ``reclaimed`` line proves that its deletion was allowed. Add its records to ``deleted``."""
    errors: list[str] = []
    notes: list[str] = []
    unread = 0
    if not isinstance(line.get("routes"), list):
        reason = "its 'evidence' line is missing" if "evidence" in line else "no cursors are recorded"
        rule = line.get("rule", "no rule")
        errors.append(f"{reason} ({rule}): it cannot be proven that the deletion was allowed")
    else:
        try:
            evidence, lost = _evidence(line), _lost(line)
            unread = sum(count for route, count in lost.items() if route in evidence and evidence[route].expires)
            errors.extend(_unproven(evidence, lost))
            if sealed is not None:
                errors.extend(_unlike_sealed(line, evidence, sealed))
        except _Malformed as error:
            errors.append(str(error))
    if deleted is not None:
        if deleted.overlaps(line["base"], line["last"]):
            errors.append(REPEATED)
        deleted.add(line["base"], line["last"])
    if sealed is None:
        notes.append("no ledger records its contents when it was sealed")
    if exists:
        notes.append("it still exists; the next wald-reclaim deletes it, or withdraws the line")
    return Ruling(line["base"], tuple(errors), tuple(notes), unread)


def audit_shrink(line: Entry, before: Entry | None) -> Ruling:
    """Check that a ``shrunk`` line proves that the shrink was allowed. ``before`` is the line about the old file."""
    errors: list[str] = []
    dropped = line | {"routes": line.get("dropped"), "rule": "read"}
    try:
        evidence = _evidence(dropped)
        errors.extend(_unproven(evidence, _lost(dropped)))
        errors.extend(_wrong_runs(line))
        if before is not None:
            errors.extend(_incomplete(line, evidence, before))
    except _Malformed as error:
        errors.append(str(error))
    except (TypeError, BadRunLengths):
        errors.append("the line does not say what it dropped")
    notes = () if before is not None else ("no ledger records its contents before it was shrunk",)
    return Ruling(line["base"], tuple(f"shrink: {each}" for each in errors), notes)


def _unproven(by_route: dict[str, _Evidence], lost: dict[str, int]) -> Iterator[str]:
    for route, evidence in by_route.items():
        held, slowest = evidence.records, evidence.slowest
        if route in lost and evidence.expires:
            most = max(0, min(held.count, held.last - slowest))
            # the slowest cursor passed at most one record per sequence
            least = max(1, held.count - max(0, slowest - held.first + 1)) if slowest < held.last else 0
            if not least <= lost[route] <= most:
                yield f"it records {lost[route]} lost records of route {route}, and {least} to {most} were unread"
        elif evidence.cursors == {}:
            yield f"record {held.last} of route {route} was deleted, and no cursor of the route is recorded"
        elif slowest < held.last:
            cursors = evidence.cursors or {}
            behind = ", ".join(f"{group} at {at}" for group, at in cursors.items() if at < held.last)
            yield f"record {held.last} of route {route} was deleted, and not read by {behind}"
    for route in lost:
        if route not in by_route:
            yield f"it records a loss on route {route}, of which it held nothing"


def _unlike_sealed(line: Entry, evidence: dict[str, _Evidence], sealed: Entry) -> Iterator[str]:
    held = _sealed_routes(sealed)
    if line.get("damaged") and "sha256" not in line:  # the line lists only the readable records
        for route, entry in sorted(held.items()):
            found = evidence.get(route)
            if found is None or not (found.cursors is None or found.slowest >= entry.last or found.expires):
                yield f"it was damaged, and nothing proves that record {entry.last} of route {route} was read"
        return
    # a segment deleted raw has no digest; if it is sealed after all, another line deletes it
    for key in ("base", "last") if line.get("form") == "raw" else ("base", "last", "sha256"):
        if line.get(key) != sealed.get(key):
            yield f"its {key} is {line.get(key)}, and was {sealed.get(key)} when it was sealed"
    for route in sorted(held.keys() | evidence.keys()):
        if route not in evidence:
            yield f"it leaves out route {route}, of which it held {_text(held[route])}"
        elif route not in held:
            yield f"it names route {route}, of which it held nothing"
        elif (claimed := evidence[route].records) != held[route]:
            yield f"of route {route} it records {_text(claimed)}, and it held {_text(held[route])}"


def _incomplete(line: Entry, dropped: dict[str, _Evidence], before: Entry) -> Iterator[str]:
    claimed, held = _with_dropped(_sealed_routes(line), dropped), _sealed_routes(before)
    for key, earlier in (("base", "base"), ("last", "last"), ("was_sha256", "sha256")):
        if line.get(key) != before.get(earlier):
            yield f"its {key} is {line.get(key)}, and was {before.get(earlier)} before"
    for route in sorted(held.keys() | claimed.keys()):
        if claimed.get(route) != held.get(route):
            yield f"of route {route} it records {_text(claimed.get(route))}, and it held {_text(held.get(route))}"


def _wrong_runs(line: Entry) -> Iterator[str]:
    for route in line["dropped"]:
        runs = runs_of(line, route)
        if runs is None and not route["count"]:  # only pieces of a record that began earlier
            continue
        count, end = sum(last + 1 - first for first, last in runs or ()), max(runs or (), default=(0, 0))[1]
        if (count, end) != (route["count"], route["last"]):
            yield f"its runs of route {route['route']} are not the records that it says to be dropped"


def _with_dropped(remaining: dict[str, RouteEntry], dropped: dict[str, _Evidence]) -> dict[str, RouteEntry]:
    whole = dict(remaining)
    for route, evidence in dropped.items():
        one, other = evidence.records, remaining.get(route)
        if other is not None:  # an entry without records names one that began earlier
            first = min(one.first if one.count else other.first, other.first if other.count else one.first)
            one = one.plus(other)._replace(first=first)
        whole[route] = one
    return whole


def _evidence(line: Entry) -> dict[str, _Evidence]:
    found: dict[str, _Evidence] = {}
    rule = line.get("rule")
    for entry in line["routes"]:
        try:
            route = str(entry["route"])
            records = RouteEntry(route, *map(_number, (entry["count"], entry["first"], entry["last"])))
            retired = entry.get("retired") is True
            cursors = None if retired else {str(group): _number(at) for group, at in entry["cursors"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise _Malformed("the line does not list routes as wald-reclaim does") from error
        if route in found:
            raise _Malformed(f"the line lists route {route} twice")
        found[route] = _Evidence(records, cursors, entry.get("rule") if rule == "each_route" else rule)
    return found


def _lost(line: Entry) -> dict[str, int]:
    lost = line.get("lost", {})
    if not isinstance(lost, dict):
        raise _Malformed("the line does not list losses as wald-reclaim does")
    return {str(route): _number(count) for route, count in lost.items()}


def _sealed_routes(line: Entry) -> dict[str, RouteEntry]:
    try:
        return {
            str(name): RouteEntry(str(name), *map(_number, (count, first, last)))
            for name, count, first, last, _ in line["routes"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise _Malformed("the sealed line does not list the contents") from error


def _text(held: RouteEntry | None) -> str:
    return "nothing" if held is None else f"{held.count} records, {held.first} to {held.last}"


def _number(value: object) -> int:
    if type(value) is not int:
        raise _Malformed(f"the line has {value!r} instead of a number")
    return value
