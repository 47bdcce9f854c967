"""What `wald doctor` examines, and each thing it can find, as the tables of its rules have them."""

from __future__ import annotations

import re

from documents.tables import table
from wald.cli.doctor.checks import Check, Outcome
from wald.cli.doctor.examination import CHECKS

_PUT_IN = re.compile(r"\{f\.\w+\}")


def checks() -> str:
    """Every check, what it looks at, and the promises that rest on it."""
    rows = [[f"`{check.name}`", check.about, ", ".join(map(str, check.promises)) or "–"] for check, _ in CHECKS]
    return table(["check", "what is looked at", "promises"], rows)


def findings() -> str:
    """What is wrong or not known, and what to type; what differs from host to host is `…`."""
    return table(["check", "outcome", "message", "hint"], [row for check, _ in CHECKS for row in rows_of(check)])


def rows_of(check: Check[object]) -> list[list[str]]:
    """A row for each rule but those for what is right."""
    return [
        [f"`{check.name}`", rule.outcome, f"`{shown(rule.message)}`", f"`{shown(rule.advice)}`" if rule.advice else ""]
        for rule in check.rules
        if rule.outcome not in (Outcome.OK, Outcome.SKIPPED)
    ]


def shown(text: str) -> str:
    """A message of a rule as a reader can find it."""
    return (
        _PUT_IN.sub("…", text).replace("{root}", "ROOT").replace("{at}", "ROOT").replace("{wald}", "wald --root ROOT")
    )
