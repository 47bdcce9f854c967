"""``wald repair``: makes a damaged log good again, and records what is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.options import json_option, root_option
from wald.cli.output import json_line
from wald.cli.streams import ignore_stdout
from wald.errors import Damaged, Locked, NotFound, Refused, UnsupportedFormat
from wald.files import locks
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import CURSOR_SUFFIX, SKIPS_LEDGER, WORK_SUFFIX
from wald.format.times import utc
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.checking.checker import Finding
    from wald.repairing.apply import Repair
    from wald.repairing.plan import Act, Plan
    from wald.repairing.survey import LogSurvey
    from wald.writing.daemon_lock import Lock

_OWNERS = {
    "reclaim.jsonl": "wald-reclaim",
    "archive.jsonl": "wald-archive",
    "verify.jsonl": "verification",
    SKIPS_LEDGER: "wald cursor skip",
}


@click.command()
@root_option
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.option("--accept-loss", is_flag=True, help="Also give up records that are unreadable.")
@json_option
def repair(root: Path, dry_run: bool, accept_loss: bool, as_json: bool) -> int:
    """Repair a log that `wald verify` reports as damaged. The daemon and wald-reclaim must be stopped.

    Indexes, the head, ledgers and log.json are rebuilt if that loses nothing. Bad bytes are cut out only with
    --accept-loss: they are kept in quarantine/, and a line in ledger/segments.jsonl gives the records up. Every action
    is printed first.

    Each repair uses an epoch, as a start of the daemon does; --dry-run uses none.

    Exit code 0: the log is good. 9: records would be given up without --accept-loss: a line begins with `refuse:`; also
    with --dry-run. 4, without such a line: with --dry-run, there is damage, as for `wald verify`; otherwise some damage
    is left that this command does not repair.
    """
    from wald.checking.checker import Level
    from wald.checking.verifier import verify
    from wald.files import uptime
    from wald.repairing.apply import Repair, proposed
    from wald.repairing.survey import lost_identity
    from wald.writing.daemon_lock import require_free

    here = Root(root)
    lost_identity(here)  # before anything is written: whether there is a log, and which
    if dry_run:
        with _hinting(here):
            require_free(here, Disk())
        with proposed(here) as (plan, _):
            left = (*plan.left, *_journals(here))
            return _report(plan, left, here, dry_run=True, accept_loss=accept_loss, as_json=as_json)
    ignore_stdout()
    with _locked(here) as lock, proposed(here) as (plan, facts):
        if not as_json:
            _print(plan, here, accept_loss=accept_loss)
        _carry_out(plan, facts, Repair(here, Disk(), lock.epoch, time.time_ns, uptime.now), accept_loss=accept_loss)
        left = (*(found for found in verify(here) if found.level is Level.ERROR), *_journals(here))
        return _report(plan, left, here, dry_run=False, accept_loss=accept_loss, as_json=as_json)


def _journals(root: Root) -> Iterator[Finding]:
    """What is wrong with those of work groups, which nothing can make anew."""
    from wald.checking.checker import Level
    from wald.work.checking import check_journals

    try:
        log_id = read_identity(root).log_id
    except (Damaged, NotFound, UnsupportedFormat):  # the plan has it
        return
    yield from (each.finding for each in check_journals(root, log_id) if each.finding.level is Level.ERROR)


@contextmanager
def _locked(root: Root) -> Iterator[Lock]:
    """The daemon's lock, and those of the programs that change what is repaired."""
    from wald.files.ledger_write import lock_ledger
    from wald.writing.daemon_lock import Lock

    disk = Disk()
    with ExitStack() as stack:
        with _hinting(root):
            lock = Lock(root, disk, now=utc(time.time_ns()))
        stack.callback(lock.release)
        for directory in (root.ledger, root.quarantine):  # one that is lost is made again: repair writes into it
            disk.make_directory(directory)
        disk.sync_directory(root.path)
        for name, owner in _OWNERS.items():
            stack.callback(disk.close, lock_ledger(root.ledger / name, disk, owner))
        yield lock


