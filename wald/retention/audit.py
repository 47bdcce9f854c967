"""Audit of deletions, using only the ledgers.

A deletion's ``reclaimed`` line must agree with the segment's ``sealed`` line, and prove one of these for each route:

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
from wald.retention.missing import span_text

EXPIRING = ("max_age", "max_bytes", "max_records", "pinned_max_bytes")
REPEATED = "another deletion covers some of the same records"


@dataclass(frozen=True, slots=True)
class Ruling:
    """Result of the audit of one line."""

    base: int
    errors: tuple[str, ...] = ()  # why the deletion was not allowed, or lacks a proof
    notes: tuple[str, ...] = ()
    unread_records: int = 0  # deleted unread, as the rule allows


class _MalformedLine(ValueError):
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
    unread_records = 0
    if not isinstance(line.get("routes"), list):
        reason = "its 'evidence' line is missing" if "evidence" in line else "no cursors are recorded"
        rule = line.get("rule", "no rule")
        errors.append(f"{reason} ({rule}), so nothing proves that the deletion was allowed")
    else:
        try:
            evidence, losses = _parse_evidence(line), _parse_losses(line)
            unread_records = sum(
                losses[route] for route, proof in evidence.items() if proof.expires and route in losses
            )
            errors.extend(_proof_errors(evidence, losses))
            if sealed is not None:
                errors.extend(_sealed_line_errors(line, evidence, sealed))
        except _MalformedLine as error:
            errors.append(str(error))
    if deleted is not None:
        if deleted.overlaps(line["base"], line["last"]):
            errors.append(REPEATED)
        deleted.add(line["base"], line["last"])
    if sealed is None:
        notes.append("no ledger line lists its contents when it was sealed")
    if exists:
        notes.append("the segment still exists; the next wald-reclaim deletes it or withdraws the line")
    return Ruling(line["base"], tuple(errors), tuple(notes), unread_records)


def audit_shrink(line: Entry, before: Entry | None) -> Ruling:
    """Check that a ``shrunk`` line proves that the shrink was allowed. ``before`` is the old file's line."""
    errors: list[str] = []
    dropped = line | {"routes": line.get("dropped"), "rule": "read"}
    try:
        evidence = _parse_evidence(dropped)
        errors.extend(_proof_errors(evidence, _parse_losses(dropped)))
        errors.extend(_run_errors(line))
        if before is not None:
            errors.extend(_content_errors(line, evidence, before))
    except _MalformedLine as error:
        errors.append(str(error))
    except (TypeError, BadRunLengths):
        errors.append("the line does not list the dropped records")
    notes = () if before is not None else ("no ledger line lists its contents before it was shrunk",)
    return Ruling(line["base"], tuple(f"shrink: {each}" for each in errors), notes)


def _proof_errors(by_route: dict[str, _Evidence], losses: dict[str, int]) -> Iterator[str]:
    for route, evidence in by_route.items():
        records, slowest = evidence.records, evidence.slowest
        if route in losses and evidence.expires:
            most = max(0, min(records.count, records.last - slowest))
            # the slowest cursor passed at most one record per sequence
            least = max(1, records.count - max(0, slowest - records.first + 1)) if slowest < records.last else 0
            if not least <= losses[route] <= most:
                yield f"{losses[route]} records of route {route} are listed as lost, but {least} to {most} were unread"
        elif evidence.cursors == {}:
            yield f"record {records.last} of route {route} was deleted, but no cursor of the route is recorded"
        elif slowest < records.last:
            cursors = evidence.cursors or {}
            behind = ", ".join(f"{group} at {at}" for group, at in cursors.items() if at < records.last)
            yield f"record {records.last} of route {route} was deleted before it was read by {behind}"
    for route in losses:
        if route not in by_route:
            yield f"the line records a loss on route {route}, but lists no records of it"


