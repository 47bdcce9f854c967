"""Which error a refusal by the daemon, or its silence, is for the caller, and what to type next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wald.client.connection import status
from wald.errors import DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, Unavailable, WaldError
from wald.format.protocol import Code, ProtocolError


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
            return NotFound(
                message,
                case="route-missing-at-daemon",
                root=root,
                route=route,
                socket=socket,
                is_retired="retired" in error.message,
            )
        case Code.DENIED:
            return NotPermitted(error.message, case="request-denied", words=words, route=route, socket=socket)
        case Code.GAP | Code.FORGOTTEN | Code.CONFLICT:
            return Refused(error.message, case="producer-out-of-step", root=root, route=route)
        case Code.TOO_LARGE:
            return InvalidInput(error.message, case="request-too-large")
        case _:
            return InvalidInput(f"{error.code}: {error.message}", case="request-refused")


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
            return Unavailable(message, case="daemon-over-quota", root=root, socket=socket)
        if is_full:
            return DiskFailure(message, case="daemon-lacks-room", root=root, socket=socket)
        return Unavailable(message, case="daemon-not-available", root=root, socket=socket)
    if isinstance(reason, PermissionError):
        return NotPermitted.of(reason, socket)
    if isinstance(reason, TimeoutError):
        return _silent(root, socket)
    return Unavailable(
        f"{socket}: no daemon answers ({reason.strerror or reason})", case="no-daemon", root=root, socket=socket
    )


def _silent(root: Path | None, socket: Path) -> WaldError:
    """The error for a daemon that is connected and does not answer: its STAT may say why."""
    state = status(socket)
    if state.get("degraded"):
        numbers = f"{state.get('free_bytes')} bytes are free of {state.get('needed_bytes')} that are needed"
        return DiskFailure(
            f"{socket}: the disk is full: {numbers}; the daemon waits for space",
            case="daemon-lacks-room",
            root=root,
            socket=socket,
        )
    if state.get("held_requests"):
        return DiskFailure(
            f"{socket}: the disk has no space for a request of this size",
            case="daemon-lacks-room",
            root=root,
            socket=socket,
        )
    over = state.get("over_quota")
    if isinstance(over, list) and over:
        return Unavailable(
            f"{socket}: the daemon does not accept it now: {over[0].get('message')}",
            case="daemon-over-quota",
            root=root,
            socket=socket,
        )
    return Unavailable(  # without a state, it is stopped by a signal, or hangs
        f"{socket}: the daemon does not answer",
        case="daemon-lacks-room" if state else "daemon-hangs",
        root=root,
        socket=socket,
    )


def _is_quota(state: Mapping[str, object]) -> bool:
    """Whether it is a quota, and not the disk, that lets a daemon of this STAT refuse records."""
    return bool(state.get("over_quota")) and not state.get("degraded")
