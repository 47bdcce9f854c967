"""What becomes of damage: it ends the query, or is passed over, counted and told."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass, field

from wald.errors import Damaged

_SHOWN = 10  # of one reading, on stderr; the report has all
_log = logging.getLogger("wald.spark")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much may be missing.

    Attributes:
        damage: whether what cannot be read is passed over (mode=PERMISSIVE).
        loss: whether what RECLAIM has removed is (failOnDataLoss=false).
        report: a directory that gets a file of JSON lines for every reading that passed over something; "": none.
    """

    damage: bool = False
    loss: bool = False
    report: str = ""


STRICT = Tolerance()


@dataclass(slots=True)
class DamageReport:
    """The damage met in one reading, which ``name`` tells from all others.

    Raises, when called:
        Damaged: what it was called with, unless damage is tolerated.
    """

    tolerance: Tolerance
    name: str
    messages: list[str] = field(default_factory=list)

    def __call__(self, error: Damaged) -> None:
        if not self.tolerance.damage:
            raise Damaged(
                error.message, hint=f'{error.hint}; .option("mode", "PERMISSIVE") passes over what cannot be read'
            )
        self.messages.append(error.message)

    def close(self) -> None:
        """Tell what was passed over: on stderr, and in the report. A reading that is repeated replaces its file."""
        if not self.messages:
            return
        for message in self.messages[:_SHOWN]:
            _log.warning("passed over: %s", message)
        if len(self.messages) > _SHOWN:
            _log.warning("passed over: %d more like these in %s", len(self.messages) - _SHOWN, self.name)
        if self.tolerance.report:
            os.makedirs(self.tolerance.report, exist_ok=True)
            lines = "".join(json.dumps({"reading": self.name, "message": message}) + "\n" for message in self.messages)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.tolerance.report, prefix=".", suffix=".tmp", delete=False
            ) as file:
                file.write(lines)
            os.replace(file.name, os.path.join(self.tolerance.report, f"{self.name}.jsonl"))
