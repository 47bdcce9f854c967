"""A small file kept in memory: written by assignment, seen at once by whoever reads it, never waited for.

The head and the takes live in such files. What is assigned survives the death of the process (the pages belong to the
kernel) but not that of the machine: the head is told anew from the segments then, and the pipes that the takes are
about are gone.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from wald.store.disk import Disk


class MappedFile:
    """``length`` bytes of the file at ``path``, created with zeros if missing; writable through :attr:`view`.

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, length: int, disk: Disk) -> None:
        self._path = os.fspath(path)
        self._length = length
        descriptor = disk.open_append(path)
        try:
            if os.fstat(descriptor).st_size != length:
                disk.truncate(descriptor, length)
            disk.allocate(descriptor, length)  # an assignment that finds no room would kill the process
            self._map = mmap.mmap(descriptor, length)
            self._file = os.fstat(descriptor).st_ino
        finally:
            disk.close(descriptor)
        self.view = memoryview(self._map)

    def stands(self) -> bool:
        """Whether the name still stands for this file, whole; False once somebody removed, replaced or shortened it."""
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return (status.st_ino, status.st_size) == (self._file, self._length)

    def close(self) -> None:
        self.view.release()
        self._map.close()
