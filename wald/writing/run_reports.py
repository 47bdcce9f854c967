"""Reports about runs of the daemon, and how they ended.

Each run writes a report to ``recovery/`` at its start and adds its end. If the end is missing, the run was killed or
its machine went down; the kernel's boot id distinguishes the two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from wald.files.layout import Root
from wald.files.locks import is_locked
from wald.files.safe_open import read_object
from wald.format.times import utc

if TYPE_CHECKING:
    from wald.files.disk import Disk

STOPPED = "stopped"  # "ended" of a run without failure


def add_to_run(root: Root, disk: Disk, epoch: int, fields: Mapping[str, Any]) -> None:
    """Add JSON fields to the report of a run, if one exists."""
    report = read_object(root.report(epoch))
    if report is not None:
        disk.replace(root.report(epoch), json.dumps(report | dict(fields), indent=2).encode() + b"\n")


def run_reports(root: Root) -> Iterator[dict[str, Any]]:
    """Yield the reports, newest first."""
    for path in sorted(root.recovery.glob("*.json"), reverse=True):
        if (report := read_object(path)) is not None:
            yield report


def last_daemon_fields(root: Root) -> dict[str, object]:
    """Return the known fields of the daemon that started last: epoch, pid, host, started.

    If this user cannot read the lock file, the run's report supplies them, once written.
    """
    from wald.writing.daemon_lock import is_lock_hidden, read_signature

    if not is_lock_hidden(root):
        return read_signature(root)
    locked_ns = os.stat(root.lock).st_mtime_ns
    fields: dict[str, object] = {"started": utc(locked_ns, 3)}
    report = next(run_reports(root), {})
    if isinstance(at_ns := report.get("at_ns"), int) and at_ns >= locked_ns:
        fields |= {name: report[name] for name in ("epoch", "pid", "host", "started") if report.get(name)}
    return fields


def describe_last_end(root: Root) -> str:
    """Describe how the last reported run ended, or return "" without one."""
    from wald.files.uptime import boot_id

    report = next(run_reports(root), None)
    if report is None:
        return ""
    run = f"the last one (epoch {report.get('epoch')})"
    how, at_ns = report.get("ended"), report.get("ended_at_ns")
    if how and isinstance(at_ns, int):
        return f"{run} was stopped at {utc(at_ns)}" if how == STOPPED else f"{run} failed at {utc(at_ns)}: {how}"
    if report.get("boot") != boot_id():
        return f"{run} was not stopped: its machine went down while it ran, or it was killed earlier"
    return f"{run} was not stopped: it was killed or crashed"


class CrashReport(NamedTuple):
    """Run that did not end with a stop."""

    epoch: int
    how: str
    found_ns: int | None  # None before the next start
    lost: tuple[str, ...]  # durable data
    cut_bytes: int  # of an unfinished write


def crash_reports(root: Root, *, running: int | None = None) -> Iterator[CrashReport]:
    """Yield the runs that did not end with a stop, newest first, except ``running``."""
    after: dict[str, Any] = {}
    for report in run_reports(root):
        epoch, ended = report.get("epoch"), report.get("ended")
        if epoch != running and ended != STOPPED:
            how = f"failed: {ended}" if ended else "was killed or crashed, or its machine went down"
            errors, cut = after.get("errors"), after.get("trimmed_bytes")
            lost = tuple(map(str, errors)) if isinstance(errors, list) else ()
            yield CrashReport(int(epoch or 0), how, after.get("at_ns"), lost, cut if isinstance(cut, int) else 0)
        after = report


def no_daemon_message(root: Root, disk: Disk) -> str:
    """Report that no daemon runs, and how the last run ended.

    Return "" if a daemon runs, or if the log was written without a daemon.
    """
    if not os.path.lexists(root.lock):
        return "" if os.path.lexists(root.head) else "no daemon runs: this log has never had one"
    if is_locked(root.lock, disk):
        return ""
    return f"no daemon runs: {describe_last_end(root) or 'the last one ended before it had recovered the log'}"
