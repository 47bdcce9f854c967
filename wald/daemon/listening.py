"""Unix socket, and limits on connections.

The unix socket: making it at its path or taking it over, and deciding which connections have a place.

There are so many places in all and so many for one user, and none on the descriptors that the log itself needs. Every
connection is accepted first, because only then the kernel reports its user; one that has no place gets an ERR. Some
places are kept for the log's owner and root, so that they can find out what is going on.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.errors import InvalidInput
from wald.files.modes import give_socket, umask_for

_BACKLOG = 4096  # a connect that does not wait fails where it is full
_PATH_MAX_BYTES = 107
_PEER = struct.Struct("iII")
_DESCRIPTORS_KEPT = 32  # for segments, pipes that are added, and scrapers of metrics
_OWNERS_SHARE = 16  # one place of so many is the owners'
_REPORT_SECONDS = 10.0  # between lines in the journal


def check_socket(path: Path, root: Path) -> None:
    """Check that a socket can be made at ``path``.

    In the root the lock decides: a socket that another daemon has left there, or has lost with its lock, will be
    replaced.

    Raises:
        InvalidInput: it cannot; a file that is no socket, a socket of systemd, and elsewhere one that any program
            listens on, is not removed.
    """
    if len(os.fsencode(path)) > _PATH_MAX_BYTES:
        raise _refusal(path, "AF_UNIX path too long")
    if path.parent != root and not path.parent.is_dir():
        raise _refusal(path, f"{path.parent} is no directory")
    if path.parent != root and not os.access(path.parent, os.W_OK | os.X_OK):
        raise _refusal(path, f"{path.parent} may not be written to by this user")
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise _refusal(path, "what is there is not a socket")
    listener = _listener(path)
    if listener is not None and (path.parent != root or _is_systemd(listener)):
        raise _refusal(path, "another program listens on it; systemd, if there is a socket unit")


class Listener:
    """The listening socket and its path; tmp cleaners and operators may remove the file there.

    Args:
        given: the socket that systemd passed and keeps; None to make one at ``path``.

    Attributes:
        socket: accepts the connections; :meth:`restore` may replace it.

    Raises:
        InvalidInput: it cannot be made.
    """

    def __init__(self, path: Path, mode: int, given: socket.socket | None) -> None:
        self.socket = listen(path, mode) if given is None else given
        self._mode = mode
        self._is_systemds = given is not None
        name = self.socket.getsockname()
        self._path = Path(name) if isinstance(name, str) else None  # bytes: it has no file
        self._identity = None if self._path is None else identity_of(self._path)
        self._reported = ""

    def restore(self) -> InvalidInput | str:
        """Recreate the socket if it is gone; return what happened, or "" if there is nothing new.

        A file that took its place is left alone, unless it is a socket on which no process listens.
        """
        path = self._path
        found = None if path is None else identity_of(path)
        if path is None or self._identity in (None, found):  # None: systemd made it in another mount namespace
            self._reported = ""
            return ""
        how = "removed" if found is None else "replaced"
        try:
            if self._is_systemds:
                message = f"{path}: the socket that systemd made was {how}, and no program can connect"
                raise InvalidInput(message, case="socket-of-systemd-gone")
            if found is not None:
                _require_dead(path)
            self.socket = listen(path, self._mode, replace=found is not None)
        except InvalidInput as error:
            known, self._reported = self._reported, error.message
            return "" if error.message == known else error
        self._identity, self._reported = identity_of(path), ""
        return f"{path}: the socket was {how}; made again"

    def remove(self) -> None:
        """Remove the socket, unless it is systemd's, or another process has put its own there."""
        if self._path is not None and not self._is_systemds and identity_of(self._path) == self._identity:
            self._path.unlink(missing_ok=True)


def listen(path: Path, mode: int, *, replace: bool = True) -> socket.socket:
    """Make the socket.

    Args:
        replace: whether to remove an existing socket on which no process listens.

    Raises:
        InvalidInput: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if replace:
            path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), mode)  # before it has a name: no user may connect sooner than the mode allows
        with umask_for(mode):
            listener.bind(str(path))
        give_socket(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(path, str(error)) from error
    return listener


def identity_of(path: Path) -> tuple[int, int] | None:
    """The device and the inode of what is at ``path``; None if there is nothing.

    As long as a socket is open, no other one has its inode.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def inherited(sockets: Sequence[socket.socket]) -> socket.socket | None:
    """The listening socket among those that systemd handed over; None if there are none.

    Raises:
        InvalidInput: one is of another kind, or there are several: nothing would answer what comes to them.
    """
    for each in sockets:
        is_stream = each.family == socket.AF_UNIX and each.type == socket.SOCK_STREAM
        if len(sockets) > 1 or not (is_stream and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            names = ", ".join(str(each.getsockname()) for each in sockets)
            raise InvalidInput(
                f"systemd handed over {names}: wald takes one unix socket",
                case="sockets-of-another-kind",
            )
    return sockets[0] if sockets else None


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """The process at the other end, its user and its group, as they were when it connected or began to listen."""
    return _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))


