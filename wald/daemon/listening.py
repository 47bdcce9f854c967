"""Listening unix socket, and limits on connections.

The kernel reports a connection's user only after accept(2), so a refused client gets an ERR. One connection in 16 is
reserved for root and the log's owner, to diagnose a full daemon.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.errors import InvalidInput
from wald.files.modes import set_socket_owner, umask_for

_BACKLOG = 4096  # a nonblocking connect fails if the backlog is full
_PATH_MAX_BYTES = 107
_PEER = struct.Struct("iII")
_RESERVED_DESCRIPTORS = 32  # for segments, new pipes and metrics requests
_OWNERS_SHARE = 16
_REPORT_SECONDS = 10.0


def check_socket(path: Path, root: Path) -> None:
    """Raise InvalidInput if no socket can be created at ``path``.

    No daemon runs in ``root`` by now (:func:`require_free`), so only systemd may listen on a socket there.
    """
    if len(os.fsencode(path)) > _PATH_MAX_BYTES:
        raise _refusal(path, "AF_UNIX path too long")
    if path.parent != root and not path.parent.is_dir():
        raise _refusal(path, f"{path.parent} is not a directory")
    if path.parent != root and not os.access(path.parent, os.W_OK | os.X_OK):
        raise _refusal(path, f"the user may not write to {path.parent}")
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise _refusal(path, "the existing file is not a socket")
    error_number, process = _connect(path)
    is_listening = error_number in (0, errno.EAGAIN)
    if is_listening and (path.parent != root or process == 1 or process_name(process) == "systemd"):
        raise _refusal(path, "another program listens on it; it may be systemd, for a socket unit")


class Listener:
    """Listening socket, recreated if its file is removed. Raises InvalidInput if it cannot be created."""

    def __init__(self, path: Path, mode: int, inherited: socket.socket | None) -> None:
        self.socket = _listen(path, mode, replace=True) if inherited is None else inherited
        self._mode = mode
        self._is_from_systemd = inherited is not None
        name = self.socket.getsockname()
        self._path = Path(name) if isinstance(name, str) else None  # bytes: an abstract socket, without a file
        self._identity = None if self._path is None else _identity(self._path)
        self._reported = ""

    def restore(self) -> InvalidInput | str:
        """Recreate the socket if its file is gone or replaced; return a new problem, a message, or ""."""
        path = self._path
        current = None if path is None else _identity(path)
        if path is None or self._identity in (None, current):  # None: systemd created it in another mount namespace
            self._reported = ""
            return ""
        change = "removed" if current is None else "replaced"
        try:
            if self._is_from_systemd:
                message = f"{path}: the socket that systemd created was {change}; no program can connect to the daemon"
                raise InvalidInput(message, case="socket-of-systemd-gone")
            if current is not None and (kind := _occupant(path)):
                raise InvalidInput(
                    f"{path}: the socket was replaced by {kind}; no program can connect to this daemon",
                    case="socket-replaced",
                    path=path,
                )
            self.socket = _listen(path, self._mode, replace=current is not None)
        except InvalidInput as error:
            before, self._reported = self._reported, error.message
            return "" if error.message == before else error
        self._identity, self._reported = _identity(path), ""
        return f"{path}: the socket was {change}; the daemon recreated it"

    def remove(self) -> None:
        if self._path is not None and not self._is_from_systemd and _identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)


def inherited_listener(sockets: Sequence[socket.socket]) -> socket.socket | None:
    """Return the socket from systemd, if any. Raise InvalidInput for several, or for another kind."""
    for each in sockets:
        is_stream = each.family == socket.AF_UNIX and each.type == socket.SOCK_STREAM
        if len(sockets) > 1 or not (is_stream and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            names = ", ".join(str(each.getsockname()) for each in sockets)
            raise InvalidInput(
                f"systemd passed {names}; wald accepts only one listening unix socket", case="sockets-of-another-kind"
            )
    return sockets[0] if sockets else None


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return the peer's process, user and group ids when it connected or began to listen."""
    return _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))


def process_name(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm", "rb") as file:
            return file.read().rstrip(b"\n").decode("utf-8", "replace")
    except OSError:
        return ""


class ConnectionRefusal(NamedTuple):
    """Reason for refusing a connection."""

    message: str
    user_id: int | None = None  # whose connections may be closed instead; None: any


@dataclass(slots=True, eq=False)
class ConnectionLimits:
    """Limits on open connections. ``_per_user_max`` exempts root and the log's owner."""

    _metrics: Metrics
    _journal: FilteringBoundLogger
    _connections_max: int
    _per_user_max: int
    count: Counter[int] = field(default_factory=Counter)
    _refused: int = 0
    _reported_at: float = float("-inf")

    def check(self, user_id: int, descriptor: int) -> ConnectionRefusal | None:
        if not self.leaves_enough(descriptor):
            return ConnectionRefusal("too few file descriptors are left")
        connections_max = self._connections_max
        if user_id not in (0, os.geteuid()):
            if self.count[user_id] >= self._per_user_max:
                return ConnectionRefusal(f"user {user_id} already has {self._per_user_max} connections", user_id)
            connections_max -= self._connections_max // _OWNERS_SHARE
        if (total := self.count.total()) >= connections_max:
            return ConnectionRefusal(f"{total} connections are already open")
        return None

    def leaves_enough(self, descriptor: int) -> bool:
        """Return True if enough descriptors remain.

        A new descriptor has the lowest free number, which shows how many are open.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return descriptor < soft - _RESERVED_DESCRIPTORS

    def add(self, user_id: int) -> None:
        self.count[user_id] += 1

    def remove(self, user_id: int) -> None:
        self.count[user_id] -= 1
        if not self.count[user_id]:
            del self.count[user_id]

    def report(self, user_id: int, message: str) -> None:
        """Count a connection that a limit refused or closed; log some of them."""
        self._metrics.connections_refused += 1
        self._refused += 1
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS:
            self._journal.warning("connection refused", reason=message, user=user_id, refused=self._refused)
            self._reported_at, self._refused = now, 0


def _listen(path: Path, mode: int, *, replace: bool) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if replace:
            path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), mode)  # before bind: the mode must exclude users from the start
        with umask_for(mode):
            listener.bind(str(path))
        set_socket_owner(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(path, str(error)) from error
    return listener


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode, unique while the socket is open; None without a file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _occupant(path: Path) -> str:
    """Return the kind of file at the socket's path; "" for a stale socket."""
    error_number, _ = _connect(path)
    if not (os.path.lexists(path) and stat.S_ISSOCK(path.lstat().st_mode)):
        return "a file"
    return "" if error_number in (errno.ECONNREFUSED, errno.ENOENT) else "another socket"


def _connect(path: Path) -> tuple[int, int]:
    """Return the error number, and the listening process or 0."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        return client.connect_ex(str(path)), peer_of(client)[0]


def _refusal(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{path}: cannot listen ({reason})",
        case="cannot-listen",
        path=path,
        directory=path.parent,
        limit=_PATH_MAX_BYTES,
    )
