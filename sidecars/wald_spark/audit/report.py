"""Result of an audit: numbers and findings for each log and each archive, and the lines that show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wald.checking.checker import Level
from wald.cli.output import aligned, json_line
from wald.errors import Damaged, Unavailable
from wald.setting_types import format_bytes

_LOGS = ("log", "segments", "records", "raw", "reclaimed", "expired", "bundles", "errors")
_ARCHIVES = ("archive", "bags", "bundles", "stored", "errors")


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A remark or an error; ``where`` is a path or an address, ``offset`` is in bytes.

    Attributes:
        unread: True if the data could not be read, so that nothing is known about it; not counted as an error.
    """

    level: Level
    where: str
    offset: int | None
    message: str
    unread: bool = False

    @property
    def kind(self) -> str:
        return "unread" if self.unread else self.level.value


@dataclass(frozen=True, slots=True)
class LogReport:
    """Result for one log.

    Attributes:
        segments, records, raw_bytes: numbers read.
        reclaimed: deleted segments. expired: records in those that no group had read.
        bundles: in its ledger.
    """

    root: str
    segments: int
    records: int
    raw_bytes: int
    reclaimed: int
    expired: int
    bundles: int
    found: tuple[AuditFinding, ...]

    @property
    def errors(self) -> int:
        return _errors(self.found)


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """Result for one archive: ``bundles`` counts the proven ones, ``stored_bytes`` is of all that could be listed."""

    address: str
    bags: int
    bundles: int
    stored_bytes: int
    found: tuple[AuditFinding, ...]

    @property
    def errors(self) -> int:
        return _errors(self.found)


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit; ``seconds`` excludes the start of Spark."""

    logs: tuple[LogReport, ...]
    archives: tuple[ArchiveReport, ...]
    seconds: float

    @property
    def raw_bytes(self) -> int:
        return sum(log.raw_bytes for log in self.logs)

    @property
    def megabytes_per_second(self) -> float:
        return self.raw_bytes / 1e6 / self.seconds

    @property
    def errors(self) -> int:
        return _errors(self.found)

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
        """All findings: of the logs, then of the archives."""
        return [
            *(each for log in self.logs for each in log.found),
            *(each for at in self.archives for each in at.found),
        ]


def _errors(found: Iterable[AuditFinding]) -> int:
    return sum(each.level is Level.ERROR and not each.unread for each in found)


def audit_lines(audit: Audit, *, as_json: bool) -> Iterator[str]:
    """Yield a row for each log and each archive, all errors and unread parts, and the speed."""
    if as_json:
        yield json_line("audit", _as_json(audit))
        return
    for found in audit.found:
        if found.level is Level.ERROR or found.unread:
            at = f" offset {found.offset}:" if found.offset is not None else ""
            yield f"{found.kind:<6} {found.where}:{at} {found.message}"
    yield from _tables(audit)
    counts = Counter(found.kind for found in audit.found)
    verdict = "damaged" if audit.errors else "not all could be read" if audit.unread else "OK"
    errors = counts[Level.ERROR.value]
    unread = f", {audit.unread} unread" if audit.unread else ""
    yield (
        f"{verdict}: {counts[Level.INFO.value]} info, {errors} error{'s' * (errors != 1)}{unread}; "
        f"{format_bytes(audit.raw_bytes)} in {audit.seconds:.1f} s, {audit.megabytes_per_second:.0f} MB/s"
    )


def _tables(audit: Audit) -> Iterator[str]:
    rows = [
        (
            log.root,
            *map(str, (log.segments, log.records)),
            format_bytes(log.raw_bytes),
            *map(str, (log.reclaimed, log.expired, log.bundles, log.errors)),
        )
        for log in audit.logs
    ]
    yield from aligned([_LOGS, *rows], range(1, len(_LOGS)))
    if audit.archives:
        yield ""
        places = [
            (each.address, str(each.bags), str(each.bundles), format_bytes(each.stored_bytes), str(each.errors))
            for each in audit.archives
        ]
        yield from aligned([_ARCHIVES, *places], range(1, len(_ARCHIVES)))


def _as_json(audit: Audit) -> dict[str, Any]:  # Any: it is JSON
    return {
        "logs": [_log(log) for log in audit.logs],
        "archives": [_archive(archive) for archive in audit.archives],
        "found": [
            {"level": found.kind, "path": found.where, "offset": found.offset, "message": found.message}
            for found in audit.found
        ],
        "errors": audit.errors,
        "unread": audit.unread,
        "raw_bytes": audit.raw_bytes,
        "seconds": round(audit.seconds, 3),
        "megabytes_per_second": round(audit.megabytes_per_second, 1),
    }


def _log(log: LogReport) -> dict[str, Any]:
    return {
        "root": log.root,
        "segments": log.segments,
        "records": log.records,
        "raw_bytes": log.raw_bytes,
        "reclaimed": log.reclaimed,
        "expired": log.expired,
        "bundles": log.bundles,
        "errors": log.errors,
    }


def _archive(archive: ArchiveReport) -> dict[str, Any]:
    return {
        "dest": archive.address,
        "bags": archive.bags,
        "bundles": archive.bundles,
        "bytes": archive.stored_bytes,
        "errors": archive.errors,
        "unread": sum(each.unread for each in archive.found),
    }
