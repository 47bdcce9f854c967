"""Audits of one log and of one archive: work for executors, and the judgement of its outcomes."""

from __future__ import annotations

import os
import pickle
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from wald.checking import checker
from wald.checking.checker import CheckResult, Level, SegmentToCheck, check
from wald.checking.verifier import Verification
from wald.errors import Damaged, DiskFailure, InvalidInput, NotPermitted, Unavailable, UnsupportedFormat, WaldError
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import readable_entries
from wald.files.listing import list_segments
from wald.format.spans import Spans
from wald.retention.audit import Ruling, audit_deletion, audit_shrink
from wald.work.snapshot import check_journals
from wald_archive.ledger import Recorded, RecordedBag, recorded_at
from wald_archive.manifest import Manifest
from wald_archive.objects import BagName, Destination, open_destination
from wald_archive.verify import Bags, Finding, Proof, bag_bytes, survey
from wald_spark.audit.report import ArchiveReport, AuditFinding, LogReport

# Missing credentials or packages, a store that does not answer: nothing is known about the bytes.
UNREAD = (DiskFailure, InvalidInput, NotPermitted, PermissionError)


def described(error: Exception) -> str:
    """Return the message of an error with its hint."""
    hint = error.hint if isinstance(error, WaldError) else ""
    return f"{error}; {hint}" if hint else str(error)


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """Check of one segment; ``stored_bytes`` is the size of the file."""

    target: SegmentToCheck
    stored_bytes: int

    @property
    def key(self) -> SegmentToCheck:
        return self.target

    def outcome(self) -> CheckResult | None:
        """Return the result; None if the segment was sealed or deleted since it was listed."""
        try:
            return check(self.target)
        except FileNotFoundError:
            _require(self.target.segment.path.parent)
            return None


@dataclass(frozen=True, slots=True)
class Proven:
    """Findings about a bag, and the data with which :class:`wald_archive.verify.Bags` judges it together with others.

    Attributes:
        unread: reason why the bag, which may be good, could not be read to its end; None if it was.
    """

    findings: tuple[Finding, ...]
    manifest: Manifest | None
    digests: dict[str, str]
    unread: Finding | None = None


@dataclass(frozen=True, slots=True)
class BagWork:
    """Proof of one bag at ``place``; ``stored_bytes`` is the size of its bundles."""

    place: str
    bag: BagName
    recorded: RecordedBag
    stored_bytes: int

    @property
    def key(self) -> tuple[str, BagName]:
        return self.place, self.bag

    def outcome(self) -> Proven:
        """Return the findings."""
        if "://" not in self.place:
            _require(Path(self.place))
        findings: list[Finding] = []
        proof: Proof | None = None
        unread: Finding | None = None
        try:
            proof = Proof(open_destination(self.place, Disk()), self.bag, self.recorded, on_bytes=lambda _: None)
            findings += proof.findings()
        except (WaldError, OSError) as error:
            found = Finding(Level.ERROR, self.place, str(self.bag), "", f"cannot be read: {described(error)}")
            if isinstance(error, UNREAD):
                unread = found
            else:
                findings.append(found)
        if proof is None:
            return Proven(tuple(findings), None, {}, unread)
        return Proven(tuple(findings), proof.manifest, proof.digests, unread)


Work = SegmentWork | BagWork


def pickled_outcome(work: Work) -> bytes:
    """Run ``work``, on an executor."""
    return pickle.dumps(work.outcome())


@dataclass(slots=True)
class Outcomes:
    """Outcomes of work, kept pickled because there may be very many."""

    _pickled: dict[Hashable, bytes] = field(default_factory=dict)

    def add(self, work: Work, pickled: bytes) -> None:
        self._pickled[work.key] = pickled

    def of(self, key: Hashable) -> Any:  # the type depends on the work
        """Return the outcome of the work with this key; None if there was no such work."""
        return pickle.loads(self._pickled[key]) if key in self._pickled else None  # noqa: S301 - from executors of ours


def _require(directory: Path) -> None:
    """Check that a directory is on this machine."""
    if not directory.is_dir():
        raise Unavailable(
            f"{directory}: not there on {socket.gethostname()}",
            hint="every machine needs it under the same path; --master 'local[*]' needs no other machine",
        )


