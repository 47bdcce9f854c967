"""``wald-compact``: keeps the latest value of each key."""

from __future__ import annotations

import sys
from typing import Any

import click

from wald.cli.command import examples, run
from wald.cli.output import stdout_is_a_report
from wald_spark.commands import damage_options, spark_options, table_options


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("wald-compact --out /data/latest", "wald-compact --out /data/latest --route customers"),
)
@table_options
@damage_options
@spark_options
@stdout_is_a_report
def command(**settings: Any) -> None:
    """Keep the latest value of each key as Parquet in OUT/latest.

    A run reads the records since the last run, and the result of that run. An empty value deletes its key: the row
    stays, and its value is null. Records without a key are counted and left out.
    """
    from wald_spark.session import require_spark

    require_spark()  # before the modules that need it
    from wald_spark.compact.job import compact

    compact(**settings, write=click.echo)


def main() -> None:
    sys.exit(run(command, "wald-compact", sys.argv[1:]))
