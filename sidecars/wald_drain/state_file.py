"""State file of a worker's command, ``<group>.command-3``, next to the cursor.

    {"run": 17…, "exit_code": 0, "error": 0, "crc": "…"}        512 bytes, by the keeper, when the command has ended
    {"run": 17…, "try": 1, "records": [11, 14, 20, 20], …}      by drain, before the command starts

The keeper first writes ``"started": true`` instead of the exit code. The records of a lease need not be consecutive.
They are processed if both lines are of one run and the exit code is 0. In a strict group the second line has the
identity of the cursor file, which must not have changed since.

The command and its keeper hold the lock of the file, and only its holder starts a command. If drain is killed, the next
one waits until the command has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from wald.files.cursor_directory import GroupFile
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.names import COMMAND_SUFFIX
from wald.work.ownership import describe_commands
from wald.work.window import runs_of

LINE_BYTES = 512  # more than is ever needed; allocated once, so that it can be written on a full disk
POLL_SECONDS = 0.2
_NAME_SECONDS = 5.0  # between two checks of which process it is
LEFT_RUNNING = "that an earlier wald-drain has left running"
UNKEPT = "whose keeper was killed"
Identity = tuple[int, int]
"""Inode and modification time of a cursor file; (0, 0) without one. Setting a cursor makes a new file."""


class LastRun(NamedTuple):
    """Last unsettled run."""

    sequences: list[int]
    number: int  # of the try
    is_started: bool
    outcome: tuple[int, int] | None  # exit code and error; None if no line says that it has ended
    cursor: Identity | None = None  # of a strict group, when the run began

    @property
    def is_processed(self) -> bool:
        return self.outcome == (0, 0)


def padded(fields: dict[str, object]) -> bytes:
    """Encode fields as a line of :data:`LINE_BYTES` bytes."""
    return encode_line(fields).rjust(LINE_BYTES)


def encode_given(run: int, sequences: Sequence[int], number: int, cursor: Identity | None = None) -> bytes:
    """Encode the line about the records that a command gets, in order."""
    pairs = [each for part in runs_of(list(sequences)) for each in part]
    return encode_line({"run": run, "try": number, "records": pairs} | ({"cursor": list(cursor)} if cursor else {}))


def decode_outcome(line: bytes, run: int) -> tuple[bool, tuple[int, int] | None]:
    """Return True if ``run`` was started, and its exit code and error if it has ended."""
    match decode_line(line):
        case {"run": int(number), "exit_code": int(exit_code), "error": int(error)} if number == run:
            return not error, (exit_code, error)
        case {"run": int(number), "started": True} if number == run:
            return True, None
    return False, None


def last_run_in(content: bytes) -> LastRun | None:
    outcome, given = content[:LINE_BYTES], content[LINE_BYTES:].partition(b"\n")[0]
    match decode_line(given):
        case {"run": int(run), "try": int(number), "records": [*numbers], **rest}:
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            sequences = [sequence for first, last in pairs for sequence in range(first, last + 1)]
            match rest:
                case {"cursor": [int(inode), int(changed_ns)]}:
                    return LastRun(sequences, number, *decode_outcome(outcome, run), (inode, changed_ns))
            return LastRun(sequences, number, *decode_outcome(outcome, run))
    return None


def cursor_identity(path: Path) -> Identity:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return (0, 0)
    return status.st_ino, status.st_mtime_ns


class StateFile(GroupFile):
    """State file of ``worker``, or with None of an older drain without workers."""

    def __init__(self, root: Root, route: str, group: str, worker: int | None, disk: Disk) -> None:
        self.worker = worker
        super().__init__(root, route, group, COMMAND_SUFFIX + ("" if worker is None else f"-{worker}"), disk)

    def wait(self, stop: threading.Event, report: Callable[[str], None], which: str = LEFT_RUNNING) -> bool:
        """Wait until no command has the lock; return False if ``stop`` is set first."""
        reported, due = "", 0.0
        while not self.lock():
            if time.monotonic() >= due:
                text = describe_commands(self.path)
                if text and text != reported:
                    report(f"waits for the command {which}: {text}")
                    reported, due = text, time.monotonic() + _NAME_SECONDS
            if stop.wait(POLL_SECONDS):
                return False
        return True

    def begin(self, run: int, sequences: Sequence[int], number: int, cursor: Identity | None = None) -> None:
        """Record which records the command is about to get.

        Not synced: no command survives a crash.
        """
        self.disk.write(self.descriptor, [encode_given(run, sequences, number, cursor)], LINE_BYTES)

    def outcome(self, run: int) -> tuple[int, int] | None:
        return decode_outcome(os.pread(self.descriptor, LINE_BYTES, 0), run)[1]

    def settle(self) -> None:
        """Clear the last run: its result is on disk elsewhere, or will never be known."""
        self.disk.truncate(self.descriptor, LINE_BYTES)

    def last_run(self) -> LastRun | None:
        """Return the last unsettled run. No command may be running."""
        return last_run_in(self.path.read_bytes())

    def remove(self) -> None:
        """Remove the file, unless a command has its lock by now."""
        if self.lock():
            self.disk.unlink(self.path)

    def _open(self) -> tuple[Path, int]:
        path, descriptor = super()._open()
        try:
            if not os.fstat(descriptor).st_size:
                self.disk.allocate(descriptor, LINE_BYTES)
        except OSError:
            self.disk.close(descriptor)
            raise
        return path, descriptor
