"""What there is to audit: a look at the logs, at the archives that their ledgers tell of, and at all bags in these."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from wald.errors import DiskFailure, InvalidInput
from wald.store.files.directory import Root
from wald_spark.audit.archives import ArchiveAudit, archives_of
from wald_spark.audit.logs import LogAudit
from wald_spark.audit.pieces import Work
from wald_spark.locations import require_bags


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to audit, as it was found."""

    logs: Sequence[LogAudit]
    archives: Sequence[ArchiveAudit]

    @property
    def work(self) -> list[Work]:
        """For executors, the largest first: whatever is begun last is over soon."""
        work: chain[Work] = chain(*(log.work for log in self.logs), *(archive.work for archive in self.archives))
        return sorted(work, key=lambda each: each.stored_bytes, reverse=True)


def plan(roots: Sequence[Path], destinations: Sequence[str]) -> Plan:
    """Look at ``roots``, and at the archives that their ledgers tell of and those at ``destinations``.

    Raises:
        NotFound: one of the roots is no log, or there is no archive at one of ``destinations``.
    """
    for destination in destinations:
        with suppress(InvalidInput, DiskFailure):  # out of reach: found when it is audited
            require_bags(destination)
    logs = [LogAudit(Root(path)) for path in dict.fromkeys(path.absolute() for path in roots)]
    told = (destination for log in logs for destination in log.destinations)
    return Plan(logs, archives_of([log.root for log in logs], [*told, *destinations]))
