"""``wald-audit``: audit of many logs and of the archives that their ledgers name."""

from __future__ import annotations

import sys

import click

from wald.cli.command import examples, run
from wald.cli.options import SequenceNumber
from wald.cli.output import progress
from wald_spark.commands import roots_option, spark_options


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
@spark_options
def command(roots: tuple[str, ...], destinations: tuple[str, ...], first: int, master: str, as_json: bool) -> int:
    """Read every byte of every log and of its archives, prove that nothing is missing, and change nothing.

    It checks the checksums of all frames, the sha256 of all segments, that sequences have no gaps, that every deletion
    was allowed by the cursors recorded before it, and every bundle against its manifest. Daemons may keep running.

    The exit code is 4 if anything is wrong. It is 6 if nothing else is wrong but an archive could not be read:
    credentials are missing, or the store does not answer.
    """
    from wald_spark.audit.audits import audit, audit_lines, expanded, plan
    from wald_spark.session import session

    planned = plan(list(expanded(roots)), destinations, first=first)
    total = sum(work.stored_bytes for work in planned.work)
    with session("wald-audit", master=master) as spark, progress("audit", total) as advance:
        audited = audit(spark, planned, on_bytes=advance)
    for line in audit_lines(audited, as_json=as_json):
        click.echo(line)
    return audited.exit_code


def main() -> None:
    sys.exit(run(command, "wald-audit", sys.argv[1:]))
