"""The files that segments are made in: under a temporary name, allocated ahead where there is room, one in reserve."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from wald.store.files.directory import TEMPORARY
from wald.store.files.disk import Disk
from wald.store.files.inodes import Name
from wald.store.writing.room import Room


class Blank(NamedTuple):
    """A file without content: its temporary name, and the descriptor to write it with."""

    path: Path
    descriptor: int


class Blanks:
    """Makes them in ``directory``, and keeps one for the next segment.

    Args:
        room: what of the disk may be allocated ahead; None: as much as there is.
    """

    def __init__(self, directory: Path, disk: Disk, *, epoch: int, room: Room | None) -> None:
        self._directory = directory
        self._disk = disk
        self._epoch = epoch
        self._room = room
        self._spare: Blank | None = None
        self._mutex = threading.Lock()

    def prepare(self, length: int) -> bool:
        """Allocate ``length`` bytes for the spare one; False if there is no room. For the background thread."""
        with self._mutex:
            if self._spare is None and self._lets_allocate(length):
                with contextlib.suppress(OSError):  # the cut itself will meet and report the full disk
                    self._spare = self._make("spare", length)
                self._hold(os.fstat(self._spare.descriptor).st_blocks * 512 if self._spare else 0)
            return self._spare is not None

    def take(self, length: int) -> Blank:
        """The spare one if it is still there, else a new one of ``length`` bytes; the caller names or discards it.

        Raises:
            OSError: it cannot be made.
        """
        with self._mutex:
            spare, self._spare = self._spare, None
            self._hold(0)
        if spare is not None and not Name(*spare).holds():  # somebody has removed it
            self._disk.close(spare.descriptor)
            spare = None
        return spare or self._make("next", length)

    def name(self, blank: Blank, target: Path) -> None:
        """Give it its name for good, in place of what has that; the directory is not synced yet.

        Raises:
            OSError: it has not got it; or somebody has taken its temporary one.
        """
        if not Name(*blank).holds():
            raise OSError(errno.ESTALE, "somebody has removed or replaced the file", os.fspath(blank.path))
        self._disk.rename(blank.path, target)

    def discard(self, blank: Blank) -> None:
        """Close it, and remove it if that can be done."""
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
        # A name that nobody else makes: neither another thread, nor a life that was taken over and still runs.
        path = self._directory / f"{purpose}-{self._epoch}-{secrets.token_hex(8)}{TEMPORARY}"
        blank = Blank(path, self._disk.create(path))
        try:
            if self._lets_allocate(length):  # else it grows as it is written, and its cut can free what was read
                self._disk.allocate(blank.descriptor, length)
        except OSError:
            self.discard(blank)
            raise
        return blank
