"""``wald group``: owners, leased records, why a group makes no progress, and how to unblock it.

A change is made by the group's owner, or by this process without one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import LazyCommand, LazyGroup, examples
from wald.cli.options import count_option, duration_option, json_option, root_option, route_argument
from wald.cli.output import aligned, counted, json_line, print_result, stdout_is_a_report
from wald.errors import Damaged, InvalidInput, Locked, NotFound, NotPermitted, Refused
from wald.files.cursor_directory import is_own_file
from wald.files.disk import Disk
from wald.files.locks import is_stopped
from wald.format.names import check_group, check_route
from wald.format.times import utc
from wald.hints import command_line, user_name
from wald.retention.cursors import CursorState
from wald.setting_types import format_bytes, format_seconds

if TYPE_CHECKING:
    from wald.format.work import DeadRecord
    from wald.log import Log
    from wald.retention.backlog import GroupBacklog
    from wald.status.retention import FoundGroup
    from wald.status.schema import WorkOfGroup
    from wald.work.group import WorkGroup
    from wald.work.ownership import RunningCommand
    from wald.work.snapshot import GroupStatus, Out, OwnerProcess, Waiting, WorkFile

SHOWN = 20
_NS = 10**9
_COLUMNS = ("ROUTE", "GROUP", "OWNER", "DONE TO", "READ TO", "OPEN", "OUT", "WAITING", "GIVING UP", "BEHIND", "OLDEST")
_NUMERIC = tuple(range(2, len(_COLUMNS)))


_COMMANDS = {
    "list": LazyCommand(__name__, "list_", "List work groups with their owners and positions."),
    "pending": LazyCommand(__name__, "pending", "Show which worker has which records, and what waits."),
    "release": LazyCommand(__name__, "release", "Release the records that a worker has leased."),
    "remove": LazyCommand(__name__, "remove", "Remove a work group with its cursor and its journal."),
    "show": LazyCommand(__name__, "show", "Show one work group: owner, position, open records."),
    "skip": LazyCommand(__name__, "skip", "Mark records that no worker can process as done."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def group() -> None:
    """Show work groups, and unblock a stuck one.

    In a work group, many workers share a route: each record is leased to one of them, acknowledged individually, and
    retried if it fails: wald.WorkGroup, leases of `wald-gate`, `wald-drain --workers`. The position of the group as a
    whole is a cursor; see `wald cursor`.
    """


_group_argument = click.argument("group", callback=lambda _ctx, _parameter, name: check_group(name))


@click.command("list", epilog=examples("wald group list", "wald group list orders --json"))
@click.argument("route", required=False, callback=lambda _ctx, _parameter, name: name and check_route(name))
@root_option
@json_option
def list_(root: Path, route: str | None, as_json: bool) -> int:
    """List the work groups of ROUTE, or of every route, with their owners and positions.

    DONE TO is the ack floor: all records up to it are done. Of the records up to READ TO, OPEN are not done: OUT are
    leased, WAITING are not due, and GIVING UP become dead letters. BEHIND have not been read yet. OLDEST is how long
    the first open record has been in the log. OWNER is the process that the workers are part of, or connected to. The
    exit code is 4 if a journal is damaged.
    """
    from wald.status.retention import found_groups

    log = wald.open(root)
    now_ns = time.time_ns()
    found = found_groups(log, [route] if route else log.routes(), now_ns)
    if as_json:
        for each in found:
            click.echo(json_line("group.list", each.fields()))
    else:
        for line in aligned([(*_COLUMNS, ""), *(_row(log, each, now_ns) for each in found)], _NUMERIC):
            click.echo(line)
    return Damaged.exit_code if any(each.seen.damage for each in found) else 0


def _row(log: Log, found: FoundGroup, now_ns: int) -> tuple[str, ...]:
    seen, work = found.seen, found.work()
    owner = "none" if seen.owner is None else str(seen.owner.pid or "elsewhere")
    notes = [f"of {other}"] if (other := seen.cursor.other_user) else []
    if found.left:
        notes.append(f"waits for a command: {_group_line(log, 'show', seen.file)}" if seen.owner else "a command runs")
    if seen.damage:
        notes.append(f"damaged: {_group_line(log, 'show', seen.file)}")
        numbers = ["?"] * 7
    else:
        counts = (work.open_records, work.out_records, work.waiting_records, work.giving_up_records)
        numbers = [str(each) for each in (work.floor, work.taken_in, *counts, work.behind_records)]
    age = "-" if found.unfinished.oldest_ns is None else format_seconds(found.unfinished.seconds(now_ns))
    return (seen.file.route, seen.file.group, owner, *numbers, age, ", ".join(notes))


@click.command("show", epilog=examples("wald group show orders billing", "wald group show orders billing --json"))
@route_argument
@_group_argument
@root_option
@json_option
def show(root: Path, route: str, group: str, as_json: bool) -> int:
    """Show a work group: its position, its owner, its open records, and what the oldest of them waits for.

    If its journal is damaged, show where, what is known, and what can be done; the exit code is then 4.
    """
    from wald.status.retention import with_lags
    from wald.work.snapshot import read_status, work_file

    log = wald.open(root)
    now_ns = time.time_ns()
    seen = read_status(log, work_file(log.root, route, group), now_ns)
    (found,) = with_lags(log, [seen])
    held = _backlog_of(log, seen)
    fields = found.fields() | _more_fields(found, held)
    print_result("group.show", as_json, fields, aligned(list(_rows(log, found, held, now_ns)), ()))
    return Damaged.exit_code if seen.damage else 0


def _backlog_of(log: Log, seen: GroupStatus) -> GroupBacklog:
    from wald.retention.backlog import Backlog, GroupBacklog
    from wald.retention.progress import Lag

    backlog = Backlog(log.view())
    for _ in backlog.segments():
        pass
    file, cursor = seen.file, seen.cursor
    return backlog.groups.get((file.route, file.group)) or GroupBacklog(cursor, Lag(cursor.effective), retired=False)


def _more_fields(found: FoundGroup, held: GroupBacklog) -> dict[str, object]:
    from wald.status.schema import time_fields

    seen, picture = found.seen, found.seen.snapshot
    due = min((each.due_ns for each in picture.waiting()), default=None)
    return {
        "oldest": picture.floor + 1 if picture.open else None,
        **time_fields("next_due", due),
        "journal_bytes": seen.reading.size,
        "journal_lines": seen.reading.lines,
        "lines_behind_damage": seen.reading.behind,
        "pinned_segments": held.pinned_segments,
        "pinned_bytes": held.pinned_bytes,
        "frees_bytes": held.exclusive_bytes,
    }


def _rows(log: Log, found: FoundGroup, held: GroupBacklog, now_ns: int) -> Iterator[tuple[str, str]]:
    seen, picture = found.seen, found.seen.snapshot
    at = seen.cursor
    yield "route", seen.file.route
    yield "group", f"{seen.file.group}, of {at.other_user}" if at.other_user else seen.file.group
    yield "owner", _owner(seen)
    for each in found.commands[:SHOWN]:
        yield "command", _command(each)
    if len(found.commands) > SHOWN:
        yield "", f"and {len(found.commands) - SHOWN} more"
    yield "cursor", f"at {at.sequence}" if at.state is CursorState.VALID else f"{at.state.value}: {at.message}"
    if seen.damage:
        yield "damaged", f"{seen.file.path}: {seen.damage}"
        known = f"{seen.reading.lines} valid lines before it, and {seen.reading.behind} after it"
        yield "known", f"{known}; the state of records above the cursor is unknown"
    else:
        yield "done to", f"{picture.floor}: every record up to there is done" if picture.floor else "nothing yet"
        more = counted(found.behind.records, "record")
        behind = f"; {more} more in the log" if found.behind.records else ", the last record"
        yield "read to", f"{picture.end - 1}{behind}"
        yield "open", _open(found.work())
        if found.unfinished.oldest_ns is not None:
            yield "oldest", _oldest(found, now_ns)
        if due := min((each.due_ns for each in picture.waiting()), default=0):
            yield "next due", f"{utc(due)}, in {format_seconds((due - now_ns) / _NS)}"
        if picture.open:
            yield "tries", f"{picture.tries_max}, the maximum of all open records"
    yield "journal", f"{seen.file.path}, {format_bytes(seen.reading.size)}"
    size, alone = format_bytes(held.pinned_bytes), f"{format_bytes(held.exclusive_bytes)} by it alone"
    pins = f"{counted(held.pinned_segments, 'segment')}, {size}; {alone}"
    yield "pins", pins if held.pinned_segments else "no complete segment"
    yield "next", _next(log, found)


def _owner(seen: GroupStatus) -> str:
    if seen.owner is None:
        return "none runs" + "; the next owner redelivers leased records at once" * bool(seen.snapshot.open)
    if seen.owner.pid is None:
        return "runs, in another container or PID namespace"
    return f"process {seen.owner.pid}{': ' if seen.owner.command else ''}{seen.owner.command}"


def _command(command: RunningCommand) -> str:
    from wald.work.ownership import worker_name

    worker = "" if command.worker is None else f"{worker_name(command.worker)}: "
    left = ", left running by an earlier wald-drain" * command.left
    return f"{worker}process {command.process}, since {utc(command.started_ns)}{left}: {command.words}"


def _open(work: WorkOfGroup) -> str:
    if not work.open_records:
        return "nothing: every record that was read is done"
    out, waiting, dead = work.out_records, work.waiting_records, work.giving_up_records
    ready = max(0, work.open_records - out - waiting - dead)
    parts = f"{out} out, {waiting} waiting, {dead} being given up, {ready} ready"
    return f"{counted(work.open_records, 'record')}: {parts}"


def _oldest(found: FoundGroup, now_ns: int) -> str:
    picture = found.seen.snapshot
    named = f"record {picture.floor + 1}" if picture.open else "a record not read yet"
    since = f"appended {utc(found.unfinished.oldest_ns or 0)}, {format_seconds(found.unfinished.seconds(now_ns))} ago"
    failure = picture.failures.get(picture.floor + 1)
    last = f"; last returned with: {_one_line(failure.reason)}" if failure and failure.reason else ""
    return f"{named}, {since}{_standing(found.seen, now_ns)}{last}"


def _standing(seen: GroupStatus, now_ns: int) -> str:
    picture = seen.snapshot
    oldest = picture.floor + 1
    if not picture.open:
        return ""
    if dead := [each for each in picture.dead if each.sequence == oldest]:
        return f"; is being given up: {dead[0].reason}"
    out = next(picture.out(), None)
    if out is not None and out.first == oldest:
        left = "" if out.until_ns is None else f", {format_seconds((out.until_ns - now_ns) / _NS)} left"
        return f"; {out.worker} has it, try {out.tries}{left}"
    waiting = next(picture.waiting(), None)
    if waiting is not None and waiting.first == oldest:
        return f"; waits until {utc(waiting.due_ns)}, delivered {_times(waiting.tries)}"
    return f"; no worker has it, delivered {_times(picture.tries(oldest))}"


def _next(log: Log, found: FoundGroup) -> str:
    from wald.work.journal import beyond_head

    seen, picture, left = found.seen, found.seen.snapshot, found.left
    path = seen.file.path
    if seen.damage and beyond_head(log.root, seen.reading):
        daemon = command_line(log.root.path, "run")
        return f"restart the daemon ({daemon}): it does not reuse these numbers; then start its workers"
    if seen.damage:
        lost = counted(found.unfinished.records, "record")
        moving = f"mv {path} {path}.damaged, then start its workers: {lost} above the cursor will be redelivered"
        if seen.owner is None:
            return moving
        stopping = f"kill {seen.owner.pid}" if seen.owner.pid is not None else "stop its owner"
        return f"{stopping}: an owner writes its state when it ends; if the journal is still damaged, {moving}"
    if seen.cursor.state is CursorState.ABSENT:
        return f"nothing: the journal is not used without a cursor; {_group_line(log, 'remove', seen.file)} removes it"
    if not picture.open and not found.behind.records:
        return "nothing: every record is done"
    if seen.owner is not None and seen.owner.pid is not None and is_stopped(seen.owner.pid):
        return f"kill -CONT {seen.owner.pid}: the owner was stopped by a signal or a debugger"
    if waits := _only_waits(found):
        return waits
    if seen.owner is None:
        return f"start its workers, which wait for process {left[0].process}" if left else "start its workers"
    if left:
        return f"wait until process {left[0].process} has ended; to end it: kill -- -{left[0].process_group}"
    if picture.dead or any(picture.out()) or any(picture.waiting()):
        return _group_line(log, "pending", seen.file)
    return "check its workers: none requests a record" + f"; ps -fp {seen.owner.pid}" * bool(seen.owner.pid)


def _only_waits(found: FoundGroup) -> str:
    """Describe when the next record is due; "" if one can be delivered earlier."""
    work, due = found.work(), [each.due_ns for each in found.seen.snapshot.waiting()]
    if found.left or found.behind.records or not due or work.waiting_records < work.open_records:
        return ""
    starting = "; start its workers before then" * (found.seen.owner is None)
    return f"nothing before {utc(min(due))}, when the next record is due{starting}"


@click.command(
    "pending", epilog=examples("wald group pending orders billing", "wald group pending orders billing -n 100")
)
@route_argument
@_group_argument
@root_option
@click.option("--worker", metavar="NAME", help="Only the records of this worker.")
@count_option("-n", "count", help_text=f"Show at most N lines of each kind.  [default: {SHOWN}; with --json: all]")
@json_option
def pending(root: Path, route: str, group: str, worker: str | None, count: int | None, as_json: bool) -> None:
    """Show the leased records of a work group with their workers, the delayed ones, and those that are being given up.

    A record that was not acknowledged before UNTIL is ready again and no longer shown. TRIES is the number of
    deliveries of each record, REASON why it was last returned. With --json, one object per line.
    """
    from wald.status.schema import fields_of, pending_objects
    from wald.work.snapshot import read_status, work_file

    log = wald.open(root)
    now_ns = time.time_ns()
    seen = read_status(log, work_file(log.root, route, group), now_ns)
    if seen.damage:
        raise Damaged(f"{seen.file.path}: {seen.damage}", hint=_group_line(log, "show", seen.file))
    picture = seen.snapshot
    out = [each for each in picture.out() if worker in (None, each.worker)]
    waiting, dead = ([], []) if worker else (list(picture.waiting()), picture.dead)
    if as_json:
        for each in pending_objects(out, waiting, dead, count):
            click.echo(json_line("group.pending", {"route": route, "group": group} | fields_of(each)))
        return
    tables = [*_tables(out, waiting, dead, now_ns, count)]
    if seen.owner is None and picture.open:
        tables.append("No owner runs: the next owner redelivers leased records at once; delays still apply.")
    nothing = f"{worker} has no records" if worker else "no record is leased, delayed, or being given up"
    click.echo("\n\n".join(tables or [nothing]))


def _group_line(log: Log, command: str, file: WorkFile, rest: str = "") -> str:
    return command_line(log.root.path, f"group {command} {file.route} {file.group} {rest}".rstrip())


def _times(tries: int) -> str:
    return counted(tries, "time") if tries else "never"


def _one_line(reason: str) -> str:
    return " ".join(reason.split())


def _tables(
    out: list[Out], waiting: list[Waiting], dead: list[DeadRecord], now_ns: int, count: int | None
) -> Iterator[str]:
    def until(time_ns: int | None) -> tuple[str, str]:
        return ("-", "until it ends") if time_ns is None else (utc(time_ns), format_seconds((time_ns - now_ns) / _NS))

    outs = [(each.first, each.last, each.worker, *until(each.until_ns), each.tries) for each in out]
    yield from _table(("OUT", "TO", "WORKER", "UNTIL", "LEFT", "TRIES"), outs, (0, 1, 4, 5), count)
    waits = [(each.first, each.last, *until(each.due_ns), each.tries, _one_line(each.reason)) for each in waiting]
    yield from _table(("WAITING", "TO", "DUE", "IN", "TRIES", "REASON"), waits, (0, 1, 3, 4), count)
    ends = [(each.sequence, utc(each.at_ns), each.tries, each.route, _one_line(each.reason)) for each in dead]
    yield from _table(("GIVING UP", "SINCE", "TRIES", "DEAD LETTER TO", "REASON"), ends, (0, 2), count)


def _table(
    headings: tuple[str, ...], rows: Sequence[tuple[object, ...]], numeric: tuple[int, ...], count: int | None
) -> Iterator[str]:
    shown = count or SHOWN
    if rows:
        lines = list(aligned([headings, *(tuple(map(str, row)) for row in rows[:shown])], numeric))
        if (more := len(rows) - shown) > 0:
            lines.append(f"and {more} more; -n {len(rows)} shows all")
        yield "\n".join(lines)


_timeout_option = duration_option("--timeout", "10s", "How long to wait for the owner of the group.", seconds_min=0.1)


@click.command(
    "release",
    epilog=examples("wald group release orders billing worker-1", "wald group release orders billing worker-1 --force"),
)
@route_argument
@_group_argument
@click.argument("worker")
@root_option
@click.option("--force", is_flag=True, help="Release even while a command of wald-drain processes the records.")
@_timeout_option
@json_option
@stdout_is_a_report
def release(root: Path, route: str, group: str, worker: str, force: bool, timeout: float, as_json: bool) -> None:
    """Release all records that WORKER has leased: they are redelivered at once, to any worker.

    Use it for a hung worker whose leases are long. The worker is not stopped, so it may continue alongside the one
    that gets its records. Its later acknowledgements count as long as no other worker has the record. This is refused
    while a command of wald-drain runs for the worker; the error says how to end the command, after which its records
    are redelivered.
    """
    from wald.status.retention import count_of

    log = wald.open(root)
    seen = _changeable(log, route, group)
    if not count_of(each for each in seen.snapshot.out() if each.worker == worker):
        raise NotFound(f"worker {worker} has no record of {route}/{group}", hint=_group_line(log, "pending", seen.file))
    if seen.owner is None:
        message = f"no process works for {route}/{group}, so worker {worker} has no records"
        raise Refused(message, hint="start its workers: all open records are redelivered")
    if not force:
        _require_no_command(log, seen, worker)
    asked = {"do": "release", "worker": worker}
    records = _carried_out(log, seen, asked, lambda work: work.release(worker), timeout)
    fields = {"route": route, "group": group, "worker": worker, "records": records}
    text = f"{route}/{group}: released from {worker}: {counted(records, 'record')}"
    print_result("group.release", as_json, fields, [text])


@click.command(
    "skip",
    epilog=examples(
        "wald group skip orders billing 250 --why 'no such customer'", "wald group skip orders billing 250..260"
    ),
)
@route_argument
@_group_argument
@click.argument("records", metavar="FIRST[..LAST]")
@root_option
@click.option("--why", default="", metavar="TEXT", help="The reason, for the ledger.")
@_timeout_option
@json_option
@stdout_is_a_report
def skip(root: Path, route: str, group: str, records: str, why: str, timeout: float, as_json: bool) -> None:
    """Mark records of ROUTE that no worker can process as done, and record that in ledger/skips.jsonl.

    They are done for this group only, and stay in the log as long as others need them. FIRST must be after the records
    that are already done. The log's owner and root may skip.
    """
    from wald.cli.cursors import on_record, skips

    first, last = _range(records)
    log = wald.open(root)
    seen = _changeable(log, route, group)
    expected = _skippable(log, seen, first, last)
    again = f"group skip {route} {group} {records}"
    with skips(log, again) as ledger:
        entry: dict[str, object] = {"route": route, "group": group, "first": first, "sequence": last}
        entry |= {"records": expected, "by": user_name(os.geteuid()), "why": why}
        with on_record(ledger, entry):
            asked = {"do": "skip", "first": first, "last": last}
            skipped = _carried_out(log, seen, asked, lambda work: work.skip(first, last), timeout)
            entry["records"] = skipped
    fields: dict[str, object] = {"route": route, "group": group, "first": first, "last": last}
    text = f"{route}/{group}: skipped: {counted(skipped, 'record')} of {records}"
    print_result("group.skip", as_json, fields | {"records": skipped, "why": why}, [text])


@click.command("remove", epilog=examples("wald group remove orders billing", "wald group remove orders billing --json"))
@route_argument
@_group_argument
@root_option
@json_option
@stdout_is_a_report
def remove(root: Path, route: str, group: str, as_json: bool) -> None:
    """Remove a work group from ROUTE: its cursor, its journal, and its other files.

    Refused while a process owns the group, and while a command of a killed wald-drain still runs.

    The records that it has not completed are no longer kept for it. Records that other groups of the route have not
    processed are kept; if there is no other group, all are.
    """
    from wald.work.ownership import remove_group
    from wald.work.snapshot import owner_of, work_file

    log = wald.open(root)
    file = work_file(log.root, route, group)
    try:
        removed = remove_group(file)
    except Locked as error:
        if (owner := owner_of(file)) is None:
            raise
        raise Locked(error.message, hint=_stopping(file, owner)) from error
    fields = {"route": route, "group": group, "paths": [str(each) for each in removed]}
    print_result("group.remove", as_json, fields, removed)


def _require_no_command(log: Log, seen: GroupStatus, worker: str) -> None:
    from wald.work.ownership import commands_of, worker_name

    for each in commands_of([seen]).get(seen.file.path, []):
        if each.worker is not None and worker_name(each.worker) == worker:
            again = _group_line(log, "release", seen.file, f"{worker} --force")
            raise Refused(
                f"{worker} of {seen.file.route}/{seen.file.group} runs process {each.process}, with its records: "
                f"it would continue alongside a second one: {each.words}",
                hint=f"kill -- -{each.process_group} ends it, its records are redelivered; {again} starts a second",
            )


def _stopping(file: WorkFile, owner: OwnerProcess) -> str:
    if owner.pid is None:
        return f"stop it first: fuser -v {file.lock} names it"
    if any(name in owner.command for name in ("wald-gate", "wald_gate")):  # it may own other groups, too
        asking = f"DELETE /v1/routes/{file.route}/groups/{file.group}"
        return (
            f"ask it: {asking}; or wait: it releases the group 30 s after the last request, once no worker has a record"
        )
    return f"stop it first: kill {owner.pid}{', which is ' if owner.command else ''}{owner.command}"


def _changeable(log: Log, route: str, group: str) -> GroupStatus:
    """Return the group if this user may change it."""
    from wald.work.snapshot import read_status, work_file

    file = work_file(log.root, route, group)
    if not is_own_file(file.path):
        user = user_name(file.path.lstat().st_uid)
        raise NotPermitted(f"{file.path}: the group of another user", hint=f"run it as user {user}; ls -l {file.path}")
    seen = read_status(log, file, time.time_ns())
    if seen.damage:
        raise Damaged(f"{file.path}: {seen.damage}", hint=_group_line(log, "show", file))
    if seen.cursor.state is not CursorState.VALID:
        raise Damaged(f"{seen.cursor.message}", hint=_group_line(log, "show", file))
    return seen


def _carried_out(
    log: Log, seen: GroupStatus, asked: Mapping[str, object], do: Callable[[WorkGroup], int], seconds: float
) -> int:
    """Let the owner apply a change; without an owner, apply it in this process."""
    from wald.work.group import WorkGroup
    from wald.work.ownership import OwnerGone, Ownership, ask_owner

    file = seen.file
    while True:
        try:
            with (  # even while a leftover command runs
                Ownership(log.root, file.route, file.group, Disk()) as ownership,
                WorkGroup(log, file.route, file.group, ownership=ownership) as work,
            ):
                return do(work)
        except Locked:
            pass
        try:
            return ask_owner(log.root, file.route, file.group, asked, seconds)
        except OwnerGone:
            continue


def _skippable(log: Log, seen: GroupStatus, first: int, last: int) -> int:
    from wald.retention.cursor_moves import EarlierReclaim

    route, group, picture = seen.file.route, seen.file.group, seen.snapshot
    head = log.head()
    durable = 0 if head is None else head.sequence
    if last > durable:
        raise Refused(
            f"record {last} is beyond the last durable record, {durable}",
            hint=f"{command_line(log.root.path, 'head')} shows it",
        )
    if first <= picture.floor < last:
        hint = _group_line(log, "skip", seen.file, f"{picture.floor + 1}..{last}")
        raise Refused(f"{route}/{group} has already processed every record up to {picture.floor}", hint=hint)
    known = sum(each.size for each in picture.open_in(first, last)) if first <= last else 0
    if last >= picture.end:
        skip = EarlierReclaim(log.root, route, group).skip
        known += sum(batch.count for batch in log.batches(route, max(first, picture.end), last, on_missing=skip))
    if not known:
        message = f"records {first} to {last} of route {route} are not pending for group {group}"
        raise NotFound(message, hint=_group_line(log, "show", seen.file))
    return known


def _range(given: str) -> tuple[int, int]:
    ends = given.split("..")
    if not all(end.isascii() and end.isdecimal() and 0 < int(end) < 1 << 63 for end in ends) or len(ends) > 2:
        raise InvalidInput(f"{given}: neither a sequence nor a range of sequences", hint="250, or 250..260")
    first, last = int(ends[0]), int(ends[-1])
    if first > last:
        raise InvalidInput(f"{given}: ends before it begins", hint=f"{last}..{first}")
    return first, last
