"""``wald group release``, ``skip`` and ``remove``: by the group's owner, or by this process without one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wald
from wald.cli.command import examples
from wald.cli.cursors import on_record, skips
from wald.cli.groups import group_argument, group_line
from wald.cli.options import duration_option, json_option, root_option, route_argument
from wald.cli.output import json_line
from wald.cli.streams import stdout_is_a_report
from wald.errors import Damaged, InvalidInput, Locked, NotFound, NotPermitted, Refused
from wald.files.cursor_directory import is_own_file
from wald.files.disk import Disk
from wald.hints import command_line, user_name

if TYPE_CHECKING:
    from wald.log import Log
    from wald.work.group import WorkGroup
    from wald.work.snapshot import GroupStatus, OwnerProcess, WorkFile

timeout_option = duration_option("--timeout", "10s", "How long to wait for the owner of the group.", seconds_min=0.1)


@click.command(
    "release",
    epilog=examples("wald group release orders billing worker-1", "wald group release orders billing worker-1 --force"),
)
@route_argument
@group_argument
@click.argument("worker")
@root_option
@click.option("--force", is_flag=True, help="Also if a command of wald-drain still processes the records.")
@timeout_option
@json_option
@stdout_is_a_report
def release(root: Path, route: str, group: str, worker: str, force: bool, timeout: float, as_json: bool) -> None:
    """Release all records that WORKER has leased: they are redelivered at once, to any worker.

    For a worker that hangs, if its leases are long. The worker is not stopped, so it may continue alongside the one
    that gets its records. Its later acknowledgements count as long as no other worker has the record. This is refused
    while a command of wald-drain runs for the worker; the error says how to end the command, after which its records
    are redelivered.
    """
    from wald.status.retention import count_of

    log = wald.open(root)
    seen = _changeable(log, route, group)
    if not count_of(each for each in seen.snapshot.out() if each.worker == worker):
        raise NotFound(f"worker {worker} has no record of {route}/{group}", hint=group_line(log, "pending", seen.file))
    if seen.owner is None:
        message = f"no process works for {route}/{group}, so worker {worker} has no records"
        raise Refused(message, hint="start its workers: all open records are redelivered")
    if not force:
        _require_no_command(log, seen, worker)
    asked = {"do": "release", "worker": worker}
    records = _carried_out(log, seen, asked, lambda work: work.release(worker), timeout)
    if as_json:
        fields = {"route": route, "group": group, "worker": worker, "records": records}
        click.echo(json_line("group.release", fields))
    else:
        click.echo(f"{route}/{group}: taken back from {worker}: {_records(records)}")


@click.command(
    "skip",
    epilog=examples(
        "wald group skip orders billing 250 --why 'no such customer'", "wald group skip orders billing 250..260"
    ),
)
@route_argument
@group_argument
@click.argument("records", metavar="FIRST[..LAST]")
@root_option
@click.option("--why", default="", metavar="TEXT", help="The reason, for the ledger.")
@timeout_option
@json_option
@stdout_is_a_report
def skip(root: Path, route: str, group: str, records: str, why: str, timeout: float, as_json: bool) -> None:
    """Mark records of ROUTE that no worker can process as done, and record that in ledger/skips.jsonl.

    They are done for this group only, and stay in the log as long as others need them. FIRST must be after the records
    that are already done. The log's owner and root may skip.
    """
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
    if as_json:
        fields: dict[str, object] = {"route": route, "group": group, "first": first, "last": last}
        click.echo(json_line("group.skip", fields | {"records": skipped, "why": why}))
    else:
        click.echo(f"{route}/{group}: skipped: {_records(skipped)} of {records}")


@click.command("remove", epilog=examples("wald group remove orders billing", "wald group remove orders billing --json"))
@route_argument
@group_argument
@root_option
@json_option
@stdout_is_a_report
def remove(root: Path, route: str, group: str, as_json: bool) -> None:
    """Remove a work group from ROUTE: its cursor, its journal, and its other files.

    Refused while a process owns the group, and while a command of a killed wald-drain still runs.

    The records that it has not done are no longer kept for it. Records that other groups of the route have not
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
    if as_json:
        click.echo(
            json_line("group.remove", {"route": route, "group": group, "paths": [str(each) for each in removed]})
        )
    else:
        click.echo("\n".join(map(str, removed)))


