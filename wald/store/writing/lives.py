"""How the lives of the daemon ended. Each life writes a report to ``recovery/`` at its start and adds its end to it.

A life that was killed, or whose machine went down, adds no end. The kernel's id of the boot tells the two apart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wald.errors import Damaged
from wald.format.times import utc
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.regular import open_file
from wald.store.files.uptime import boot_id
from wald.store.writing.lock import is_held

STOPPED = "stopped"


def report_path(root: Root, epoch: int) -> Path:
    """The path of the report of one life."""
    return root.recovery / f"{epoch:010d}.json"


def end_life(root: Root, disk: Disk, epoch: int, how: str, *, now_ns: int) -> None:
    """Add to the report of a life how it ends.

    Args:
        how: STOPPED, or what went wrong.

    Raises:
        OSError: the report cannot be written. The life counts as killed.
    """
    report = _read(report_path(root, epoch))
    if report is not None:
        report |= {"ended": how, "ended_at_ns": now_ns}
        disk.replace(report_path(root, epoch), json.dumps(report, indent=2).encode() + b"\n")


def last_end(root: Root) -> str:
    """How the last life with a report ended, as a sentence; "" if there is none."""
    for path in sorted(root.recovery.glob("*.json"), reverse=True):
        report = _read(path)
        if report is not None:
            return _ending(report)
    return ""


def no_daemon(root: Root, disk: Disk) -> str:
    """Says that no daemon runs and how the last one ended; "" if one runs, or none ever ran."""
    if not os.path.lexists(root.lock) or is_held(root, disk):
        return ""
    return f"no daemon runs: {last_end(root) or 'the last one ended before it had recovered the log'}"


def _ending(report: dict[str, Any]) -> str:
    who = f"the last one (epoch {report.get('epoch')})"
    how, at_ns = report.get("ended"), report.get("ended_at_ns")
    if how and isinstance(at_ns, int):
        what = "was stopped" if how == STOPPED else "failed"
        return f"{who} {what} at {utc(at_ns)}" + ("" if how == STOPPED else f": {how}")
    if report.get("boot") != boot_id():
        return f"{who} was not stopped: its machine went down under it, or it was killed before that"
    return f"{who} was not stopped: it was killed, or crashed"


def _read(path: Path) -> dict[str, Any] | None:
    """A report; None if it is missing or not a report."""
    try:
        with open_file(path) as file:
            report = json.load(file)
    except (OSError, ValueError, RecursionError, Damaged):
        return None
    return report if isinstance(report, dict) else None
