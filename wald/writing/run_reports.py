"""Reports about runs of the daemon, and how they ended.

How the lives of the daemon ended. Each life writes a report to ``recovery/`` at its start and adds its end to it.

A life that was killed, or whose machine went down, adds no end. The kernel's id of the boot tells the two apart.
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
    """Add to the report of a life how it ends.

    Args:
        how: STOPPED, or what went wrong.

    Raises:
        OSError: the report cannot be written. The life counts as killed.
    """
    add_to_run(root, disk, epoch, {"ended": how, "ended_at_ns": now_ns})


def add_to_run(root: Root, disk: Disk, epoch: int, fields: Mapping[str, Any]) -> None:
    """Add fields to the report of a life, if it has one; ``Any``: they are JSON.

    Raises:
        OSError: the report cannot be written.
    """
    report = read_run(root, epoch)
    if report is not None:
        disk.replace(root.report(epoch), json.dumps(report | dict(fields), indent=2).encode() + b"\n")


def read_run(root: Root, epoch: int) -> dict[str, Any] | None:
    """The report of a life; None if it is missing or not a report."""
    return read_object(root.report(epoch))


def run_reports(root: Root) -> Iterator[dict[str, Any]]:
    """The reports that are kept, the newest life first."""
    for path in sorted(root.recovery.glob("*.json"), reverse=True):
        if (report := read_object(path)) is not None:
            yield report


def signed(root: Root) -> dict[str, object]:
    """What the daemon that started last says of itself: epoch, pid, host, started; empty if none has.

    The lock file says it; to a user who may not open that, the report of the life. Before the start has written its
    report, such a user knows only when the lock was taken.
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
    """Whether the last life with a report added its end to it."""
    return bool(next(run_reports(root), {}).get("ended"))


def last_end(root: Root) -> str:
    """How the last life with a report ended, as a sentence; "" if there is none."""
    report = next(run_reports(root), None)
    return "" if report is None else _ending(report)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """A life that did not end with a stop.

    Attributes:
        how: as a sentence.
        found_ns: when the next start found it, ns since 1970; None: no start has, so what was lost is not known yet.
        lost: what was durable and is no longer there; nothing, unless the disk or the machine is at fault.
        cut_bytes: of a write that was not finished, and so not acknowledged.
    """

    epoch: int
    how: str
    found_ns: int | None = None
    lost: tuple[str, ...] = ()
    cut_bytes: int = 0


def last_crash(root: Root, *, running: int | None) -> CrashReport | None:
    """The last crash that the reports know of.

    Args:
        running: the epoch of the life that has not ended; None: no daemon runs.
    """
    after: dict[str, Any] = {}
    for report in run_reports(root):
        if report.get("epoch") != running and report.get("ended") != STOPPED:
            return _crash(report, after)
        after = report
    return None


def crashes(root: Root) -> Iterator[CrashReport]:
    """The crashes that the reports know of and a start has found, the newest first."""
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
    """Says that no daemon runs and how the last one ended; "" if one runs, or records came without one."""
    if not os.path.lexists(root.lock):
        return "" if os.path.lexists(root.head) else "no daemon runs: none has run on this log"
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
