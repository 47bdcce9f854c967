"""The unix socket: whether its path will do, looked at before anything is written, and listening on it."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from wald.errors import InvalidInput

_BACKLOG = 128
_PATH_MAX_BYTES = 107


def check_socket(path: Path, root: Path) -> None:
    """See that a socket can be made at ``path``; in the root one that a killed daemon has left will be replaced.

    Raises:
        InvalidInput: it cannot; a file that is no socket, or one that somebody listens on, is not removed.
    """
    if len(os.fsencode(path)) > _PATH_MAX_BYTES:
        raise _refusal(path, "AF_UNIX path too long")
    if path.parent != root and not path.parent.is_dir():
        raise _refusal(path, f"{path.parent} is no directory")
    if path.parent != root and not os.access(path.parent, os.W_OK | os.X_OK):
        raise _refusal(path, f"{path.parent} may not be written to by this user")
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise _refusal(path, "what is there is not a socket")
    if path.parent != root and _is_listened_on(path):
        raise _refusal(path, "another program listens on it")


def listen(path: Path, mode: int) -> socket.socket:
    """Make the socket, in the place of one that is there.

    Raises:
        InvalidInput: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)  # nobody listens on it: in the root the lock is ours, elsewhere it was looked at
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(path, str(error)) from error
    return listener


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        return caller.connect_ex(str(path)) in (0, errno.EAGAIN)


def _refusal(path: Path, words: str) -> InvalidInput:
    hint = f"ls -ld {path.parent} {path}; WALD_SOCKET=PATH sets another, of at most {_PATH_MAX_BYTES} bytes"
    return InvalidInput(f"{path}: cannot listen ({words})", hint=hint)
