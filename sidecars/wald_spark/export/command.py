"""``wald-export``: writes the records since the last run as Parquet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from wald.cli.command import examples, run
from wald.cli.options import size_option
from wald.cli.output import stdout_is_a_report
from wald.errors import InvalidInput
from wald_spark.commands import damage_options, spark_options, table_options


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "wald-export --out /data/parquet", "wald-export --out /data/parquet --route access --columns status,host"
    ),
)
@table_options
@click.option("--json-schema", default="", metavar="DDL", help="Parse values: 'status INT, host STRING, at TIMESTAMP'.")
@click.option("--columns", default="", metavar="NAMES", help="The same, with types inferred: status,host.")
@size_option("--bytes-per-file", "128MiB", "The approximate size of the records in a file, before compression.")
@damage_options
@spark_options
@stdout_is_a_report
def command(
    out: Path, routes: tuple[str, ...] | None, json_schema: str, columns: str, bytes_per_file: int, **settings: Any
) -> None:
    """Export logs to Parquet: OUT/route=ROUTE/date=DATE/*.parquet, for Spark, DuckDB and pandas.

    A run exports the complete records after those already exported, each exactly once, even if an earlier run was
    interrupted. With --json-schema or --columns, values that are JSON objects become a column `json` with these fields;
    any other value is in `_corrupt_record`.
    """
    if json_schema and columns:
        raise InvalidInput("--json-schema and --columns are mutually exclusive", hint="wald-export --help")
    from wald_spark.session import require_spark

    require_spark()  # before the modules that need it
    from wald_spark.export.job import Shape, export

    names = tuple(dict.fromkeys(name.strip() for name in columns.split(",") if name.strip()))
    shape = Shape(routes, names, " ".join(json_schema.split()))
    export(out, shape, bytes_per_file, **settings, write=click.echo, warn=_warn)


def _warn(message: str) -> None:
    click.echo(f"wald-export: {message}", err=True)


def main() -> None:
    sys.exit(run(command, "wald-export", sys.argv[1:]))
