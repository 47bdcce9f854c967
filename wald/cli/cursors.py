"""``wald cursor``: show and move the positions of consumer groups."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import wald
from wald.cli.command import LazyCommand, LazyGroup, examples
from wald.cli.options import group_option, json_option, now, root_option, route_argument
from wald.cli.output import aligned, counted, json_line, print_result, stdout_is_a_report
from wald.cli.positions import exit_code
from wald.errors import Damaged, InvalidInput, NotFound, NotPermitted, Refused
from wald.files.cursor_directory import is_own_file
from wald.files.disk import Disk
from wald.format.names import CURSOR_SUFFIX, SKIPS_LEDGER, check_group, check_route
from wald.format.times import nanoseconds, utc
from wald.format.times import parse_position_option as position_of
from wald.hints import command_line, user_name
from wald.retention.cursors import Cursor, CursorState, new_group_warning, reject_leftover_journal, remove_cursor

if TYPE_CHECKING:
    from wald.files.ledger_write import Ledger
    from wald.format.records import Record
    from wald.log import Log
    from wald.retention.missing import Missing

_COMMANDS = {
    "get": LazyCommand(__name__, "get", "Print the sequence up to which a group has processed a route."),
    "list": LazyCommand(__name__, "list_", "List the cursors of one route, or of all routes."),
    "remove": LazyCommand(__name__, "remove", "Remove a group's cursor, so that it keeps no records."),
    "set": LazyCommand(__name__, "set_", "Record that a group has processed a route up to a position."),
    "show": LazyCommand(__name__, "show", "Show the records that a group has not processed."),
    "skip": LazyCommand(__name__, "skip", "Move a group past a record that it cannot process."),
    "from-checkpoint": LazyCommand(
        "wald_spark.checkpoint", "from_checkpoint", "Move a cursor to the position that a Spark stream has committed."
    ),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def cursor() -> None:
    """Show, move or remove the cursor of a consumer group: the last sequence of a route that it has processed.

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
    found = wald.open(root).cursor(route, group, any_user=True)
    again = command_line(root, f"cursor set {route} SEQUENCE --group {group}")
    if as_json:
        from wald.status.schema import CursorFile

        click.echo(json_line("cursor.get", CursorFile.made_of(found)))
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
    log = wald.open(root)
    number = _sequence(log, position, route, group)
    reject_leftover_journal(log.root, log.cursor(route, group, any_user=True))
    news = new_group_warning(log.root, route, group)
    moved = log.set_cursor(route, number, group, rewind=rewind, any_user=True)
    if as_json:
        from wald.status.schema import CursorFile, fields_of

        click.echo(json_line("cursor.set", fields_of(CursorFile.made_of(moved)) | {"new": bool(news)}))
    else:
        print_moved(moved, news)


def _sequence(log: Log, given: str, route: str, group: str) -> int:
    from wald.segments.seek import sequence_since

    try:
        place = position_of("", given, now())
    except InvalidInput:
        head = log.head()
        last = 0 if given == "earliest" else head.sequence if head else "SEQUENCE"
        hint = command_line(log.root.path, f"cursor set {route} {last} --group {group}")
        raise InvalidInput(f"{given}: neither a sequence (the number of a record) nor a time", hint=hint) from None
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
        from wald.status.schema import CursorFile

        for each in found:
            click.echo(json_line("cursor.list", CursorFile.made_of(each)))
        return
    rows = [("ROUTE", "GROUP", "CURSOR", "STATE")]
    for each in found:
        state = f"{each.state.value}, of {each.other_user}" if each.other_user else each.state.value
        rows.append((each.route, each.group, str(each.sequence), state))
    click.echo("\n".join(aligned(rows, (2,))))


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
    help="The consumer group. There is no default, because removing the wrong cursor allows deletions.",
)
@json_option
@stdout_is_a_report
def remove(root: Path, route: str, group: str, as_json: bool) -> None:
    """Remove a group from ROUTE: the records that it has not processed are no longer kept for it.

    Records that other groups of the route have not processed are kept; if there is no other group, all are.
    """
    log = wald.open(root)
    log.root.require_route(route)
    found = log.cursor(route, group, any_user=True)
    if found.of_work_group:
        hint = command_line(root, f"group remove {route} {group}")
        raise Refused(f"{found.path}: the cursor of a work group, which has other files, too", hint=hint)
    path = remove_cursor(log.root, route, group, disk=Disk())
    print_result("cursor.remove", as_json, {"route": route, "group": group, "path": str(path)}, [path])
    if not any(path.parent.glob(f"*{CURSOR_SUFFIX}")):
        retire = command_line(root, f"route retire {route}")
        click.echo(
            f"wald: no group reads route {route} any more, so its records are kept; to stop that: {retire}", err=True
        )


def print_moved(cursor: Cursor, news: str) -> None:
    """Print the cursor's sequence; report on stderr if it is new, or needs records that reclaim has deleted."""
    click.echo(cursor.sequence)
    _warn(news, cursor.message)