class LogAudit:
    """Audit of one log.

    Args:
        first: earlier records may be missing.

    Attributes:
        work: for executors, oldest first.
        destinations: of the bundles in its ledger.
    """

    def __init__(self, root: Root, *, first: int = 1) -> None:
        self.root = root
        self._verification = Verification(root, first=first)
        self._bundles = {
            (str(line.get("dest")), str(line.get("bag")), str(line.get("bundle")))
            for line in readable_entries(root.ledger / "archive.jsonl")
            if line.get("event") == "archived"
        }
        self.work = [SegmentWork(target, _stored_bytes(target)) for target in self._verification.segments_to_check()]
        self.destinations = sorted({dest for dest, _, _ in self._bundles})

    def report(self, outcomes: Outcomes) -> LogReport:
        """Return the report; a segment without an outcome from an executor is checked here."""
        verification = self._verification
        found = [
            AuditFinding(finding.level, str(finding.path), finding.offset, finding.message)
            for finding in chain(verification.findings(outcomes.of), self._journals())
            if finding.level is not Level.OK
        ]
        lost = reclaimed = 0
        ledger = str(self.root.ledger / "reclaim.jsonl")
        for ruling in self._rulings():
            reclaimed += 1
            lost += ruling.unread_records
            found += [
                AuditFinding(Level.ERROR, ledger, None, f"segment {ruling.base}: {each}") for each in ruling.errors
            ]
            found += [AuditFinding(Level.INFO, ledger, None, f"segment {ruling.base}: {each}") for each in ruling.notes]
        return LogReport(
            root=str(self.root.path),
            segments=verification.segments,
            records=verification.records,
            raw_bytes=verification.raw_bytes,
            reclaimed=reclaimed,
            expired=lost,
            bundles=len(self._bundles),
            found=tuple(found),
        )

    def _journals(self) -> Iterator[checker.Finding]:
        """Yield findings about work groups; none if the log's id is unknown, which the verification reports."""
        with suppress(Damaged, UnsupportedFormat):
            for _, finding in check_journals(self.root, read_identity(self.root).log_id):
                yield finding

    def _rulings(self) -> Iterator[Ruling]:
        """Yield a ruling for each deletion and shrink; none if the ledger is damaged, which verification reports."""
        there: set[int] = set()
        with suppress(Damaged):  # reported by the verification
            there = {segment.base_sequence for segment in list_segments(self.root).segments}
        history, deleted = self._verification.history, Spans()
        with suppress(Damaged):
            for line in history.deletions():
                sealed = None
                with suppress(Damaged):
                    sealed = history.line_for_digest(line["base"], line.get("sha256"))
                yield audit_deletion(line, sealed, exists=line["base"] in there, deleted=deleted)
            for line in history.all_shrinks():
                before = None
                with suppress(Damaged):
                    before = history.line_for_digest(line["base"], line.get("was_sha256"))
                yield audit_shrink(line, before)


def _stored_bytes(target: SegmentToCheck) -> int:
    if target.durable is not None:
        return target.durable  # a preallocated file is longer
    with suppress(OSError):
        return target.segment.path.stat().st_size
    return 0


class ArchiveAudit:
    """Audit of one destination; an archive that cannot be read is neither proven nor an error.

    Args:
        roots: the logs whose ledgers name its bundles.

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
        """Return the findings of this destination, and add its bags to ``bags``."""
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
        for found in survey(destination, self._recorded):
            if isinstance(found, BagName):
                bag = str(found)
                self.work.append(BagWork(self.address, found, self._recorded.bags[bag], bag_bytes(destination, bag)))
            else:
                self._findings.append(found)


def archives_of(roots: Sequence[Root], destinations: Iterable[str]) -> list[ArchiveAudit]:
    """Return the destinations, each once even if it is spelled in several ways."""
    plain = (place.removeprefix("file://") for place in destinations)
    places = {place if "://" in place else os.path.realpath(place): place for place in plain}
    return [ArchiveAudit(place, roots) for place in places.values()]


def reports(archives: Sequence[ArchiveAudit], outcomes: Outcomes, *, first: int = 1) -> list[ArchiveReport]:
    """Return a report for each archive, judged together, because a bundle may follow one at another destination.

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
    """Return the entries of all ledgers for one destination; one that no ledger names is proven by its bags alone."""
    lines = chain.from_iterable(readable_entries(root.ledger / "archive.jsonl") for root in roots)
    return replace(recorded_at(lines, place), elsewhere=())
