"""What the daemon's ERR means to who asked: which error it is, and what to type next."""

from __future__ import annotations

import os
from pathlib import Path

from wald.errors import InvalidInput, NotFound, NotPermitted, Refused, WaldError, command_line, user_name
from wald.format.protocol import Code, ProtocolError


def as_error(error: ProtocolError, request: bytes, *, root: Path | None, socket: Path) -> WaldError:
    """
    Args:
        request: the line that was answered so.
        root: of the log; None: not known.
        socket: whose owner is the user that the daemon runs as.
    """
    words = request.decode(errors="replace").split()
    route = words[2] if words[:1] == ["ROUTE"] else words[1] if len(words) > 1 else ""
    match error.code:
        case Code.NO_ROUTE:
            return NotFound(error.words, hint=_making(error.words, route, root, socket))
        case Code.DENIED:
            return NotPermitted(error.words, hint=_letting_in(words, route, socket))
        case Code.GAP | Code.FORGOTTEN | Code.CONFLICT:
            look = f"{_command(root, f'read {route}')} shows what has arrived"
            return Refused(error.words, hint=f"use another producer id; {look}")
        case Code.TOO_LARGE:
            return InvalidInput(error.words, hint="raise request_max_bytes, or write the record to the route's FIFO")
        case _:
            return InvalidInput(f"{error.code}: {error.words}", hint="wald append --help")


def _making(words: str, route: str, root: Path | None, socket: Path) -> str:
    adding = _command(root, f"route add {route}")
    if "retired" not in words:
        return f"{adding} makes it; {_command(root, 'routes')} lists them"
    if _is_owner(socket):
        return f"{adding} takes it back"
    return f"{adding} takes it back; that is for user {_owner(socket)}, and for writers in [routes.{route}]"


def _letting_in(words: list[str], route: str, socket: Path) -> str:
    """What a request that was denied needs: another user, other settings, or other options."""
    settings = f"writers in [routes.{route}] of the daemon's config"
    match words:
        case "PUB", *_:
            return f"add the user to {settings}, and kill -HUP the daemon"
        case "ROUTE", "ADD", _, *options if any(option.startswith("mode=") for option in options):
            return "--mode 0600, or none" if _is_owner(socket) else f"leave out --mode, or be user {_owner(socket)}"
        case "ROUTE", "ADD", _, *options if "fifo" in options:
            return f"be user {_owner(socket)}"
        case _:
            return f"be user {_owner(socket)}, or one of the {settings}"


def _command(root: Path | None, words: str) -> str:
    return f"wald {words}" if root is None else command_line(root, words)


def _owner(socket: Path) -> str:
    try:
        return user_name(socket.stat().st_uid)
    except OSError:
        return "that the daemon runs as"


def _is_owner(socket: Path) -> bool:
    try:
        return os.geteuid() in (0, socket.stat().st_uid)
    except OSError:
        return False
