"""One at a time: a program has a directory to itself until it ends, however it ends, and no other ever gets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wald.errors import Locked, Refused
from wald.store.files.disk import Disk


@contextmanager
def alone_in(directory: Path, disk: Disk, program: str) -> Iterator[None]:
    """Hold ``directory/lock``, which says whose it is; the directory is made if it is missing.

    Raises:
        Locked: another process has it.
        Refused: another program's files are there.
    """
    disk.make_directory(directory)
    path = directory / "lock"
    descriptor = disk.open_lock(path)
    try:
        if not disk.lock(descriptor):
            raise Locked(
                f"{directory.parent}: another {program} writes there",
                hint="wait until it has ended, or choose another --out",
            )
        owner = path.read_text().strip()
        if not owner:
            disk.write(descriptor, [f"{program}\n".encode()], 0)
        elif owner != program:
            raise Refused(
                f"{directory.parent}: made by {owner}; {program} needs a place of its own", hint="another --out"
            )
        yield
    finally:
        disk.close(descriptor)
