"""The file of a command: its lock, which the command holds too, and room for a line that says how it ended.

    drain ──fork──▶ keeper ──▶ command          <group>.command, beside the cursor; <group>.command-3 of worker 3

Only with the lock is a command started. If drain is killed, the next one waits until the command has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from wald.files.cursor_directory import GroupFile
from wald.format.ledger_lines import encode_line
from wald.work.ownership import describe_commands

LINE_BYTES = 512  # more than is ever written; allocated once, so that a full disk takes it too
POLL_SECONDS = 0.2
_LOOK_SECONDS = 5.0  # for which process it waits, which may change
LEFT_RUNNING = "that an earlier wald-drain has left running"
UNKEPT = "whose keeper was killed"


class CommandFile(GroupFile):
    """``<group><suffix>`` of ``route``, with room for the line; with its lock a command may be started.

    Raises:
        NotFound: there is no such route.
        NotPermitted: this user may not.
        OSError: the disk is full, or fails.
    """

    def wait(self, stop: threading.Event, report: Callable[[str], None], which: str = LEFT_RUNNING) -> bool:
        """Wait until no command has the lock; False if ``stop`` was set before that.

        Args:
            which: command that is, for the report.
        """
        reported, look = "", 0.0
        while not self.lock():
            if time.monotonic() >= look:
                text = describe_commands(self.path)
                if text and text != reported:
                    report(f"waits for the command {which}: {text}")
                    reported, look = text, time.monotonic() + _LOOK_SECONDS
            if stop.wait(POLL_SECONDS):
                return False
        return True

    def line(self) -> bytes:
        """The line about the last command; zeros if there was none."""
        return os.pread(self.descriptor, LINE_BYTES, 0)

    def _open(self) -> tuple[Path, int]:
        path, descriptor = super()._open()
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
