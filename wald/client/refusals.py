"""Which error a refusal by the daemon, or its silence, is for the caller, and what to type next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from wald.client.connection import status
from wald.errors import DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, Unavailable, WaldError
from wald.format.protocol import Code, ProtocolError
from wald.hints import command_line, room_commands, user_name


def refused(error: ProtocolError, request: bytes, *, root: Path | None, socket: Path) -> WaldError:
    """The error for an ERR that does not pass.

    Args:
        error: the answer of the daemon.
        request: the request line that got this answer.
        root: root of the log; None if it is not known.
        socket: its owner is the user that the daemon runs as.
    """
    words = request.decode(errors="replace").split()
    route = words[2] if words[:1] == ["ROUTE"] else words[1] if len(words) > 1 else ""
    match error.code:
        case Code.NO_ROUTE:
            message, _, _ = error.message.partition("; ROUTE ")  # what follows is for clients of the bare protocol
            return NotFound(message, hint=_how_to_make(route, root, socket, retired="retired" in error.message))
        case Code.DENIED:
            return NotPermitted(error.message, hint=_how_to_permit(words, route, socket))
        case Code.GAP | Code.FORGOTTEN | Code.CONFLICT:
            reading = f"{_command(root, f'read {route}')} shows what has arrived"
            return Refused(error.message, hint=f"use another producer id; {reading}")
        case Code.TOO_LARGE:
            return InvalidInput(error.message, hint="raise request_max_bytes, or write the record to the route's FIFO")
        case _:
            return InvalidInput(f"{error.code}: {error.message}", hint="wald append --help")


def unreachable(reason: OSError | ProtocolError, *, root: Path | None, socket: Path) -> WaldError:
    """The error for a daemon that was waited for in vain.

    Args:
        reason: how the last attempt failed.
        root: root of the log; None if it is not known.
        socket: where the daemon should listen.
    """
    if isinstance(reason, ProtocolError):
        message, is_full = f"{socket}: {reason.code}: {reason.message}", reason.code is Code.FULL
        if is_full and _is_quota(status(socket)):
            return Unavailable(message, hint=_explaining(root, socket))
        kind = DiskFailure if is_full else Unavailable
        return kind(message, hint=_inspect(root, socket, "explain" if is_full else "head"))
    if isinstance(reason, PermissionError):
        return NotPermitted.of(reason, socket)
    if isinstance(reason, TimeoutError):
        return _silent(root, socket)
    hint = f"ls -l {socket}; start the daemon that listens there" if root is None else command_line(root, "run")
    return Unavailable(f"{socket}: no daemon answers ({reason.strerror or reason})", hint=hint)


def _silent(root: Path | None, socket: Path) -> WaldError:
    """The error for a daemon that is connected and does not answer: its STAT may say why."""
    hint = _inspect(root, socket, "explain")
    state = status(socket)
    if state.get("degraded"):
        numbers = f"{state.get('free_bytes')} bytes are free of {state.get('needed_bytes')} that are needed"
        return DiskFailure(f"{socket}: the disk is full: {numbers}; the daemon waits for space", hint=hint)
    if state.get("held_requests"):
        return DiskFailure(f"{socket}: the disk has no space for a request of this size", hint=hint)
    over = state.get("over_quota")
    if isinstance(over, list) and over:
        hint = _explaining(root, socket)
        return Unavailable(f"{socket}: the daemon does not accept it now: {over[0].get('message')}", hint=hint)
    if not state:  # it is stopped by a signal, or hangs
        held = shlex.quote(os.fspath(socket if root is None else root / "lock"))
        hint = f"ps -o pid,stat,wchan,args -p $(fuser {held} 2>&-)"
    return Unavailable(f"{socket}: the daemon does not answer", hint=hint)


def _is_quota(state: Mapping[str, object]) -> bool:
    """Whether it is a quota, and not the disk, that lets a daemon of this STAT refuse records."""
    return bool(state.get("over_quota")) and not state.get("degraded")


def _explaining(root: Path | None, socket: Path) -> str:
    """The command that shows which group is behind."""
    return f"STAT to {socket}" if root is None else command_line(root, "explain")


def _inspect(root: Path | None, socket: Path, command: str) -> str:
    """The commands that show the state of the disk and of the log."""
    free = room_commands(socket.parent)
    return free if root is None else f"{free}; {command_line(root, command)}"


def _how_to_make(route: str, root: Path | None, socket: Path, *, retired: bool) -> str:
    adding = _command(root, f"route add {route}")
    if not retired:
        return f"{adding} makes it; {_command(root, 'routes')} lists them"
    if _is_owner(socket):
        return f"{adding} takes it back"
    return f"{adding} takes it back; that is for user {_owner(socket)}, and for writers in [routes.{route}]"


def _how_to_permit(words: list[str], route: str, socket: Path) -> str:
    """What a denied request needs: another user, other settings, or other options."""
    settings = f"writers in [routes.{route}] of the daemon's config"
    match words:
        case "PUB", *_:
            return f"add the user to {settings}, and kill -HUP the daemon"
        case "ROUTE", "ADD", _, *options if any(option.startswith("mode=") for option in options):
            return "--mode 0600, or none" if _is_owner(socket) else f"leave out --mode, or be user {_owner(socket)}"
        case "ROUTE", "ADD", _, *options if any(option.startswith("consumers=") for option in options):
            owner = _owner(socket)
            joining = f"usermod --append --groups GROUP {owner}, and start the daemon again"
            return joining if _is_owner(socket) else f"leave out --consumers, or be user {owner}"
        case "ROUTE", "ADD", _, *options if "fifo" in options:
            return f"be user {_owner(socket)}"
        case _:
            return f"be user {_owner(socket)}, or one of the {settings}"


def _command(root: Path | None, arguments: str) -> str:
    return f"wald {arguments}" if root is None else command_line(root, arguments)


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
