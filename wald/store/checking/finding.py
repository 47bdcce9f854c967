"""One thing that was found out about a file of a log, and how bad it is."""

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
    """Worth knowing, and what crashes and interrupted work leave behind."""
    ERROR = "error"
    """Bytes are not what was written, or two things that must agree do not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found in one file, at ``offset`` bytes."""

    level: Level
    path: Path
    offset: int
    message: str

    @classmethod
    def of(cls, level: Level, path: Path, told: str) -> Self:
        """What the message of an error says about ``path``, which it may begin with, and with an offset behind it."""
        found = re.fullmatch(r"(?:offset (\d+): )?(.*)", told.removeprefix(f"{path}: "), re.DOTALL)
        assert found is not None, "it matches whatever there is"
        return cls(level, path, int(found[1] or 0), found[2])