def _require_no_command(log: Log, seen: GroupStatus, worker: str) -> None:
    from wald.work.ownership import commands_of, worker_name

    for each in commands_of([seen]).get(seen.file.path, []):
        if each.worker is not None and worker_name(each.worker) == worker:
            again = group_line(log, "release", seen.file, f"{worker} --force")
            raise Refused(
                f"{worker} of {seen.file.route}/{seen.file.group} runs process {each.process}, with its records: "
                f"it would continue alongside a second one: {each.words}",
                hint=f"kill -- -{each.process_group} ends it, its records are redelivered; {again} starts a second",
            )


def _stopping(file: WorkFile, owner: OwnerProcess) -> str:
    if owner.pid is None:
        return f"stop it first: fuser -v {file.lock} names it"
    if any(name in owner.command for name in ("wald-gate", "wald_gate")):  # it works for other groups too
        asking = f"DELETE /v1/routes/{file.route}/groups/{file.group}"
        return f"ask it: {asking}; or wait: it lets go 30 s after the last request, once no worker has a record"
    return f"stop it first: kill {owner.pid}{', which is ' if owner.command else ''}{owner.command}"


def _changeable(log: Log, route: str, group: str) -> GroupStatus:
    """The group, if this user may change it."""
    from wald.retention.cursors import CursorState
    from wald.work.snapshot import read_status, work_file

    file = work_file(log.root, route, group)
    if not is_own_file(file.path):
        user = user_name(file.path.lstat().st_uid)
        raise NotPermitted(f"{file.path}: the group of another user", hint=f"run it as user {user}; ls -l {file.path}")
    seen = read_status(log, file, time.time_ns())
    if seen.damage:
        raise Damaged(f"{file.path}: {seen.damage}", hint=group_line(log, "show", file))
    if seen.cursor.state is not CursorState.VALID:
        raise Damaged(f"{seen.cursor.message}", hint=group_line(log, "show", file))
    return seen


def _carried_out(
    log: Log, seen: GroupStatus, asked: Mapping[str, object], do: Callable[[WorkGroup], int], seconds: float
) -> int:
    """Let the owner apply a change; without an owner, apply it here."""
    from wald.work.control import OwnerGone, ask_owner
    from wald.work.group import WorkGroup
    from wald.work.ownership import Ownership

    file = seen.file
    while True:
        try:
            with (
                Ownership(
                    log.root, file.route, file.group, Disk()
                ) as ownership,  # even while a command that was left behind runs
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
    """Return the number of records to skip."""
    from wald.retention.cursor_moves import EarlierReclaim

    route, group, picture = seen.file.route, seen.file.group, seen.snapshot
    head = log.head()
    durable = 0 if head is None else head.sequence
    if last > durable:
        raise Refused(
            f"record {last} is beyond the head, {durable}", hint=f"{command_line(log.root.path, 'head')} shows it"
        )
    if first <= picture.floor < last:
        hint = group_line(log, "skip", seen.file, f"{picture.floor + 1}..{last}")
        raise Refused(f"{route}/{group} has done everything up to {picture.floor}", hint=hint)
    known = sum(each.size for each in picture.open_in(first, last)) if first <= last else 0
    if last >= picture.end:
        skip = EarlierReclaim(log.root, route, group).skip
        known += sum(batch.count for batch in log.batches(route, max(first, picture.end), last, on_missing=skip))
    if not known:
        message = f"records {first} to {last} of route {route} are not pending for group {group}"
        raise NotFound(message, hint=group_line(log, "show", seen.file))
    return known


def _range(given: str) -> tuple[int, int]:
    ends = given.split("..")
    if not all(end.isascii() and end.isdecimal() and 0 < int(end) < 1 << 63 for end in ends) or len(ends) > 2:
        raise InvalidInput(f"{given}: neither a sequence nor a range of them", hint="250, or 250..260")
    first, last = int(ends[0]), int(ends[-1])
    if first > last:
        raise InvalidInput(f"{given}: ends before it begins", hint=f"{last}..{first}")
    return first, last


def _records(count: int) -> str:
    return f"{count} record{'s' * (count != 1)}"
