"""``wald head`` and ``wald where``: how far the log is durable, and what became of any record."""

from __future__ import annotations

from pathlib import Path

import click

import wald
from wald.cli.options import json_option, root_option
from wald.cli.output import json_line, ledger_fields, segment_fields, time_fields
from wald.errors import Damaged, NotFound, command_line
from wald.format.times import utc
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.segments.view import State
from wald.store.writing.lives import no_daemon

EXITS = {
    State.NEVER_ISSUED: NotFound.exit_code,
    State.SKIPPED: NotFound.exit_code,
    State.UNKNOWN: NotFound.exit_code,
    State.QUARANTINED: Damaged.exit_code,
    State.LOST: Damaged.exit_code,
}


@click.command()
@root_option
@json_option
def head(root: Path, as_json: bool) -> None:
    """Show the last durable sequence, and where the durable bytes end."""
    log = wald.open(root)
    found = log.head()
    if found is None:
        raise NotFound(
            f"{log.root.head}: nothing has been durable yet",
            hint=f"{command_line(root, 'run')}, or send it a record if it runs",
        )
    if as_json:
        fields = {
            "sequence": found.sequence,
            "segment": found.segment,
            "position": found.position,
            "epoch": found.epoch,
            **time_fields("at", found.at_ns),
            "no_daemon": no_daemon(log.root, Disk()),
        }
        click.echo(json_line("head", fields))
    else:
        click.echo(
            f"seq={found.sequence} segment={found.segment} position={found.position} epoch={found.epoch} "
            f"at={moment(found.at_ns)}"
        )
        warn_without_daemon(log.root)


@click.command()
@click.argument("sequence", type=int)
@root_option
@json_option
def where(root: Path, sequence: int, as_json: bool) -> int:
    """Show where record SEQUENCE is: active, cut, sealed, reclaimed, archived, never issued, …

    The exit code is 3 if it was never issued or nothing is known of it, and 4 if it is damaged.
    """
    found = wald.open(root).where(sequence)
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
        return EXITS.get(found.state, 0)
    fields = {
        "sequence": found.sequence,
        "state": found.state.value,
        "message": found.message,
        "durable": found.durable,
        "route": found.route,
        **time_fields("append_time", found.append_time_ns),
        **segment_fields(found.segment),
        "position": found.position,
        "processed": found.processed,
        "bundle": found.bundle,
        "member": found.member,
        "reclaimed": found.reclaimed and ledger_fields(found.reclaimed),
    }
    click.echo(json_line("where", fields))
    return EXITS.get(found.state, 0)


def warn_without_daemon(root: Root) -> None:
    """Report on stderr that no daemon runs, and how the last one ended."""
    if message := no_daemon(root, Disk()):
        click.echo(f"{message}\n  hint: {command_line(root.path, 'run')}", err=True)


def moment(time_ns: int) -> str:
    """A time in UTC, as ``--from`` takes it; "-" if there is none."""
    return utc(time_ns, 6) if time_ns else "-"
