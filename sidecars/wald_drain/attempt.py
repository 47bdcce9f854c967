"""One run of the command: records to its stdin, its exit code back, even if drain is killed in between.

    drain ──fork──▶ keeper ──▶ command          <group>.command, beside the cursor

The keeper is a process that waits for the command and writes into the file how it ended; both hold the file's lock. So
if drain is killed, the next one waits for the command that is still running, and learns whether it succeeded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from wald.errors import InvalidInput
from wald.format.checked_line import decode_line, encode_line
from wald.format.names import COMMAND_SUFFIX
from wald.loop import SIGNALS
from wald.store.files.consumers import open_own
from wald.store.files.directory import Root
from wald.store.files.disk import Disk

_NOT_A_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
_LINE_BYTES = 512  # more than is ever written; allocated once, so that a full disk takes it too
_POLL_SECONDS = 0.2
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LOCK, _STDIN = 3, 4  # descriptors of the keeper


def check_command(command: Sequence[str]) -> None:
    """
    Raises:
        InvalidInput: there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise _not_a_program(command, os.strerror(errno.ENOENT))


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
    """The line, padded to :data:`_LINE_BYTES`."""
    return encode_line(asdict(ended)).rjust(_LINE_BYTES)


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
        root.require_route(route)
        self._place = root, disk, route, group, COMMAND_SUFFIX
        self._cursor = root.cursor(route, group)
        self._disk = disk
        self.path, self._descriptor = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disk.close(self._descriptor)

    def wait(self, stop: threading.Event, report: Callable[[str], None]) -> bool:
        """Wait until no command of an earlier drain is running; False if ``stop`` was set before that."""
        reported = False
        while not self._disk.lock(self._descriptor):
            if not reported:
                report(f"waits for the command that an earlier wald-drain has left running: fuser {self.path}")
                reported = True
            if stop.wait(_POLL_SECONDS):
                return False
        return True

    def processed(self) -> Ended | None:
        """The last run, if it succeeded and the cursor has not moved since."""
        ended = self._last()
        if ended is None or ended.exit_code or ended.error or ended.cursor != cursor_identity(self._cursor):
            return None
        return ended

    def run(self, command: Sequence[str], stdin: bytes, variables: Mapping[str, str], *, first: int, last: int) -> int:
        """Run ``command`` to its end; return its exit code, or the signal that ended it as a negative number.

        Its stdin is a file in memory that no process can change; it holds all of ``stdin``, and the command need not
        read it to the end. The command has a session of its own, so that Ctrl-C, which the terminal sends to every
        process in its foreground, ends drain after this run and not during it.

        Args:
            variables: added to the environment of the command.

        Raises:
            InvalidInput: the command cannot be started.
        """
        cursor = cursor_identity(self._cursor)
        batch = _sealed(stdin)
        try:
            keeper = os.fork()
            if keeper == 0:
                try:
                    self._keep(command, batch, variables, Ended(cursor, first, last, 0))
                finally:
                    os._exit(1)
        finally:
            os.close(batch)
        _, status = os.waitpid(keeper, 0)
        ended = self._last()
        if status or ended is None:  # the keeper was killed, and the command may still be running
            self._renew()
            return os.waitstatus_to_exitcode(status) or 1
        if ended.error in _NOT_A_PROGRAM:
            raise _not_a_program(command, os.strerror(ended.error))
        if ended.error:
            raise OSError(ended.error, os.strerror(ended.error), command[0])
        return ended.exit_code

    def _keep(self, command: Sequence[str], batch: int, variables: Mapping[str, str], ended: Ended) -> None:
        """The work of the keeper, which keeps nothing of drain but the lock and the batch."""
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # caught, not ignored: the command would inherit that
        high = max(self._descriptor, batch, _STDIN) + 1
        lock, stdin = fcntl.fcntl(self._descriptor, fcntl.F_DUPFD, high), fcntl.fcntl(batch, fcntl.F_DUPFD, high)
        os.dup2(lock, _LOCK)
        os.dup2(stdin, _STDIN)
        os.closerange(_STDIN + 1, os.sysconf("SC_OPEN_MAX"))
        try:
            done = subprocess.run(
                command,
                stdin=_STDIN,
                env=os.environ | variables,
                start_new_session=True,
                pass_fds=(_LOCK,),
                check=False,
            )
            ended = Ended(ended.cursor, ended.first, ended.last, done.returncode)
        except OSError as error:
            ended = Ended(ended.cursor, ended.first, ended.last, 0, error.errno or errno.EIO)
        # Not through the disk class, and not synced: after a crash of the machine no command is still running.
        os.pwrite(_LOCK, encode_ended(ended), 0)
        os._exit(0)

    def _last(self) -> Ended | None:
        return decode_ended(os.pread(self._descriptor, _LINE_BYTES, 0))

    def _renew(self) -> None:
        """Open the file again: commands started before do not share the lock of the new descriptor."""
        self._disk.close(self._descriptor)
        self.path, self._descriptor = self._opened()

    def _opened(self) -> tuple[Path, int]:
        path, descriptor = open_own(*self._place)
        try:
            if not os.fstat(descriptor).st_size:
                self._disk.allocate(descriptor, _LINE_BYTES)
        except OSError:
            self._disk.close(descriptor)
            raise
        return path, descriptor


def _sealed(data: bytes) -> int:
    """A file in memory with this content, positioned at its start, which can no longer change."""
    descriptor = os.memfd_create("batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _not_a_program(command: Sequence[str], why: str) -> InvalidInput:
    return InvalidInput(
        f"{command[0]}: cannot be run: {why}",
        hint=f"command -v {command[0]}; a script needs a first line like #!/bin/sh",
    )
