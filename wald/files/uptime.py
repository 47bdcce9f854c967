"""Monotonic time across boots, and recorded steps of the wall clock.

Deletions by age use the time since boot, including suspension, because the wall clock may be years ahead. No time
counts between boots: a root may be moved, restored or shared.

A time namespace (time_namespaces(7)) adds an offset to CLOCK_BOOTTIME but keeps the boot id. A :class:`Moment` is in
the host's time, and cannot be compared if the offset is unknown.

Append times never decrease, except at a clock step. If the clock was far ahead, an operator has the daemon record a
step in ``clock.jsonl``, and append times restart from the clock in the next segment. A step without that segment is
harmless: no records follow it, and the next start completes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import read_regular
from wald.format.ledger_lines import decode_line, encode_line

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random(4)
_OFFSETS = Path("/proc/self/timens_offsets")  # of the time namespace for children
_NAMESPACES = ("/proc/self/ns/time", "/proc/self/ns/time_for_children")


@dataclass(frozen=True, slots=True)
class Moment:
    """Time since a boot according to the host's clock."""

    boot: str  # boot id; "" if not comparable with other processes' moments
    boottime_ns: int

    def as_entry(self) -> dict[str, Any]:
        return {"boot": self.boot, "boottime": self.boottime_ns}


def now() -> Moment:
    boot, offset_ns = boot_id(), _namespace_offset_ns()
    boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return Moment("", boottime_ns) if offset_ns is None else Moment(boot, boottime_ns - offset_ns)


def parse_moment(entry: Mapping[str, Any]) -> Moment | None:
    match entry:
        case {"boot": str(boot), "boottime": int(boottime_ns)}:
            return Moment(boot, boottime_ns)
    return None


class Elapsed:
    """Time known to have passed over a series of moments."""

    def __init__(self) -> None:
        self._total_ns = 0
        self._last: Moment | None = None

    def until(self, moment: Moment) -> int:
        """Return the time known to have passed between the first moment and ``moment``."""
        last = self._last
        if last is None or not moment.boot or moment.boot != last.boot:
            return self._total_ns
        return self._total_ns + max(0, moment.boottime_ns - last.boottime_ns)

    def advance(self, moment: Moment) -> int:
        """Add a moment to the series; return the time until that moment."""
        self._total_ns = self.until(moment)
        if self._last is None or moment.boot != self._last.boot or moment.boottime_ns > self._last.boottime_ns:
            self._last = moment
        return self._total_ns


def boot_id() -> str:
    """Return the boot id; "" if unknown."""
    try:  # not cached: a process restored from a checkpoint may run in another boot
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _namespace_offset_ns() -> int | None:
    """Return the offset of CLOCK_BOOTTIME; None if unknown."""
    try:
        own, children = map(os.readlink, _NAMESPACES)
        if own != children:  # after unshare(2), the offsets are the children's
            return None
        for clock, seconds, nanoseconds in map(str.split, _OFFSETS.read_text().splitlines()):
            if clock == "boottime":
                return int(seconds) * 10**9 + int(nanoseconds)
    except FileNotFoundError:  # a kernel without time namespaces
        return 0 if not os.path.lexists(_NAMESPACES[0]) else None
    except (OSError, ValueError):
        return None
    return None


@dataclass(frozen=True, slots=True)
class ClockStep:
    """A step of the wall clock."""

    base: int  # first sequence that may follow it
    before_ns: int  # last append time before the step
    at_ns: int  # clock at the step, from which append times restart


def read_steps(root: Root) -> tuple[ClockStep, ...]:
    """Return the readable steps in order."""
    steps = []
    for line in _step_lines(root):
        with suppress(TypeError):
            steps.append(ClockStep(**(decode_line(line) or {})))
    return tuple(sorted(steps, key=lambda step: step.base))


def step_between(steps: Sequence[ClockStep], first: int, last: int) -> ClockStep | None:
    """Return the last of the ordered ``steps`` whose base is from ``first`` to ``last``.

    Append times restart in a segment if a step is after the previous base and not after its own, because the step's
    segment may be gone.
    """
    return next((step for step in reversed(steps) if first <= step.base <= last), None)


def require_steps(root: Root) -> None:
    for number, line in enumerate(_step_lines(root), start=1):
        if set(decode_line(line) or {}) != {"base", "before_ns", "at_ns"}:
            raise Damaged(
                f"{root.clock_steps}: line {number} is not a clock step; look-ups by time may miss records",
                case="clock-step-damaged",
                path=root.clock_steps,
            )


def add_step(root: Root, disk: Disk, step: ClockStep) -> None:
    disk.replace(root.clock_steps, b"".join(_step_lines(root)) + encode_line(asdict(step)))


def ranges_between_steps(root: Root) -> list[tuple[int, int | None]]:
    """Return the ranges between steps: first sequence and exclusive end (None: open)."""
    bases = sorted({step.base for step in read_steps(root) if step.base > 1})
    return list(zip([1, *bases], [*bases, None], strict=True))


def _step_lines(root: Root) -> list[bytes]:
    try:
        return read_regular(root.clock_steps).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
