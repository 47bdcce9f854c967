"""``wald-audit``: reads and judges many logs, the archives that their ledgers name, and all bags in these."""

from __future__ import annotations

import glob
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples, run
from wald.cli.options import SequenceNumber, json_option
from wald.cli.output import progress
from wald.errors import DiskFailure, InvalidInput, NotFound
from wald.files.layout import Root
from wald_spark.audit.audits import ArchiveAudit, LogAudit, Outcomes, Work, archives_of, pickled_outcome, reports
from wald_spark.audit.report import Audit, audit_lines
from wald_spark.commands import master_option, roots_option
from wald_spark.locations import is_pattern, require_bags
from wald_spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("wald-audit --root '/var/lib/wald*'", "wald-audit --root /var/lib/wald --archive /srv/archive"),
)
@roots_option
@click.option(
    "--archive",
    "destinations",
    multiple=True,
    metavar="DIR|URL",
    help="An archive in addition to those in the logs' ledgers. Repeatable.",
)
@click.option(
    "--from",
    "first",
    type=SequenceNumber(),
    default=1,
    metavar="SEQ",
    help="For partial copies: records before SEQ may be missing.",
)
@master_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(roots: tuple[str, ...], destinations: tuple[str, ...], first: int, master: str, as_json: bool) -> int:
    """Read every byte of every log and of its archives, prove that nothing is missing, and change nothing.

    It checks the checksums of all frames, the sha256 of all segments, that sequences have no gaps, that every deletion
    was allowed by the cursors recorded before it, and every bundle against its manifest. Daemons may keep running.

    The exit code is 4 if anything is wrong. It is 6 if nothing else is wrong but an archive could not be read:
    credentials are missing, or the store does not answer.
    """
    planned = plan(list(expanded(roots)), destinations, first=first)
    total = sum(work.stored_bytes for work in planned.work)
    with session("wald-audit", master=master) as spark, progress("audit", total) as advance:
        audited = audit(spark, planned, on_bytes=advance)
    for line in audit_lines(audited, as_json=as_json):
        click.echo(line)
    return audited.exit_code


def main() -> None:
    sys.exit(run(command, "wald-audit", sys.argv[1:]))


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
        """Work for executors, the largest first, so that the last task to start is short."""
        work: chain[Work] = chain(*(log.work for log in self.logs), *(archive.work for archive in self.archives))
        return sorted(work, key=lambda each: each.stored_bytes, reverse=True)


def plan(roots: Sequence[Path], destinations: Sequence[str], *, first: int = 1) -> Plan:
    """Plan the audit of ``roots``, of the archives that their ledgers name, and of those at ``destinations``.

    Args:
        first: earlier records may be missing, from the logs and from the archives.
    """
    for destination in destinations:
        with suppress(InvalidInput, DiskFailure):  # it cannot be reached: reported when it is audited
            require_bags(destination)
    logs = [LogAudit(Root(path), first=first) for path in dict.fromkeys(path.absolute() for path in roots)]
    named = (destination for log in logs for destination in log.destinations)
    return Plan(logs, archives_of([log.root for log in logs], [*named, *destinations]), first)


def audit(spark: SparkSession, planned: Plan, *, on_bytes: Callable[[int], None]) -> Audit:
    """Read and judge everything; nothing is changed.

    Args:
        on_bytes: called with the number of stored bytes that have been read since the last call.
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
