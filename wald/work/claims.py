"""What consumers name, put together: records that follow each other are one stretch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from wald.work.window import Run, runs_of

Named = tuple[str, Sequence[int]]
"""A consumer, and the records that it names, in order."""


class Claim(NamedTuple):
    """Records that a consumer names.

    Attributes:
        who: its place among those who name some.
    """

    run: Run
    who: int


def stretches(named: Sequence[Named]) -> Iterator[list[Claim]]:
    """All claims in order, in stretches: each claim begins right behind the one before.

    A record that two name is in two stretches.
    """
    claims = [Claim(run, who) for who, (_, sequences) in enumerate(named) for run in runs_of(sequences)]
    stretch: list[Claim] = []
    for claim in sorted(claims):
        if stretch and claim.run.first != stretch[-1].run.last + 1:
            yield stretch
            stretch = []
        stretch.append(claim)
    if stretch:
        yield stretch


def joined(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Consumers, each with how many records; neighbours of one consumer as one."""
    found: list[tuple[str, int]] = []
    for consumer, size in parts:
        if found and found[-1][0] == consumer:
            found[-1] = (consumer, found[-1][1] + size)
        else:
            found.append((consumer, size))
    return found
