"""A file of a consumer group, beside its cursor, whose lock one process at a time has, with all that it starts."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from wald.store.files.consumers import open_own
from wald.store.files.directory import Root
from wald.store.files.disk import Disk


class GroupFile:
    """``<group><suffix>`` of ``route``, open for reading and writing until it is closed.

    Attributes:
        path, descriptor: of the file.

    Raises:
        NotFound: there is no such route.
        NotPermitted: this user may not.
        OSError: it cannot be made, or is no file.
    """

    def __init__(self, root: Root, route: str, group: str, suffix: str, disk: Disk) -> None:
        root.require_route(route)
        self._place = root, disk, route, group, suffix
        self.disk = disk
        self.path, self.descriptor = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it; the lock ends when all processes that share it have."""
        self.disk.close(self.descriptor)

    def lock(self) -> bool:
        """Take the lock; False if it is held by a process that has another descriptor."""
        return self.disk.lock(self.descriptor)

    def renew(self) -> None:
        """Open the file again: processes that share the descriptor so far do not share the lock of the new one."""
        path, descriptor = self._opened()
        self.close()
        self.path, self.descriptor = path, descriptor

    def _opened(self) -> tuple[Path, int]:
        return open_own(*self._place)
