"""``wald-compact``: the latest value of each key, brought up to date."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import click

import wald
from wald.cli.entry import run
from wald.cli.options import json_option
from wald.format.times import utc
from wald.store.files.disk import Disk
from wald_spark.commands import alone_in, master_option, out_option, permissive_hint, roots_option, routes_option
from wald_spark.compact.generations import Generations
from wald_spark.session import require_spark, session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@roots_option
@out_option
@routes_option
@click.option("--permissive", is_flag=True, help="Pass over what is damaged or was reclaimed too early, and say so.")
@master_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    roots: tuple[str, ...], out: Path, routes: tuple[str, ...] | None, permissive: bool, master: str, as_json: bool
) -> None:
    """Keep the latest value of each key as Parquet in OUT/latest.

    A run reads what has come since the last one, and what that one has made. An empty value deletes its key: the row
    stays, and its value is null. Records without a key are counted and left out.
    """
    require_spark()  # and not before that what needs it
    from wald_spark.compact.job import Compactor
    from wald_spark.compact.report import Report
    from wald_spark.progress import find_logs

    places = find_logs(roots, routes)
    disk, at = Disk(), utc(time.time_ns())
    with alone_in(out / "_wald", disk, "wald-compact"), closing(Report(as_json)) as report:
        compactor = Compactor(
            Generations(out, disk),
            routes,
            permissive,
            notes=out / "_wald" / "passed-over" / at,
            at=at,
            spark=partial(session, "wald-compact", master=master),
            on_held=report.held.add,
            on_begin=report.begin,
            on_done=report.advance,
        )
        with permissive_hint("everything is as it was"):
            done = compactor.compact(places)
        report.close()
        report.done(done, compactor.notes)


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-compact", sys.argv[1:]))
