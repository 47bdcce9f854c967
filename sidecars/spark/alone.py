"""One at a time: a program has a directory to itself until it ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wald.errors import Locked
from wald.store.disk import Disk


@contextmanager
def alone_in(directory: Path, disk: Disk, program: str) -> Iterator[None]:
    """Hold ``directory/lock``; the directory is made if it is missing.

    Raises:
        Locked: another process has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = disk.open_append(directory / "lock")
    try:
        if not disk.lock(descriptor):
            raise Locked(
                f"{directory.parent}: another {program} writes there",
                hint="wait until it has ended, or choose another --out",
            )
        yield
    finally:
        disk.close(descriptor)
