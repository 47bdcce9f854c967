"""Audit of a deletion against the evidence in its ledger line.

Whether a deletion or a relief was legal, judged by the lines of the ledgers alone.

A segment may be deleted if one of these holds for each route in it, by the line that was written before the deletion:

    it is retired                               {"route": …, "retired": true}
    every cursor has reached its last record    {"route": …, "last": 250, "cursors": {"processed": 250, …}}
    it was to expire, read or unread            "rule": "max_age", "lost": {"<route>": 12}

The last one is legal, but records are lost, so they are counted. Its rule is one of ``EXPIRING``. If routes go by
different rules, the line says "rule": "each_route", and each route in it has its own. The line also has to agree on
what the segment held with the ``sealed`` line, which the daemon wrote when it sealed the segment. Where it leaves its
routes to a line ``excused``, that has the cursors, and the ``sealed`` line says what they must have reached.

Of what a relief has dropped, the same must hold for each route, but for the last way. With what it says is left, that
must be what the segment held before, by the ``sealed`` line or by the line of an earlier relief.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wald.format.ledger_lines import Entry
from wald.format.sealed_index import RouteEntry
from wald.format.spans import BadRunLengths, Spans
from wald.retention.history import runs_of

EXPIRING = ("max_age", "max_bytes", "max_records", "pinned_max_bytes")
REPEATED = "another deletion has some of its records"


@dataclass(frozen=True, slots=True)
class Ruling:
    """The judgement of one deletion.

    Attributes:
        errors: why it was not legal, or why that cannot be proven.
        notes: other facts worth knowing.
        lost: how many records were deleted unread, as the rule allows.
    """

    base: int
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lost: int = 0


class _Malformed(ValueError):
    """The line is not as wald-reclaim writes it."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What justifies a deletion for one route; ``cursors`` is None if the route was retired."""

    held: RouteEntry
    cursors: dict[str, int] | None
    rule: object

    @property
    def expiring(self) -> bool:
        """Whether its rule lets unread records go."""
        return self.rule in EXPIRING

    @property
    def slowest(self) -> int:
        """The record up to which all groups had read; 0 if there was no cursor."""
        return self.held.last if self.cursors is None else min(self.cursors.values(), default=0)