@contextmanager
def _hinting(root: Root) -> Iterator[None]:
    """Where a daemon must not run, the hint is how to stop it."""
    try:
        yield
    except Locked as error:
        pids = locks.holders(root.lock)
        raise Locked(error.message, case="daemon-in-the-way", lock=root.lock, pids=pids) from None


def _carry_out(plan: Plan, facts: LogSurvey, repair: Repair, *, accept_loss: bool) -> None:
    for act in plan.acts:
        if accept_loss or not act.loses:
            repair.apply(act, facts)


def _report(
    plan: Plan, left: tuple[Finding, ...], root: Root, *, dry_run: bool, accept_loss: bool, as_json: bool
) -> int:
    """Print what is left, or all of it as JSON; returns the exit code."""
    refused = plan.loses and not accept_loss
    code = Refused.exit_code if refused else Damaged.exit_code if left or (dry_run and plan.damage) else 0
    if as_json:
        acts = [_fields(act, root, done=not dry_run and (accept_loss or not act.loses)) for act in plan.acts]
        lost = sum(act.lost_records for act in plan.acts)
        remaining = [{"path": str(found.path), "message": found.message, "hint": _hint(found)} for found in left]
        fields = {
            "dry_run": dry_run,
            "accept_loss": accept_loss,
            "actions": acts,
            "lost_records": lost,
            "left": remaining,
        }
        click.echo(json_line("repair", fields | {"exit_code": code}))
        return code
    if dry_run:
        _print(plan, root, accept_loss=accept_loss)
    if not refused:
        for found in left:
            hint = _hint(found)
            click.echo(f"left: {_short(found.path, root)}: {found.message}" + (f"\n  hint: {hint}" if hint else ""))
    click.echo(_summary(plan, left, root, dry_run=dry_run, refused=refused))
    return code


def _print(plan: Plan, root: Root, *, accept_loss: bool) -> None:
    """What will be done, and what only with --accept-loss."""
    for act in plan.acts:
        ready = accept_loss or not act.loses
        click.echo(
            f"{'repair' if ready else 'refuse'}: {_line(act, root)}" + ("" if ready else "; needs --accept-loss")
        )


def _line(act: Act, root: Root) -> str:
    lost = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in act.lost)
    dropped = act.dropped_records
    among = f", of which shrinking had dropped {dropped}" if dropped else ""
    cost = f"; gives up {act.lost_records} records: {lost}{among}" if lost else ""
    return f"{act.kind.value} {_short(act.path, root)}: {act.reason}{cost}"


def _summary(plan: Plan, left: tuple[Finding, ...], root: Root, *, dry_run: bool, refused: bool) -> str:
    if not plan.acts and not left:
        return "good: nothing to repair"
    lost = sum(act.lost_records for act in plan.acts)
    if refused:
        again = command_line(root.path, "repair --accept-loss")
        if not list_segments(root).segments:
            again = f"findmnt -T {root.segments} shows whether it is mounted; {again}"
        return f"damaged: {lost} records cannot be read any more; {again} gives them up"
    good = "damaged" if left or (dry_run and plan.damage) else "good"
    actions = f"{len(plan.acts)} action{'s' * (len(plan.acts) != 1)}"
    if dry_run:
        return f"{good}: {actions} would be done, {lost} records given up; {len(left)} errors would be left"
    return f"{good}: {actions} done, {lost} records lost, on record; {len(left)} errors left"


def _fields(act: Act, root: Root, *, done: bool) -> dict[str, object]:
    fields = {"action": act.kind.value, "path": _short(act.path, root), "reason": act.reason, "loses": act.loses}
    return fields | {"lost": [{"first": first, "last": last} for first, last in act.lost], "done": done}


def _hint(found: Finding) -> str:
    """What an operator can type about what is not repaired."""
    path = found.path
    if path.suffix in (CURSOR_SUFFIX, WORK_SUFFIX):
        group, route, root = path.stem, path.parents[1].name, path.parents[3]
        if path.suffix == WORK_SUFFIX:
            return command_line(root, f"group show {route} {group}")
        return command_line(root, f"cursor set {route} SEQUENCE --group {group} --rewind")
    return ""


def _short(path: Path, root: Root) -> str:
    return str(path.relative_to(root.path)) if path.is_relative_to(root.path) else str(path)
