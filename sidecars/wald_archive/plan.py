"""What is to be done: facts from the ledger and the destination in, the next run out; nothing is read or changed here.

    {"event": "begun", "route", "group", "dest", "bag", "after", "first", "last", "records_per_bundle",
     "bytes_per_bundle", "codec", "software", "archived_at", "previous", "at"}          before anything else
    {"event": "archived", "route", "group", "dest", "bag", "bundle", "first", "last", "after", "count",
     "runs", "parts", "sha256", "at"}                                                   when a bag is whole, per bundle
    {"event": "finished", "route", "group", "dest", "bag", "first", "last", "at"}       when the cursor has moved
    {"event": "abandoned", …the same}                                                   when it cannot be carried out

A run whose ``begun`` has neither of the last two behind it is done again, with what that line says and not with what is
asked for now: so it makes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wald.errors import Damaged, Refused, command_line
from wald.store.retention.history import Entry
from wald_archive.bundle import Origin
from wald_archive.codecs import Codec
from wald_archive.cutting import Bytes, Records, Size
from wald_archive.layout import BagName
from wald_archive.manifest import Entry as BundleEntry
from wald_archive.manifest import Manifest, Previous


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
            "previous": self.previous.told() if self.previous else None,
            "at": at_ns,
        }

    def archived(self, entry: BundleEntry, *, at_ns: int) -> Entry:
        """The line about a bundle that was read back."""
        contents = entry.bundle.contents
        return self._line("archived") | {
            "bundle": entry.bundle.name,
            "first": contents.first,
            "last": contents.last,
            "after": contents.after,
            "count": contents.count,
            "runs": entry.bundle.runs.tolist(),
            "parts": [part.part for part in contents.parts],
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
    """What the ledger tells of one route, group and destination.

    Attributes:
        unfinished: the run that was interrupted; None if none was.
        told: the bundles of that run that the ledger tells of already.
        complete: whether that is every one of them: made, read back and told.
    """

    unfinished: Run | None = None
    told: frozenset[str] = frozenset()
    complete: bool = False


def past(entries: Iterable[Entry], *, log: str, route: str, group: str, dest: str) -> Past:
    """The last run that was begun, and neither finished nor abandoned.

    Raises:
        Damaged: its line does not say what it should.
    """
    begun: Entry | None = None
    told: list[Entry] = []
    for entry in entries:
        if (entry.get("route"), entry.get("group"), entry.get("dest")) != (route, group, dest):
            continue
        if entry.get("event") == "begun":
            begun, told = entry, []
        elif begun is not None and entry.get("bag") == begun.get("bag"):
            if entry.get("event") in ("finished", "abandoned"):
                begun, told = None, []
            elif entry.get("event") == "archived":
                told.append(entry)
    if begun is None:
        return Past()
    run = _parse(begun, log)
    names = frozenset(str(entry.get("bundle")) for entry in told)
    return Past(run, names, complete=any(entry.get("last") == run.last for entry in told))


def last_told(entries: Iterable[Entry], *, route: str, group: str, after: int) -> Previous | None:
    """The bundle that a run behind ``after`` follows, wherever it was brought; None if the ledger knows of none."""
    found: Entry | None = None
    for entry in entries:
        last = entry.get("last")
        ours = (entry.get("event"), entry.get("route"), entry.get("group")) == ("archived", route, group)
        if ours and isinstance(last, int) and last <= after and (found is None or last >= found["last"]):
            found = entry
    return None if found is None else Previous(str(found.get("bundle")), str(found.get("sha256")))


def check_lineage(
    manifests: Sequence[tuple[str, Manifest]], *, log: str, root: Path, group: str, first: int, last: int
) -> None:
    """May records ``first`` to ``last`` go where these bags are?

    Args:
        manifests: of bags of the same route, each with its path or address.

    Raises:
        Refused: a bag belongs to another log, or holds some of these records already.
    """
    for place, manifest in manifests:
        if manifest.origin.log != log:
            raise Refused(
                f"{place}: this bag belongs to log {manifest.origin.log}, not to {log}",
                hint="archive to another place: --dest DIR",
            )
        if (manifest.first, manifest.last) == (first, last) and manifest.origin.group != group:
            raise Refused(
                f"{place}: a bag of the same records is here, of group {manifest.origin.group}",
                hint="archive to another place: --dest DIR",
            )
        if manifest.origin.group == group and manifest.first <= last and first <= manifest.last:
            setting = command_line(root, f"cursor set {manifest.origin.route} {manifest.last} --group {group}")
            raise Refused(
                f"{place}: this bag of the same group holds records {manifest.first} to {manifest.last} already, "
                "though the ledger and the cursor do not say so",
                hint=f"{setting}, or another --dest",
            )


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
            hint="restore the ledger from a backup; archive to another --dest meanwhile",
        ) from error
