"""Reports about runs of the daemon, and how they ended.

Each run writes a report to ``recovery/`` at its start and adds its end, unless it was killed or its machine went down;
the kernel's boot id tells these two apart.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wald.files.layout import Root
from wald.files.locks import is_held
from wald.files.safe_open import read_object
from wald.format.times import utc

if TYPE_CHECKING:
    from wald.files.disk import Disk

STOPPED = "stopped"
_SIGNED = ("epoch", "pid", "host", "started")


def end_run(root: Root, disk: Disk, epoch: int, how: str, *, now_ns: int) -> None:
    """Record the end of a run (STOPPED, or the failure); without it, the run counts as killed."""
    add_to_run(root, disk, epoch, {"ended": how, "ended_at_ns": now_ns})


def add_to_run(root: Root, disk: Disk, epoch: int, fields: Mapping[str, Any]) -> None:
    """Add JSON fields to the report of a run, if it has one."""
    report = read_run(root, epoch)
    if report is not None:
        disk.replace(root.report(epoch), json.dumps(report | dict(fields), indent=2).encode() + b"\n")


def read_run(root: Root, epoch: int) -> dict[str, Any] | None:
    return read_object(root.report(epoch))


def run_reports(root: Root) -> Iterator[dict[str, Any]]:
    """Yield the reports, newest first."""
    for path in sorted(root.recovery.glob("*.json"), reverse=True):
        if (report := read_object(path)) is not None:
            yield report


def signed(root: Root) -> dict[str, object]:
    """Return epoch, pid, host and started of the daemon that started last, if known.

    A user who cannot open the lock file gets them from the run's report; before that is written, only the start.
    """
    from wald.writing.daemon_lock import is_hidden, signature

    if not is_hidden(root):
        return signature(root)
    taken_ns = os.stat(root.lock).st_mtime_ns
    report = next(run_reports(root), {})
    at_ns = report.get("at_ns")
    if not isinstance(at_ns, int) or at_ns < taken_ns:
        report = {}
    return {"started": utc(taken_ns, 3)} | {name: report[name] for name in _SIGNED if report.get(name)}


def last_has_ended(root: Root) -> bool:
    return bool(next(run_reports(root), {}).get("ended"))


def last_end(root: Root) -> str:
    """Describe how the last run with a report ended; "" without one."""
    report = next(run_reports(root), None)
    return "" if report is None else _ending(report)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """Run that did not end with a stop.

    Attributes:
        found_ns: when the next start found it; None before that, while the loss is unknown.
        lost: missing durable data; only a failing disk or machine can cause this.
        cut_bytes: of an unfinished write.
    """

    epoch: int
    how: str
    found_ns: int | None = None
    lost: tuple[str, ...] = ()
    cut_bytes: int = 0


def last_crash(root: Root, *, running: int | None) -> CrashReport | None:
    after: dict[str, Any] = {}
    for report in run_reports(root):
        if report.get("epoch") != running and report.get("ended") != STOPPED:
            return _crash(report, after)
        after = report
    return None


def crashes(root: Root) -> Iterator[CrashReport]:
    """Yield the crashes that a later start has found, newest first."""
    after: dict[str, Any] = {}
    for report in run_reports(root):
        if after and report.get("ended") != STOPPED:
            yield _crash(report, after)
        after = report


def _crash(report: Mapping[str, Any], after: Mapping[str, Any]) -> CrashReport:
    how = f"failed: {report['ended']}" if report.get("ended") else "was killed or crashed, or its machine went down"
    errors, found_ns, cut = after.get("errors"), after.get("at_ns"), after.get("trimmed_bytes")
    lost = tuple(map(str, errors)) if isinstance(errors, list) else ()
    return CrashReport(int(report.get("epoch") or 0), how, found_ns, lost, cut if isinstance(cut, int) else 0)


def no_daemon(root: Root, disk: Disk) -> str:
    """Report that no daemon runs and how the last ended; "" if one runs, or records came without one."""
    if not os.path.lexists(root.lock):
        return "" if os.path.lexists(root.head) else "no daemon runs: this log has never had one"
    if is_held(root.lock, disk):
        return ""
    return f"no daemon runs: {last_end(root) or 'the last one ended before it had recovered the log'}"


def _ending(report: dict[str, Any]) -> str:
    from wald.files.uptime import boot_id

    who = f"the last one (epoch {report.get('epoch')})"
    how, at_ns = report.get("ended"), report.get("ended_at_ns")
    if how and isinstance(at_ns, int):
        what = "was stopped" if how == STOPPED else "failed"
        return f"{who} {what} at {utc(at_ns)}" + ("" if how == STOPPED else f": {how}")
    if report.get("boot") != boot_id():
        return f"{who} was not stopped: its machine went down under it, or it was killed before that"
    return f"{who} was not stopped: it was killed, or crashed"
