"""What Linux says of a process in /proc; see proc(5)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_STOPPED_STATES = "Tt"  # by a signal, or by a debugger; see proc_pid_stat(5)
_NS = 10**9


def all_processes() -> Iterator[int]:
    """The processes that run now."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def command_of(process: int) -> str:
    """The command line of a process; "" if this user may not see it, or it has ended."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)


def name_of(process: int) -> str:
    """The name of a process, which :func:`take_name` can change; "" if it has ended."""
    try:
        return Path(f"/proc/{process}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def take_name(name: str) -> None:
    """Have this process listed by another name, of at most 15 bytes, until it executes another program."""
    try:
        with Path("/proc/self/comm").open("r+b", buffering=0) as file:  # never made, if it is not there
            file.write(name.encode())
    except OSError:  # a sandbox may forbid it, and nothing but a list depends on it
        return


def parent_of(process: int) -> int | None:
    """The parent of a process; None if it has ended."""
    found = _status(process)
    return int(found[1]) if found else None


def process_group_of(process: int) -> int | None:
    """The process group of a process; None if it has ended."""
    found = _status(process)
    return int(found[2]) if found else None


def started_ns(process: int) -> int | None:
    """When a process was started, in ns since 1970; None if it has ended."""
    found = _status(process)
    if not found:
        return None
    since_boot = int(found[19]) * _NS // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    found = _status(process)
    return bool(found) and found[0] in _STOPPED_STATES


def _status(process: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the state on, which is the third; none if there is no process any more."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
