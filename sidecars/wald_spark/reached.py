"""How far a job has done a log: a route whose newest record has not ended yet holds back itself, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wald_spark.blocks import Range
from wald_spark.ends import End


@dataclass(frozen=True, slots=True)
class Reached:
    """Up to where the records of a log are done.

    Attributes:
        last: of all routes but those in ``held``.
        held: of each route that was held back by a record without an end, the last one that is done.
    """

    last: int
    held: Mapping[str, int] = field(default_factory=dict)

    def to(self, end: End) -> Reached:
        """As far as a job can get now; no further, where nobody can say which routes are held back and which not."""
        unknown = end.routes is None and (end.begun or self.held)
        if unknown or end.last < self.last:
            return self
        return Reached(end.last, {route: begun - 1 for route, begun in end.begun.items()})

    def ranges(self, after: Reached, end: End, wanted: frozenset[str] | None) -> list[Range]:
        """The records from here to ``after``, each once.

        Args:
            end: what ``after`` was made of.
            wanted: the routes; None: all.
        """
        apart = {*self.held, *after.held} if wanted is None else {*self.held, *after.held} & wanted
        others = wanted
        if apart:
            others = (end.routes or frozenset()) - apart
        ranges = [Range(others, self.last + 1, after.last)]
        ranges += [
            Range(frozenset({route}), self.held.get(route, self.last) + 1, after.held.get(route, after.last))
            for route in sorted(apart)
        ]
        return [each for each in ranges if each.first <= each.last and (each.routes is None or each.routes)]
