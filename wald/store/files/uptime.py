"""Time that cannot be set: moments of one boot of the machine, and how much has certainly passed between them.

A wall clock may be years ahead one minute and right the next; what is deleted by age must not depend on it. Linux
counts the time since the machine was booted (CLOCK_BOOTTIME, suspension included) and gives each boot an id. Between
moments of two boots nothing is known to have passed: a root may have been moved or restored, or be shared with another
machine.

A time namespace, which containers and checkpoints use, adds an offset to CLOCK_BOOTTIME and leaves the boot id
unchanged; see time_namespaces(7). A moment is in the host's time, without the offset; it is unknown if the offset is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4)
_OFFSETS = Path("/proc/self/timens_offsets")  # those of the namespace for children
_NAMESPACES = ("/proc/self/ns/time", "/proc/self/ns/time_for_children")


@dataclass(frozen=True, slots=True)
class Moment:
    """
    Attributes:
        boot: the boot id; "" if the system has none, or if its clock cannot be compared with that of other processes.
            Then no time is known to have passed.
        boottime_ns: the time since that boot, by the clock of the host.
    """

    boot: str
    boottime_ns: int

    def as_entry(self) -> dict[str, Any]:
        """As it stands in a ledger's line. ``Any``: it is JSON."""
        return {"boot": self.boot, "boottime": self.boottime_ns}


def now() -> Moment:
    """This moment."""
    boot, offset_ns = boot_id(), _namespace_offset_ns()
    boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return Moment("", boottime_ns) if offset_ns is None else Moment(boot, boottime_ns - offset_ns)


def moment_of(entry: Mapping[str, Any]) -> Moment | None:
    """When a ledger's line was written; None if it does not say."""
    match entry:
        case {"boot": str(boot), "boottime": int(boottime_ns)}:
            return Moment(boot, boottime_ns)
    return None


class Elapsed:
    """The time that has certainly passed, added up over moments that come one after the other."""

    def __init__(self) -> None:
        self._total_ns = 0
        self._last: Moment | None = None

    def until(self, moment: Moment) -> int:
        """Return the least number of nanoseconds from the first moment to this one."""
        last = self._last
        if last is None or not moment.boot or moment.boot != last.boot:
            return self._total_ns
        return self._total_ns + max(0, moment.boottime_ns - last.boottime_ns)

    def advance(self, moment: Moment) -> int:
        """Return the same, and continue from there."""
        self._total_ns = self.until(moment)
        if self._last is None or moment.boot != self._last.boot or moment.boottime_ns > self._last.boottime_ns:
            self._last = moment
        return self._total_ns


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if the kernel has none.

    It is read at each call: a process restored from a checkpoint may run in another boot than the one it began in.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _namespace_offset_ns() -> int | None:
    """Return the offset of CLOCK_BOOTTIME in this process's time namespace; None if it is unknown."""
    try:
        own, children = map(os.readlink, _NAMESPACES)
        if own != children:  # after unshare(2) in this process, the offsets are those of its children
            return None
        for clock, seconds, nanoseconds in map(str.split, _OFFSETS.read_text().splitlines()):
            if clock == "boottime":
                return int(seconds) * 10**9 + int(nanoseconds)
    except FileNotFoundError:  # a kernel without time namespaces
        return 0 if not os.path.lexists(_NAMESPACES[0]) else None
    except (OSError, ValueError):
        return None
    return None
