"""Preallocated files for new segments, one of them spare, under temporary names."""

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
    """Empty file under a temporary name."""

    path: Path
    descriptor: int


class Preallocator:
    """Factory for new segment files in ``directory``; keeps one spare ready."""

    def __init__(self, directory: Path, disk: Disk, *, epoch: int, room: DiskBudget | None) -> None:
        self._directory = directory
        self._disk = disk
        self._epoch = epoch
        self._room = room
        self._place: FileIdentity | None = None
        self._spare: Blank | None = None
        self._mutex = threading.Lock()

    def require_directory(self) -> None:
        """Raise ESTALE if the directory was unmounted or replaced since the first file."""
        if self._place is not None and not self._place.is_current():
            raise OSError(errno.ESTALE, "the directory was unmounted or replaced", os.fspath(self._directory))

    def prepare(self, length: int) -> bool:
        """Create the spare file if it is missing (background thread); return False without room."""
        with self._mutex:
            if self._spare is None and self._lets_allocate(length):
                with contextlib.suppress(OSError):  # the cut will report the full disk
                    self._spare = self._make("spare", length)
                self._hold(os.fstat(self._spare.descriptor).st_blocks * 512 if self._spare else 0)
            return self._spare is not None

    def take(self, length: int) -> Blank:
        """Return the spare file or a new one; the caller names or discards it."""
        with self._mutex:
            spare, self._spare = self._spare, None
            self._hold(0)
        if spare is not None and not FileIdentity(*spare).is_current():
            self._disk.close(spare.descriptor)
            spare = None
        return spare or self._make("next", length)

    def name(self, blank: Blank, target: Path) -> None:
        """Rename the file to ``target``, without a directory sync."""
        if not FileIdentity(*blank).is_current():
            raise OSError(errno.ENOENT, "another program removed or replaced the file", os.fspath(blank.path))
        self._disk.rename(blank.path, target)

    def discard(self, blank: Blank) -> None:
        self._disk.close(blank.descriptor)
        with contextlib.suppress(OSError):  # the next start removes it
            self._disk.unlink(blank.path)

    def close(self) -> None:
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
        # The name is unique: another thread or a superseded daemon may create a file at the same time.
        path = self._directory / f"{purpose}-{self._epoch}-{secrets.token_hex(8)}{TEMPORARY}"
        blank = Blank(path, self._disk.create(path))
        try:
            if self._place is None:  # not earlier: on overlayfs, the first file replaces the directory (copy-up)
                self._place = _name_of(self._directory)
            if self._lets_allocate(length):  # otherwise the file grows as it is written
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
