"""``wald-export``: what has come since the last run, as Parquet."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import click

import wald
from wald.cli.entry import run
from wald.cli.options import json_option, size_option
from wald.errors import InvalidInput
from wald.format.times import utc
from wald.store.files.disk import Disk
from wald_spark.commands import alone_in, master_option, out_option, permissive_hint, roots_option, routes_option
from wald_spark.export.book import Shape
from wald_spark.export.target import Target, private
from wald_spark.session import require_spark, session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@roots_option
@out_option
@routes_option
@click.option("--json-schema", default="", metavar="DDL", help="Parse values: 'status INT, host STRING, at TIMESTAMP'.")
@click.option("--columns", default="", metavar="NAMES", help="The same, with types found out: status,host.")
@size_option("--bytes-per-file", "128MiB", "About so many bytes of records in a file, before they are compressed.")
@click.option("--permissive", is_flag=True, help="Pass over what is damaged or was reclaimed too early, and say so.")
@master_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    roots: tuple[str, ...],
    out: Path,
    routes: tuple[str, ...] | None,
    json_schema: str,
    columns: str,
    bytes_per_file: int,
    permissive: bool,
    master: str,
    as_json: bool,
) -> None:
    """Export logs to Parquet: OUT/route=ROUTE/date=DATE/*.parquet, for Spark, DuckDB and pandas.

    A run exports the complete records behind those that are exported already, each exactly once, whatever became of
    the run before. With --json-schema or --columns, values that are JSON objects become a column `json` with these
    fields; a value that is none, or does not fit, is in `_corrupt_record`.
    """
    if json_schema and columns:
        raise InvalidInput("--json-schema and --columns exclude each other", hint="wald-export --help")
    require_spark()  # and not before that what needs it
    from wald_spark.export.job import Exporter
    from wald_spark.export.report import Report
    from wald_spark.progress import find_logs

    names = tuple(dict.fromkeys(name.strip() for name in columns.split(",") if name.strip()))
    places = find_logs(roots, routes)
    disk, at = Disk(), utc(time.time_ns())
    with alone_in(private(out), disk, "wald-export"), closing(Report(out, as_json)) as report:
        target = Target(out, disk)
        report.finished(target.recover())
        exporter = Exporter(
            target,
            Shape(routes, names, " ".join(json_schema.split())),
            permissive,
            bytes_per_file,
            notes=private(out) / "passed-over" / at,
            at=at,
            spark=partial(session, "wald-export", master=master),
            on_shape=report.shape,
            on_held=report.held.add,
            on_begin=report.begin,
            on_done=report.advance,
        )
        with permissive_hint("nothing of this run is exported"):
            done = exporter.export(places)
        report.close()
        report.done(done, exporter.notes)


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-export", sys.argv[1:]))
