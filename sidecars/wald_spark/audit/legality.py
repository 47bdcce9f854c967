"""Was a deletion legal? The ledger's lines in, a ruling out, nothing else.

A segment may be deleted when, for each route in it, one of these holds, by what the line about it has recorded before:

    it is retired                               {"route": …, "retired": true}
    every cursor has reached its last record    {"route": …, "last": 250, "cursors": {"processed": 250, …}}
    it was to expire, whoever has read it       "rule": "max_age", "max_bytes" or "max_records", "lost": {"<route>": 12}

The last of them is legal and a loss all the same, so it is counted. What the line says was in the segment has to be
what the ``sealed`` line says, too, which another program wrote when it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from wald.store.retention.history import Entry

EXPIRING = ("max_age", "max_bytes", "max_records")


@dataclass(frozen=True, slots=True)
class Ruling:
    """On one deletion.

    Attributes:
        errors: why it was not legal, or that it cannot be proven to have been.
        notes: what else is worth knowing.
        lost: how many records were deleted unread, as the rule has it.
    """

    base: int
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lost: int = 0


class _Malformed(ValueError):
    """The line is not as wald-reclaim writes it."""


@dataclass(frozen=True, slots=True)
class _Route:
    """What a segment held of a route."""

    count: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.count} records, {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a deletion rests on for one route; ``cursors`` is None for one that was retired."""

    held: _Route
    cursors: dict[str, int] | None

    @property
    def slowest(self) -> int:
        """As far as everybody had read; where there was no cursor nobody had."""
        return self.held.last if self.cursors is None else min(self.cursors.values(), default=0)


@dataclass(slots=True)
class _Bench:
    """Where one deletion is judged."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: int = 0

    def claims(self, line: Entry) -> None:
        """By what it rests on itself."""
        claims, lost = _claims(line), _lost(line)
        expiring = line.get("rule") in EXPIRING
        for route, claim in claims.items():
            told, last = lost.pop(route, None), claim.held.last
            if told is not None and expiring:
                self._expired(route, claim, told)
            elif claim.cursors is not None and not claim.cursors:
                self.errors.append(f"no cursor of route {route} is recorded, and record {last} of it was deleted")
            elif claim.slowest < last:
                behind = ", ".join(f"{group} at {at}" for group, at in (claim.cursors or {}).items() if at < last)
                self.errors.append(f"record {last} of route {route} was deleted, and not read by {behind}")
        for route in lost:
            self.errors.append(f"it tells of a loss on route {route}, of which it held nothing")

    def sealed(self, line: Entry, sealed: Entry) -> None:
        """By what the segment held when it was sealed."""
        held, claims = _sealed_routes(sealed), _claims(line)
        if line.get("damaged") and "sha256" not in line:
            self._damaged(held, claims, expiring=line.get("rule") in EXPIRING)
            return
        for key in ("base", "last", "sha256"):
            if line.get(key) != sealed.get(key):
                self.errors.append(f"its {key} is {line.get(key)}, and was {sealed.get(key)} when it was sealed")
        claimed = {route: claim.held for route, claim in claims.items()}
        for route in sorted(held.keys() | claimed.keys()):
            if route not in claimed:
                self.errors.append(f"it leaves out route {route}, of which it held {held[route]}")
            elif route not in held:
                self.errors.append(f"it tells of route {route}, of which it held nothing")
            elif claimed[route] != held[route]:
                self.errors.append(f"of route {route} it tells of {claimed[route]}, and it held {held[route]}")

    def _damaged(self, held: dict[str, _Route], claims: dict[str, _Claim], *, expiring: bool) -> None:
        """By what it held; the line tells only what was left of it, for its index could not be read."""
        for route, whole in sorted(held.items()):
            claim = claims.get(route)
            retired = claim is not None and claim.cursors is None
            read = claim is not None and claim.slowest >= whole.last
            if not (retired or read or (claim is not None and expiring)):
                words = f"it was damaged, and nothing proves that record {whole.last} of route {route} was read"
                self.errors.append(words)

    def _expired(self, route: str, claim: _Claim, told: int) -> None:
        self.lost += told
        held = claim.held
        most = max(0, min(held.count, held.last - claim.slowest))
        # Between the cursor and the last record there is that one at least, and all that the cursor cannot have passed.
        least = max(1, held.count - max(0, claim.slowest - held.first + 1)) if claim.slowest < held.last else 0
        if not least <= told <= most:
            self.errors.append(f"it tells of {told} lost records of route {route}, and {least} to {most} were unread")


def judge(line: Entry, sealed: Entry | None, *, there: bool = False) -> Ruling:
    """The ruling on the deletion that a line ``reclaimed`` tells of.

    Args:
        sealed: the ``sealed`` line of the segment; None if the ledger has none.
        there: whether the segment can still be read.
    """
    bench = _Bench()
    if not isinstance(line.get("routes"), list):
        bench.errors.append(
            f"no cursors are recorded ({line.get('rule', 'no rule')}): nobody can prove that it was legal"
        )
    else:
        try:
            bench.claims(line)
            if sealed is not None:
                bench.sealed(line, sealed)
        except _Malformed as error:
            bench.errors.append(str(error))
    if sealed is None:
        bench.notes.append("no ledger tells what it held when it was sealed")
    if there:
        bench.notes.append("it is still there; the next wald-reclaim deletes it, or takes the line back")
    return Ruling(line["base"], tuple(bench.errors), tuple(bench.notes), bench.lost)


def overlaps(lines: Sequence[Entry]) -> Iterator[Ruling]:
    """The deletions that hold records of the one before, of ``lines`` in the order of their segments."""
    end = 0
    for line in lines:
        if line["base"] <= end:
            yield Ruling(line["base"], (f"it begins at or before record {end}, where the one before it ends",))
        end = max(end, line["last"])


def _claims(line: Entry) -> dict[str, _Claim]:
    claims: dict[str, _Claim] = {}
    for told in line["routes"]:
        try:
            route, held = str(told["route"]), _route(told["count"], told["first"], told["last"])
            cursors = (
                None if told.get("retired") is True else {str(g): _number(at) for g, at in told["cursors"].items()}
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise _Malformed("the line does not tell of routes as wald-reclaim does") from error
        if route in claims:
            raise _Malformed(f"the line tells of route {route} twice")
        claims[route] = _Claim(held, cursors)
    return claims


def _lost(line: Entry) -> dict[str, int]:
    lost = line.get("lost", {})
    if not isinstance(lost, dict):
        raise _Malformed("the line does not tell of losses as wald-reclaim does")
    return {str(route): _number(count) for route, count in lost.items()}


def _sealed_routes(line: Entry) -> dict[str, _Route]:
    try:
        return {str(name): _route(count, first, last) for name, count, first, last, _bytes in line["routes"]}
    except (KeyError, TypeError, ValueError) as error:
        raise _Malformed("the sealed line does not tell what it held") from error


def _route(*numbers: object) -> _Route:
    return _Route(*map(_number, numbers))


def _number(told: object) -> int:
    if type(told) is not int:
        raise _Malformed(f"the line has {told!r} where a number belongs")
    return told
