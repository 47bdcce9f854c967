"""Temporary files that killed programs have left behind.

:meth:`Disk.replace` holds a lock on its temporary file until the file has its final name. So a file that can be locked
belongs to a dead process, of any user or container, or to one that has not locked its new file yet. Therefore a file is
removed while its lock is held, and :meth:`Disk.replace` then creates another; and a file that was written within the
last minute stays for the next start. On a file system without locks, nothing is removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wald.errors import Damaged
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.inodes import Name
from wald.store.files.regular import open_regular

_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.tmp")
_YOUNG_SECONDS = 60  # a program locks its new file a moment after it has created it


def leftovers(root: Root, disk: Disk) -> list[Path]:
    """Return the abandoned temporary files in the root, its ledgers and its routes."""
    directories = (root.path, root.ledger, *root.route_directories())
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
        with suppress(OSError, Damaged):
            remove_abandoned(path, disk)


def remove_abandoned(path: Path, disk: Disk) -> None:
    """Remove a temporary file unless a process is writing it.

    Raises:
        OSError: this user may not remove it, or it is gone.
        Damaged: it is not a regular file.
    """
    with _claimed(path, disk) as claimed:
        if claimed:
            disk.unlink(path)


def _is_abandoned(path: Path, disk: Disk) -> bool:
    with suppress(OSError, Damaged), _claimed(path, disk) as claimed:
        return claimed
    return False


@contextmanager
def _claimed(path: Path, disk: Disk) -> Iterator[bool]:
    """Hold the lock of a temporary file; False if a process is writing it, or has done so within the last minute."""
    descriptor = open_regular(path)
    try:
        yield _is_old(descriptor) and disk.lock(descriptor) and Name(path, descriptor).holds()
    finally:
        os.close(descriptor)


def _is_old(descriptor: int) -> bool:
    return time.time() - os.fstat(descriptor).st_mtime >= _YOUNG_SECONDS  # one from the future is young
