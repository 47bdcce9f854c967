"""What a run leaves for the next one: the routes whose newest record has begun and not ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from wald_spark.since import Portion


@dataclass(slots=True)
class Held:
    """Of all logs of one run.

    Attributes:
        routes: as JSON has them, a dict for each.
    """

    routes: list[dict[str, str | int]] = field(default_factory=list)

    def add(self, portion: Portion) -> None:
        self.routes += [
            {"root": str(portion.place.root.path), "route": route, "record": last + 1}
            for route, last in sorted(portion.after.held.items())
        ]

    def lines(self) -> Iterator[str]:
        """A line for each route."""
        for each in self.routes:
            yield (
                f"{each['root']}: route {each['route']} waits: record {each['record']} has begun and not ended; "
                "other routes go on"
            )