def _sealed_line_errors(line: Entry, evidence: dict[str, _Evidence], sealed: Entry) -> Iterator[str]:
    sealed_routes = _parse_sealed_routes(sealed)
    if line.get("damaged") and "sha256" not in line:  # the line lists only the readable records
        for route, entry in sorted(sealed_routes.items()):
            proof = evidence.get(route)
            if proof is None or not (proof.cursors is None or proof.slowest >= entry.last or proof.expires):
                yield f"the segment was damaged, and nothing proves that record {entry.last} of route {route} was read"
        return
    # a segment deleted raw has no digest; if it is sealed after all, another line deletes it
    for key in ("base", "last") if line.get("form") == "raw" else ("base", "last", "sha256"):
        if line.get(key) != sealed.get(key):
            yield f"its {key} is {line.get(key)}, but was {sealed.get(key)} when it was sealed"
    for route in sorted(sealed_routes.keys() | evidence.keys()):
        if route not in evidence:
            yield f"the line omits route {route}, of which the segment held {_describe(sealed_routes[route])}"
        elif route not in sealed_routes:
            yield f"the line names route {route}, of which the segment held nothing"
        elif evidence[route].records != sealed_routes[route]:
            yield _difference(route, evidence[route].records, sealed_routes[route])


def _content_errors(line: Entry, dropped: dict[str, _Evidence], before: Entry) -> Iterator[str]:
    listed_routes, former_routes = _add_dropped(_parse_sealed_routes(line), dropped), _parse_sealed_routes(before)
    for key, earlier in (("base", "base"), ("last", "last"), ("was_sha256", "sha256")):
        if line.get(key) != before.get(earlier):
            yield f"its {key} is {line.get(key)}, but was {before.get(earlier)} before"
    for route in sorted(former_routes.keys() | listed_routes.keys()):
        if listed_routes.get(route) != former_routes.get(route):
            yield _difference(route, listed_routes.get(route), former_routes.get(route))


def _run_errors(line: Entry) -> Iterator[str]:
    for route in line["dropped"]:
        runs = runs_of(line, route)
        if runs is None and not route["count"]:  # only pieces of a record that began earlier
            continue
        count, end = sum(last + 1 - first for first, last in runs or ()), max(runs or (), default=(0, 0))[1]
        if (count, end) != (route["count"], route["last"]):
            yield f"its runs of route {route['route']} differ from the records that it lists as dropped"


def _add_dropped(remaining: dict[str, RouteEntry], dropped: dict[str, _Evidence]) -> dict[str, RouteEntry]:
    contents = dict(remaining)
    for route, evidence in dropped.items():
        gone, rest = evidence.records, remaining.get(route)
        if rest is not None:  # an entry without records names one that began earlier
            first = min(gone.first if gone.count else rest.first, rest.first if rest.count else gone.first)
            gone = gone.plus(rest)._replace(first=first)
        contents[route] = gone
    return contents


def _parse_evidence(line: Entry) -> dict[str, _Evidence]:
    evidence: dict[str, _Evidence] = {}
    rule = line.get("rule")
    for entry in line["routes"]:
        try:
            route = str(entry["route"])
            records = RouteEntry(route, *map(_require_integer, (entry["count"], entry["first"], entry["last"])))
            retired = entry.get("retired") is True
            cursors = None if retired else {str(group): _require_integer(at) for group, at in entry["cursors"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise _MalformedLine("the line's list of routes is malformed") from error
        if route in evidence:
            raise _MalformedLine(f"the line lists route {route} twice")
        evidence[route] = _Evidence(records, cursors, entry.get("rule") if rule == "each_route" else rule)
    return evidence


def _parse_losses(line: Entry) -> dict[str, int]:
    losses = line.get("lost", {})
    if not isinstance(losses, dict):
        raise _MalformedLine("the line's list of losses is malformed")
    return {str(route): _require_integer(count) for route, count in losses.items()}


def _parse_sealed_routes(line: Entry) -> dict[str, RouteEntry]:
    try:
        return {
            str(name): RouteEntry(str(name), *map(_require_integer, (count, first, last)))
            for name, count, first, last, _ in line["routes"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise _MalformedLine("the sealed line does not list the segment's contents") from error


def _difference(route: str, listed: RouteEntry | None, held: RouteEntry | None) -> str:
    return f"of route {route}, the line lists {_describe(listed)}, but the segment held {_describe(held)}"


def _describe(records: RouteEntry | None) -> str:
    return "nothing" if records is None else f"{span_text(records.first, records.last)} ({records.count} in total)"


def _require_integer(value: object) -> int:
    if type(value) is not int:
        raise _MalformedLine(f"the line has {value!r} instead of a number")
    return value
