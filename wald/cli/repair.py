"""``wald verify`` and ``wald repair``: find damage, repair it, and record the loss."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.command import examples
from wald.cli.options import json_option, root_option
from wald.cli.output import counted, ignore_stdout, json_line, print_result
from wald.errors import Damaged, Locked, NotFound, Refused, UnsupportedFormat
from wald.files import locks
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import CURSOR_SUFFIX, SKIPS_LEDGER, VERIFY_LEDGER, WORK_SUFFIX
from wald.format.times import utc
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.checking.checker import Finding, Level
    from wald.repairing.plan import Plan
    from wald.writing.daemon_lock import Lock


@click.command(epilog=examples("wald verify", "wald verify --record"))
@root_option
@click.option("--record", is_flag=True, help="Write the result to ledger/verify.jsonl, where the metrics find it.")
@json_option
def verify(root: Path, record: bool, as_json: bool) -> int:
    """Read every byte of the log, check it against its checksums, digests and neighbours, and change nothing.

    Print one line for each file and each finding; the exit code is 4 if there is an error. A daemon may be running.
    """
    from wald.checking.checker import Level
    from wald.files.ledger_write import Ledger

    here = Root(root)
    log_id = read_identity(here).log_id
    with ExitStack() as held:
        ledger = None
        if record:
            ledger = Ledger(here.ledger / VERIFY_LEDGER, Disk(), owner="verification with --record")
            held.callback(ledger.close)
        counts = _report_findings(here, log_id, as_json=as_json)
        if ledger is not None:
            errors = counts[Level.ERROR]
            ledger.cut()
            ledger.append({"event": "verified", "ok": counts[Level.OK], "errors": errors, "at": time.time_ns()})
    return Damaged.exit_code if counts[Level.ERROR] else 0


def _report_findings(root: Root, log_id: bytes, *, as_json: bool) -> Counter[Level]:
    from wald.checking.checker import Level
    from wald.checking.verifier import Verification
    from wald.work.snapshot import check_journals

    counts: Counter[Level] = Counter()
    began = time.monotonic()
    verification = Verification(root)
    journals = (finding for _, finding in check_journals(root, log_id))
    for finding in chain(verification.findings(), journals):
        counts[finding.level] += 1
        fields: dict[str, object] = {"kind": "finding", "level": finding.level.value, "path": str(finding.path)}
        fields |= {"offset": finding.offset, "message": finding.message}
        at = f" offset {finding.offset}:" if finding.level is Level.ERROR else ""
        line = f"{finding.level.value:5}  {_short(finding.path, root)}:{at} {finding.message}"
        print_result("verify", as_json, fields, [line])
    errors = counts[Level.ERROR]
    summary: dict[str, object] = {"kind": "summary", "good": not errors, "seconds": round(time.monotonic() - began, 3)}
    summary |= {name: getattr(verification, name) for name in ("segments", "records", "raw_bytes")}
    summary["findings"] = {level.value: counts[level] for level in Level}
    verdict = "damaged" if errors else "OK"
    text = f"{verdict}: {counts[Level.OK]} ok, {counts[Level.INFO]} info, {counted(errors, 'error')}"
    print_result("verify", as_json, summary, [text])
    return counts


_VERBS = {  # of kinds of action
    "ledger": "rebuild",
    "identity": "rewrite",
    "put back": "restore",
    "set aside": "quarantine",
    "clear away": "quarantine",
    "remake": "rebuild",
    "give up": "give up records of",
    "record": "add the ledger line of",
    "head": "rewrite",
}
_OWNERS = {
    "reclaim.jsonl": "wald-reclaim",
    "archive.jsonl": "wald-archive",
    "verify.jsonl": "verification",
    SKIPS_LEDGER: "wald cursor skip",
}


@click.command(epilog=examples("wald repair --dry-run", "wald repair --accept-loss"))
@root_option
@click.option("--dry-run", is_flag=True, help="Print the actions, and change nothing.")
@click.option("--accept-loss", is_flag=True, help="Also give up unreadable records.")
@json_option
def repair(root: Path, dry_run: bool, accept_loss: bool, as_json: bool) -> int:
    """Repair a log that `wald verify` reports as damaged. The daemon and wald-reclaim must be stopped.

    Indexes, the head, ledgers and log.json are rebuilt if that loses nothing. Damaged bytes are cut out only with
    --accept-loss: they are saved in quarantine/, and a line in ledger/segments.jsonl lists the lost records. Every
    action is printed first.

    Each repair takes a new epoch, as each start of the daemon does; --dry-run takes none.

    Exit codes: 0 if the log is intact. 9 if an action would give up records and --accept-loss is missing: its line
    begins with `refuse:`. Otherwise 4, if damage remains that this command cannot repair, or, with --dry-run, if the
    log is damaged.
    """
    from wald.checking.checker import Level
    from wald.checking.verifier import verify
    from wald.files import uptime
    from wald.repairing.apply import Repair, planned_repair
    from wald.repairing.survey import recover_identity
    from wald.writing.daemon_lock import require_free

    here = Root(root)
    recover_identity(here)  # fails, before anything is written, if this is not a log or its identity is uncertain
    if dry_run:
        with _hinting(here):
            require_free(here, Disk())
        with planned_repair(here) as (plan, _):
            left = (*plan.unrepaired, *_journals(here))
            return _report(plan, left, here, dry_run=True, accept_loss=accept_loss, as_json=as_json)
    ignore_stdout()
    with _locked(here) as lock, planned_repair(here) as (plan, survey):
        if not as_json:
            _print(plan, here, accept_loss=accept_loss)
        applied = Repair(here, Disk(), lock.epoch, time.time_ns, uptime.now)
        for action in plan.actions:
            if accept_loss or not action.loses_data:
                applied.apply(action, survey)
        left = (*(found for found in verify(here) if found.level is Level.ERROR), *_journals(here))
        return _report(plan, left, here, dry_run=False, accept_loss=accept_loss, as_json=as_json)


def _journals(root: Root) -> Iterator[Finding]:
    """Yield the errors in journals of work groups, which cannot be repaired."""
    from wald.checking.checker import Level
    from wald.work.snapshot import check_journals

    try:
        log_id = read_identity(root).log_id
    except (Damaged, NotFound, UnsupportedFormat):  # the plan reports it
        return
    yield from (finding for _, finding in check_journals(root, log_id) if finding.level is Level.ERROR)


@contextmanager
def _locked(root: Root) -> Iterator[Lock]:
    """Acquire the daemon's lock, and those of the programs that write ledgers."""
    from wald.files.ledger_write import lock_ledger
    from wald.writing.daemon_lock import Lock

    disk = Disk()
    with ExitStack() as stack:
        with _hinting(root):
            lock = Lock(root, disk, now=utc(time.time_ns()))
        stack.callback(lock.release)
        for directory in (root.ledger, root.quarantine):  # repair writes to both
            disk.make_directory(directory)
        disk.sync_directory(root.path)
        for name, owner in _OWNERS.items():
            stack.callback(disk.close, lock_ledger(root.ledger / name, disk, owner))
        yield lock


