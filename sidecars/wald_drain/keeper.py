"""The keeper: a process that waits for one run of the command and writes into its file how it ended.

It and the command hold the lock of the file, and the batch is a file in memory. So neither needs drain.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from wald.errors import InvalidInput
from wald.files.locks import set_process_name
from wald.loop import outlive_signals
from wald.work.ownership import KEEPER
from wald_drain.command_file import padded
from wald_drain.retries import TIMED_OUT

_NOT_A_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.05
_LOCK, _STDIN = 3, 4  # descriptors of the keeper


def check_command(command: Sequence[str]) -> None:
    """
    Raises:
        InvalidInput: there is no such program, or it is none.
    """
    if shutil.which(command[0]) is None:
        raise _not_a_program(command, errno.EACCES if os.path.exists(command[0]) else errno.ENOENT)


def not_started(command: Sequence[str], error: int) -> Exception:
    """The error about a command that could not be started."""
    if error in _NOT_A_PROGRAM:
        return _not_a_program(command, error)
    return OSError(error, os.strerror(error), command[0])


def keep(
    lock: int,
    command: Sequence[str],
    batch: int,
    variables: Mapping[str, str],
    about: Mapping[str, object],
    time_limit: float | None,
) -> int:
    """Fork a keeper for one run of ``command``, and wait for it; returns its status, which is 0 unless it was killed.

    The caller must have a single thread: a forked child inherits the locks of other threads, and nothing releases them.

    The command has a session of its own, so that Ctrl-C, which the terminal sends to every process in its foreground,
    ends drain after this run and not during it.

    Args:
        lock: a descriptor of the file, locked.
        batch: what :func:`sealed` returned; the command gets it as stdin, and need not read it to the end.
        variables: added to the environment of the command.
        about: the run. The line that records its end adds ``exit_code`` (as in :mod:`subprocess`: a negative number
            is the signal that ended the command; or TIMED_OUT and more) and ``error``, the error number if the command
            could not be started, or 0.
        time_limit: after this many seconds the command and its children get SIGTERM, and SIGKILL if they keep running.
    """
    keeper = os.fork()
    if keeper == 0:
        try:
            _keep(lock, command, batch, variables, about, time_limit)
        finally:
            os._exit(1)
    _, status = os.waitpid(keeper, 0)
    return status


def _keep(
    lock: int,
    command: Sequence[str],
    batch: int,
    variables: Mapping[str, str],
    about: Mapping[str, object],
    time_limit: float | None,
) -> None:
    """The work of the keeper, which keeps nothing of drain but the lock and the batch."""
    os.setsid()
    set_process_name(KEEPER)
    outlive_signals()
    high = max(lock, batch, _STDIN) + 1
    lock, batch = fcntl.fcntl(lock, fcntl.F_DUPFD, high), fcntl.fcntl(batch, fcntl.F_DUPFD, high)
    os.dup2(lock, _LOCK)
    os.dup2(batch, _STDIN)
    os.closerange(_STDIN + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        process = subprocess.Popen(
            command,
            stdin=_STDIN,
            stdout=_output(1),
            stderr=_output(2),
            env=os.environ | variables,
            start_new_session=True,
            pass_fds=(_LOCK,),
        )
        line = padded({**about, "exit_code": _exit_code(process, time_limit), "error": 0})
    except OSError as error:
        line = padded({**about, "exit_code": 0, "error": error.errno or errno.EIO})
    # Not through the disk class, and not synced: after a crash of the machine no command is still running.
    os.pwrite(_LOCK, line, 0)
    os._exit(0)


def _output(descriptor: int) -> int | None:
    """Return the descriptor for a command's output; without this stream, every try of the command would fail."""
    is_closed = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return subprocess.DEVNULL if is_closed else None


def _exit_code(process: subprocess.Popen[bytes], time_limit: float | None) -> int:
    """Wait for a command; if its time is over, end it with all that it has started in its process group."""
    try:
        return process.wait(time_limit)
    except subprocess.TimeoutExpired:
        pass
    over = time.monotonic() + GRACE_SECONDS
    with suppress(ProcessLookupError, PermissionError):  # none is left; or it runs as another user, and is waited for
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < over:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return TIMED_OUT + round((time_limit or 0) * 1000)


def sealed(data: bytes) -> int:
    """A file in memory with this content, positioned at its start, which no process can change."""
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


def _not_a_program(command: Sequence[str], error: int) -> InvalidInput:
    return InvalidInput(
        f"{command[0]}: cannot be run: {os.strerror(error)}",
        hint=f"command -v {command[0]}; a script needs a first line like #!/bin/sh",
    )
