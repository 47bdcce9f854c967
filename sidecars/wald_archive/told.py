"""What the ledger of a log tells of a destination: which bundles have to be there, and which runs are not done."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from wald.store.retention.history import Entry as Line


@dataclass(slots=True)
class Told:
    """What the ledger says is at one destination.

    Attributes:
        bundles: the lines ``archived``, by bag and name of the bundle.
        whole: the bags that these are about: such a line is written when the whole bag has been read back.
        unfinished: bag and group of each run that was begun, and neither finished nor abandoned.
        abandoned: bag and group of each run that was given up.
        elsewhere: the destinations of all bundles it tells of, if it tells of nothing here.
    """

    bundles: dict[tuple[str, str], Line] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    unfinished: set[tuple[str, str]] = field(default_factory=set)
    abandoned: set[tuple[str, str]] = field(default_factory=set)
    elsewhere: tuple[str, ...] = ()

    def by_bag(self) -> defaultdict[str, Told]:
        """The same, bag by bag; a bag of which it says nothing comes out empty."""
        parts: defaultdict[str, Told] = defaultdict(Told)
        for (bag, name), line in self.bundles.items():
            parts[bag].bundles[bag, name] = line
        for bag in self.whole:
            parts[bag].whole.add(bag)
        for run in self.unfinished:
            parts[run[0]].unfinished.add(run)
        for run in self.abandoned:
            parts[run[0]].abandoned.add(run)
        return parts

    def last_of(self, route: str) -> int:
        """The last record of a route that it says is in a bundle; 0: there is none."""
        lasts = (line.get("last") for line in self.bundles.values() if line.get("route") == route)
        return max((last for last in lasts if isinstance(last, int)), default=0)

    def excuse(self, bag: str, group: str | None) -> str:
        """Why a bag of ``group`` (None: whoever's) may be half-written; "" if it may not."""
        if bag in self.whole:
            return ""
        for begun, whose in sorted(self.unfinished):
            if begun == bag and group in (None, whose):
                route = bag.partition("/")[0]
                return f"unfinished: an interrupted run; wald-archive {route} --group {whose} goes on with it"
        if any(begun == bag and group in (None, whose) for begun, whose in self.abandoned):
            return "an abandoned run; it may be removed"
        return ""


def told_of(entries: Iterable[Line], place: str) -> Told:
    """The lines of a ledger about one destination, however its path is spelled there."""
    told = Told()
    real = cache(_real)
    known, others = False, set()
    for entry in entries:
        dest, event = str(entry.get("dest")), entry.get("event")
        if real(dest) != real(place):
            if event == "archived":
                others.add(dest)
            continue
        known = True
        bag = str(entry.get("bag"))
        run = bag, str(entry.get("group"))
        if event == "archived":
            told.bundles[bag, str(entry.get("bundle"))] = entry
            told.whole.add(bag)
        elif event == "begun":
            told.unfinished.add(run)
            told.abandoned.discard(run)
        elif event == "finished":
            told.unfinished.discard(run)
        elif event == "abandoned":
            told.unfinished.discard(run)
            told.abandoned.add(run)
    told.elsewhere = () if known else tuple(sorted(others))
    return told


def _real(place: str) -> str:
    """One spelling of each directory; an address is what it is."""
    return place if "://" in place else os.path.realpath(place)
