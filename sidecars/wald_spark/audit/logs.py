"""The audit of one log: the segments to check, and the judgement of its ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

from wald.checking.checker import Finding, Level, SegmentToCheck
from wald.checking.verifier import Verification
from wald.errors import Damaged, UnsupportedFormat
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import readable_entries
from wald.files.listing import list_segments
from wald.format.spans import Spans
from wald.retention.audit import Ruling, audit_deletion, audit_shrink
from wald.work.snapshot import check_journals
from wald_spark.audit.report import AuditFinding, LogReport
from wald_spark.audit.work import Outcomes, SegmentWork


class LogAudit:
    """
    Args:
        first: earlier records may be missing.

    Attributes:
        work: for executors, oldest first.
        destinations: where its ledger says that bundles are.

    Raises:
        NotFound: there is no log.
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
        """The report; a segment of which no executor has returned an outcome is checked here."""
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

    def _journals(self) -> Iterator[Finding]:
        """Those of work groups; none if it is not known which log this is, which the verification reports."""
        with suppress(Damaged, UnsupportedFormat):
            for _, finding in check_journals(self.root, read_identity(self.root).log_id):
                yield finding

    def _rulings(self) -> Iterator[Ruling]:
        """One for each deletion and shrink in the ledger; none if that is damaged, which the verification reports."""
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
