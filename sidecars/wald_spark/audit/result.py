"""What an audit comes to: numbers and findings for each log and each archive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wald.store.checking.finding import Level


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is worth knowing, or wrong: ``where`` is a path or an address, ``offset`` in bytes."""

    level: Level
    where: str
    offset: int | None
    message: str


@dataclass(frozen=True, slots=True)
class LogReport:
    """
    Attributes:
        segments, records, raw_bytes: what was read.
        reclaimed: segments that were deleted. expired: records that nobody had read, in those.
        bundles: that its ledger tells of.
    """

    root: str
    segments: int
    records: int
    raw_bytes: int
    reclaimed: int
    expired: int
    bundles: int
    found: tuple[Found, ...]

    @property
    def errors(self) -> int:
        return _errors(self.found)


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """``bundles``: how many are proven; ``stored_bytes``: of all."""

    place: str
    bags: int
    bundles: int
    stored_bytes: int
    found: tuple[Found, ...]

    @property
    def errors(self) -> int:
        return _errors(self.found)


@dataclass(frozen=True, slots=True)
class Audit:
    """``seconds``: it took, without the start of Spark."""

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
    def found(self) -> list[Found]:
        """All of it: of the logs, then of the archives."""
        return [
            *(each for log in self.logs for each in log.found),
            *(each for at in self.archives for each in at.found),
        ]


def _errors(found: Iterable[Found]) -> int:
    return sum(each.level is Level.ERROR for each in found)
