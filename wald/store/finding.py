"""One thing that was found out about a file of a log, and how bad it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


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
