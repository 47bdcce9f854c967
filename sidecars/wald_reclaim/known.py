"""What a planner keeps of each segment between two passes: little, because there may be many segments."""

from __future__ import annotations

from dataclasses import dataclass

from wald.format.names import Kind
from wald.retention.blockers import Pin


@dataclass(slots=True)
class Known:
    """One complete segment; ``kind`` and ``stored_bytes`` are those of its file."""

    kind: Kind
    stored_bytes: int
    opened: bool = False
    """Whether its index was read, or it is known that it cannot be."""
    records: int = 0
    """Once it is opened."""
    pin: Pin | None = None
    other: Pin | None = None
    """Of another route than ``pin``; None if that one alone holds the segment back."""
    problem: str = ""
    damage: str = ""
    """What is wrong with its index, if it is known from elsewhere what the segment holds."""
