"""One run of the command: records to its stdin, its exit code back, even if drain is killed in between.

The next drain waits for a command that is still running, and learns whether it succeeded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.ledger_lines import decode_line
from wald.format.names import COMMAND_SUFFIX
from wald_drain.command_file import LEFT_RUNNING, UNKEPT, CommandFile, padded
from wald_drain.keeper import not_started
from wald_drain.retries import UNKNOWN
from wald_drain.runner import Runner


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended.

    Attributes:
        cursor: the identity of the cursor file when the run began: its inode and when it was changed. Setting a cursor,
            even to the value it has, makes a new file; the result of a run before that is ignored.
        exit_code: as in :mod:`subprocess`: a negative number is the signal that ended the command.
        error: the error number with which the command could not be started; 0: it was started.
    """

    cursor: tuple[int, int]
    first: int
    last: int
    exit_code: int
    error: int = 0


def encode_ended(ended: Ended) -> bytes:
    """The line, padded to its full length."""
    return padded(asdict(ended))


def decode_ended(line: bytes) -> Ended | None:
    """The run that a line describes; None if it describes none."""
    fields = decode_line(line)
    if fields is None:
        return None
    try:
        inode, changed_ns = fields.pop("cursor")
        return Ended((inode, changed_ns), **fields)
    except (KeyError, TypeError, ValueError):
        return None


def cursor_identity(path: Path) -> tuple[int, int]:
    """What tells a cursor file from the one that replaces it; (0, 0) if there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return (0, 0)
    return status.st_ino, status.st_mtime_ns


class Attempts:
    """Runs of the command for ``route`` and ``group``, one at a time, whichever process started them.

    Raises:
        NotFound: there is no such route.
        NotPermitted: this user may not.
    """

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        self._file = CommandFile(root, route, group, COMMAND_SUFFIX, disk)
        self._cursor = root.cursor(route, group)
        self._left = LEFT_RUNNING

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def wait(self, stop: threading.Event, report: Callable[[str], None]) -> bool:
        """Wait until no command runs, of an earlier drain or of a killed keeper; False if ``stop`` was set before."""
        return self._file.wait(stop, report, self._left)

    def processed(self) -> Ended | None:
        """The last run, if it succeeded and the cursor has not moved since."""
        ended = decode_ended(self._file.line())
        if ended is None or ended.exit_code or ended.error or ended.cursor != cursor_identity(self._cursor):
            return None
        return ended

    def run(self, runner: Runner, stdin: bytes, variables: Mapping[str, str], *, first: int, last: int) -> int:
        """Run the command of ``runner`` to its end; return its exit code, or the signal that ended it, negative.

        If the keeper is killed, it is UNKNOWN, and the command may be running: :meth:`wait` waits for it.

        Args:
            stdin: all that it gets.
            variables: added to the environment of the command.

        Raises:
            InvalidInput: the command cannot be started.
            WaldError: the runner was killed.
        """
        cursor = cursor_identity(self._cursor)
        status = runner.run({"cursor": cursor, "first": first, "last": last}, self._file.descriptor, stdin, variables)
        ended = decode_ended(self._file.line())
        if status or ended is None:
            self._left = UNKEPT
            self._file.renew()
            return UNKNOWN
        if ended.error:
            raise not_started(runner.command, ended.error)
        return ended.exit_code
