"""The runner of a worker: a process with one thread, which forks a keeper for each run of the command.

    thread of a worker ──batch, lock──▶ runner ──fork──▶ keeper ──▶ command
                       ◀────status─────

The workers are threads because they share a group, and a drain without workers has threads too. A process with threads
should not fork: the child gets a copy of every lock that another thread holds at that moment, and nothing ever releases
it. So the runners are forked while there is only one thread, and stay small.

With each batch a runner gets the locked file of its worker. Even on the way it counts as open: if drain is killed just
then, the lock is held until the command has ended, or until it is certain that it does not start.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from wald.errors import WaldError
from wald.files.locks import set_process_name
from wald.loop import outlive_signals
from wald.work.ownership import RUNNER
from wald_drain.keeper import keep, sealed

_MESSAGE_BYTES = 1 << 16


class Runner:
    """The process for ``worker``, until it is closed. It is to be made while this process has one thread."""

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

    def run(self, about: Mapping[str, object], lock: int, stdin: bytes, variables: Mapping[str, str]) -> int:
        """Run the command to its end; return the status of its keeper, which is 0 unless that was killed.

        Args:
            about: the run, as in :func:`wald_drain.keeper.keep`.
            lock: a descriptor of the command's file, locked; the result of the run is written there.
            stdin: all that the command gets.
            variables: added to its environment.

        Raises:
            WaldError: the process was killed.
            OSError: it cannot fork.
        """
        batch = sealed(stdin)
        try:
            socket.send_fds(self._socket, [json.dumps([dict(about), dict(variables)]).encode()], [batch, lock])
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
        status, error = json.loads(reply)
        if error:
            raise OSError(error, os.strerror(error), self.command[0])
        return int(status)

    def close(self) -> None:
        """End the process, once the command has ended that it runs."""
        self._socket.close()
        os.waitpid(self.process_id, 0)
        _RUNNERS.discard(self.process_id)


_RUNNERS: set[int] = set()


def _reap_orphans() -> None:
    """Reap the zombies that commands have left: as PID 1 of a container, this process inherits them."""
    if os.getpid() != 1:
        return
    with suppress(ChildProcessError):  # no child, or another thread has reaped it
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in _RUNNERS:  # its worker notices
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


@contextmanager
def runners_for(command: Sequence[str], workers: int, time_limit: float | None = None) -> Iterator[list[Runner]]:
    """A runner for each of so many workers, numbered from 1 on; closed at the end of the block."""
    with ExitStack() as held:
        runners: list[Runner] = []
        for worker in range(1, workers + 1):
            runners.append(Runner(worker, command, time_limit))
            held.callback(runners[-1].close)
        yield runners


def _serve(requests: socket.socket, command: Sequence[str], time_limit: float | None) -> None:
    """The work of the process, which ends with its socket."""
    set_process_name(RUNNER)
    outlive_signals()
    os.closerange(3, requests.fileno())  # with the sockets of other runners, which would not end otherwise
    os.closerange(requests.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
        if not request:
            os._exit(0)
        about, variables = json.loads(request)
        batch, lock = descriptors
        try:
            reply = keep(lock, command, batch, variables, about, time_limit), 0
        except OSError as error:
            reply = 0, error.errno or errno.EIO
        os.close(batch)
        os.close(lock)
        try:
            requests.send(json.dumps(reply).encode())
        except OSError:  # drain was killed; the file says how the command ended
            os._exit(0)
