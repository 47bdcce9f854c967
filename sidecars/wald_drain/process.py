"""Processes that run the command, each with one thread, and the next step for each exit code.

    thread of a worker ──batch, lock──▶ runner ──fork──▶ keeper ──▶ command
                       ◀────status─────

A fork copies the locks that other threads hold, and nothing ever releases the copies. So the runners are forked while
drain has a single thread, and fork a keeper for each run. The keeper waits for the command and writes its exit code to
the state file.

The keeper and the command hold the lock of the state file, and the batch is a file in memory. So neither needs drain
to stay alive. A lock that is being sent to a runner counts as held: if drain is killed at that moment, the next one
waits until the command has ended or can no longer start.

The state file, ``<group>.command-3`` of worker 3, is next to the cursor:

    {"run": 17…, "exit_code": 0, "error": 0, "crc": "…"}        512 bytes, by the keeper, when the command has ended
    {"run": 17…, "try": 1, "records": [11, 14, 20, 20], …}      by drain, before the command starts

The keeper first writes ``"started": true`` instead of the exit code. The records of a lease need not be consecutive.
They are processed if both lines are of one run and the exit code is 0. In a strict group the second line has the
identity of the cursor file, which must not have changed since.

A batch that fails is tried a few times unchanged, then in halves, and a half that fails in halves again. So its good
records are processed, and the failing record ends up alone. Only a single record is ever given up.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from wald.errors import InvalidInput, WaldError
from wald.files.cursor_directory import GroupFile
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.locks import set_process_name
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.names import COMMAND_SUFFIX
from wald.loop import outlive_signals
from wald.setting_types import format_seconds
from wald.work.ownership import KEEPER, RUNNER, describe_commands
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


_NOT_A_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
PAUSE_FIRST_SECONDS = 0.1
PAUSE_MAX_SECONDS = 30.0
TRIES_WHOLE = 3  # of a batch with several records, before it is halved
UNKNOWN = 1 << 16  # in place of the exit code of a command whose keeper was killed
TIMED_OUT = 1 << 17  # and above, in place of the exit code of a command that exceeded its limit: plus that, in ms
KILLED_TOO = "killed with its wald-drain"
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.05
_LOCK, _STDIN = 3, 4  # descriptors of the keeper
_MESSAGE_BYTES = 1 << 16
_RUNNERS: set[int] = set()


def check_command(command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise start_error(command, errno.EACCES if os.path.exists(command[0]) else errno.ENOENT)


def start_error(command: Sequence[str], error: int) -> Exception:
    if error not in _NOT_A_PROGRAM:
        return OSError(error, os.strerror(error), command[0])
    return InvalidInput(
        f"{command[0]}: cannot be run: {os.strerror(error)}",
        hint=f"command -v {command[0]}; a script needs a first line like #!/bin/sh",
    )


class Runner:
    """Process that starts the commands of ``worker``. Create it while this process has a single thread."""

    def __init__(self, worker: int, command: Sequence[str], time_limit: float | None) -> None:
        self.worker = worker
        self.command = command
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process_id = os.fork()
        if self.process_id == 0:
            try:
                _serve(theirs, command, time_limit)
            finally:
                os._exit(1)
        theirs.close()
        _RUNNERS.add(self.process_id)

    def run(self, run: int, lock: int, stdin: bytes, variables: Mapping[str, str]) -> None:
        """Run the command until it ends; the state file then describes the result, unless the keeper was killed.

        ``lock`` is the descriptor of the state file, locked. The command need not read ``stdin`` to its end.
        """
        batch = sealed(stdin)
        try:
            socket.send_fds(self._socket, [json.dumps([run, dict(variables)]).encode()], [batch, lock])
            reply = self._socket.recv(_MESSAGE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        finally:
            os.close(batch)
        _reap_orphans()
        if not reply:
            raise WaldError(
                f"process {self.process_id}, which starts its commands, was killed",
                hint="start wald-drain again, which waits for the command and uses its exit code",
            )
        if error := int(reply):
            raise OSError(error, os.strerror(error), self.command[0])

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self.process_id, 0)
        _RUNNERS.discard(self.process_id)


@contextmanager
def runners_for(command: Sequence[str], workers: int, time_limit: float | None = None) -> Iterator[list[Runner]]:
    with ExitStack() as held:
        numbers = range(1, workers + 1)
        yield [held.enter_context(closing(Runner(worker, command, time_limit))) for worker in numbers]


def sealed(data: bytes) -> int:
    """Return a descriptor, at offset 0, of an in-memory file with this content that no process can change."""
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


def _reap_orphans() -> None:
    """Reap zombies that commands have left: as PID 1 of a container, this process inherits them."""
    if os.getpid() != 1:
        return
    with suppress(ChildProcessError):  # no child, or another thread has reaped it
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in _RUNNERS:  # its worker notices
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _serve(requests: socket.socket, command: Sequence[str], time_limit: float | None) -> None:
    set_process_name(RUNNER)
    outlive_signals()
    os.closerange(3, requests.fileno())  # including the sockets of other runners, which would never end otherwise
    os.closerange(requests.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
        if not request:
            os._exit(0)
        run, variables = json.loads(request)
        batch, lock = descriptors
        error = 0
        try:
            keeper = os.fork()
            if keeper == 0:
                try:
                    _keep(run, lock, command, batch, variables, time_limit)
                finally:
                    os._exit(1)
            os.waitpid(keeper, 0)
        except OSError as failed:
            error = failed.errno or errno.EIO
        os.close(batch)
        os.close(lock)
        try:
            requests.send(str(error).encode())
        except OSError:  # drain was killed; the state file has the exit code
            os._exit(0)


def _keep(
    run: int, lock: int, command: Sequence[str], batch: int, variables: Mapping[str, str], time_limit: float | None
) -> None:
    """Run a keeper. It keeps only the lock and the batch open.

    The command runs in a new session, so Ctrl-C in the terminal ends drain after this run and not during it.
    """
    os.setsid()
    set_process_name(KEEPER)
    outlive_signals()
    high = max(lock, batch, _STDIN) + 1
    lock, batch = fcntl.fcntl(lock, fcntl.F_DUPFD, high), fcntl.fcntl(batch, fcntl.F_DUPFD, high)
    os.dup2(lock, _LOCK)
    os.dup2(batch, _STDIN)
    os.closerange(_STDIN + 1, os.sysconf("SC_OPEN_MAX"))
    # Not through the disk class, and not synced: after a crash of the machine no command is still running.
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
        os.pwrite(_LOCK, padded({"run": run, "started": True}), 0)
        line = padded({"run": run, "exit_code": _exit_code(process, time_limit), "error": 0})
    except OSError as error:
        line = padded({"run": run, "exit_code": 0, "error": error.errno or errno.EIO})
    os.pwrite(_LOCK, line, 0)
    os._exit(0)


def _output(descriptor: int) -> int | None:
    """Return /dev/null in place of a closed stdout or stderr, without which every try would fail."""
    is_closed = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return subprocess.DEVNULL if is_closed else None


def _exit_code(process: subprocess.Popen[bytes], time_limit: float | None) -> int:
    """Wait for a command; after the time limit, end it and its process group."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(time_limit)
    over = time.monotonic() + GRACE_SECONDS
    with suppress(ProcessLookupError, PermissionError):  # the group has ended, or runs as another user and is awaited
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < over:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return TIMED_OUT + round((time_limit or 0) * 1000)


