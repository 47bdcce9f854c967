"""A small file that is written in place: a reader sees it at once, and the writer never waits.

The head and the transfers are such files. What is written survives the death of the process (the pages belong to the
kernel) but, unless it is synced, not that of the machine: the head is made again from the segments then, and the pipes
that the transfers are about are gone.

Others may shorten, remove or replace the file at any moment. Assigning to a map of it would be a SIGBUS then, so the
bytes go through the kernel, which makes the file longer again, or answers with an error.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from wald.store.files.disk import Disk
from wald.store.files.inodes import Name


class InPlaceFile:
    """``length`` bytes of the file at ``path``, created with zeros if missing.

    Attributes:
        descriptor: for reading it; another one after :meth:`restore`.

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, length: int, disk: Disk) -> None:
        self._path = path
        self._length = length
        self._disk = disk
        self.descriptor = -1
        self._open()

    def write(self, data: bytes, offset: int = 0) -> None:
        """
        Raises:
            OSError: the file was shortened, and there is no room to make it longer again.
        """
        self._disk.update(self.descriptor, data, offset)

    def sync(self) -> None:
        """Return when the bytes and the name are on disk."""
        self._disk.sync(self.descriptor)
        self._disk.sync_directory(self._path.parent)

    def restore(self) -> bool:
        """Make the file again if its name is that of another, or of none; return whether that was so.

        Raises:
            OSError: as for the class.
        """
        if self._name.holds():
            return False
        self.close()
        self._open()
        return True

    def close(self) -> None:
        """May be called twice."""
        if self.descriptor >= 0:
            self._disk.close(self.descriptor)
            self.descriptor = -1

    def _open(self) -> None:
        descriptor = self.descriptor = self._disk.open_or_create(self._path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", os.fspath(self._path))
            if status.st_size != self._length:
                self._disk.truncate(descriptor, self._length)
            self._disk.allocate(descriptor, self._length)  # later there may be no room
            self._name = Name(self._path, descriptor)
        except OSError:
            self.close()
            raise
