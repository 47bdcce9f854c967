"""``wald-export``: writes the records since the last run as Parquet."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import wald
from wald.cli.command import examples, run
from wald.cli.options import json_option, size_option
from wald.cli.output import json_line, stdout_is_a_report
from wald.errors import InvalidInput
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
from wald_spark.export.output import ExportedLog, Output, Shape, private
from wald_spark.session import require_spark, session

if TYPE_CHECKING:
    from wald_spark.export.job import LogResult


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "wald-export --out /data/parquet", "wald-export --out /data/parquet --route access --columns status,host"
    ),
)
@roots_option
@out_option
@routes_option
@click.option("--json-schema", default="", metavar="DDL", help="Parse values: 'status INT, host STRING, at TIMESTAMP'.")
@click.option("--columns", default="", metavar="NAMES", help="The same, with types inferred: status,host.")
@size_option("--bytes-per-file", "128MiB", "The approximate size of the records in a file, before compression.")
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
    json_schema: str,
    columns: str,
    bytes_per_file: int,
    permissive: bool,
    is_partial: bool,
    master: str,
    as_json: bool,
) -> None:
    """Export logs to Parquet: OUT/route=ROUTE/date=DATE/*.parquet, for Spark, DuckDB and pandas.

    A run exports the complete records after those already exported, each exactly once, even if an earlier run was
    interrupted. With --json-schema or --columns, values that are JSON objects become a column `json` with these fields;
    any other value is in `_corrupt_record`.
    """
    if json_schema and columns:
        raise InvalidInput("--json-schema and --columns are mutually exclusive", hint="wald-export --help")
    require_spark()  # before the modules that need it
    from wald_spark.export.job import Exporter
    from wald_spark.progress import find_logs

    names = tuple(dict.fromkeys(name.strip() for name in columns.split(",") if name.strip()))
    locations = find_logs(roots, routes)
    disk, at, report = Disk(), utc(time.time_ns()), RunReport(as_json)
    with locked_by("wald-export", private(out), disk), closing(report):
        output = Output(out, disk)
        _report_recovered(output.recover())
        exporter = Exporter(
            output,
            Shape(routes, names, " ".join(json_schema.split())),
            permissive,
            is_partial,
            bytes_per_file,
            notes=private(out) / "passed-over" / at,
            at=at,
            spark=partial(session, "wald-export", master=master),
            on_shape=_report_shape,
            on_new=report.add_held_back,
            on_begin=partial(report.begin, "export"),
            on_done=report.advance,
        )
        with permissive_hint("nothing of this run is exported"):
            results = exporter.export(locations)
    (_print_json if as_json else _print_lines)(out, results, report, exporter.notes)


def main() -> None:
    sys.exit(run(command, "wald-export", sys.argv[1:]))


def _report_recovered(entries: Sequence[ExportedLog]) -> None:
    """Report the files of an interrupted run that were moved to their names."""
    for entry in entries:
        message = f"moved {_files(len(entry.pending))} that an interrupted run had left for log {entry.log}"
        click.echo(f"wald-export: {message}", err=True)


def _report_shape(ddl: str) -> None:
    """Report the inferred types."""
    click.echo(f"wald-export: inferred --json-schema '{ddl}'", err=True)


def _print_json(out: Path, results: Sequence[LogResult], report: RunReport, _: Path) -> None:
    printed = {
        "out": str(out),
        "logs": [_as_json(result) for result in results],
        "held_back": report.held_back,
        "seconds": round(report.seconds, 3),
    }
    click.echo(json_line("export", printed))


def _print_lines(out: Path, results: Sequence[LogResult], report: RunReport, notes: Path) -> None:
    for result in results:
        click.echo(_line(result))
    if not results:
        click.echo("nothing to export: every complete record is exported")
    for line in report.lines():
        click.echo(line)
    if passed_over := [message for result in results for message in result.passed_over]:
        click.echo(f"skipped damage {len(passed_over)} times, listed in {notes}: {passed_over[0]}")
    if raw := sum(result.due.new.raw_bytes for result in results):
        click.echo(f"{format_bytes(raw)} of records in {report.seconds:.1f} s with Spark's start, to {out}")


def _line(result: LogResult) -> str:
    entry, before = result.entry, result.due.before
    corrupt = entry.corrupt - before.corrupt
    return (
        f"{result.due.new.location.root.path}: up to record {entry.last}: {entry.records - before.records} records"
        f"{f' ({corrupt} of them corrupt)' if corrupt else ''} in {_files(len(result.files))}, "
        f"{format_bytes(entry.bytes - before.bytes)}"
    )


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _as_json(result: LogResult) -> dict[str, Any]:  # Any: it is JSON
    entry, before = result.entry, result.due.before
    return {
        "log": entry.log,
        "root": str(result.due.new.location.root.path),
        "first": before.last + 1,
        "last": entry.last,
        "records": entry.records - before.records,
        "corrupt": entry.corrupt - before.corrupt,
        "passed_over": result.passed_over,
        "raw_bytes": result.due.new.raw_bytes,
        "bytes": entry.bytes - before.bytes,
        "files": [file.name for file in result.files],
    }
