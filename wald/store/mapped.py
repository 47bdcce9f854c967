"""A small file kept in memory: written by assignment, seen at once by whoever reads it, never waited for.

The head and the takes live in such files. What is assigned survives the death of the process (the pages belong to the
kernel) but not that of the machine: both files are rebuilt from the segments then.
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
        descriptor = disk.open_append(path)
        try:
            if os.fstat(descriptor).st_size != length:
                disk.truncate(descriptor, length)
            disk.allocate(descriptor, length)  # an assignment that finds no room would kill the process
            self._map = mmap.mmap(descriptor, length)
        finally:
            disk.close(descriptor)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()
