"""Lines of ``ledger/archive.jsonl``, which a run writes, and the state of runs and destinations that they show.

    {"event": "begun", "route", "group", "dest", "bag", "after", "first", "last", "records_per_bundle",
     "bytes_per_bundle", "codec", "software", "archived_at", "previous", "at"}          before anything else
    {"event": "archived", "route", "group", "dest", "bag", "bundle", "path", "first", "last", "after",
     "count", "runs", "parts", "sha256", "at"}                                          when a bag is whole, per bundle
    {"event": "finished", "route", "group", "dest", "bag", "first", "last", "at"}       when the cursor has moved
    {"event": "abandoned", …the same}                                                   when it was given up

The core reads ``archived`` lines: ``path`` is the bundle's file below the destination, and ``parts`` are the first
record and the name of each file of records in it.

A run with a ``begun`` line but neither of the last two is repeated with the parameters of that line instead of the
current options, so it makes the same bytes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Literal

from wald.errors import Damaged
from wald.format.ledger_lines import Entry
from wald.format.spans import pack
from wald_archive.bundle import Bytes, Origin, Records, Size, records_name
from wald_archive.codecs import Codec
from wald_archive.manifest import BundleEntry, Previous
from wald_archive.objects import PAYLOAD, BagName, bundle_stem


@dataclass(frozen=True, slots=True)
class Request:
    """Parameters of the next run; an interrupted run keeps its own."""

    route: str
    group: str
    size: Size
    codec: Codec
    software: str
    to: int | None = None  # last record to pack; None for all


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters that, with the records, determine the bytes of a run."""

    origin: Origin
    dest: str
    after: int  # last record that the group had processed
    first: int
    last: int
    size: Size  # limit of a bundle
    codec: Codec
    previous: Previous | None  # bundle that the first one follows

    @property
    def bag(self) -> BagName:
        return BagName(self.origin.route, self.first, self.last)

    def begun(self, *, at_ns: int) -> Entry:
        return self._line("begun") | {
            "after": self.after,
            "first": self.first,
            "last": self.last,
            "records_per_bundle": self.size.limit if isinstance(self.size, Records) else None,
            "bytes_per_bundle": self.size.limit if isinstance(self.size, Bytes) else None,
            "codec": self.codec.value,
            "software": self.origin.software,
            "archived_at": self.origin.archived_at,
            "previous": asdict(self.previous) if self.previous else None,
            "at": at_ns,
        }

    def archived(self, entry: BundleEntry, *, at_ns: int) -> Entry:
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

    def ended(self, event: Literal["finished", "abandoned"], *, at_ns: int) -> Entry:
        return self._line(event) | {"first": self.first, "last": self.last, "at": at_ns}

    def _line(self, event: str) -> Entry:
        origin = self.origin
        names = {"route": origin.route, "group": origin.group, "dest": self.dest, "bag": str(self.bag)}
        return {"event": event} | names


@dataclass(frozen=True, slots=True)
class Past:
    """Interrupted run of one route, group and destination, according to the ledger."""

    unfinished: Run | None = None  # the run, or None
    recorded: frozenset[str] = frozenset()  # its bundles with a line in the ledger
    complete: bool = False  # True if all of them were made, read back and recorded


def past(entries: Iterable[Entry], *, log: str, route: str, group: str, dest: str) -> Past:
    """Return the last run that has begun but was neither finished nor abandoned; ``lines`` are newest first."""
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
                if bag in ended:
                    break
                run, lines = _parse(entry, log), archived.get(bag, [])
                names = frozenset(str(line.get("bundle")) for line in lines)
                return Past(run, names, complete=any(line.get("last") == run.last for line in lines))
    return Past()


def last_recorded(entries: Iterable[Entry], *, route: str, group: str, after: int) -> Previous | None:
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
class RecordedBag:
    """Ledger lines about one bag. The bag was read back completely before the lines in ``bundles`` were written."""

    bundles: dict[str, Entry] = field(default_factory=dict)  # ``archived`` lines by name
    runs: dict[str, str] = field(default_factory=dict)  # the last event of each group's run

    def why_incomplete(self, route: str, group: str | None) -> str:
        """Return why the bag of ``group`` (None for any) may be incomplete, or "" if it must be complete."""
        runs = sorted((of_group, event) for of_group, event in self.runs.items() if group in (None, of_group))
        if self.bundles:
            return ""
        for of_group, event in runs:
            if event == "begun":
                return f"unfinished: an interrupted run; wald-archive {route} --group {of_group} continues it"
        return "an abandoned run; it may be removed" if any(event == "abandoned" for _, event in runs) else ""


@dataclass(slots=True)
class Recorded:
    """Contents of one destination according to the ledger."""

    bags: defaultdict[str, RecordedBag] = field(default_factory=lambda: defaultdict(RecordedBag))
    elsewhere: tuple[str, ...] = ()  # destinations of all recorded bundles, if this destination has none

    @property
    def bundles(self) -> dict[tuple[str, str], Entry]:
        return {(bag, name): line for bag, lines in self.bags.items() for name, line in lines.bundles.items()}

    def last_of(self, route: str) -> int:
        lasts = (line.get("last") for line in self.bundles.values() if line.get("route") == route)
        return max((last for last in lasts if isinstance(last, int)), default=0)


def recorded_at(entries: Iterable[Entry], address: str) -> Recorded:
    """Return the lines of a ledger about one destination, under any spelling of its path."""
    recorded = Recorded()
    real = cache(lambda place: place if "://" in place else os.path.realpath(place))
    known, others = False, set()
    for entry in entries:
        dest, event = str(entry.get("dest")), str(entry.get("event"))
        if real(dest) == real(address):
            known = True
            bag = recorded.bags[str(entry.get("bag"))]
            if event == "archived":
                bag.bundles[str(entry.get("bundle"))] = entry
            else:
                bag.runs[str(entry.get("group"))] = event
        elif event == "archived":
            others.add(dest)
    recorded.elsewhere = () if known else tuple(sorted(others))
    return recorded
