"""``wald cursor``: how far a consumer group has processed a route."""

from __future__ import annotations

import json
from pathlib import Path

import click

import wald
from wald.cli.options import group_option, json_option, root_option, route_argument
from wald.errors import Damaged, NotFound
from wald.store.checkpoint import processed_by_stream
from wald.store.cursors import Cursor, CursorState


@click.group()
def cursor() -> None:
    """Show or move the cursor of a consumer group: the last sequence it has processed."""


@cursor.command("get")
@route_argument
@root_option
@group_option
@json_option
def get(root: Path, route: str, group: str, as_json: bool) -> None:
    """Print the sequence up to which the group has processed ROUTE."""
    found = wald.open(root).cursor(route, group)
    again = f"wald --root {root} cursor set {route} SEQUENCE --group {group}"
    if as_json:
        told = {"route": route, "group": group, "state": found.state.value, "sequence": found.sequence}
        click.echo(json.dumps(told | {"path": str(found.path), "message": found.message}))
    elif found.state is CursorState.VALID:
        click.echo(found.sequence)
    if found.state is CursorState.ABSENT:
        raise NotFound(found.message, hint=again)
    if found.state is not CursorState.VALID:
        raise Damaged(f"{found.message}; it counts as nothing processed", hint=f"{again} --rewind")


@cursor.command("set")
@route_argument
@click.argument("sequence", type=int)
@root_option
@group_option
@click.option("--rewind", is_flag=True, help="Allow it to move backwards, or to replace one that cannot be trusted.")
def set_(root: Path, route: str, sequence: int, group: str, rewind: bool) -> None:
    """Say that the group has processed ROUTE up to and including SEQUENCE."""
    _say(wald.open(root).set_cursor(route, sequence, group, rewind=rewind))


@cursor.command("from-checkpoint")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@route_argument
@root_option
@group_option
def from_checkpoint(root: Path, checkpoint: Path, route: str, group: str) -> None:
    """Move it to what a stream has committed of ROUTE, as told by the directory of its CHECKPOINT."""
    log = wald.open(root)
    current = log.cursor(route, group)
    sequence = processed_by_stream(checkpoint, log.root, current, log_id=log.identity.log_id)
    _say(log.set_cursor(route, sequence, group))


def _say(cursor: Cursor) -> None:
    """Where it stands now; and, on stderr, what it needs and RECLAIM has taken."""
    click.echo(cursor.sequence)
    if cursor.message:
        click.echo(f"wald: {cursor.message}", err=True)