@contextmanager
def _hinting(root: Root) -> Iterator[None]:
    try:
        yield
    except Locked as error:
        pids = locks.holders(root.lock)
        raise Locked(error.message, case="daemon-in-the-way", lock=root.lock, pids=pids) from None


def _report(
    plan: Plan, left: tuple[Finding, ...], root: Root, *, dry_run: bool, accept_loss: bool, as_json: bool
) -> int:
    """Print the remaining errors, or with --json everything; return the exit code."""
    refused = plan.loses_data and not accept_loss
    code = Refused.exit_code if refused else Damaged.exit_code if left or (dry_run and plan.damage) else 0
    if as_json:
        fields: dict[str, object] = {"dry_run": dry_run, "accept_loss": accept_loss, "exit_code": code}
        fields["actions"] = [
            {
                "action": action.kind.value,
                "path": _short(action.path, root),
                "reason": action.reason,
                "loses": action.loses_data,
                "lost": [{"first": first, "last": last} for first, last in action.lost_spans],
                "done": not dry_run and (accept_loss or not action.loses_data),
            }
            for action in plan.actions
        ]
        fields["lost_records"] = sum(action.lost_records for action in plan.actions)
        fields["left"] = [{"path": str(each.path), "message": each.message, "hint": _hint(each)} for each in left]
        click.echo(json_line("repair", fields))
        return code
    if dry_run:
        _print(plan, root, accept_loss=accept_loss)
    if not refused:
        for found in left:
            hint = f"\n  hint: {_hint(found)}" if _hint(found) else ""
            click.echo(f"not repaired: {_short(found.path, root)}: {found.message}{hint}")
    click.echo(_summary(plan, left, root, dry_run=dry_run, refused=refused))
    return code


def _print(plan: Plan, root: Root, *, accept_loss: bool) -> None:
    for action in plan.actions:
        lost = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in action.lost_spans)
        dropped = action.dropped_records
        among = f", {dropped} of them already dropped by shrinking" if dropped else ""
        cost = f"; gives up {action.lost_records} records: {lost}{among}" if lost else ""
        verb = _VERBS.get(action.kind.value, action.kind.value)
        text = f"{verb} {_short(action.path, root)}: {action.reason}{cost}"
        ready = accept_loss or not action.loses_data
        click.echo(f"repair: {text}" if ready else f"refuse: {text}; needs --accept-loss")


def _summary(plan: Plan, left: tuple[Finding, ...], root: Root, *, dry_run: bool, refused: bool) -> str:
    if not plan.actions and not left:
        return "OK: nothing to repair"
    lost = sum(action.lost_records for action in plan.actions)
    if refused:
        command = command_line(root.path, "repair --accept-loss")
        if not list_segments(root).segments:
            command = f"findmnt -T {root.segments} shows whether the directory is mounted; {command}"
        return f"damaged: {lost} records cannot be read; {command} gives them up"
    verdict = "damaged" if left or (dry_run and plan.damage) else "OK"
    actions = counted(len(plan.actions), "action")
    if dry_run:
        return f"{verdict}: {actions} would be done, {lost} records would be lost; {len(left)} errors would remain"
    return f"{verdict}: {actions} done, {lost} records lost; {len(left)} errors remain"


def _hint(found: Finding) -> str:
    path = found.path
    if path.suffix in (CURSOR_SUFFIX, WORK_SUFFIX):
        group, route, root = path.stem, path.parents[1].name, path.parents[3]
        if path.suffix == WORK_SUFFIX:
            return command_line(root, f"group show {route} {group}")
        return command_line(root, f"cursor set {route} SEQUENCE --group {group} --rewind")
    return ""


def _short(path: Path, root: Root) -> str:
    return str(path.relative_to(root.path)) if path.is_relative_to(root.path) else str(path)
