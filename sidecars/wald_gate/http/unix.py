"""The unix socket of ``--uds``: whether it can be made at its path, in the place of one that has ended, and its end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from wald.errors import InvalidInput

_PATH_MAX_BYTES = 107  # what fits into a socket address
_MODE = 0o666  # each user may connect; what they may do is theirs to prove


def check_path(path: Path) -> None:
    """Check that a socket can be made there, if no process listens on one that is there.

    Raises:
        InvalidInput: it cannot; what is there and is no socket is not removed.
    """
    parent = path.parent
    if len(os.fsencode(path)) > _PATH_MAX_BYTES:
        raise _refusal(path, f"the path is longer than {_PATH_MAX_BYTES} bytes", "--uds PATH, a shorter one")
    if not parent.is_dir():
        raise _refusal(path, f"there is no directory {parent}", f"mkdir {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _refusal(path, f"this user may not write to {parent}", f"ls -ld {parent}")
    if os.path.lexists(path) and not _is_socket(path):
        raise _refusal(path, "the file there is not a socket", f"ls -ld {path}; --uds PATH, another one")


class UnixListener:
    """Server on a unix socket whose path tmp cleaners and operators may remove.

    Args:
        given: the socket that systemd passed and keeps; None to make one at ``path``.
    """

    def __init__(
        self,
        connection: Callable[[], asyncio.Protocol],
        path: Path,
        backlog: int,
        given: socket.socket | None = None,
    ) -> None:
        self._connection = connection
        self._path = path
        self._backlog = backlog
        self._given = given
        self._server: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._reported = ""

    async def start(self) -> None:
        """Start to listen.

        Raises:
            InvalidInput: as of :func:`check_path`; another process listens there.
        """
        loop, before = asyncio.get_running_loop(), self._server
        if self._given is not None:
            self._server = await loop.create_unix_server(self._connection, sock=self._given, backlog=self._backlog)
        else:
            self._server = await _serve(self._connection, self._path, self._backlog)
        self._identity = _identity_of(self._path)
        if before is not None:
            before.close()

    async def restore(self) -> InvalidInput | str:
        """Recreate the socket if it is gone; return what happened, or "" if there is nothing new.

        A file that took its place is left alone, unless it is a socket on which no process listens.
        """
        found = _identity_of(self._path)
        if self._identity in (None, found):  # None: systemd made it in another mount namespace
            self._reported = ""
            return ""
        how = "removed" if found is None else "replaced"
        try:
            if self._given is not None:
                message = f"{self._path}: the socket that systemd made was {how}, and no client can connect"
                raise InvalidInput(message, hint="systemctl restart wald-gate.socket")
            await self.start()
        except InvalidInput as error:
            known, self._reported = self._reported, error.message
            return "" if error.message == known else error
        self._reported = ""
        return f"--uds {self._path}: the socket was {how}; recreated"

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def remove(self) -> None:
        """Remove the socket, unless it is systemd's, or another file has taken its place."""
        if self._given is None and self._identity is not None and _identity_of(self._path) == self._identity:
            self._path.unlink(missing_ok=True)


async def _serve(connection: Callable[[], asyncio.Protocol], path: Path, backlog: int) -> asyncio.Server:
    """A server at a path.

    Raises:
        InvalidInput: as of :func:`check_path`; another process listens there.
    """
    check_path(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise _refusal(path, "another process listens there", f"fuser {path}")
    try:
        path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(connection, path, backlog=backlog)
        path.chmod(_MODE)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error), f"ls -ld {path.parent} {path}") from None
    return server


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of the file at ``path``; None without a file."""
    try:
        status = path.lstat()
    except (OSError, ValueError):  # ValueError: an abstract address
        return None
    return status.st_dev, status.st_ino


def _is_socket(path: Path) -> bool:
    """Whether the name itself is one: a link, which may lead to another's, is none."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _refusal(path: Path, reason: str, hint: str) -> InvalidInput:
    return InvalidInput(f"--uds {path}: {reason}", hint=hint)