def _warn(*messages: str) -> None:
    for message in filter(None, messages):
        click.echo(f"wald: {message}", err=True)


def _unprocessed(log: Log, cursor: Cursor) -> dict[str, Any]:
    """Return the JSON object about a group's unprocessed records; ``missing`` and ``lost`` are upper limits."""
    from wald.retention.progress import last_sequences, measure_lags
    from wald.status.schema import time_fields

    view, route, group = log.view(), cursor.route, cursor.group
    gone: list[Missing] = []
    following = log.records(route, cursor.effective + 1, limit=1, on_missing=gone.append)
    first = next(following, None)  # finds removed records even if none is left
    last = None if first is None else last_sequences(view).get(route)
    fields: dict[str, Any] = {"route": route, "group": group, "state": cursor.state.value, "sequence": cursor.sequence}
    fields |= {"message": cursor.message, "lag_records": measure_lags(view, [cursor])[route, group].records}
    fields |= {"missing_records": sum(each.records for each in gone), "last": last}
    fields |= {"first": first and first.sequence, "lost_records": _lost_behind(log, first) if first else 0}
    fields |= time_fields("first_append_time", first and first.append_time_ns)
    return fields | time_fields("last_append_time", log.where(last).append_time_ns if last else None)


def _lost_behind(log: Log, first: Record) -> int:
    """Return an upper limit, from the ledger, of the route's records after ``first`` that repairs gave up."""
    from wald.retention.history import History
    from wald.retention.missing import count_missing
    from wald.segments.seek import end_sequence

    following, head = first.sequence + 1, end_sequence(log.root, log.identity.log_id) - 1
    extents = [loss.starting_extent for loss in History(log.root).losses(following, head)]
    missing = count_missing(log.root.path, extents, frozenset([first.route]), following, head)
    return missing.records if missing else 0


@click.command("show", epilog=examples("wald cursor show access", "wald cursor show access --group billing --json"))
@route_argument
@root_option
@group_option
@json_option
def show(root: Path, route: str, group: str, as_json: bool) -> None:
    """Show the records of ROUTE that the group has not processed: their number, range and age.

    The cursor of another user is shown as well, with the name of that user.
    """
    log = wald.open(root)
    cursor = log.cursor(route, group, any_user=True)
    fields = _unprocessed(log, cursor)
    print_result("cursor.show", as_json, fields, _unprocessed_text(log, cursor, fields))


def _unprocessed_text(log: Log, cursor: Cursor, fields: dict[str, Any]) -> Iterator[str]:
    first, missing, lost = fields["first"], fields["missing_records"], fields["lost_records"]
    at = f"at {cursor.sequence}" if cursor.state is CursorState.VALID else f"{cursor.state.value}: {cursor.message}"
    at += f", of {cursor.other_user}" if cursor.other_user else ""
    rows = [("route", cursor.route), ("group", cursor.group), ("cursor", at)]
    if first is None:
        left = "no record that the log still has" if missing else "none: every record was processed"
        if fields["lag_records"]:  # the next record is unfinished
            left = counted(fields["lag_records"], "record")
        rows.append(("left", left))
    else:
        last_ns = fields["last_append_time_ns"]
        rows.append(("left", f"{fields['lag_records']} records, {first} to {fields['last'] or '?'}"))
        rows.append(("appended", f"{utc(fields['first_append_time_ns'])} to {utc(last_ns) if last_ns else '?'}"))
        start = f"cursor --group {cursor.group}{' --on-missing skip' * bool(missing)}"
        if cursor.user_id != -1 and not is_own_file(cursor.path):
            start = str(first)
        rows.append(("to read", command_line(log.root.path, f"read {cursor.route} --from {start}")))
    if lost:
        rows.append(("lost", f"up to {counted(lost, 'record')} after the first one, given up by a repair"))
    if missing:
        passing = "" if first is None else "; --on-missing skip skips them"
        removed = f"up to {counted(missing, 'record')} before these, removed before the group processed them"
        rows.append(("missing", f"{removed}{passing}"))
    yield from aligned(rows, ())


