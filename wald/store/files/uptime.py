"""Time that cannot be set: moments of one boot of the machine, and how much has certainly passed between them.

A wall clock may be years ahead one minute and right the next; what is deleted by age must not depend on it. Linux
counts the time since the machine was booted (CLOCK_BOOTTIME, suspension included) and gives each boot an id. Between
moments of two boots nothing is known to have passed: a root may have been moved or restored, or be shared with another
machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wald.format.ledger_part import CLOCK_ZERO, Clock

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4)


@dataclass(frozen=True, slots=True)
class Moment:
    """
    Attributes:
        boot: the id of the boot; "" where the system gives none, and then nothing is known to have passed.
        boottime_ns: since that boot.
    """

    boot: str
    boottime_ns: int

    def as_entry(self) -> dict[str, Any]:
        """As it stands in a ledger's line. ``Any``: it is JSON."""
        return {"boot": self.boot, "boottime": self.boottime_ns}


def now() -> Moment:
    """This moment."""
    return Moment(boot_id(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def moment_of(entry: Mapping[str, Any]) -> Moment | None:
    """When a ledger's line was written; None if it does not say."""
    match entry:
        case {"boot": str(boot), "boottime": int(boottime_ns)}:
            return Moment(boot, boottime_ns)
    return None


class Elapsed:
    """The time that has certainly passed, added up over moments that come one after the other."""

    def __init__(self, clock: Clock = CLOCK_ZERO) -> None:
        self._total_ns = clock[0]
        self._last = Moment(*clock[1:]) if clock[1] else None

    @property
    def clock(self) -> Clock:
        """To go on from, later."""
        return (self._total_ns, self._last.boot, self._last.boottime_ns) if self._last else (self._total_ns, "", 0)

    def until(self, moment: Moment) -> int:
        """Nanoseconds from the first moment to this one, at least."""
        last = self._last
        if last is None or not moment.boot or moment.boot != last.boot:
            return self._total_ns
        return self._total_ns + max(0, moment.boottime_ns - last.boottime_ns)

    def advance_over(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Go on from the last of the lines that say when they were written."""
        for entry in entries:
            if (moment := moment_of(entry)) is not None:
                self.advance(moment)

    def advance(self, moment: Moment) -> int:
        """The same, and go on from there."""
        self._total_ns = self.until(moment)
        if self._last is None or moment.boot != self._last.boot or moment.boottime_ns > self._last.boottime_ns:
            self._last = moment
        return self._total_ns


@cache
def boot_id() -> str:
    """The id of this boot of the machine; "" if the kernel does not give it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
