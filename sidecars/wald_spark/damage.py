"""Damage that a query meets: it ends the query, or it is passed over, counted and reported."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import dataclass, field

from wald.errors import Damaged

_SHOWN = 10  # messages of one piece on stderr; the report has all
_log = logging.getLogger("wald.spark")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may be missing.

    Attributes:
        damage: whether what cannot be read is passed over (mode=PERMISSIVE).
        loss: whether what RECLAIM has deleted is passed over (failOnDataLoss=false).
        report: a directory that gets a file of JSON lines for each piece in which something was passed over; "": none.
    """

    damage: bool = False
    loss: bool = False
    report: str = ""


STRICT = Tolerance()


@dataclass(slots=True)
class DamageReport:
    """The damage met in one piece; ``name`` identifies the piece."""

    tolerance: Tolerance
    name: str
    messages: list[str] = field(default_factory=list)

    def add(self, error: Damaged) -> None:
        """
        Raises:
            Damaged: ``error``, unless damage is tolerated.
        """
        if not self.tolerance.damage:
            raise Damaged(
                error.message, hint=f'{error.hint}; .option("mode", "PERMISSIVE") passes over what cannot be read'
            )
        self.messages.append(error.message)

    def close(self) -> None:
        """Report what was passed over on stderr and in a file; if a piece is read again, its file is replaced."""
        if not self.messages:
            return
        for message in self.messages[:_SHOWN]:
            _log.warning("passed over: %s", message)
        if len(self.messages) > _SHOWN:
            _log.warning("passed over: %d more like these in %s", len(self.messages) - _SHOWN, self.name)
        if self.tolerance.report:
            self._write(self.tolerance.report)

    def _write(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        lines = "".join(json.dumps({"reading": self.name, "message": message}) + "\n" for message in self.messages)
        with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", suffix=".tmp", delete=False) as file:
            file.write(lines)
        os.replace(file.name, os.path.join(directory, f"{self.name}.jsonl"))
