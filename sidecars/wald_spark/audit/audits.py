"""Audits of logs and archives: work for executors, evaluation of the outcomes, and the report."""

from __future__ import annotations

import glob
import os
import pickle
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wald.checking.checker import CheckResult, Level, SegmentToCheck, check
from wald.checking.verifier import Verification
from wald.cli.output import aligned, json_line
from wald.errors import (
    Damaged,
    DiskFailure,
    InvalidInput,
    NotFound,
    NotPermitted,
    Unavailable,
    UnsupportedFormat,
    WaldError,
)
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import readable_entries
from wald.files.listing import list_segments
from wald.format.ledger_lines import Entry
from wald.format.spans import Spans
from wald.retention.audit import Ruling, audit_deletion, audit_shrink
from wald.setting_types import format_bytes
from wald.work.snapshot import check_journals
from wald_archive.ledger import RecordedBag, recorded_at
from wald_archive.manifest import Manifest
from wald_archive.objects import BagName, open_destination
from wald_archive.verify import Bags, Finding, Proof, bag_bytes, survey
from wald_spark.locations import is_pattern, require_bags

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGS = ("log", "segments", "records", "raw", "reclaimed", "expired", "bundles", "errors")
_ARCHIVES = ("archive", "bags", "bundles", "stored", "errors")
# Such as missing credentials or packages, or an unreachable store: nothing is known about the bytes.
UNREAD = (DiskFailure, InvalidInput, NotPermitted, PermissionError)


def described(error: Exception) -> str:
    hint = error.hint if isinstance(error, WaldError) else ""
    return f"{error}; {hint}" if hint else str(error)


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """Check of one segment; ``stored_bytes`` is the size of the file."""

    key: SegmentToCheck
    stored_bytes: int

    def outcome(self) -> CheckResult | None:
        """Return the result; None if the segment has been sealed or deleted since it was listed."""
        try:
            return check(self.key)
        except FileNotFoundError:
            _require(self.key.segment.path.parent)
            return None


@dataclass(frozen=True, slots=True)
class Proven:
    """Findings about a bag, and the data that :class:`Bags` needs to judge it together with others."""

    findings: tuple[Finding, ...]
    manifest: Manifest | None
    digests: dict[str, str]
    unread: Finding | None = None  # why the bag, which may be good, could not be read completely; None if it was


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
        if "://" not in self.place:
            _require(Path(self.place))
        findings: list[Finding] = []
        proof, unread = None, None
        try:
            proof = Proof(open_destination(self.place, Disk()), self.bag, self.recorded, on_bytes=lambda _: None)
            findings += proof.findings()
        except (WaldError, OSError) as error:
            found = Finding(Level.ERROR, self.place, str(self.bag), "", f"cannot be read: {described(error)}")
            unread = found if isinstance(error, UNREAD) else None
            findings += [] if unread else [found]
        manifest, digests = (proof.manifest, proof.digests) if proof else (None, {})
        return Proven(tuple(findings), manifest, digests, unread)


Work = SegmentWork | BagWork


def pickled_outcome(work: Work) -> bytes:
    return pickle.dumps(work.outcome())


class Outcomes(dict[Hashable, bytes]):
    """Outcomes by the key of their work; kept pickled because there may be very many."""

    def of(self, key: Hashable) -> Any:  # the type depends on the work; None if there was no such work
        return pickle.loads(self[key]) if key in self else None  # noqa: S301 - from executors of ours


def _require(directory: Path) -> None:
    if not directory.is_dir():
        raise Unavailable(
            f"{directory}: does not exist on {socket.gethostname()}",
            hint="every machine needs it under the same path; --master 'local[*]' needs no other machine",
        )


