"""``wald route``: list, add and retire routes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import Command, examples
from wald.cli.options import daemon_at, json_option, root_option, route_argument, runs, setting_option, socket_option
from wald.cli.output import aligned, json_line, stdout_is_a_report
from wald.cli.positions import warn_without_daemon
from wald.errors import InvalidInput
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.routes import FIFO_MODE, add_route, retire_route
from wald.format.times import utc
from wald.hints import command_line
from wald.setting_types import MODE, OS_GROUP

if TYPE_CHECKING:
    from wald.retention.progress import Progress

_COLUMNS = ("ROUTE", "LAST", "GROUP", "CURSOR", "LAG", "")


@click.group()
def route() -> None:
    """List, add or retire routes: the named streams of a log."""


@route.command("list", epilog=examples("wald route list", "wald route list --json"))
@root_option
@json_option
def list_(root: Path, as_json: bool) -> None:
    """List routes with their last sequence, and for each group its cursor and its lag.

    LAG is the number of records of the route that the log has and the group has not processed.
    """
    from wald.retention.progress import read_progress
    from wald.status.schema import Routes

    log = wald.open(root)
    every = read_progress(log.view())
    if as_json:
        click.echo(json_line("route.list", Routes.of(log.root, every)))
        return
    warn_without_daemon(log.root)
    rows = [_COLUMNS, *(row for route in every for row in _rows(route))]
    click.echo("\n".join(aligned(rows, numeric=(1, 3, 4))))


@route.command(cls=Command, epilog=examples("wald route add orders", "wald route add access --fifo --mode 0620"))
@route_argument
@root_option
@socket_option
@click.option("--fifo", is_flag=True, help="Make ROOT/routes/NAME/in, for programs that write to a file.")
@setting_option(
    "--mode", lambda: MODE, "OCTAL", None, f"Permissions of the FIFO; a new one has {FIFO_MODE:04o}.", "0620"
)
@click.option(
    "--consumers",
    metavar="GROUP",
    help="An OS group whose members may leave cursors; 'group': that of the root; '': none.",
)
@json_option
@stdout_is_a_report
def add(
    root: Path, socket: Path | None, route: str, fifo: bool, mode: int | None, consumers: str | None, as_json: bool
) -> None:
    """Create a route, or reactivate a retired one; through the daemon if one runs."""
    if mode is not None and not fifo:
        hint = command_line(root, f"route add {route} --fifo --mode {mode:04o}")
        raise InvalidInput("--mode is for the FIFO", hint=hint)
    try:
        group: str | None = None if consumers is None else OS_GROUP.parse(consumers)
    except ValueError as error:
        raise InvalidInput(f"--consumers must be {error}", hint="getent group") from None
    if runs(root):
        given = (fifo and "fifo", mode is not None and f"mode={mode:o}", group is not None and f"consumers={group}")
        options = [option for option in given if option]
        with daemon_at(root, socket) as daemon:
            daemon.command("ROUTE", "ADD", route, *options)
    else:
        here = Root(root)
        read_identity(here)
        add_route(here, Disk(), route, fifo=fifo, mode=mode, consumers=group)
    if as_json:
        _print_state("route.add", Root(root), route)


@route.command(cls=Command, epilog=examples("wald route retire orders", "wald route retire orders --json"))
@route_argument
@root_option
@socket_option
@json_option
@stdout_is_a_report
def retire(root: Path, socket: Path | None, route: str, as_json: bool) -> None:
    """Accept no more records for a route; its cursors no longer keep RECLAIM from deleting."""
    here = Root(root)
    read_identity(here)
    here.require_route(route)
    if runs(root):
        with daemon_at(root, socket) as daemon:
            daemon.command("ROUTE", "RETIRE", route)
    else:
        retire_route(here, Disk(), route, now=utc(time.time_ns()))
    if as_json:
        _print_state("route.retire", here, route)


def _print_state(command: str, root: Root, route: str) -> None:
    from wald.files.routes import has_fifo

    fields = {"route": route, "path": str(root.route(route)), "retired": root.retired(route).exists()}
    click.echo(json_line(command, fields | {"fifo": has_fifo(root, route)}))


def _rows(route: Progress) -> list[tuple[str, ...]]:
    from wald.retention.cursors import CursorState

    consumers = f"consumers={route.consumers}"
    known = (("fifo", route.fifo), ("retired", route.retired), (consumers, bool(route.consumers)))
    notes = " ".join(note for note, holds in known if holds)
    rows: list[tuple[str, ...]] = []
    for number, (cursor, lag) in enumerate(zip(route.cursors, route.lags, strict=True)):
        known_last = "?" if route.last_sequence is None else str(route.last_sequence)
        name, last, about = (route.route, known_last, notes) if number == 0 else ("", "", "")
        if cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            about = f"{about} {cursor.state.value}".strip()
        if cursor.of_work_group:
            about = f"{about} work group".strip()
        shown = "-" if cursor.state is CursorState.ABSENT else str(cursor.sequence)
        rows.append((name, last, cursor.group, shown, str(lag), about))
    return rows
