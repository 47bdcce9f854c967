"""``wald clock``: recovery after the clock was far ahead."""

from __future__ import annotations

from pathlib import Path

import click

from wald.cli.command import Command, examples
from wald.cli.options import json_option, root_option, socket_option
from wald.cli.output import json_line
from wald.cli.streams import stdout_is_a_report


@click.group()
def clock() -> None:
    """Restart append times after the clock was far ahead."""


@clock.command(cls=Command, epilog=examples("wald clock step", "wald clock step --json"))
@root_option
@socket_option
@json_option
@stdout_is_a_report
def step(root: Path, socket: Path | None, as_json: bool) -> None:
    """Record a clock step: the next records get their append times from the clock again.

    While the clock was far ahead, records got append times in the future, and all later records get the last of them
    until the clock has caught up. Correct the clock first. Sequences and records do not change; look-ups by time treat
    the records before and after the step as separate ranges. Only the log's owner may use it. Needs the daemon.
    """
    from wald.cli.connect import daemon_at

    with daemon_at(root, socket) as daemon:
        what, base = daemon.command("CLOCK STEP").split()
    stepped = what == "stepped"
    if as_json:
        click.echo(json_line("clock.step", {"stepped": stepped, "sequence": int(base)}))
    elif stepped:
        click.echo(f"stepped: append times begin again with record {base}")
    else:
        click.echo("nothing to step: append times are not ahead of the clock")
