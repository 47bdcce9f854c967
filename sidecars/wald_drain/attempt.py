"""One run of the command: records in on its stdin, its exit code out, also if drain is killed meanwhile.

    drain ──fork──▶ keeper ──▶ command          routes/<route>/<group>.command

The keeper waits for the command and writes into the file how it ended; both hold the file's lock. So a drain that
starts after another was killed waits for the command that it left, and knows whether that has processed its batch.
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
from wald.loop import SIGNALS
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald_drain.line import decode_line, encode_line

_NOT_A_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
_LINE_BYTES = 512  # more than is ever written; allocated once, so that a full disk takes it, too
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
        cursor: which cursor file stood there when it began: its inode, and when it was changed. Whoever sets a cursor,
            even to where it is, makes another; so a run that was followed by that is not taken for the last word.
        exit_code: as :mod:`subprocess` has it: below 0 is the signal that ended it.
        error: the error number with which it could not be run at all; 0: it could.
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
    """What a line says; None if it says nothing."""
    told = decode_line(line)
    if told is None:
        return None
    try:
        inode, changed_ns = told.pop("cursor")
        return Ended((inode, changed_ns), **told)
    except (KeyError, TypeError, ValueError):
        return None


def cursor_identity(path: Path) -> tuple[int, int]:
    """What tells a cursor file from the one that replaces it; (0, 0) where there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return status.st_ino, status.st_mtime_ns


class Attempts:
    """Runs of the command for ``route`` and ``group``, one at a time, whoever started them.

    Raises:
        NotFound: no such route.
    """

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        root.require_route(route)
        self.path = root.route(route) / f"{group}.command"
        self._cursor = root.cursor(route, group)
        self._disk = disk
        self._descriptor = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disk.close(self._descriptor)

    def wait(self, stop: threading.Event, tell: Callable[[str], None]) -> bool:
        """Return once no command is at work that an earlier drain has left; False if ``stop`` was set before that."""
        told = False
        while not self._disk.lock(self._descriptor):
            if not told:
                tell(f"waits for the command that an earlier wald-drain has left running: fuser {self.path}")
                told = True
            if stop.wait(_POLL_SECONDS):
                return False
        return True

    def processed(self) -> Ended | None:
        """The last run, if it was a success that the cursor does not tell of yet."""
        ended = self._last()
        if ended is None or ended.exit_code or ended.error or ended.cursor != cursor_identity(self._cursor):
            return None
        return ended

    def run(self, command: Sequence[str], stdin: bytes, variables: Mapping[str, str], *, first: int, last: int) -> int:
        """Run ``command`` to its end; returns its exit code, or the signal that ended it as a number below 0.

        It may leave off reading whenever it likes. Its stdin is a file in memory that nobody can change: all of
        ``stdin``, or the command does not run. It has a session of its own, so that Ctrl-C, which the terminal sends to
        everything in its foreground, ends drain after this run and not in the midst of it.

        Args:
            variables: what its environment has beside our own.

        Raises:
            InvalidInput: it cannot be run at all.
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
        if status or ended is None:  # somebody killed the keeper, and the command may still be at work
            self._renew()
            return os.waitstatus_to_exitcode(status) or 1
        if ended.error in _NOT_A_PROGRAM:
            raise _not_a_program(command, os.strerror(ended.error))
        if ended.error:
            raise OSError(ended.error, os.strerror(ended.error), command[0])
        return ended.exit_code

    def _keep(self, command: Sequence[str], batch: int, variables: Mapping[str, str], ended: Ended) -> None:
        """What the keeper does; it has nothing of drain's but the lock and the batch."""
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # not ignored: that the command would inherit
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
        # Not by way of the disk, and not synced: a machine that stops has no orphans.
        os.pwrite(_LOCK, encode_ended(ended), 0)
        os._exit(0)

    def _last(self) -> Ended | None:
        return decode_ended(os.pread(self._descriptor, _LINE_BYTES, 0))

    def _renew(self) -> None:
        """Another hold on the file, which does not share its lock with what was started under the former."""
        self._disk.close(self._descriptor)
        self._descriptor = self._opened()

    def _opened(self) -> int:
        try:
            descriptor = self._disk.create(self.path)
        except FileExistsError:
            return self._disk.open(self.path)
        try:
            self._disk.allocate(descriptor, _LINE_BYTES)
        except OSError:
            self._disk.close(descriptor)
            raise
        return descriptor


def _sealed(data: bytes) -> int:
    """A file in memory with this content, at its beginning, which cannot change any more."""
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


def _not_a_program(command: Sequence[str], words: str) -> InvalidInput:
    return InvalidInput(
        f"{command[0]}: cannot be run: {words}",
        hint=f"command -v {command[0]}; a script needs a first line like #!/bin/sh",
    )
