"""A finding: what was found in a file of a log, and how bad it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    INFO = "info"
    """Not damage: what crashes and interrupted work leave behind, for example."""
    ERROR = "error"
    """Bytes are not those that were written, or two things that must agree do not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found in one file, at ``offset`` bytes."""

    level: Level
    path: Path
    offset: int
    message: str

    @classmethod
    def of(cls, level: Level, path: Path, message: str) -> Self:
        """A finding from the message of an error, which may begin with ``path`` and an offset."""
        found = re.fullmatch(r"(?:offset (\d+): )?(.*)", message.removeprefix(f"{path}: "), re.DOTALL)
        assert found is not None, "it matches whatever there is"
        return cls(level, path, int(found[1] or 0), found[2])
