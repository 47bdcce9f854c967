"""Damage met by a query: it ends the query, or it is skipped, counted and reported."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass, field

from wald.errors import Damaged

PARTIAL_OPTION = '.option("partial", "true")'
PARTIAL_HINT = (
    f"put the segments back; if this is a copy without them, {PARTIAL_OPTION} begins with the oldest record present"
)
_SHOWN = 10  # messages of one piece on stderr; the report has all
_log = logging.getLogger("wald.spark")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Data that may be missing.

    Attributes:
        damage: True to skip unreadable records (mode=PERMISSIVE).
        loss: True to skip records that RECLAIM has deleted (failOnDataLoss=false).
        report: a directory for a file of JSON lines for each piece with skipped records; "" for none.
        partial: True if records before the oldest segment may be missing (partial=true).
    """

    damage: bool = False
    loss: bool = False
    report: str = ""
    partial: bool = False


STRICT = Tolerance()


@dataclass(slots=True)
class DamageReport:
    """Damage met in one piece; ``name`` identifies the piece."""

    tolerance: Tolerance
    name: str
    messages: list[str] = field(default_factory=list)

    def add(self, error: Damaged) -> None:
        """Add damage to the report."""
        if not self.tolerance.damage:
            raise Damaged(error.message, hint=f'{error.hint}; .option("mode", "PERMISSIVE") skips unreadable records')
        self.pass_over(error.message)

    def pass_over(self, message: str) -> None:
        """Add tolerated damage or loss to the report."""
        self.messages.append(message)

    def close(self) -> None:
        """Report skipped records on stderr and in a file, which replaces that of an earlier attempt."""
        if not self.messages:
            return
        for message in self.messages[:_SHOWN]:
            _log.warning("skipped: %s", message)
        if len(self.messages) > _SHOWN:
            _log.warning("skipped: %d more like these in %s", len(self.messages) - _SHOWN, self.name)
        if self.tolerance.report:
            self._write(self.tolerance.report)

    def _write(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        lines = "".join(json.dumps({"reading": self.name, "message": message}) + "\n" for message in self.messages)
        with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", suffix=".tmp", delete=False) as file:
            file.write(lines)
        os.replace(file.name, os.path.join(directory, f"{self.name}.jsonl"))
