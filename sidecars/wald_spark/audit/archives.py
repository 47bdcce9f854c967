"""The audit of archives: the bags at each destination, judged together and by the ledgers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from wald.checking.checker import Level
from wald.errors import WaldError
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import readable_entries
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
from wald_spark.audit.report import ArchiveReport, AuditFinding
from wald_spark.audit.work import UNREAD, BagWork, Outcomes, Proven, described


class ArchiveAudit:
    """Audit of one destination; an archive that cannot be read is neither proven nor an error.

    Args:
        roots: the logs whose ledgers say what has to be there.

    Attributes:
        work: for executors.
        unread: findings about bags that could not be read, so that nothing is known about them.
    """

    def __init__(self, place: str, roots: Iterable[Root]) -> None:
        self.address = place
        self.work: list[BagWork] = []
        self._recorded = _recorded(place, roots)
        self._findings: list[Finding] = []
        self.unread: list[Finding] = []
        self._reached = False
        try:
            destination = open_destination(place, Disk())
            self.address = destination.address
            self._survey(destination)
            self._reached = True
        except (WaldError, OSError) as error:
            message = described(error).removeprefix(self.address).lstrip("/: ")
            found = self.unread if isinstance(error, UNREAD) else self._findings
            found.append(Finding(Level.ERROR, self.address, "", "", message))

    def join(self, outcomes: Outcomes, bags: Bags) -> list[Finding]:
        """The findings of this destination; its bags are added to ``bags``."""
        found = self._findings
        for work in self.work:
            proven: Proven = outcomes.of(work.key)
            found += proven.findings
            bags.add(self.address, work.bag, proven.manifest, proven.digests)
            if proven.unread is not None:
                self.unread.append(proven.unread)
        if self._reached:
            unread = {finding.bag for finding in self.unread}
            found += (each for each in bags.missing(self.address, self._recorded) if each.bag not in unread)
        return found

    def _survey(self, destination: Destination) -> None:
        recorded = self._recorded.by_bag()
        for found in survey(destination, self._recorded):
            if isinstance(found, BagName):
                bag = str(found)
                self.work.append(BagWork(self.address, found, recorded[bag], bag_bytes(destination, bag)))
            else:
                self._findings.append(found)


def archives_of(roots: Sequence[Root], destinations: Iterable[str]) -> list[ArchiveAudit]:
    """The destinations, each once even if it is spelled in several ways."""
    plain = (place.removeprefix("file://") for place in destinations)
    places = {place if "://" in place else os.path.realpath(place): place for place in plain}
    return [ArchiveAudit(place, roots) for place in places.values()]


def reports(archives: Sequence[ArchiveAudit], outcomes: Outcomes, *, first: int = 1) -> list[ArchiveReport]:
    """A report for each; a bundle may follow one at another destination, so all are judged at once.

    Args:
        first: bundles with earlier records may be missing.
    """
    bags = Bags(first=first)
    findings = {archive.address: archive.join(outcomes, bags) for archive in archives}
    if not any(archive.unread for archive in archives):  # a link may lead there
        for finding in bags.broken_links():
            findings[finding.address].append(finding)
    return [_report(archive, findings[archive.address]) for archive in archives]


def _report(archive: ArchiveAudit, findings: list[Finding]) -> ArchiveReport:
    levels = Counter(finding.level for finding in findings)
    found = [AuditFinding(f.level, f.name, f.offset, f.message) for f in findings if f.level is not Level.OK]
    found += [AuditFinding(f.level, f.name, None, f.message, unread=True) for f in archive.unread]
    return ArchiveReport(
        address=archive.address,
        bags=len(archive.work),
        bundles=levels[Level.OK],
        stored_bytes=sum(work.stored_bytes for work in archive.work),
        found=tuple(found),
    )


def _recorded(place: str, roots: Iterable[Root]) -> Recorded:
    """What all ledgers record of one destination; a destination that is in no ledger is proven by itself."""
    recorded = Recorded()
    for root in roots:
        of_one = recorded_at(readable_entries(root.ledger / "archive.jsonl"), place)
        recorded.bundles |= of_one.bundles
        recorded.whole |= of_one.whole
        recorded.unfinished |= of_one.unfinished
        recorded.abandoned |= of_one.abandoned
    return recorded
