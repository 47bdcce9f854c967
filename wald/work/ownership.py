"""The right to work for a group: one process at a time has it, by the lock of its file ``routes/R/G.drain``."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Self

from wald.errors import Locked
from wald.format.names import HANDOVER_SUFFIX
from wald.store.files.consumers import open_own
from wald.store.files.directory import Root
from wald.store.files.disk import Disk

_ASKED_SECONDS = 0.1  # another process may hold the lock for an instant, to see whether it is held


class Ownership:
    """The right to work on ``route`` for ``group``, held until it is closed.

    Attributes:
        path, descriptor: the file, open for reading and writing. What is in it is for who works.

    Raises:
        NotFound: there is no such route.
        Locked: another process works for this group.
        NotPermitted: this user may not.
    """

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        root.require_route(route)
        self._disk = disk
        self.path, self.descriptor = open_own(root, disk, route, group, HANDOVER_SUFFIX)
        try:
            until = time.monotonic() + _ASKED_SECONDS
            while not disk.lock(self.descriptor):
                if time.monotonic() < until:
                    time.sleep(_ASKED_SECONDS / 10)
                    continue
                raise Locked(
                    f"{self.path}: another process works on route {route} for group {group}",
                    hint=f"wait until it has ended, or find it: fuser {self.path}",
                )
            if not os.fstat(self.descriptor).st_nlink:
                raise Locked(f"{self.path}: the group was removed at this moment", hint="type the same command again")
            disk.sync_directory(self.path.parent)
        except (Locked, OSError):
            disk.close(self.descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process work for the group."""
        self._disk.close(self.descriptor)
