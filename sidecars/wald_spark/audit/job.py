"""An audit: the logs, the archives that their ledgers name and all bags in these are found, read and judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import DiskFailure, InvalidInput
from wald.files.layout import Root
from wald_spark.audit.archives import ArchiveAudit, archives_of, reports
from wald_spark.audit.logs import LogAudit
from wald_spark.audit.report import Audit
from wald_spark.audit.work import Outcomes, Work, pickled_outcome
from wald_spark.locations import require_bags

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Plan:
    """Logs and archives to audit; records before ``first`` may be missing."""

    logs: Sequence[LogAudit]
    archives: Sequence[ArchiveAudit]
    first: int = 1

    @property
    def work(self) -> list[Work]:
        """For executors, the largest first, so that what is begun last does not take long."""
        work: chain[Work] = chain(*(log.work for log in self.logs), *(archive.work for archive in self.archives))
        return sorted(work, key=lambda each: each.stored_bytes, reverse=True)


def plan(roots: Sequence[Path], destinations: Sequence[str], *, first: int = 1) -> Plan:
    """Find what to read of ``roots``, of the archives that their ledgers name, and of those at ``destinations``.

    Args:
        first: earlier records may be missing, from the logs and from the archives.

    Raises:
        NotFound: one of the roots is not a log, or there is no archive at one of ``destinations``.
    """
    for destination in destinations:
        with suppress(InvalidInput, DiskFailure):  # it cannot be reached: reported when it is audited
            require_bags(destination)
    logs = [LogAudit(Root(path), first=first) for path in dict.fromkeys(path.absolute() for path in roots)]
    named = (destination for log in logs for destination in log.destinations)
    return Plan(logs, archives_of([log.root for log in logs], [*named, *destinations]), first)


def audit(spark: SparkSession, planned: Plan, *, on_bytes: Callable[[int], None]) -> Audit:
    """Read everything and judge it; nothing is changed.

    Args:
        on_bytes: called with the number of stored bytes that have been read since the last call.

    Raises:
        Unavailable: Spark gives up, or an executor does not have what it is to read.
    """
    from wald_spark.tasks import run

    began = time.perf_counter()
    work, outcomes = planned.work, Outcomes()
    done = run(spark, work, pickled_outcome, on_done=lambda number: on_bytes(work[number].stored_bytes))
    with closing(done) as results:
        for number, pickled in results:
            outcomes.add(work[number], pickled)
    logs = tuple(log.report(outcomes) for log in planned.logs)
    archives = tuple(reports(planned.archives, outcomes, first=planned.first))
    return Audit(logs, archives, time.perf_counter() - began)
