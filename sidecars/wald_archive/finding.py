"""One thing that was found out about an archive, and where."""

from __future__ import annotations

from dataclasses import dataclass

from wald.store.checking.finding import Level


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        place: the destination. bag: in it; "" for what is in none. file: in the bag, or else in the destination.
        offset: the byte from which on it is wrong; None where that says nothing.
    """

    level: Level
    place: str
    bag: str
    file: str
    message: str
    offset: int | None = None

    @property
    def name(self) -> str:
        """The whole path or address."""
        return "/".join(part for part in (self.place, self.bag, self.file) if part)