class LogAudit:
    """Audit of one log; records before ``first`` may be missing."""

    def __init__(self, root: Root, *, first: int = 1) -> None:
        self.root = root
        self._verification = Verification(root, first=first)
        self._bundles = {
            (str(line.get("dest")), str(line.get("bag")), str(line.get("bundle")))
            for line in readable_entries(root.ledger / "archive.jsonl")
            if line.get("event") == "archived"
        }
        targets = self._verification.segments_to_check()
        self.work = [SegmentWork(target, _stored_bytes(target)) for target in targets]  # oldest first
        self.destinations = sorted({dest for dest, _, _ in self._bundles})

    def report(self, outcomes: Outcomes) -> Report:
        """Return the report; a segment without an outcome from an executor is checked here."""
        verification = self._verification
        findings = list(verification.findings(outcomes.of))
        with suppress(Damaged, UnsupportedFormat):  # the log's id is unknown, which the verification reports
            findings += [finding for _, finding in check_journals(self.root, read_identity(self.root).log_id)]
        found = [
            AuditFinding(finding.level, str(finding.path), finding.offset, finding.message)
            for finding in findings
            if finding.level is not Level.OK
        ]
        ledger, rulings = str(self.root.ledger / "reclaim.jsonl"), list(self._rulings())
        for ruling in rulings:
            for level, messages in ((Level.ERROR, ruling.errors), (Level.INFO, ruling.notes)):
                found += [AuditFinding(level, ledger, None, f"segment {ruling.base}: {each}") for each in messages]
        counts = {
            "root": str(self.root.path),
            "segments": verification.segments,
            "records": verification.records,
            "raw_bytes": verification.raw_bytes,
            "reclaimed": len(rulings),  # deleted segments; expired: records in those that no group had read
            "expired": sum(ruling.unread_records for ruling in rulings),
            "bundles": len(self._bundles),  # in its ledger
        }
        return Report(counts, tuple(found))

    def _rulings(self) -> Iterator[Ruling]:
        """Yield a ruling for each deletion and shrink; none if the ledger is damaged, which verification reports."""
        there: set[int] = set()
        with suppress(Damaged):  # reported by the verification
            there = {segment.base_sequence for segment in list_segments(self.root).segments}
        history, deleted = self._verification.history, Spans()

        def sealed(line: Entry, digest: str) -> Entry | None:
            with suppress(Damaged):
                return history.line_for_digest(line["base"], line.get(digest))
            return None

        with suppress(Damaged):
            for line in history.deletions():
                exists = line["base"] in there
                yield audit_deletion(line, sealed(line, "sha256"), exists=exists, deleted=deleted)
            for line in history.all_shrinks():
                yield audit_shrink(line, sealed(line, "was_sha256"))


def _stored_bytes(target: SegmentToCheck) -> int:
    if target.durable is not None:
        return target.durable  # a preallocated file is longer
    with suppress(OSError):
        return target.segment.path.stat().st_size
    return 0


class ArchiveAudit:
    """Audit of one archive destination of ``roots``. An unreadable archive is neither proven nor an error."""

    def __init__(self, place: str, roots: Iterable[Root]) -> None:
        self.address = place
        self.work: list[BagWork] = []
        lines = chain.from_iterable(readable_entries(root.ledger / "archive.jsonl") for root in roots)
        # Bags at a destination that no ledger names are proven individually.
        self._recorded = replace(recorded_at(lines, place), elsewhere=())
        self._findings: list[Finding] = []
        self.unread: list[Finding] = []  # about bags that could not be read, so that nothing is known about them
        self._reached = False
        try:
            destination = open_destination(place, Disk())
            self.address = destination.address
            for each in survey(destination, self._recorded):
                if isinstance(each, BagName):
                    recorded = self._recorded.bags[str(each)]
                    self.work.append(BagWork(self.address, each, recorded, bag_bytes(destination, str(each))))
                else:
                    self._findings.append(each)
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

    def report(self, findings: list[Finding]) -> Report:
        """Return the report; it counts proven bundles, and the bytes of everything that could be listed."""
        found = [AuditFinding(f.level, f.name, f.offset, f.message) for f in findings if f.level is not Level.OK]
        found += [AuditFinding(f.level, f.name, None, f.message, unread=True) for f in self.unread]
        proven = sum(finding.level is Level.OK for finding in findings)
        stored_bytes = sum(work.stored_bytes for work in self.work)
        counts = {"dest": self.address, "bags": len(self.work), "bundles": proven, "bytes": stored_bytes}
        return Report(counts, tuple(found))


def reports(archives: Sequence[ArchiveAudit], outcomes: Outcomes, *, first: int = 1) -> list[Report]:
    bags = Bags(first=first)
    findings = {archive.address: archive.join(outcomes, bags) for archive in archives}
    if not any(archive.unread for archive in archives):  # a link may lead there
        for finding in bags.broken_links():
            findings[finding.address].append(finding)
    return [archive.report(findings[archive.address]) for archive in archives]


