"""The file of a command: its lock, which the command holds too, and room for a line that says how it ended.

    drain ──fork──▶ keeper ──▶ command          <group>.command, beside the cursor; <group>.command-3 of worker 3

Only with the lock is a command started. If drain is killed, the next one waits until the command has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from wald.format.checked_line import encode_line
from wald.store.files.consumers import open_own
from wald.store.files.directory import Root
from wald.store.files.disk import Disk

LINE_BYTES = 512  # more than is ever written; allocated once, so that a full disk takes it too
POLL_SECONDS = 0.2
LEFT_RUNNING = "that an earlier wald-drain has left running"


class CommandFile:
    """``<group><suffix>`` of ``route``, open until it is closed.

    Attributes:
        path, descriptor: of the file.

    Raises:
        NotFound: there is no such route.
        NotPermitted: this user may not.
        OSError: the disk is full, or fails.
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
        """Take the lock; False if a command is running that was started with another descriptor."""
        return self.disk.lock(self.descriptor)

    def wait(self, stop: threading.Event, report: Callable[[str], None], which: str = LEFT_RUNNING) -> bool:
        """Wait until no command has the lock; False if ``stop`` was set before that.

        Args:
            which: command that is, for the report.
        """
        reported = False
        while not self.lock():
            if not reported:
                report(f"waits for the command {which}: fuser {self.path}")
                reported = True
            if stop.wait(POLL_SECONDS):
                return False
        return True

    def line(self) -> bytes:
        """The line about the last command; zeros if there was none."""
        return os.pread(self.descriptor, LINE_BYTES, 0)

    def renew(self) -> None:
        """Open the file again: commands started before do not share the lock of the new descriptor."""
        self.disk.close(self.descriptor)
        self.path, self.descriptor = self._opened()

    def _opened(self) -> tuple[Path, int]:
        path, descriptor = open_own(*self._place)
        try:
            if not os.fstat(descriptor).st_size:
                self.disk.allocate(descriptor, LINE_BYTES)
        except OSError:
            self.disk.close(descriptor)
            raise
        return path, descriptor


def padded(fields: dict[str, object]) -> bytes:
    """A line of :data:`LINE_BYTES` bytes."""
    return encode_line(fields).rjust(LINE_BYTES)
