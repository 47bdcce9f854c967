"""Clock steps: places in the log after which append times restart from the clock, in ``clock.jsonl`` of a root.

Otherwise append times never decrease from record to record. After the clock was far ahead, an operator has the daemon
record a step; the segments after it are a separate range of times. The file has a checksummed line for each step and is
replaced as a whole, before the first segment of the new range exists. A step without that segment is harmless: if
records follow, append times on both sides of it are still in order; otherwise the next start completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from wald.errors import Damaged
from wald.format.checked_line import decode_line, encode_line
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.regular import read_regular


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
