"""Control socket of a work group's owner, ``routes/R/cursors/G.ask``, for commands of other processes.

    command: connects, sends a request
    owner:   sends "accepted", applies the request, sends the answer

A command that gives up shuts its connection down, after which the owner cannot send "accepted". So nothing is applied
for a command that has given up or was killed, however late the owner is. The mode of the socket is 0600: only the
owner's user and root may connect.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wald.errors import Refused, Unavailable, WaldError
from wald.files import locks
from wald.files.cursor_directory import not_permitted
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root
from wald.format.names import ASK_SUFFIX, HANDOVER_SUFFIX
from wald.hints import command_line

_MODE = 0o600
_BACKLOG = 16
_POLL_SECONDS = 0.02
_RECEIVE_SECONDS = 1.0  # a client sends its request at once
_MESSAGE_MAX_BYTES = 64 << 10
_ACCEPTED = b"accepted"

Apply = Callable[[Mapping[str, Any]], int]
"""Applies a request, which is JSON, and returns the number of records; on disk when it returns."""


class OwnerGone(Exception):
    """No process owns the group any more."""


def ask_owner(root: Root, route: str, group: str, request: Mapping[str, Any], seconds: float) -> int:
    """Send a request to the owner of a group, and return the number of records that it was applied to.

    The owner has that number of seconds to accept the request, and as long again to answer it.
    """
    path = root.cursor_directory(route) / f"{group}{ASK_SUFFIX}"
    until = time.monotonic() + seconds
    while True:
        with suppress(ConnectionError, FileNotFoundError, BlockingIOError):  # it starts, ends, or has a full backlog
            _require_trusted(root, route, path)
            try:
                with _connection(path) as connection:
                    return _exchange(connection, root, path, request, until, seconds)
            except PermissionError as error:
                raise not_permitted(root, route, path, error) from error
        if not locks.is_locked(path.with_suffix(HANDOVER_SUFFIX), Disk()):
            raise OwnerGone
        if time.monotonic() > until:
            raise _not_accepted(path, seconds)
        time.sleep(_POLL_SECONDS)


class ControlServer:
    """Thread that applies the requests of commands, one after the other."""

    def __init__(self, root: Root, route: str, group: str, apply: Apply, report: Callable[[str], None]) -> None:
        self._apply = apply
        self._path = root.cursor_directory(route) / f"{group}{ASK_SUFFIX}"
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"wald-work-control-{route}", daemon=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._identity: tuple[int, int] | None = None
        try:
            self._listen()
            self._thread.start()
        except OSError as error:  # for example, another user has planted a file
            report(f"{self._path}: cannot listen: {error}; `wald group` cannot change the group while this owner runs")

    def close(self) -> None:
        """End the thread after its current request, and remove the socket."""
        self._is_closed = True
        if self._identity is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            with suppress(OSError):
                if self._identity == _identity(self._path):
                    self._path.unlink()
            self._identity = None
        self._listener.close()

    def leave_in_child(self) -> None:
        """Close the parent's socket in the child of a fork."""
        self._listener.close()

    def _listen(self) -> None:
        os.fchmod(self._listener.fileno(), _MODE)
        # A socket address has at most 107 bytes, too few for a long group name.
        temporary = self._path.with_name(f"{secrets.token_hex(8)}{TEMPORARY}")
        with _opened(self._path.parent, os.O_DIRECTORY) as directory:
            self._listener.bind(f"{directory}/{temporary.name}")
        try:
            self._listener.listen(_BACKLOG)
            identity = _identity(temporary)
            temporary.rename(self._path)  # replaces that of an owner that was killed
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._identity = identity

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or too many open files
                time.sleep(_POLL_SECONDS)
                continue
            with connection, suppress(OSError, ValueError, RecursionError):
                connection.settimeout(_RECEIVE_SECONDS)
                request = json.loads(connection.recv(_MESSAGE_MAX_BYTES))
                connection.send(_ACCEPTED, socket.MSG_NOSIGNAL)  # fails if the command has given up
                connection.send(json.dumps(self._answer(request)).encode(), socket.MSG_NOSIGNAL)

    def _answer(self, request: Mapping[str, Any]) -> dict[str, object]:
        try:
            return {"records": self._apply(request)}
        except WaldError as error:
            return {"error": error.message, "hint": error.hint}
        except Exception as error:  # noqa: BLE001 - the command reports it
            return {"error": f"it cannot be done: {error!r}"}


def _exchange(
    connection: socket.socket, root: Root, path: Path, request: Mapping[str, Any], until: float, seconds: float
) -> int:
    connection.send(json.dumps(request).encode(), socket.MSG_NOSIGNAL)
    connection.settimeout(max(_POLL_SECONDS, until - time.monotonic()))
    try:
        accepted = connection.recv(_MESSAGE_MAX_BYTES)
    except TimeoutError:
        connection.shutdown(socket.SHUT_RDWR)
        if not connection.recv(_MESSAGE_MAX_BYTES):
            raise _not_accepted(path, seconds) from None
        raise _not_answered(root, path, seconds) from None
    connection.settimeout(seconds)
    try:
        data = accepted and connection.recv(_MESSAGE_MAX_BYTES)
    except TimeoutError:
        raise _not_answered(root, path, seconds) from None
    if not data:
        raise ConnectionResetError
    answer = json.loads(data)
    if "error" in answer:
        raise Refused(str(answer["error"]), hint=str(answer.get("hint", "")))
    return int(answer["records"])


def _require_trusted(root: Root, route: str, path: Path) -> None:
    """Raise NotPermitted if another user has planted the file, as any cursor owner may."""
    if path.lstat().st_uid not in (0, os.geteuid(), path.parent.stat().st_uid):
        raise not_permitted(root, route, path, PermissionError(errno.EPERM, "the file belongs to another user"))


@contextmanager
def _connection(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, _opened(path, os.O_NOFOLLOW) as address:
        connection.settimeout(_RECEIVE_SECONDS)
        connection.connect(address)
        yield connection


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[str]:
    """Yield a short path of a file, for a socket address."""
    descriptor = os.open(path, os.O_PATH | flags)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _not_accepted(path: Path, seconds: float) -> Unavailable:
    return Unavailable(
        f"{path}: the owner of the group accepted no request for {seconds:g} s; nothing was changed",
        hint=_owner_hint(path),
    )


def _not_answered(root: Root, path: Path, seconds: float) -> Unavailable:
    showing = command_line(root.path, f"group show {path.relative_to(root.routes).parts[0]} {path.stem}")
    return Unavailable(
        f"{path}: the owner has accepted the request, but has not answered for {seconds:g} s",
        hint=f"{showing} shows whether it was applied; {_owner_hint(path)}",
    )


def _owner_hint(path: Path) -> str:
    lock = path.with_suffix(HANDOVER_SUFFIX)
    process = next(iter(locks.holders(lock)), None)
    return f"ps -o pid,stat,wchan,args -p {process}" if process else f"fuser -v {lock}"
