"""``wald-audit``: everything of many logs and their archives, read and judged at once."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

import wald
from wald.cli.entry import run
from wald.cli.options import json_option
from wald.cli.progress import progress
from wald.errors import Damaged, NotFound
from wald_spark.audit.plan import plan
from wald_spark.audit.report import tell
from wald_spark.commands import master_option, roots_option
from wald_spark.session import session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@roots_option
@click.option(
    "--archive",
    "destinations",
    multiple=True,
    metavar="DIR|URL",
    help="An archive besides those that the ledgers of the logs tell of. Repeatable.",
)
@master_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(roots: tuple[str, ...], destinations: tuple[str, ...], master: str, as_json: bool) -> int:
    """Read every byte of every log and of its archives, prove that nothing is missing, and change nothing.

    Checked are the checksums of all frames and the sha256 of all segments, that sequences go on without a gap, that
    every deletion was legal by the cursors that were recorded before it, and every bundle against its manifest.
    Daemons may run meanwhile. The exit code is 4 if anything is wrong.
    """
    planned = plan(list(_expanded(roots)), destinations)
    with session("wald-audit", master=master) as spark:
        from wald_spark.audit.job import audit  # not before it is sure that there is a PySpark

        with progress("audit", sum(work.stored_bytes for work in planned.work)) as advance:
            done = audit(spark, planned, on_bytes=advance)
    tell(done, as_json=as_json)
    return Damaged.exit_code if done.errors else 0


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-audit", sys.argv[1:]))


def _expanded(patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        names = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not names:
            raise NotFound(f"{pattern}: nothing matches", hint=f"ls -d {pattern}")
        yield from map(Path, names)
