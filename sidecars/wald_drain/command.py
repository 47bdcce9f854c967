"""Command ``wald-drain`` with ``feed`` and ``redrive``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import Command, examples, run
from wald.cli.options import (
    DefaultGroup,
    count_option,
    duration_option,
    group_option,
    metrics_option,
    root_option,
    route_argument,
    socket_option,
)
from wald.cli.output import stdout_is_a_report
from wald.errors import InvalidInput
from wald.format.names import check_route

if TYPE_CHECKING:
    from wald.work.group import Order

_DEAD_LETTER = "dead_letter"
_BATCH_RECORDS = 1000


@click.group(
    cls=DefaultGroup,
    takes_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="ROUTE -- COMMAND [ARGUMENT]... | redrive [ROUTE]",
)
@click.option("--root", type=click.Path(path_type=Path), help="The directory of the log.  [env: WALD_ROOT]")
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def command(ctx: click.Context, root: Path | None) -> None:
    """Feed a route to a command, batch by batch; redrive records that it could not process.

    `wald-drain ROUTE -- COMMAND...` is short for `wald-drain feed ROUTE -- COMMAND...`; see `wald-drain feed --help`.
    """
    ctx.obj = root


@command.command(
    cls=Command,
    epilog=examples("wald-drain orders --tries 5 -- ./handle", "wald-drain orders --workers 4 --order key -- ./handle"),
)
@route_argument
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND [ARGUMENT]...", type=click.UNPROCESSED)
@root_option
@group_option
@count_option(
    "--batch-records",
    count_max=1_000_000,
    help_text="The maximum number of records for one run of the command.  [default: 1000; with --workers: 1]",
)
@count_option("--workers", count_max=1000, help_text="The number of commands that run at once, with different records.")
@click.option(
    "--order",
    type=click.Choice(["log", "key"]),
    help="With --workers. key: process the records of each key in their order.  [default: log]",
)
@count_option(
    "--tries", count_max=1000, help_text="Give up a single record after this number of tries.  [default: never]"
)
@duration_option(
    "--time-limit",
    None,
    "Stop the command if it runs longer; that counts as a failed try.",
    seconds_min=0.001,
    days_max=30,
)
@click.option(
    "--dead-letter",
    default=_DEAD_LETTER,
    show_default=True,
    metavar="ROUTE",
    help="The route for records that are given up.",
)
@click.option("--exit-at-end", is_flag=True, help="Exit when every record that existed at the start is processed.")
@click.option(
    "--format",
    "form",
    hidden=True,
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="json: one object per line.",
)
@metrics_option
@socket_option
@stdout_is_a_report
def feed(
    root: Path,
    route: str,
    words: tuple[str, ...],
    group: str,
    batch_records: int | None,
    workers: int | None,
    order: Order | None,
    tries: int | None,
    time_limit: float | None,
    dead_letter: str,
    exit_at_end: bool,
    form: str,
    metrics: str | None,
    socket: Path | None,
) -> None:
    """Feed the records of ROUTE to COMMAND, one batch at a time.

    Starts after the group's cursor. COMMAND gets each batch on its stdin. If it exits 0, the cursor moves past the
    batch. Otherwise it gets the same batch again after 0.1 s and 0.2 s, and then in halves, until the failing record is
    alone. That record is retried after 0.1 s, 0.2 s, 0.4 s and so on, up to every 30 s, until it succeeds. With --tries
    N, the record goes to the dead-letter route after N tries, with headers that name its origin and the reason, and the
    cursor moves. Exit code 75 (EX_TEMPFAIL) does not count as a try: COMMAND gets the same records again later.

    With --time-limit 5m, a COMMAND that runs longer gets SIGTERM, and SIGKILL 10 s later, together with its process
    group; that counts as a failed try, regardless of its exit code.

    The environment of COMMAND has WALD_ROUTE, WALD_GROUP, WALD_FIRST, WALD_LAST (sequences), WALD_COUNT (of records)
    and WALD_TRY. If the machine stops before the cursor has moved, COMMAND may get a processed batch again. If only
    drain is killed, COMMAND continues, and the next start waits for it and uses its exit code.

    With --workers N, up to N instances of COMMAND run at once, each with different records, and with WALD_WORKER from 1
    to N. Each record is acknowledged individually, so one that fails does not block the others. Records are processed
    in any order; with --order key, one COMMAND at a time has the records of a key, in their order.

    SIGTERM, SIGHUP or Ctrl-C lets a running COMMAND finish and starts no other; a second Ctrl-C ends drain at once
    (exit code 130) and leaves COMMAND running for the next start, which waits for it. If records are damaged or
    missing, drain ends with the cursor before them and exit code 4 or 3; otherwise the exit code is 10 if a record was
    given up. While the disk is full, drain waits for space; if the disk fails, drain ends with exit code 7.
    """
    if check_route(dead_letter) == route and tries is not None:
        raise InvalidInput(
            f"route {route}: cannot be its own dead-letter route", hint="--dead-letter takes the name of another route"
        )
    if order is not None and workers is None:
        raise InvalidInput("--order needs --workers", hint="--workers 4 --order key")
    from wald_drain.run import feed
    from wald_drain.worker import Job

    job = Job(
        command=words,
        stdin_format=form,
        records_max=batch_records or (_BATCH_RECORDS if workers is None else 1),
        tries=tries,
        dead_letter=dead_letter,
        daemon=socket or root,
        exit_at_end=exit_at_end,
        order="strict" if workers is None else order or "log",
    )
    feed(root, route, group, job, workers=workers or 1, time_limit=time_limit, metrics=metrics, report=_report)


@command.command(cls=Command, epilog=examples("wald-drain redrive", "wald-drain redrive dead_letter --group retry"))
@click.argument("route", default=_DEAD_LETTER, callback=lambda _ctx, _parameter, name: check_route(name))
@root_option
@group_option
@socket_option
@stdout_is_a_report
def redrive(root: Path, route: str, group: str, socket: Path | None) -> None:
    """Append dead letters to their original routes again.

    Reads ROUTE (dead_letter if not given) after the group's cursor. Each dead letter is appended once to the route that
    its headers name, with its value, key, event time and headers as before. There it is a new record, which every
    group of that route gets. Then the cursor moves.
    """
    from wald.log import Log
    from wald.loop import stop_on_signals
    from wald_drain.redrive import Consumer, redrive

    with stop_on_signals() as stop:
        redrive(Consumer(Log(root), route, group), daemon=socket or root, stop=stop, report=_report)


def _report(line: str) -> None:
    click.echo(f"wald-drain: {line}", err=True)


def main() -> None:
    sys.exit(run(command, "wald-drain", sys.argv[1:]))
