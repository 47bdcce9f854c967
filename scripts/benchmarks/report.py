"""Rows of the table: measurements of wald and of a peer, their ratio, and whether it reaches the goal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Goal:
    """Promise about a number: about the ratio wald / peer, or, without a peer, about wald's number.

    Attributes:
        bound: the smallest allowed value; with ``at_most`` the largest.
    """

    bound: float
    at_most: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        ours, theirs: medians, in ``unit``.
        spread: lowest and highest of ours.
    """

    group: str
    what: str
    unit: str
    ours: float
    peer: str = ""
    theirs: float | None = None
    goal: Goal | None = None
    spread: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def reached(self) -> bool | None:
        value = self.ratio if self.peer else self.ours
        return None if self.goal is None or value is None else self.goal.reached(value)

    def as_json(self) -> dict[str, object]:
        goal = None if self.goal is None else str(self.goal)
        return asdict(self) | {"ratio": self.ratio, "goal": goal, "reached": self.reached}


@dataclass
class Samples:
    """Repeated measurements of several contenders, which take turns so that a disturbance affects all."""

    values: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def alternate(cls, contenders: dict[str, Callable[[], float]], repeat: int) -> Samples:
        samples = cls({name: [] for name in contenders})
        for _ in range(repeat):
            for name, measure in contenders.items():
                samples.values[name].append(measure())
        return samples

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def spread(self, name: str) -> tuple[float, float]:
        return min(self.values[name]), max(self.values[name])

    def rows(self, group: str, unit: str, ours: tuple[str, str], goals: dict[str, Goal | None]) -> list[Row]:
        """Return a row for each peer in ``goals`` that was measured; ``ours`` is our contender and its description."""
        name, what = ours
        return [
            Row(group, what, unit, self.median(name), peer, self.median(peer), goal, self.spread(name))
            for peer, goal in goals.items()
            if peer in self.values
        ]


def table(rows: Sequence[Row]) -> str:
    """Format rows for people, and for a README."""
    lines = []
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            lines += ["", f"{group}", f"  {'':48}{'wald':>9}  {'':26}{'theirs':>9}  {'ratio':>6}  {'goal':>7}"]
        theirs = "" if row.theirs is None else number(row.theirs)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else str(row.goal)
        mark = {True: "yes", False: "no", None: ""}[row.reached]
        what = f"{row.what}, {row.unit}"
        lines.append(
            f"  {what:48}{number(row.ours):>9}  {row.peer:26}{theirs:>9}  {ratio:>6}  {goal:>7}  {mark}".rstrip()
        )
    return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
