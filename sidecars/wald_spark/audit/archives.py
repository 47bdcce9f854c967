"""The audit of archives: the bags at each destination, and what they and the ledgers come to together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from wald.errors import WaldError
from wald.store.checking.finding import Level
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.ledger import read_ledger
from wald_archive.api import (
    BagName,
    Bags,
    Destination,
    Finding,
    Recorded,
    bag_bytes,
    open_destination,
    recorded_at,
    survey,
)
from wald_spark.audit.pieces import BagWork, Outcomes, Proven
from wald_spark.audit.result import ArchiveReport, Found


class ArchiveAudit:
    """One destination; that it cannot be reached is a finding.

    Args:
        roots: the logs whose ledgers say what has to be there.

    Attributes:
        work: for executors.
    """

    def __init__(self, place: str, roots: Iterable[Root]) -> None:
        self.place = place
        self.work: list[BagWork] = []
        self._told = _told(place, roots)
        self._findings: list[Finding] = []
        self._reached = False
        try:
            destination = open_destination(place, Disk())
            self.place = destination.place
            self._survey(destination)
            self._reached = True
        except (WaldError, OSError) as error:
            words = str(error).removeprefix(self.place).lstrip("/: ")
            self._findings.append(Finding(Level.ERROR, self.place, "", "", words))

    def join(self, outcomes: Outcomes, whole: Bags) -> list[Finding]:
        """What there is to find in this one; ``whole`` takes its bags in."""
        found = self._findings
        for work in self.work:
            proven: Proven = outcomes.of(work.key)
            found += proven.findings
            whole.add(self.place, work.bag, proven.manifest, proven.digests)
        if self._reached:
            found += whole.missing(self.place, self._told)
        return found

    def _survey(self, destination: Destination) -> None:
        told = self._told.by_bag()
        for found in survey(destination, self._told):
            if isinstance(found, BagName):
                bag = str(found)
                self.work.append(BagWork(self.place, found, told[bag], bag_bytes(destination, bag)))
            else:
                self._findings.append(found)


def archives_of(roots: Sequence[Root], destinations: Iterable[str]) -> list[ArchiveAudit]:
    """Each destination once, however it is spelled."""
    plain = (place.removeprefix("file://") for place in destinations)
    places = {place if "://" in place else os.path.realpath(place): place for place in plain}
    return [ArchiveAudit(place, roots) for place in places.values()]


def reports(archives: Sequence[ArchiveAudit], outcomes: Outcomes) -> list[ArchiveReport]:
    """One for each; bundles may follow others elsewhere, so all of them are joined at once."""
    whole = Bags()
    findings = {archive.place: archive.join(outcomes, whole) for archive in archives}
    for finding in whole.broken_links():
        findings[finding.place].append(finding)
    return [_report(archive, findings[archive.place]) for archive in archives]


def _report(archive: ArchiveAudit, findings: list[Finding]) -> ArchiveReport:
    levels = Counter(finding.level for finding in findings)
    return ArchiveReport(
        place=archive.place,
        bags=len(archive.work),
        bundles=levels[Level.OK],
        stored_bytes=sum(work.stored_bytes for work in archive.work),
        found=tuple(Found(f.level, f.name, f.offset, f.message) for f in findings if f.level is not Level.OK),
    )


def _told(place: str, roots: Iterable[Root]) -> Recorded:
    """What all ledgers tell of one destination together; one of which none of them tells is proven by itself."""
    told = Recorded()
    for root in roots:
        of_one = recorded_at(read_ledger(root.ledger / "archive.jsonl").entries, place)
        told.bundles |= of_one.bundles
        told.whole |= of_one.whole
        told.unfinished |= of_one.unfinished
        told.abandoned |= of_one.abandoned
    return told
