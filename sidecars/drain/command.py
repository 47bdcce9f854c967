"""``wald-drain``: records to a command's stdin, and the cursor after the command has succeeded."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

import wald
from sidecars.drain.attempt import check_command
from sidecars.drain.feed import Drain, Job
from sidecars.drain.portions import Form
from sidecars.loop import stop_on_signals
from wald.cli.entry import run
from wald.cli.options import group_option, root_option, route_argument, socket_option
from wald.errors import Damaged, InvalidInput
from wald.format.names import check_route
from wald.store.disk import Disk


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@route_argument
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND [ARGUMENT]...", type=click.UNPROCESSED)
@root_option
@group_option
@click.option(
    "--batch-records",
    type=click.IntRange(1, 1_000_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="The command gets at most so many records at a time.",
)
@click.option(
    "--tries",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    metavar="N",
    help="So often it gets them before they are given up.",
)
@click.option(
    "--dead-letter", default="dead_letter", show_default=True, metavar="ROUTE", help="The route for what is given up."
)
@click.option("--exit-at-end", is_flag=True, help="Exit once everything is processed that was there at the start.")
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in Form]),
    default=Form.RAW.value,
    show_default=True,
    help="json: an object a line.",
)
@socket_option
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    root: Path,
    route: str,
    words: tuple[str, ...],
    group: str,
    batch_records: int,
    tries: int,
    dead_letter: str,
    exit_at_end: bool,
    form: str,
    socket: Path | None,
) -> int:
    """Feed the records of ROUTE behind the group's cursor to COMMAND, a batch at a time.

    COMMAND gets a batch on its stdin. If it exits 0, the cursor moves behind the batch; if not, it gets the very same
    batch again after 0.1 s, 0.2 s, 0.4 s and so on up to 30 s. After the last try the batch goes to the dead-letter
    route, where its records say in their headers where they come from and why, and then the cursor moves.

    COMMAND finds WALD_ROUTE, WALD_GROUP, WALD_FIRST, WALD_LAST (sequences), WALD_COUNT and WALD_TRY in its environment.
    It may get a batch again that it has processed, if drain dies before the cursor has moved.

    SIGTERM or Ctrl-C lets a running COMMAND finish and starts no other. Where bytes are damaged it says so, goes on
    behind them, and the exit code is 4.
    """
    if check_route(dead_letter) == route:
        raise InvalidInput(
            f"route {route}: cannot be its own dead-letter route", hint="--dead-letter takes the name of another route"
        )
    check_command(words)
    log = wald.open(root)
    job = Job(
        route=route,
        group=group,
        command=words,
        form=Form(form),
        records_max=batch_records,
        tries=tries,
        dead_letter=dead_letter,
        daemon=socket or root,
        exit_at_end=exit_at_end,
    )
    damaged: set[str] = set()

    def tell(line: str) -> None:
        click.echo(f"wald-drain: {line}", err=True)

    def tell_damage(error: Damaged) -> None:
        if error.message not in damaged:  # it is met anew in every look behind the cursor
            damaged.add(error.message)
            tell(f"{error.message}\n  hint: {error.hint}")

    with stop_on_signals() as stop:
        Drain(log, job, disk=Disk(), stop=stop, tell=tell, on_damage=tell_damage, now_ns=time.time_ns).run()
    return Damaged.exit_code if damaged else 0


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-drain", sys.argv[1:]))
