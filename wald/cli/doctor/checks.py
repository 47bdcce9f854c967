"""How a check is judged: its facts meet a table of rules, and the first rule that applies gives the finding."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from wald.hints import command_line

F = TypeVar("F")


class Outcome(StrEnum):
    """How a check ends; the later, the worse."""

    OK = "ok"
    SKIPPED = "skipped"
    """It does not apply here, or would need a right that this user does not have."""
    UNKNOWN = "unknown"
    """It cannot be found out."""
    WARN = "warn"
    FAIL = "fail"
    """A promise does not hold here, or the daemon cannot run."""

    @property
    def severity(self) -> int:
        return list(Outcome).index(self)


@dataclass(frozen=True, slots=True)
class Rule(Generic[F]):
    """One row of a table.

    Attributes:
        message: with the facts put in as ``{f.name}``.
        advice: what to type, likewise; ``{root}`` is the root, ``{at}`` the directory that is examined, which is one
            above a root that is not there; ``{wald}`` is a command line that names the root.
    """

    outcome: Outcome
    applies: Callable[[F], object]
    message: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        promises: numbers in docs/guarantees.md that rest on it.
        measured: the facts, by name; a name ends with its unit.
    """

    check: str
    outcome: Outcome
    message: str
    promises: tuple[int, ...]
    measured: Mapping[str, Any]  # ``Any``: it becomes JSON
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check(Generic[F]):
    """One question about this place.

    Attributes:
        about: what is looked at.
        rules: the last one always applies.
    """

    name: str
    about: str
    promises: tuple[int, ...]
    rules: tuple[Rule[F], ...]

    def rule(self, facts: F) -> Rule[F]:
        """The first that applies."""
        return next(rule for rule in self.rules if rule.applies(facts))

    def judge(self, facts: F, root: Path, at: Path) -> Finding:
        """The finding about ``root``, where ``at`` was examined."""
        rule = self.rule(facts)
        put_in = {"f": facts, "root": _quoted(root), "at": _quoted(at), "wald": command_line(root)}
        message, advice = rule.message.format(**put_in), rule.advice.format(**put_in)
        return Finding(self.name, rule.outcome, message, self.promises, measured(facts), advice)

    def without(self, outcome: Outcome, message: str, advice: str = "") -> Finding:
        """The finding where there are no facts."""
        return Finding(self.name, outcome, message, self.promises, {}, advice)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def measured(facts: object) -> dict[str, Any]:
    """The facts by name."""
    assert dataclasses.is_dataclass(facts)
    assert not isinstance(facts, type)
    return dataclasses.asdict(facts)


def otherwise(_: object) -> bool:
    """The condition of the last rule."""
    return True
