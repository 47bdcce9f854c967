"""Monotonic time across boots, and recorded steps of the wall clock.

Time that cannot be set: moments of one boot of the machine, and how much has certainly passed between them.

A wall clock may be years ahead one minute and right the next; what is deleted by age must not depend on it. Linux
counts the time since the machine was booted (CLOCK_BOOTTIME, suspension included) and gives each boot an id. Between
moments of two boots nothing is known to have passed: a root may have been moved or restored, or be shared with another
machine.

A time namespace, which containers and checkpoints use, adds an offset to CLOCK_BOOTTIME and leaves the boot id
unchanged; see time_namespaces(7). A moment is in the host's time, without the offset; it is unknown if the offset is.

Clock steps: places in the log after which append times restart from the clock, in ``clock.jsonl`` of a root.

Otherwise append times never decrease from record to record. After the clock was far ahead, an operator has the daemon
record a step; the segments after it are a separate range of times. The file has a checksummed line for each step and is
replaced as a whole, before the first segment of the new range exists. A step without that segment is harmless: if
records follow, append times on both sides of it are still in order; otherwise the next start completes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import read_regular
from wald.format.ledger_lines import decode_line, encode_line

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


@dataclass(frozen=True, slots=True)
class ClockStep:
    """One step.

    Attributes:
        base: the sequence of the first record that may follow it.
        before_ns: the last append time before it.
        at_ns: the clock when it was recorded; append times continue from there.
    """

    base: int
    before_ns: int
    at_ns: int


def read_steps(root: Root) -> tuple[ClockStep, ...]:
    """Return the steps of a log in order, without unreadable lines."""
    steps = []
    for line in _lines(root):
        try:
            steps.append(ClockStep(**(decode_line(line) or {})))
        except TypeError:
            continue
    return tuple(sorted(steps, key=lambda step: step.base))


def step_between(steps: Sequence[ClockStep], first: int, last: int) -> ClockStep | None:
    """Return the last one of ``steps``, as :func:`read_steps` orders them, with a base of ``first`` to ``last``.

    Append times restart in a segment if a step lies after the base of the previous segment and not after its own: the
    segment that began at the step may be gone.
    """
    return next((step for step in reversed(steps) if first <= step.base <= last), None)


def require_steps(root: Root) -> None:
    """
    Raises:
        Damaged: a line of the steps cannot be read.
    """
    for number, line in enumerate(_lines(root), start=1):
        if set(decode_line(line) or {}) != {"base", "before_ns", "at_ns"}:
            raise Damaged(
                f"{root.clock_steps}: line {number} is not a clock step; look-ups by time may miss records",
                case="clock-step-damaged",
                path=root.clock_steps,
            )


def add_step(root: Root, disk: Disk, step: ClockStep) -> None:
    """Record a step; on disk when this returns."""
    disk.replace(root.clock_steps, b"".join(_lines(root)) + encode_line(asdict(step)))


def ranges(root: Root) -> list[tuple[int, int | None]]:
    """Return the ranges of sequences in which append times do not decrease: the first sequence, and the exclusive end.

    The end of the last range is None.
    """
    bases = sorted({step.base for step in read_steps(root) if step.base > 1})
    return list(zip([1, *bases], [*bases, None], strict=True))


def _lines(root: Root) -> list[bytes]:
    try:
        return read_regular(root.clock_steps).splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
