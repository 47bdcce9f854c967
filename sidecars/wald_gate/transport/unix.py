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
        raise _refusal(path, "what is there is not a socket", f"ls -ld {path}; --uds PATH, another one")


async def serve(connection: Callable[[], asyncio.Protocol], path: Path, backlog: int) -> asyncio.Server:
    """A server at a path.

    Raises:
        InvalidInput: as of :func:`check_path`; another process listens there.
    """
    check_path(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(os.fspath(path)) in (0, errno.EAGAIN):
            raise _refusal(path, "another process listens there", f"fuser {path}")
    try:
        path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(connection, path, backlog=backlog)
        path.chmod(_MODE)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error), f"ls -ld {path.parent} {path}") from None
    return server


def remove(path: Path) -> None:
    """Remove the socket; what has taken its place, and is none, stays."""
    if _is_socket(path):
        path.unlink(missing_ok=True)


def _is_socket(path: Path) -> bool:
    """Whether the name itself is one: a link, which may lead to another's, is none."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _refusal(path: Path, reason: str, hint: str) -> InvalidInput:
    return InvalidInput(f"--uds {path}: {reason}", hint=hint)
