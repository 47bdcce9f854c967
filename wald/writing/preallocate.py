"""Preallocated files for new segments.

The files that become segments: each has a temporary name, is allocated ahead if there is room, and one is spare.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from wald.files.disk import Disk
from wald.files.layout import TEMPORARY
from wald.files.safe_open import FileIdentity
from wald.writing.disk_budget import DiskBudget


class Blank(NamedTuple):
    """An empty file: its temporary name, and a descriptor."""

    path: Path
    descriptor: int


class Preallocator:
    """Makes them in ``directory`` and keeps a spare one for the next segment.

    Args:
        room: limits what may be allocated ahead; None: no limit.
    """

    def __init__(self, directory: Path, disk: Disk, *, epoch: int, room: DiskBudget | None) -> None:
        self._directory = directory
        self._disk = disk
        self._epoch = epoch
        self._room = room
        self._place: FileIdentity | None = None
        self._spare: Blank | None = None
        self._mutex = threading.Lock()

    def require_directory(self) -> None:
        """Check that the path still leads to the directory in which the first file was made.

        Raises:
            OSError: ESTALE: the directory was unmounted or replaced, so new files would not be with the others.
        """
        if self._place is not None and not self._place.is_current():
            raise OSError(errno.ESTALE, "the directory was unmounted or replaced", os.fspath(self._directory))

    def prepare(self, length: int) -> bool:
        """Make the spare one, of ``length`` bytes; False if there is no room. Called by the background thread."""
        with self._mutex:
            if self._spare is None and self._lets_allocate(length):
                with contextlib.suppress(OSError):  # the cut will report that the disk is full
                    self._spare = self._make("spare", length)
                self._hold(os.fstat(self._spare.descriptor).st_blocks * 512 if self._spare else 0)
            return self._spare is not None

    def take(self, length: int) -> Blank:
        """The spare one, or a new one of ``length`` bytes. The caller names or discards it.

        Raises:
            OSError: no file can be made.
        """
        with self._mutex:
            spare, self._spare = self._spare, None
            self._hold(0)
        if spare is not None and not FileIdentity(*spare).is_current():  # another program removed or replaced it
            self._disk.close(spare.descriptor)
            spare = None
        return spare or self._make("next", length)

    def name(self, blank: Blank, target: Path) -> None:
        """Rename it to ``target``, whose file it replaces. The directory is not synced.

        Raises:
            OSError: the rename failed, or another program removed or replaced the file.
        """
        if not FileIdentity(*blank).is_current():
            raise OSError(errno.ENOENT, "another program removed or replaced the file", os.fspath(blank.path))
        self._disk.rename(blank.path, target)

    def discard(self, blank: Blank) -> None:
        """Close it and try to remove it."""
        self._disk.close(blank.descriptor)
        with contextlib.suppress(OSError):  # the next start removes it
            self._disk.unlink(blank.path)

    def close(self) -> None:
        """Discard the spare one."""
        with self._mutex:
            if self._spare is not None:
                self.discard(self._spare)
                self._spare = None
                self._hold(0)

    def _lets_allocate(self, length: int) -> bool:
        return self._room is None or self._room.lets_allocate(length)

    def _hold(self, spare_bytes: int) -> None:
        if self._room is not None:
            self._room.spare_bytes = spare_bytes

    def _make(self, purpose: str, length: int) -> Blank:
        self.require_directory()
        # The name is unique: another thread may make one, and a daemon that was taken over may still run.
        path = self._directory / f"{purpose}-{self._epoch}-{secrets.token_hex(8)}{TEMPORARY}"
        blank = Blank(path, self._disk.create(path))
        try:
            if self._place is None:  # only now: the first file makes an overlay copy the directory up
                self._place = _name_of(self._directory)
            if self._lets_allocate(length):  # otherwise it grows as it is written
                self._disk.allocate(blank.descriptor, length)
        except OSError:
            self.discard(blank)
            raise
        return blank


def _name_of(directory: Path) -> FileIdentity:
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return FileIdentity(directory, descriptor)
    finally:
        os.close(descriptor)