@dataclass(frozen=True, slots=True)
class ConnectionRefusal:
    """Why a connection is refused.

    Attributes:
        message: for the peer and for the journal.
        user_id: the user whose connections have to become fewer; None: those of any user.
    """

    message: str
    user_id: int | None = None


class ConnectionLimits:
    """Counts the places, and reports the connections that found none.

    Args:
        connections_max: places in all.
        per_user_max: places of one user; the log's owner and root are not limited.

    Attributes:
        count: how many places each user has, of those that have one.
    """

    def __init__(
        self, metrics: Metrics, journal: FilteringBoundLogger, *, connections_max: int, per_user_max: int
    ) -> None:
        self._metrics = metrics
        self._journal = journal
        self._places = connections_max
        self._per_user = per_user_max
        self._kept = connections_max // _OWNERS_SHARE
        self._owners = frozenset({0, os.geteuid()})
        self.count: dict[int, int] = {}
        self._refused = 0
        self._reported_at = float("-inf")

    def judge(self, user_id: int, descriptor: int) -> ConnectionRefusal | None:
        """Why a user's new connection has no place; None: it has one.

        Args:
            descriptor: of the connection; the kernel gives out the lowest that is free.
        """
        if not self.leaves_enough(descriptor):
            return ConnectionRefusal("too few descriptors are left")
        total = sum(self.count.values())
        if user_id not in self._owners:
            if self.count.get(user_id, 0) >= self._per_user:
                return ConnectionRefusal(f"user {user_id} has {self._per_user} connections already", user_id)
            total += self._kept
        return ConnectionRefusal(f"{self._places} connections are open already") if total >= self._places else None

    def leaves_enough(self, descriptor: int) -> bool:
        """Whether the log itself has the descriptors it needs, where the lowest free one was ``descriptor``."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return descriptor < soft - _DESCRIPTORS_KEPT

    def enter(self, user_id: int) -> None:
        self.count[user_id] = self.count.get(user_id, 0) + 1

    def leave(self, user_id: int) -> None:
        self.count[user_id] -= 1
        if not self.count[user_id]:
            del self.count[user_id]

    def refuse(self, user_id: int, message: str) -> None:
        """Count a connection that is refused or closed for want of room; the journal gets a line now and then."""
        self._metrics.connections_refused += 1
        self._refused += 1
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS:
            self._journal.warning("connection refused", reason=message, user=user_id, refused=self._refused)
            self._reported_at, self._refused = now, 0


def _listener(path: Path) -> int | None:
    """The process that listens on a socket; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        if caller.connect_ex(str(path)) not in (0, errno.EAGAIN):
            return None
        return peer_of(caller)[0]


def _require_dead(path: Path) -> None:
    """
    Raises:
        InvalidInput: the file is not a socket, or a process may listen on it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        found = caller.connect_ex(str(path))
        is_socket = os.path.lexists(path) and stat.S_ISSOCK(path.lstat().st_mode)
        if found not in (errno.ECONNREFUSED, errno.ENOENT) or not is_socket:
            message = f"{path}: the socket was replaced by {'another' if is_socket else 'a file'}"
            raise InvalidInput(
                f"{message}, and no program can connect to this daemon", case="socket-replaced", path=path
            )


def process_name(process: int) -> str:
    """The name of a process's command; "" if it has ended, or is hidden from this user."""
    try:
        with open(f"/proc/{process}/comm", "rb") as file:
            return file.read().rstrip(b"\n").decode("utf-8", "replace")
    except OSError:
        return ""


def _is_systemd(process: int) -> bool:
    return process_name(process) == "systemd" or process == 1


def _refusal(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{path}: cannot listen ({reason})",
        case="cannot-listen",
        path=path,
        directory=path.parent,
        limit=_PATH_MAX_BYTES,
    )