@click.command(
    "skip",
    epilog=examples(
        "wald cursor skip access 250 --group billing --why 'no such customer'", "wald cursor skip access 260 --through"
    ),
)
@route_argument
@click.argument("sequence", type=int)
@root_option
@group_option
@click.option("--through", is_flag=True, help="Also skip the records before SEQUENCE that it has not processed.")
@click.option("--why", default="", metavar="TEXT", help="The reason, for the ledger.")
@json_option
@stdout_is_a_report
def skip(root: Path, route: str, sequence: int, group: str, through: bool, why: str, as_json: bool) -> None:
    """Move the group past record SEQUENCE of ROUTE, which it cannot process, and record that in ledger/skips.jsonl.

    SEQUENCE must be the next record that the group would process, so that no other record is skipped, not even one that
    was removed or is damaged. A wald-drain that retries the record continues after it at its next try. The record stays
    in the log as long as others need it.

    The log's owner and root may skip; if the group's cursor belongs to another user, only root may.
    """
    log = wald.open(root)
    log.root.require_route(route)
    with skips(log, f"cursor skip {route} {sequence} --group {group}") as ledger:
        before = log.cursor(route, group, any_user=os.geteuid() == 0)
        reject_leftover_journal(log.root, before)
        records, missing = _skippable(log, before, sequence, through=through)
        news = new_group_warning(log.root, route, group)
        entry = {"route": route, "group": group, "after": before.effective, "sequence": sequence}
        entry |= {"records": records, "missing": missing, "by": user_name(os.geteuid()), "why": why}
        with on_record(ledger, entry):
            moved = log.set_cursor(route, sequence, group, any_user=True)
    fields = {"route": route, "group": group, "sequence": moved.sequence, "after": before.effective}
    fields |= {"records": records, "missing_records": missing, "why": why}
    removed = f"; also passed over: up to {counted(missing, 'record')} that no longer exist" if missing else ""
    text = f"{route}/{group} is at {moved.sequence}; skipped: {counted(records, 'record')}{removed}"
    print_result("cursor.skip", as_json, fields, [text])
    _warn(news, moved.message)


@contextmanager
def skips(log: Log, again: str) -> Iterator[Ledger]:
    from wald.files.ledger_write import Ledger

    path = log.root.ledger / SKIPS_LEDGER
    try:
        ledger = Ledger(path, Disk(), owner="wald cursor skip")
    except PermissionError as error:
        owner = user_name(log.root.path.stat().st_uid)
        hint = f"as user {owner} or root: {command_line(log.root.path, again)}"
        raise NotPermitted(f"{error.filename or path}: permission denied", hint=hint) from error
    with closing(ledger):
        yield ledger


@contextmanager
def on_record(ledger: Ledger, entry: dict[str, Any]) -> Iterator[None]:
    """Record a skip before it is made, and its outcome afterwards; a killed command leaves only the first line."""
    from wald.files.uptime import now as uptime_now

    def append(event: str, **more: object) -> None:
        ledger.append({"event": event} | entry | more | {"at": time.time_ns()} | uptime_now().as_entry())

    append("skipping-record")
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # of a full disk, which must not hide the error
            append("skip-failed", why=str(error))
        raise
    append("skipped-record")


def _skippable(log: Log, found: Cursor, sequence: int, *, through: bool) -> tuple[int, int]:
    """Return the number of records that a skip passes over, and an upper limit of removed ones among them."""
    route = found.route
    if found.state not in (CursorState.VALID, CursorState.ABSENT):
        setting = f"cursor set {route} SEQUENCE --group {found.group} --rewind"
        raise Damaged(found.message, hint=command_line(log.root.path, setting))
    showing = command_line(log.root.path, f"cursor show {route} --group {found.group}")
    records, last = 0, None
    first: int | None = None
    gone: list[Missing] = []
    damage: list[Damaged] = []
    start = found.effective + 1
    for batch in log.batches(route, start, sequence, on_missing=gone.append, on_damage=damage.append):
        first, last = first or batch.first_sequence, batch.last_sequence
        records += batch.count
    if last != sequence:
        if damage and exit_code(log.where(sequence).state) == Damaged.exit_code:
            raise _damaged(log, found, sequence, damage[-1])
        message = f"record {sequence} is not a record of route {route} that group {found.group} still has to process"
        raise NotFound(message, hint=showing)
    missing = sum(each.records for each in gone)
    if not through:
        message = f"record {sequence} is not the next record of route {route} for group {found.group}"
        removed = f" and passes over up to {counted(missing, 'record')} that no longer exist" if missing else ""
        hint = f"{showing}; --through skips {counted(records, 'record')} up to {sequence}{removed}"
        if found.of_work_group:
            hint = f"{command_line(log.root.path, f'group skip {route} {found.group} {sequence}')} skips it alone"
        in_front = [each.message() for each in gone] + [each.message for each in damage]
        if in_front or first != sequence:
            raise Refused(f"{message}: {in_front[0] if in_front else f'{first} is'}", hint=hint)
    return records, missing


def _damaged(log: Log, found: Cursor, sequence: int, damage: Damaged) -> Damaged:
    """Return the error for an unreadable record, with a command that skips the damage."""
    whole = next(log.records(start=sequence, limit=1, on_missing="skip", on_damage=lambda _: None), None)
    head = log.head()
    last = whole.sequence - 1 if whole is not None else head.sequence if head else sequence
    passing = command_line(log.root.path, f"cursor set {found.route} {last} --group {found.group}")
    verifying = command_line(log.root.path, "verify")
    message = f"record {sequence} is damaged, and cannot be skipped by its number: {damage.message}"
    return Damaged(message, hint=f"{passing} continues after the damage; {verifying} lists all damage")
