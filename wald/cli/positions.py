"""``wald head`` and ``wald where``: how far the log is durable, and what became of any record."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples
from wald.cli.options import json_option, root_option
from wald.cli.output import json_line
from wald.cli.times import check_span, now, time_option, warn_of_wrong_times
from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import check_route
from wald.format.times import nanoseconds, utc
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.files.layout import Root
    from wald.log import Log
    from wald.segments.view import State

_EXIT_CODES = {
    "never-issued": NotFound.exit_code,
    "skipped": NotFound.exit_code,
    "unknown": NotFound.exit_code,
    "quarantined": Damaged.exit_code,
    "lost": Damaged.exit_code,
}


def exit_code(state: State) -> int:
    """Return the exit code that reports the state of a record."""
    return _EXIT_CODES.get(state.value, 0)


@click.command(epilog=examples("wald head", "wald head --json"))
@root_option
@json_option
def head(root: Path, as_json: bool) -> None:
    """Show the last durable sequence, and where the durable bytes end."""
    log = wald.open(root)
    found = log.head()
    if found is None:
        raise NotFound(
            f"{log.root.head}: no record is durable yet",
            hint=f"{command_line(root, 'run')}, or send it a record if it runs",
        )
    if as_json:
        from wald.status.schema import Head

        click.echo(json_line("head", Head.of(log.root, found)))
    else:
        click.echo(
            f"seq={found.sequence} segment={found.segment} position={found.position} epoch={found.epoch} "
            f"at={moment(found.at_ns)}"
        )
        warn_without_daemon(log.root)


@click.command(epilog=examples("wald where 250", "wald where --route access --since 14:00 --until 14:05"))
@click.argument("sequence", type=int, required=False)
@root_option
@click.option("--route", callback=lambda _ctx, _parameter, name: name and check_route(name), help="With --since.")
@time_option("--since", "Whether all records appended then or later are here.")
@time_option("--until", "Only those appended before; without it: until now.")
@json_option
def where(
    root: Path, sequence: int | None, route: str | None, since: datetime | None, until: datetime | None, as_json: bool
) -> int:
    """Show where record SEQUENCE is: active, cut, sealed, reclaimed, archived, never issued, …

    The exit code is 3 if it was never issued or nothing is known of it, and 4 if it is damaged.

    With --since: show whether all records of that time are here, and where the others are. The exit code is 0 if they
    are, 12 if some were reclaimed, and 4 if some are damaged or lost.
    """
    from wald.segments.view import State
    from wald.status.schema import Where

    log = wald.open(root)
    if (sequence is None) == (since is None) or (since is None and (route is not None or until is not None)):
        message = "where takes a SEQUENCE, or --since with --until and --route"
        examples = ("where 250", "where --route access --since 14:00 --until 14:05")
        raise InvalidInput(message, hint="; ".join(command_line(root, each) for each in examples))
    if since is not None:
        return _coverage(log, route, since, until, as_json=as_json)
    assert sequence is not None
    found = log.where(sequence)
    if not as_json:
        state = found.state.value
        lines = [f"{found.sequence}: {found.message}"]
        if not found.message.startswith(state.replace("-", " ")):
            lines = [f"{found.sequence}: {state}: {found.message}"]
        if found.append_time_ns is not None:
            lines.append(f"  appended {moment(found.append_time_ns)}, {'durable' if found.durable else 'not durable'}")
        lines += [f"  group {group}: has {'' if done else 'not '}read it" for group, done in found.processed.items()]
        if found.bundle is not None and found.state is not State.ARCHIVED:
            lines.append(f"  also in bundle {found.bundle}, member {found.member or 'not known'}")
        click.echo("\n".join(lines))
        return exit_code(found.state)
    click.echo(json_line("where", Where.of(found)))
    return exit_code(found.state)


def _coverage(log: Log, route: str | None, since: datetime, until: datetime | None, *, as_json: bool) -> int:
    """Print whether all records of a time are here; returns the exit code."""
    from wald.cli import coverage  # reads ledgers, which one sequence does not need

    asked = now()
    if nanoseconds(since) >= nanoseconds(asked):
        day, other = timedelta(days=1), f" --route {route}" if route else ""
        spans = [("--since", since), ("--until", until)]
        earlier = "".join(f" {name} {moment(nanoseconds(each - day))}" for name, each in spans if each is not None)
        example = f"{command_line(log.root.path, f'where{other}{earlier}')} asks about the day before"
        raise InvalidInput(f"--since {moment(nanoseconds(since))}: that time has not come yet", hint=example)
    check_span(since, until)
    warn_of_wrong_times(log.root.path, since, until or asked)
    found = coverage.coverage(log, route, since, until or asked, now_ns=nanoseconds(asked))
    if as_json:
        click.echo(json_line("where.since", coverage.fields(found)))
    else:
        click.echo("\n".join(coverage.text(log, found)))
    return found.exit_code


def warn_without_daemon(root: Root) -> None:
    """Report on stderr that no daemon runs, and how the last one ended."""
    from wald.files.disk import Disk
    from wald.writing.run_reports import no_daemon_message

    if message := no_daemon_message(root, Disk()):
        click.echo(f"{message}\n  hint: {command_line(root.path, 'run')}", err=True)


def moment(time_ns: int) -> str:
    """A time in UTC, as ``--from`` takes it; "-" if there is none."""
    return utc(time_ns, 6) if time_ns else "-"
