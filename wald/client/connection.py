"""Connections to the daemon's socket, and the daemon's status."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from wald.format.protocol import ProtocolError, parse_reply

_PATH_MAX_BYTES = 107  # limit of a Unix socket address
_STATUS_SECONDS = 1.0


def connect(path: Path, *, seconds: float | None = None) -> socket.socket:
    """Connect to the socket at ``path``, which may be longer than a socket address."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    try:
        if len(os.fsencode(path)) <= _PATH_MAX_BYTES:
            connection.connect(os.fspath(path))
            return connection
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except OSError:
        connection.close()
        raise
    return connection


def status(path: Path) -> dict[str, object]:
    """Return the daemon's status, or {} if the daemon does not answer."""
    try:
        return ask_status(path, seconds=_STATUS_SECONDS)
    except OSError:
        return {}


def ask_status(path: Path, *, seconds: float) -> dict[str, object]:
    """Request the daemon's status (STAT). Return {} if the answer is invalid.

    Raise TimeoutError without an answer within ``seconds``, another OSError without a connection.
    """
    try:
        with connect(path, seconds=seconds) as connection, connection.makefile("rb") as replies:
            connection.sendall(b"STAT\n")
            answer = json.loads(parse_reply(replies.readline()))
    except (ValueError, ProtocolError):
        return {}
    return answer if isinstance(answer, dict) else {}
