"""Temporary files that killed programs have left behind.

:meth:`Disk.replace` holds a lock on its temporary file until the file has its final name. So a file that can be locked
belongs to a dead process, of any user or container. On a file system without locks, nothing is removed.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from wald.errors import Damaged
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.regular import open_regular

_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.tmp")


def leftovers(root: Root, disk: Disk) -> list[Path]:
    """Return the abandoned temporary files in the root, its ledgers and its routes."""
    directories = (root.path, root.ledger, *root.cursor_directories())
    return [path for directory in directories for path in abandoned(directory, disk)]


def abandoned(directory: Path, disk: Disk, *, prefix: str = "") -> list[Path]:
    """Return the temporary files in a directory that no process is writing; an unreadable directory has none."""
    try:
        names = [entry.name for entry in os.scandir(directory)]
    except OSError:
        return []
    paths = (directory / name for name in sorted(names) if name.startswith(prefix) and _TEMPORARY.fullmatch(name))
    return [path for path in paths if _is_abandoned(path, disk)]


def remove(paths: list[Path], disk: Disk) -> None:
    """Remove leftovers, as far as this user may."""
    for path in paths:
        with suppress(OSError):
            disk.unlink(path)


def _is_abandoned(path: Path, disk: Disk) -> bool:
    with suppress(OSError, Damaged):
        descriptor = open_regular(path)
        try:
            return disk.lock(descriptor)
        finally:
            os.close(descriptor)
    return False
