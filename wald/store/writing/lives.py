"""How the lives of the daemon ended: the report in ``recovery/`` that each begins with gets its end when it is stopped.

A life that was killed, or whose machine went down, can say nothing; which of the two it was tells the number that the
kernel gives to each boot.
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
    """Where the report of one life lies."""
    return root.recovery / f"{epoch:010d}.json"


def end_life(root: Root, disk: Disk, epoch: int, how: str, *, now_ns: int) -> None:
    """Say in the report of a life how it ends.

    Args:
        how: STOPPED, or what went wrong.

    Raises:
        OSError: that cannot be written; it counts as killed then.
    """
    told = _read(report_path(root, epoch))
    if told is not None:
        told |= {"ended": how, "ended_at_ns": now_ns}
        disk.replace(report_path(root, epoch), json.dumps(told, indent=2).encode() + b"\n")


def last_end(root: Root) -> str:
    """How the last life that there is a report of ended, in words; "" if there is none."""
    for path in sorted(root.recovery.glob("*.json"), reverse=True):
        told = _read(path)
        if told is not None:
            return _words(told)
    return ""


def no_daemon(root: Root, disk: Disk) -> str:
    """That no daemon runs, and how the last one ended, in words; "" if one runs, or none ever has."""
    if not os.path.lexists(root.lock) or is_held(root, disk):
        return ""
    return f"no daemon runs: {last_end(root) or 'the last one ended before it had recovered the log'}"


def _words(told: dict[str, Any]) -> str:
    who = f"the last one (epoch {told.get('epoch')})"
    how, at_ns = told.get("ended"), told.get("ended_at_ns")
    if how and isinstance(at_ns, int):
        what = "was stopped" if how == STOPPED else "failed"
        return f"{who} {what} at {utc(at_ns)}" + ("" if how == STOPPED else f": {how}")
    if told.get("boot") != boot_id():
        return f"{who} was not stopped: its machine went down under it, or it was killed before that"
    return f"{who} was not stopped: it was killed, or crashed"


def _read(path: Path) -> dict[str, Any] | None:
    """A report; None for one that is gone, or is none."""
    try:
        with open_file(path) as file:
            told = json.load(file)
    except (OSError, ValueError, RecursionError, Damaged):
        return None
    return told if isinstance(told, dict) else None