class NextStep(Enum):
    """Step after a try."""

    COMMIT = "the records are processed"
    RETRY = "the command gets them again after a pause"
    LATER = "the command gets them again after a pause, and this was no try"
    HALVE = "the command gets the first half of them after a pause, then the second"
    GIVE_UP = "they go to the dead-letter route"
    SKIPPED = "the cursor was moved: records are leased again"
    LEAVE = "they wait for the next start"


def tries_of(count: int, *, halved: bool, tries: int | None) -> int | None:
    """Return the number of tries for ``count`` records, ``halved`` if of a batch that has failed; None: no limit."""
    if count == 1:
        return tries
    return 1 if halved else min(TRIES_WHOLE, tries or TRIES_WHOLE)


def next_step(exit_code: int, *, number: int, tries: int | None, count: int, stopping: bool) -> NextStep:
    """Return the step after try ``number`` of ``tries``, the result of :func:`tries_of`, of ``count`` records."""
    if exit_code == 0:
        return NextStep.COMMIT
    if stopping:
        return NextStep.LEAVE
    if not is_failure(exit_code):
        return NextStep.LATER
    if tries is None or number < tries:
        return NextStep.RETRY
    return NextStep.GIVE_UP if count == 1 else NextStep.HALVE


def is_failure(exit_code: int) -> bool:
    """Return True if the try failed: its result is known, and the command did not ask for a delay."""
    return exit_code not in (0, os.EX_TEMPFAIL, UNKNOWN)


def pause_seconds(number: int) -> float:
    return min(PAUSE_FIRST_SECONDS * 2.0 ** min(number - 1, 20), PAUSE_MAX_SECONDS)


def ending(exit_code: int) -> str:
    """Describe an exit code.

    >>> ending(3), ending(-11), ending(TIMED_OUT + 300_000)
    ('exit 3', 'killed by SIGSEGV', 'time limit of 5 min')
    """
    if exit_code == UNKNOWN:
        return "its keeper was killed, so its exit code is unknown"
    if exit_code >= TIMED_OUT:
        return f"time limit of {format_seconds((exit_code - TIMED_OUT) / 1000)}"
    if exit_code >= 0:
        return f"exit {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-exit_code}"


def failure(named: str, step: NextStep, exit_code: int, number: int, tries: int | None, seconds: float) -> str:
    """Describe a failed try; ``tries`` is the limit for a single record, ``seconds`` the pause before the next try."""
    text = f"{named}: {ending(exit_code)}"
    if step is not NextStep.LATER:
        text += f", try {number}" + ("" if tries is None else f" of {tries}")
    elif exit_code != UNKNOWN:
        text += " (try again later)"
    if step in (NextStep.LATER, NextStep.RETRY):
        return f"{text}, retrying in {seconds:g} s"
    return f"{text}, retrying in halves in {seconds:g} s" if step is NextStep.HALVE else text
