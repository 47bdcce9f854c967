"""The groups that hold back segments, for many segments: compared in columns, without a step for each route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import lt
from typing import overload

from wald.format.tables import RouteTable
from wald.store.retention.pins import Claims, Pin


@dataclass(frozen=True, slots=True)
class Holders:
    """The groups that can hold back segments with certain routes.

    Attributes:
        numbers: the number of each group's route among the routes; of the rest likewise one per group.
        groups: route and group; ``ats``: up to where it has processed; ``messages``: what is wrong with its cursor.
    """

    numbers: tuple[int, ...]
    groups: tuple[tuple[str, str], ...]
    ats: tuple[int, ...]
    messages: tuple[str, ...]

    def pins(self, routes: RouteTable) -> Pins:
        """Those that hold back a segment."""
        return Pins(self, bytes(map(lt, self.ats, map(routes.lasts.__getitem__, self.numbers))), routes.lasts)


def holders_of(claims: Claims, names: Sequence[str]) -> Holders:
    """The groups that can hold back segments with the routes ``names``."""
    rows = [
        (number, (route, group), at, message)
        for number, route in enumerate(names)
        for group, at, message in claims.gating(route)
    ]
    return Holders(*zip(*rows, strict=True)) if rows else Holders((), (), (), ())


@dataclass(frozen=True, slots=True, eq=False)
class Pins(Sequence[Pin]):
    """What holds back one segment; each pin is made when it is asked for, for there may be thousands.

    Attributes:
        marks: for each group of ``holders`` 1 if it holds the segment back, 0 if not.
        lasts: the last record of each route in it.
    """

    holders: Holders
    marks: bytes
    lasts: Sequence[int]

    def __len__(self) -> int:
        return self.marks.count(1)

    def __iter__(self) -> Iterator[Pin]:
        holders = self.holders
        rows = zip(holders.numbers, holders.groups, holders.ats, holders.messages, strict=True)
        for number, (route, group), at, message in compress(rows, self.marks):
            yield Pin(route, group, at, self.lasts[number], message)

    @overload
    def __getitem__(self, number: int) -> Pin: ...
    @overload
    def __getitem__(self, number: slice) -> list[Pin]: ...
    def __getitem__(self, number: int | slice) -> Pin | list[Pin]:
        return list(self)[number]

    def groups(self) -> Iterator[tuple[str, str]]:
        """Route and group of each."""
        return compress(self.holders.groups, self.marks)

    def of_same_groups(self, other: Pins) -> bool:
        """Whether the same groups hold back both segments."""
        if self.holders is other.holders:
            return self.marks == other.marks
        return len(self) == len(other) and set(self.groups()) == set(other.groups())


NO_PINS = Pins(Holders((), (), (), ()), b"", ())