@dataclass(slots=True)
class _Judgement:
    """Collects errors and notes on one deletion."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: int = 0

    def check_claims(self, line: Entry) -> None:
        """Check what the line itself gives as justification."""
        claims, lost = _claims(line), _lost(line)
        for route, claim in claims.items():
            expired, last = lost.pop(route, None), claim.held.last
            if expired is not None and claim.expiring:
                self._check_expired(route, claim, expired)
            elif claim.cursors is not None and not claim.cursors:
                self.errors.append(f"no cursor of route {route} is recorded, and record {last} of it was deleted")
            elif claim.slowest < last:
                behind = ", ".join(f"{group} at {at}" for group, at in (claim.cursors or {}).items() if at < last)
                self.errors.append(f"record {last} of route {route} was deleted, and not read by {behind}")
        for route in lost:
            self.errors.append(f"it records a loss on route {route}, of which it held nothing")

    def check_sealed(self, line: Entry, sealed: Entry) -> None:
        """Check the line against what the segment held when it was sealed."""
        held, claims = _sealed_routes(sealed), _claims(line)
        if line.get("damaged") and "sha256" not in line:
            self._check_damaged(held, claims)
            return
        # The digest of a segment that is deleted raw is not known; one sealed meanwhile is deleted by another line.
        for key in ("base", "last") if line.get("form") == "raw" else ("base", "last", "sha256"):
            if line.get(key) != sealed.get(key):
                self.errors.append(f"its {key} is {line.get(key)}, and was {sealed.get(key)} when it was sealed")
        claimed = {route: claim.held for route, claim in claims.items()}
        for route in sorted(held.keys() | claimed.keys()):
            if route not in claimed:
                self.errors.append(f"it leaves out route {route}, of which it held {_text(held[route])}")
            elif route not in held:
                self.errors.append(f"it names route {route}, of which it held nothing")
            elif claimed[route] != held[route]:
                self.errors.append(
                    f"of route {route} it records {_text(claimed[route])}, and it held {_text(held[route])}"
                )

    def check_whole(self, line: Entry, before: Entry, whole: dict[str, RouteEntry]) -> None:
        """Check that a relief has left or dropped all that the segment held before."""
        held = _sealed_routes(before)
        for key, earlier in (("base", "base"), ("last", "last"), ("was_sha256", "sha256")):
            if line.get(key) != before.get(earlier):
                self.errors.append(f"its {key} is {line.get(key)}, and was {before.get(earlier)} before")
        for route in sorted(held.keys() | whole.keys()):
            if whole.get(route) != held.get(route):
                now, then = _text(whole.get(route)), _text(held.get(route))
                self.errors.append(f"of route {route} it records {now}, and it held {then}")

    def check_runs(self, line: Entry) -> None:
        """Check that the runs of a relief are of as many records as it says, up to the last one."""
        for route in line["dropped"]:
            runs = runs_of(line, route)
            ends = [] if runs is None else [sum(last + 1 - first for first, last in runs), max(runs, default=(0, 0))[1]]
            if runs is not None and ends != [route["count"], route["last"]]:
                self.errors.append(f"its runs of route {route['route']} are not the records that it says to be dropped")

    def _check_damaged(self, held: dict[str, RouteEntry], claims: dict[str, _Claim]) -> None:
        """Check a segment whose index could not be read, so that the line has only what was left of it."""
        for route, sealed in sorted(held.items()):
            claim = claims.get(route)
            retired = claim is not None and claim.cursors is None
            read = claim is not None and claim.slowest >= sealed.last
            if not (retired or read or (claim is not None and claim.expiring)):
                self.errors.append(
                    f"it was damaged, and nothing proves that record {sealed.last} of route {route} was read"
                )

    def _check_expired(self, route: str, claim: _Claim, expired: int) -> None:
        self.lost += expired
        held = claim.held
        most = max(0, min(held.count, held.last - claim.slowest))
        # Unread are at least the last record, and all those that the cursor cannot have passed.
        least = max(1, held.count - max(0, claim.slowest - held.first + 1)) if claim.slowest < held.last else 0
        if not least <= expired <= most:
            self.errors.append(f"it records {expired} lost records of route {route}, and {least} to {most} were unread")


def judge(line: Entry, sealed: Entry | None, *, there: bool = False) -> Ruling:
    """The ruling on the deletion that a line ``reclaimed`` records.

    Args:
        line: with its routes, as :meth:`wald.retention.history.History.completed` gives it.
        sealed: the ``sealed`` line of the segment; None if the ledger has none.
        there: whether the segment still exists.
    """
    judgement = _Judgement()
    if not isinstance(line.get("routes"), list):
        what = "its line 'excused' is missing" if "excused" in line else "no cursors are recorded"
        judgement.errors.append(f"{what} ({line.get('rule', 'no rule')}): it cannot be proven that it was legal")
    else:
        try:
            judgement.check_claims(line)
            if sealed is not None:
                judgement.check_sealed(line, sealed)
        except _Malformed as error:
            judgement.errors.append(str(error))
    if sealed is None:
        judgement.notes.append("no ledger records what it held when it was sealed")
    if there:
        judgement.notes.append("it still exists; the next wald-reclaim deletes it, or withdraws the line")
    return Ruling(line["base"], tuple(judgement.errors), tuple(judgement.notes), judgement.lost)


def judge_relief(line: Entry, before: Entry | None) -> Ruling:
    """The ruling on the relief that a line ``relieved`` records.

    Args:
        before: the line that says what the segment held before, ``sealed`` or ``relieved``; None: no ledger has it.
    """
    judgement = _Judgement()
    dropped = line | {"routes": line.get("dropped"), "rule": "read"}
    try:
        judgement.check_claims(dropped)
        judgement.check_runs(line)
        if before is not None:
            whole = _joined(_sealed_routes(line), _claims(dropped))
            judgement.check_whole(line, before, whole)
    except (_Malformed, TypeError, BadRunLengths) as error:
        judgement.errors.append(
            str(error) if isinstance(error, _Malformed) else "the line does not say what it dropped"
        )
    if before is None:
        judgement.notes.append("no ledger records what it held before it was relieved")
    errors = (f"relief: {each}" for each in judgement.errors)
    return Ruling(line["base"], tuple(errors), tuple(judgement.notes))


def _joined(left: dict[str, RouteEntry], dropped: dict[str, _Claim]) -> dict[str, RouteEntry]:
    """What a segment held of each route, by what is left of it and what was dropped."""
    whole = dict(left)
    for route, claim in dropped.items():
        one, other = claim.held, left.get(route)
        if other is not None:  # pieces of a record that begins elsewhere do not count as its first
            first = min(one.first if one.count else other.first, other.first if other.count else one.first)
            one = one.plus(other)._replace(first=first)
        whole[route] = one
    return whole


class Overlaps:
    """Finds the deletions that have a record of an earlier one that it was asked about."""

    def __init__(self) -> None:
        self._deleted = Spans()

    def check(self, line: Entry, ruling: Ruling) -> Ruling:
        """The ruling on ``line``, with the overlap if there is one."""
        base, last = line["base"], line["last"]
        if self._deleted.meets(base, last):
            ruling = replace(ruling, errors=(*ruling.errors, REPEATED))
        self._deleted.add(base, last)
        return ruling


def _claims(line: Entry) -> dict[str, _Claim]:
    claims: dict[str, _Claim] = {}
    rule = line.get("rule")
    for entry in line["routes"]:
        try:
            route, held = (
                str(entry["route"]),
                _route(str(entry["route"]), entry["count"], entry["first"], entry["last"]),
            )
            cursors = (
                None if entry.get("retired") is True else {str(g): _number(at) for g, at in entry["cursors"].items()}
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise _Malformed("the line does not list routes as wald-reclaim does") from error
        if route in claims:
            raise _Malformed(f"the line lists route {route} twice")
        claims[route] = _Claim(held, cursors, entry.get("rule") if rule == "each_route" else rule)
    return claims


def _lost(line: Entry) -> dict[str, int]:
    lost = line.get("lost", {})
    if not isinstance(lost, dict):
        raise _Malformed("the line does not list losses as wald-reclaim does")
    return {str(route): _number(count) for route, count in lost.items()}


def _sealed_routes(line: Entry) -> dict[str, RouteEntry]:
    try:
        return {str(name): _route(str(name), count, first, last) for name, count, first, last, _ in line["routes"]}
    except (KeyError, TypeError, ValueError) as error:
        raise _Malformed("the sealed line does not say what it held") from error


def _route(name: str, *numbers: object) -> RouteEntry:
    return RouteEntry(name, *map(_number, numbers))


def _text(held: RouteEntry | None) -> str:
    return "nothing" if held is None else f"{held.count} records, {held.first} to {held.last}"


def _number(value: object) -> int:
    if type(value) is not int:
        raise _Malformed(f"the line has {value!r} where a number belongs")
    return value
