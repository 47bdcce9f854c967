"""Which of the settings of room the disk can hold, told where that is not all of them."""

from __future__ import annotations

from pathlib import Path

from structlog.typing import FilteringBoundLogger

from wald.config import Config
from wald.store.files.disk import total_bytes
from wald.store.writing.room import Sizes, sizes_for


def sizes_in_force(config: Config, segments: Path, journal: FilteringBoundLogger) -> Sizes:
    """The sizes for the disk that the directory ``segments`` is on."""
    total = total_bytes(segments)
    wanted = {"segment_max_bytes": config.segment_max_bytes, "free_space_min": config.free_space_min}
    sizes = sizes_for(total, segment_max_bytes=config.segment_max_bytes, free_space_min=config.free_space_min)
    in_force = {"segment_max_bytes": sizes.segment_bytes, "free_space_min": sizes.reserve_bytes}
    if in_force != wanted:
        journal.warning(
            "the disk is too small for its settings: smaller ones are in force",
            disk=total,
            wanted=wanted,
            in_force=in_force,
            hint=" ".join(f"WALD_{name.upper()}={value}" for name, value in in_force.items()),
        )
    return sizes
