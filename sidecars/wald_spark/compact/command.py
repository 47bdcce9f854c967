"""``wald-compact``: keeps the latest value of each key."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples, run
from wald.cli.options import json_option
from wald.cli.output import json_line, stdout_is_a_report
from wald.files.disk import Disk
from wald.format.times import utc
from wald.setting_types import format_bytes
from wald_spark.commands import (
    RunReport,
    locked_by,
    master_option,
    out_option,
    partial_option,
    permissive_hint,
    roots_option,
    routes_option,
)
from wald_spark.session import require_spark, session

if TYPE_CHECKING:
    from wald_spark.compact.job import Compacted


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("wald-compact --out /data/latest", "wald-compact --out /data/latest --route customers"),
)
@roots_option
@out_option
@routes_option
@click.option("--permissive", is_flag=True, help="Skip and report records that are damaged or reclaimed too early.")
@partial_option
@master_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@stdout_is_a_report
def command(
    roots: tuple[str, ...],
    out: Path,
    routes: tuple[str, ...] | None,
    permissive: bool,
    is_partial: bool,
    master: str,
    as_json: bool,
) -> None:
    """Keep the latest value of each key as Parquet in OUT/latest.

    A run reads the records since the last run, and the result of that run. An empty value deletes its key: the row
    stays, and its value is null. Records without a key are counted and left out.
    """
    require_spark()  # before the modules that need it
    from wald_spark.compact.job import Compactor, Generations
    from wald_spark.progress import find_logs

    locations = find_logs(roots, routes)
    disk, at, report = Disk(), utc(time.time_ns()), RunReport(as_json)
    with locked_by("wald-compact", out / "_wald", disk), closing(report):
        compactor = Compactor(
            Generations(out, disk),
            routes,
            permissive,
            is_partial,
            notes=out / "_wald" / "passed-over" / at,
            at=at,
            spark=partial(session, "wald-compact", master=master),
            on_new=report.add_held_back,
            on_begin=partial(report.begin, "compact"),
            on_done=report.advance,
        )
        with permissive_hint("nothing has changed"):
            compacted = compactor.compact(locations)
    (_print_json if as_json else _print_lines)(compacted, report, compactor.notes)


def main() -> None:
    sys.exit(run(command, "wald-compact", sys.argv[1:]))


def _print_json(compacted: Compacted, report: RunReport, _: Path) -> None:
    printed = {
        "directory": str(compacted.directory) if compacted.directory else None,
        "read": asdict(compacted.counts) | {"raw_bytes": compacted.raw_bytes},
        "generation": asdict(compacted.generation) if compacted.generation else None,
        "held_back": report.held_back,
        "passed_over": compacted.passed_over,
        "seconds": round(report.seconds, 3),
    }
    click.echo(json_line("compact", printed))


def _print_lines(compacted: Compacted, report: RunReport, notes: Path) -> None:
    if not compacted.parts:
        click.echo("nothing to compact: the generation includes every complete record")
    for line in report.lines():
        click.echo(line)
    if (made := compacted.generation) is not None:
        counts = compacted.counts
        click.echo(f"{counts.records} records, {counts.unkeyed} of them without a key and left out")
        click.echo(f"{made.keys} keys, {made.deleted} of them deleted, in {compacted.directory}")
    if passed := compacted.passed_over:
        click.echo(f"skipped damage {len(passed)} times, listed in {notes}: {passed[0]}")
    if raw := compacted.raw_bytes:
        click.echo(f"{format_bytes(raw)} of records in {report.seconds:.1f} s with Spark's start")
