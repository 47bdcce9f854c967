"""``wald-reclaim``: a single pass, or one whenever a cursor moves or a segment is sealed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

import wald
from wald.cli.command import Command, examples, run
from wald.cli.options import (
    config_option,
    count_option,
    duration_option,
    json_option,
    metrics_option,
    root_option,
    size_option,
)
from wald.errors import InvalidInput

_CENTURY = 36_600  # days


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("wald-reclaim --dry-run", "wald-reclaim --watch --max-bytes 100GiB"),
)
@root_option
@config_option("The daemon's config file: its [retention], and limits of routes. Options override it.")
@click.option(
    "--watch",
    is_flag=True,
    help="Make a pass whenever a cursor moves or a segment is sealed, until SIGTERM, instead of one pass.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@duration_option("--min-age", None, "Keep segments that have been complete for less than this.", days_max=_CENTURY)
@size_option("--keep-bytes", None, "Keep the newest segments, at least this much in total.")
@click.option("--require-archived", is_flag=True, help="Keep records that wald-archive has not put into a bundle.")
@duration_option(
    "--max-age",
    None,
    "Delete read segments older than this, despite --min-age and --keep-bytes; log_max_age in the file. 0: no limit.",
    days_max=_CENTURY,
)
@size_option(
    "--max-bytes", None, "Delete read segments while the complete ones exceed this; log_max_bytes. 0: no limit."
)
@count_option("--max-records", count_min=0, hidden=True, help_text="The same in records; log_max_records. 0: no limit.")
@click.option(
    "--unread",
    type=click.Choice(["keep", "expire"]),
    help="expire: delete records beyond a limit even if unread, except in routes with keep. LOSES DATA. "
    "keep: delete no unread record, regardless of the file.  [default: the file, else keep]",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read every frame of a sealed segment before it is deleted; report damage and record it in the ledger. "
    "Without this option, damage after sealing is not noticed.",
)
@duration_option(
    "--grace",
    None,
    "How long a released segment is kept for readers about to open it.  [default: 60s]",
    days_max=366,
    hidden=True,
)
@click.option(
    "--shrink-pinned",
    is_flag=True,
    help="Rewrite a sealed segment that is kept only for unread records to just those, if that frees at least half.",
)
@metrics_option
@json_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    root: Path, config_path: Path | None, watch: bool, dry_run: bool, metrics: str | None, as_json: bool, **limits: Any
) -> None:
    """Delete the segments that every consumer group has read.

    A complete segment, sealed or not, is deleted when, for every route that has records in it and is not retired, every
    cursor has reached the route's last record in it. `wald explain` shows which group pins which segments. Each
    deletion is recorded in ledger/reclaim.jsonl before it happens, with the cursors that allowed it. Only one
    wald-reclaim works on a root at a time.
    """
    if watch and dry_run:
        raise InvalidInput("--watch excludes --dry-run", hint="wald-reclaim --help")
    if metrics is not None and not watch:
        raise InvalidInput("--metrics needs --watch", hint=f"--watch --metrics {metrics}")
    from wald_reclaim.passes import load_settings, reclaim

    given = {name: value for name, value in limits.items() if value is not False}  # an absent flag: as in the file
    load = partial(load_settings, config_path, given)
    reclaim(
        root, load, is_dry_run=dry_run, watching=watch, metrics=metrics, as_json=as_json, write=click.echo, warn=_warn
    )


def _warn(message: str) -> None:
    click.echo(f"wald-reclaim: {message}", err=True)


def main() -> None:
    sys.exit(run(command, "wald-reclaim", sys.argv[1:]))
