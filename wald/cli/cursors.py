"""``wald cursor``: how far a consumer group has processed a route."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import LazyCommand, LazyGroup, examples
from wald.cli.options import group_option, json_option, root_option, route_argument
from wald.cli.output import aligned, json_line
from wald.cli.streams import stdout_is_a_report
from wald.cli.times import now
from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.format.names import check_group, check_route
from wald.format.times import nanoseconds
from wald.format.times import parse_position_option as position_of
from wald.hints import command_line
from wald.status.schema import CursorFile, fields_of

if TYPE_CHECKING:
    from wald.log import Log
    from wald.retention.cursors import Cursor


_COMMANDS = {
    "get": LazyCommand(__name__, "get", "Print the sequence up to which a group has processed a route."),
    "list": LazyCommand(__name__, "list_", "List the cursors of one route, or of all routes."),
    "remove": LazyCommand(__name__, "remove", "Remove a group's cursor, so that it keeps no records."),
    "set": LazyCommand(__name__, "set_", "Record that a group has processed a route up to a position."),
    "show": LazyCommand("wald.cli.unprocessed", "show", "Show the records that a group has not processed."),
    "skip": LazyCommand("wald.cli.unprocessed", "skip", "Move a group past a record that it cannot process."),
}
_OF_SPARK = ("from-checkpoint", "Move a cursor to the position that a Spark stream has committed.")


class CursorCommands(LazyGroup):
    """The commands below, and one that wald_spark registers as an entry point of the group ``wald.cursor``."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        from importlib.metadata import entry_points

        registered = next(iter(entry_points(group="wald.cursor", name=cmd_name)), None)
        return None if registered is None else registered.load()


@click.group(cls=CursorCommands, lazy=_COMMANDS | {_OF_SPARK[0]: LazyCommand("", *_OF_SPARK)})
def cursor() -> None:
    """Show, move or remove the cursor of a consumer group: the last sequence that it has processed of a route.

    A consumer group reads a route in order, with one reader at a time: `wald read --commit`, `wald-drain`,
    wald.Consumer. If many workers share a route and acknowledge records individually, see `wald group`.
    """


@click.command("get", epilog=examples("wald cursor get access", "wald cursor get access --group billing"))
@route_argument
@root_option
@group_option
@json_option
def get(root: Path, route: str, group: str, as_json: bool) -> None:
    """Print the sequence up to which the group has processed ROUTE."""
    from wald.retention.cursors import CursorState

    found = wald.open(root).cursor(route, group, any_user=True)
    again = command_line(root, f"cursor set {route} SEQUENCE --group {group}")
    if as_json:
        click.echo(json_line("cursor.get", CursorFile.of(found)))
    elif found.state is CursorState.VALID:
        click.echo(found.sequence)
    if found.state is CursorState.ABSENT:
        raise NotFound(found.message, hint=again)
    if found.state is not CursorState.VALID:
        raise Damaged(f"{found.message}; no record counts as processed", hint=f"{again} --rewind")


@click.command(
    "set", epilog=examples("wald cursor set access 250 --group billing", "wald cursor set access yesterday --rewind")
)
@route_argument
@click.argument("position")
@root_option
@group_option
@click.option(
    "--rewind", is_flag=True, help="Allow the cursor to move backwards, or replace one that cannot be trusted."
)
@json_option
@stdout_is_a_report
def set_(root: Path, route: str, position: str, group: str, rewind: bool, as_json: bool) -> None:
    """Record that the group has processed ROUTE up to POSITION: a sequence (0: no record), or all before a time."""
    from wald.retention.cursors import new_group_warning, reject_leftover_journal

    log = wald.open(root)
    number = _sequence(log, position, route, group)
    reject_leftover_journal(log.root, log.cursor(route, group, any_user=True))
    news = new_group_warning(log.root, route, group)
    moved = log.set_cursor(route, number, group, rewind=rewind, any_user=True)
    if as_json:
        click.echo(json_line("cursor.set", fields_of(CursorFile.of(moved)) | {"new": bool(news)}))
    else:
        print_moved(moved, news)


def _sequence(log: Log, given: str, route: str, group: str) -> int:
    from wald.segments.seek import sequence_since

    try:
        place = position_of("", given, now())
    except InvalidInput:
        head = log.head()
        last = 0 if given == "earliest" else head.sequence if head else "SEQUENCE"
        raise InvalidInput(
            f"{given}: neither a sequence, the number of a record, nor a time",
            hint=command_line(log.root.path, f"cursor set {route} {last} --group {group}"),
        ) from None
    return place if isinstance(place, int) else sequence_since(log.view(), nanoseconds(place)) - 1


@click.command("list", epilog=examples("wald cursor list", "wald cursor list access --json"))
@click.argument("route", required=False, callback=lambda _ctx, _parameter, name: name and check_route(name))
@root_option
@json_option
def list_(root: Path, route: str | None, as_json: bool) -> None:
    """List the cursors of ROUTE, or of every route: each keeps the records that its group has not processed."""
    log = wald.open(root)
    routes = [route] if route else log.routes()
    found = [log.cursor(name, group, any_user=True) for name in routes for group in log.root.groups(name)]
    if as_json:
        for each in found:
            click.echo(json_line("cursor.list", CursorFile.of(each)))
        return
    rows = [(each.route, each.group, str(each.sequence), _standing(each)) for each in found]
    for line in aligned([("ROUTE", "GROUP", "CURSOR", "STATE"), *rows], (2,)):
        click.echo(line)


@click.command(
    "remove",
    epilog=examples("wald cursor remove access --group billing", "wald cursor remove access --group billing --json"),
)
@route_argument
@root_option
@click.option(
    "--group",
    required=True,
    callback=lambda _ctx, _parameter, name: check_group(name),
    help="The consumer group. There is no default, because the removal of a wrong cursor allows deletions.",
)
@json_option
@stdout_is_a_report
def remove(root: Path, route: str, group: str, as_json: bool) -> None:
    """Remove a group from ROUTE: the records that it has not processed are no longer kept for it.

    Records that other groups of the route have not processed are kept; if there is no other group, all are.
    """
    from wald.files.disk import Disk
    from wald.retention.cursors import remove_cursor

    log = wald.open(root)
    log.root.require_route(route)
    _require_no_work(log, route, group)
    path = remove_cursor(log.root, route, group, disk=Disk())
    fields = {"route": route, "group": group, "path": str(path)}
    click.echo(json_line("cursor.remove", fields) if as_json else path)


def _require_no_work(log: Log, route: str, group: str) -> None:
    """
    Raises:
        Refused: it is a work group, which has more than a cursor.
    """
    found = log.cursor(route, group, any_user=True)
    if found.of_work_group:
        raise Refused(
            f"{found.path}: the cursor of a work group, which has other files, too",
            hint=command_line(log.root.path, f"group remove {route} {group}"),
        )


def print_moved(cursor: Cursor, news: str) -> None:
    """Print its sequence; and on stderr, that it is new, or which records it needs and RECLAIM has deleted."""
    click.echo(cursor.sequence)
    for message in filter(None, (news, cursor.message)):
        click.echo(f"wald: {message}", err=True)


def _standing(cursor: Cursor) -> str:
    """Its state, and its owner if that is not the log's."""
    return f"{cursor.state.value}, of {other}" if (other := cursor.other_user) else cursor.state.value
