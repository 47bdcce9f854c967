"""The lines of ``ledger/archive.jsonl`` that a run writes, and what they say about runs and destinations.

    {"event": "begun", "route", "group", "dest", "bag", "after", "first", "last", "records_per_bundle",
     "bytes_per_bundle", "codec", "software", "archived_at", "previous", "at"}          before anything else
    {"event": "archived", "route", "group", "dest", "bag", "bundle", "path", "first", "last", "after",
     "count", "runs", "parts", "sha256", "at"}                                          when a bag is whole, per bundle
    {"event": "finished", "route", "group", "dest", "bag", "first", "last", "at"}       when the cursor has moved
    {"event": "abandoned", …the same}                                                   when it cannot be carried out

The core reads ``archived`` lines and does not know what a bundle is: ``path`` is its file below the destination, and
``parts`` are the first record and the name of each file of records in it.

A run whose ``begun`` is followed by neither of the last two is done again, by what that line says and not by
the options given now, so that it makes the same bytes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from wald.errors import Damaged
from wald.format.ledger_lines import Entry
from wald.format.spans import pack
from wald_archive.bundle import Origin
from wald_archive.codecs import Codec
from wald_archive.layout import PAYLOAD, BagName, bundle_stem, records_name
from wald_archive.manifest import BundleEntry, Previous
from wald_archive.sizes import Bytes, Records, Size


@dataclass(frozen=True, slots=True)
class Run:
    """All that decides which bytes a run makes, but the records themselves.

    Attributes:
        after: up to where the group had processed the route.
        size: how much goes into a bundle.
        previous: the bundle that the first one follows.
    """

    origin: Origin
    dest: str
    after: int
    first: int
    last: int
    size: Size
    codec: Codec
    previous: Previous | None

    @property
    def bag(self) -> BagName:
        return BagName(self.origin.route, self.first, self.last)

    def begun(self, *, at_ns: int) -> Entry:
        """The line before anything is done."""
        return self._line("begun") | {
            "after": self.after,
            "first": self.first,
            "last": self.last,
            "records_per_bundle": self.size.limit if isinstance(self.size, Records) else None,
            "bytes_per_bundle": self.size.limit if isinstance(self.size, Bytes) else None,
            "codec": self.codec.value,
            "software": self.origin.software,
            "archived_at": self.origin.archived_at,
            "previous": self.previous.to_dict() if self.previous else None,
            "at": at_ns,
        }

    def archived(self, entry: BundleEntry, *, at_ns: int) -> Entry:
        """The line about a bundle that was read back."""
        contents = entry.bundle.contents
        stem = bundle_stem(self.origin.route, contents.first)
        return self._line("archived") | {
            "bundle": entry.bundle.name,
            "path": f"{self.bag}/{PAYLOAD}/{entry.bundle.name}",
            "first": contents.first,
            "last": contents.last,
            "after": contents.after,
            "count": contents.count,
            "runs": pack(entry.bundle.runs),
            "parts": [[part.first, records_name(stem, part.part)] for part in contents.parts],
            "sha256": entry.bundle.sha256,
            "at": at_ns,
        }

    def finished(self, *, at_ns: int) -> Entry:
        """The line after everything is done."""
        return self._line("finished") | {"first": self.first, "last": self.last, "at": at_ns}

    def abandoned(self, *, at_ns: int) -> Entry:
        """The line about a run that cannot be carried out any more."""
        return self._line("abandoned") | {"first": self.first, "last": self.last, "at": at_ns}

    def _line(self, event: str) -> Entry:
        origin = self.origin
        return {
            "event": event,
            "route": origin.route,
            "group": origin.group,
            "dest": self.dest,
            "bag": str(self.bag),
        }


@dataclass(frozen=True, slots=True)
class Past:
    """What the ledger says about one route, group and destination.

    Attributes:
        unfinished: the run that was interrupted; None if none was.
        recorded: the bundles of that run that have a line in the ledger.
        complete: whether that is every one of them: made, read back and recorded.
    """

    unfinished: Run | None = None
    recorded: frozenset[str] = frozenset()
    complete: bool = False


def past(entries: Iterable[Entry], *, log: str, route: str, group: str, dest: str) -> Past:
    """The last run that was begun, and neither finished nor abandoned.

    Args:
        entries: of the ledger, newest first.

    Raises:
        Damaged: its line does not say what it should.
    """
    archived: dict[str, list[Entry]] = {}
    ended: set[str] = set()
    for entry in entries:
        if (entry.get("route"), entry.get("group"), entry.get("dest")) != (route, group, dest):
            continue
        bag = str(entry.get("bag"))
        match entry.get("event"):
            case "archived":
                archived.setdefault(bag, []).append(entry)
            case "finished" | "abandoned":
                ended.add(bag)
            case "begun":
                return Past() if bag in ended else _unfinished(_parse(entry, log), archived.get(bag, []))
    return Past()


def _unfinished(run: Run, archived: list[Entry]) -> Past:
    names = frozenset(str(entry.get("bundle")) for entry in archived)
    return Past(run, names, complete=any(entry.get("last") == run.last for entry in archived))


def last_recorded(entries: Iterable[Entry], *, route: str, group: str, after: int) -> Previous | None:
    """The bundle that a run after ``after`` follows, at whatever destination; None if the ledger has none.

    Args:
        entries: of the ledger, newest first.
    """
    found: Entry | None = None
    for entry in entries:
        last = entry.get("last")
        ours = (entry.get("event"), entry.get("route"), entry.get("group")) == ("archived", route, group)
        if ours and isinstance(last, int) and last <= after and (found is None or last > found["last"]):
            found = entry
    return None if found is None else Previous(str(found.get("bundle")), str(found.get("sha256")))


def _parse(begun: Entry, log: str) -> Run:
    try:
        previous = begun["previous"]
        records, size_bytes = begun["records_per_bundle"], begun["bytes_per_bundle"]
        return Run(
            Origin(log, begun["route"], begun["group"], begun["software"], begun["archived_at"]),
            begun["dest"],
            int(begun["after"]),
            int(begun["first"]),
            int(begun["last"]),
            Bytes(int(size_bytes)) if records is None else Records(int(records)),
            Codec(begun["codec"]),
            None if previous is None else Previous(previous["bundle"], previous["sha256"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(
            f"ledger/archive.jsonl: the line about bag {begun.get('bag')} cannot be used ({error!r})",
            hint="restore the ledger from a backup; until then, archive to another --dest",
        ) from error


@dataclass(slots=True)
class Recorded:
    """What the ledger says is at one destination.

    Attributes:
        bundles: the lines ``archived``, by bag and name of the bundle.
        whole: the bags of these bundles: their lines are written after the whole bag was read back.
        unfinished: bag and group of each run that was begun, and neither finished nor abandoned.
        abandoned: bag and group of each run that was given up.
        elsewhere: the destinations of all its bundles, if none is at this destination.
    """

    bundles: dict[tuple[str, str], Entry] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    unfinished: set[tuple[str, str]] = field(default_factory=set)
    abandoned: set[tuple[str, str]] = field(default_factory=set)
    elsewhere: tuple[str, ...] = ()

    def by_bag(self) -> defaultdict[str, Recorded]:
        """The same, bag by bag; a bag of which it says nothing comes out empty."""
        parts: defaultdict[str, Recorded] = defaultdict(Recorded)
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
        """Why a bag of ``group`` (None: of any group) may be half-written; "" if it may not."""
        if bag in self.whole:
            return ""
        for begun, of_group in sorted(self.unfinished):
            if begun == bag and group in (None, of_group):
                route = bag.partition("/")[0]
                return f"unfinished: an interrupted run; wald-archive {route} --group {of_group} goes on with it"
        if any(begun == bag and group in (None, of_group) for begun, of_group in self.abandoned):
            return "an abandoned run; it may be removed"
        return ""


def recorded_at(entries: Iterable[Entry], address: str) -> Recorded:
    """The lines of a ledger about one destination, however its path is spelled there."""
    recorded = Recorded()
    real = cache(_real)
    known, others = False, set()
    for entry in entries:
        dest, event = str(entry.get("dest")), entry.get("event")
        if real(dest) != real(address):
            if event == "archived":
                others.add(dest)
            continue
        known = True
        bag = str(entry.get("bag"))
        run = bag, str(entry.get("group"))
        if event == "archived":
            recorded.bundles[bag, str(entry.get("bundle"))] = entry
            recorded.whole.add(bag)
        elif event == "begun":
            recorded.unfinished.add(run)
            recorded.abandoned.discard(run)
        elif event == "finished":
            recorded.unfinished.discard(run)
        elif event == "abandoned":
            recorded.unfinished.discard(run)
            recorded.abandoned.add(run)
    recorded.elsewhere = () if known else tuple(sorted(others))
    return recorded


def _real(address: str) -> str:
    """One spelling of each directory; an address is what it is."""
    return address if "://" in address else os.path.realpath(address)
