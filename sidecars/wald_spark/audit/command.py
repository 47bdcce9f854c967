"""``wald-audit``: many logs and their archives, read and judged at once."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

import wald
from wald.cli.entry import run
from wald.cli.options import SequenceNumber, json_option
from wald.cli.progress import progress
from wald.errors import NotFound
from wald_spark.audit.job import audit, plan
from wald_spark.audit.report import audit_lines
from wald_spark.commands import master_option, roots_option
from wald_spark.locations import is_pattern
from wald_spark.session import session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
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
    """The console script."""
    sys.exit(run(command, "wald-audit", sys.argv[1:]))


def expanded(patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        names = sorted(glob.glob(pattern)) if is_pattern(pattern) else [pattern]
        if not names:
            raise NotFound(f"{pattern}: nothing matches", hint=f"ls -d {pattern}")
        yield from map(Path, names)
