"""Outcomes, verdicts and findings; the facts of a check give its verdict."""

from __future__ import annotations

import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from wald.hints import command_line


class Outcome(StrEnum):
    """Result of a check, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"
    """Does not apply here, or needs a permission that this user lacks."""
    UNKNOWN = "unknown"
    """Could not be determined."""
    WARN = "warn"
    FAIL = "fail"
    """A promise does not hold here, or the daemon cannot run."""

    @property
    def severity(self) -> int:
        return list(Outcome).index(self)


class Verdict(NamedTuple):
    """Verdict on some facts; ``advice`` is a command or an action."""

    outcome: Outcome
    message: str
    advice: str = ""


def ok(message: str) -> Verdict:
    return Verdict(Outcome.OK, message)


def skipped(message: str) -> Verdict:
    return Verdict(Outcome.SKIPPED, message)


def unknown(message: str, advice: str = "") -> Verdict:
    return Verdict(Outcome.UNKNOWN, message, advice)


def warn(message: str, advice: str) -> Verdict:
    return Verdict(Outcome.WARN, message, advice)


def fail(message: str, advice: str) -> Verdict:
    return Verdict(Outcome.FAIL, message, advice)


class Paths:
    """Paths for use in advice, quoted for a shell."""

    def __init__(self, root: Path, at: Path) -> None:
        self.root = shlex.quote(str(root))
        self.at = shlex.quote(str(at))  # a parent if the root does not exist
        self.wald = command_line(root)


class Facts(ABC):
    """Measurements of one check, a dataclass. Its docstring names the subject, and field names end with units."""

    __slots__ = ()

    @abstractmethod
    def verdict(self, paths: Paths) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, as printed in JSON."""

    check: str
    outcome: Outcome
    message: str
    promises: tuple[int, ...]  # numbers in docs/guarantees.md that depend on it
    advice: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)  # ``Any``: it becomes JSON


@contextmanager
def interrupted(error: Callable[[], BaseException], *numbers: int, after: float = 0) -> Iterator[None]:
    """Raise an error in the block on these signals, and after ``after`` seconds, even if a disk hangs."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise error()

    before = {number: signal.signal(number, interrupt) for number in (*numbers, *[signal.SIGALRM] * bool(after))}
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