def expanded(patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        names = sorted(glob.glob(pattern)) if is_pattern(pattern) else [pattern]
        if not names:
            raise NotFound(f"{pattern}: nothing matches", hint=f"ls -d {pattern}")
        yield from map(Path, names)


@dataclass(frozen=True, slots=True)
class Plan:
    """Logs and archives to audit; records before ``first`` may be missing."""

    logs: Sequence[LogAudit]
    archives: Sequence[ArchiveAudit]
    first: int = 1

    @property
    def work(self) -> list[Work]:
        """Work for executors, largest first, so that the last task to start is short."""
        work: chain[Work] = chain(*(log.work for log in self.logs), *(archive.work for archive in self.archives))
        return sorted(work, key=lambda each: each.stored_bytes, reverse=True)


def plan(roots: Sequence[Path], destinations: Sequence[str], *, first: int = 1) -> Plan:
    for destination in destinations:
        with suppress(InvalidInput, DiskFailure):  # unreachable: reported when it is audited
            require_bags(destination)
    logs = [LogAudit(Root(path), first=first) for path in dict.fromkeys(path.absolute() for path in roots)]
    named = (destination for log in logs for destination in log.destinations)
    plain = [place.removeprefix("file://") for place in (*named, *destinations)]
    places = {place if "://" in place else os.path.realpath(place): place for place in plain}  # whatever its spelling
    return Plan(logs, [ArchiveAudit(place, [log.root for log in logs]) for place in places.values()], first)


def audit(spark: SparkSession, planned: Plan, *, on_bytes: Callable[[int], None]) -> Audit:
    """Read and evaluate everything; call ``on_bytes`` with the number of stored bytes read since the last call."""
    from wald_spark.progress import run_tasks  # needs PySpark, unlike planning

    began = time.perf_counter()
    work, outcomes = planned.work, Outcomes()
    done = run_tasks(spark, work, pickled_outcome, on_done=lambda number: on_bytes(work[number].stored_bytes))
    with closing(done) as results:
        for number, pickled in results:
            outcomes[work[number].key] = pickled
    logs = tuple(log.report(outcomes) for log in planned.logs)
    archives = tuple(reports(planned.archives, outcomes, first=planned.first))
    return Audit(logs, archives, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A notice or an error; ``where`` is a path or an address, ``offset`` is in bytes."""

    level: Level
    where: str
    offset: int | None
    message: str
    unread: bool = False  # nothing is known about the data; not counted as an error

    @property
    def kind(self) -> str:
        return "unread" if self.unread else self.level.value


@dataclass(frozen=True, slots=True)
class Report:
    """Result for one log or archive; ``counts`` has the keys of JSON, in the order of the table."""

    counts: dict[str, Any]  # Any: it is JSON
    found: tuple[AuditFinding, ...]

    @property
    def errors(self) -> int:
        return sum(each.kind == Level.ERROR.value for each in self.found)

    def to_json(self) -> dict[str, Any]:
        return self.counts | {"errors": self.errors}


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit; ``seconds`` excludes the start of Spark."""

    logs: tuple[Report, ...]
    archives: tuple[Report, ...]
    seconds: float

    @property
    def errors(self) -> int:
        return sum(report.errors for report in (*self.logs, *self.archives))

    @property
    def unread(self) -> int:
        """The number of archives and bags that could not be read."""
        return sum(each.unread for each in self.found)

    @property
    def exit_code(self) -> int:
        if self.errors:
            return Damaged.exit_code
        return Unavailable.exit_code if self.unread else 0

    @property
    def found(self) -> list[AuditFinding]:
        return [each for report in (*self.logs, *self.archives) for each in report.found]


def audit_lines(audit: Audit, *, as_json: bool) -> Iterator[str]:
    """Yield a row for each log and each archive, all errors and unread parts, and the speed."""
    raw_bytes = sum(log.counts["raw_bytes"] for log in audit.logs)
    megabytes_per_second = raw_bytes / 1e6 / audit.seconds
    if as_json:
        content = {
            "logs": [log.to_json() for log in audit.logs],
            "archives": [at.to_json() | {"unread": sum(each.unread for each in at.found)} for at in audit.archives],
            "found": [
                {"level": found.kind, "path": found.where, "offset": found.offset, "message": found.message}
                for found in audit.found
            ],
            "errors": audit.errors,
            "unread": audit.unread,
            "raw_bytes": raw_bytes,
            "seconds": round(audit.seconds, 3),
            "megabytes_per_second": round(megabytes_per_second, 1),
        }
        yield json_line("audit", content)
        return
    for found in audit.found:
        if found.level is Level.ERROR or found.unread:
            at = f" offset {found.offset}:" if found.offset is not None else ""
            yield f"{found.kind:<6} {found.where}:{at} {found.message}"
    yield from aligned([_LOGS, *map(_row, audit.logs)], range(1, len(_LOGS)))
    if audit.archives:
        yield ""
        yield from aligned([_ARCHIVES, *map(_row, audit.archives)], range(1, len(_ARCHIVES)))
    verdict = "damaged" if audit.errors else "not all could be read" if audit.unread else "OK"
    info = sum(found.kind == Level.INFO.value for found in audit.found)
    unread = f", {audit.unread} unread" if audit.unread else ""
    yield (
        f"{verdict}: {info} info, {audit.errors} error{'s' * (audit.errors != 1)}{unread}; "
        f"{format_bytes(raw_bytes)} in {audit.seconds:.1f} s, {megabytes_per_second:.0f} MB/s"
    )


def _row(report: Report) -> list[str]:
    return [format_bytes(value) if name.endswith("bytes") else str(value) for name, value in report.to_json().items()]
