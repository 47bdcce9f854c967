"""Errors as ``application/problem+json`` (RFC 9457), with our codes and hints.

A problem has a ``code``, which programs may compare, and the ``detail`` and the ``hint`` that a command would print.
The problem of a partly executed request also has its durable records.

If possible, a hint tells what to do over HTTP. A hint with the path of the log is a command for the gate's machine.
Only admins get such hints, and that path in ``detail``.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response

from wald.errors import (
    DISK_ERRORS,
    Damaged,
    DiskFailure,
    GivenUp,
    InvalidInput,
    Locked,
    NotFound,
    NotPermitted,
    NotProcessed,
    Partial,
    Refused,
    Replaced,
    Unavailable,
    UnsupportedFormat,
    WaldError,
    wrong_type,
)
from wald.files.layout import Root
from wald.hints import room_commands
from wald_gate.shapes import Problem, encoded

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2
_RETRIED = (429, 503)
_OF_MACHINE = frozenset({"path", "command", "commands"})
_STATUS: tuple[tuple[type[WaldError], int, str], ...] = (
    (InvalidInput, 400, "invalid"),
    (NotPermitted, 403, "not-permitted"),
    (NotFound, 404, "not-found"),
    (Refused, 409, "refused"),
    (GivenUp, 409, "given-up"),
    (Partial, 410, "partial"),
    (Locked, 423, "locked"),
    (Damaged, 500, "damaged"),
    (UnsupportedFormat, 500, "newer-wald"),
    (NotProcessed, 504, "not-processed"),
    (DiskFailure, 503, "disk"),
    (Replaced, 503, "replaced"),
    (Unavailable, 503, "unavailable"),
)


class HttpError(WaldError):
    """An error that only exists over HTTP, such as one about a method, a media type, a token or a size.

    ``code`` is for programs, ``more`` has additional fields of the problem. ``retry``, set for every 429 and 503, is
    the number of seconds to wait before a retry.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        retry: float = RETRY_SECONDS,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.headers = dict(headers)
        if status in _RETRIED:
            self.headers.setdefault("Retry-After", str(max(1, math.ceil(retry))))
        self.more = dict(more)


def for_client(error: Exception, root: Root, route: str | None, *, is_admin: bool) -> Exception:
    """Return the error that a client may see; ``route`` is the route in the path."""
    if isinstance(error, OSError):
        error = _of_system(error)
    if not isinstance(error, WaldError):
        return error
    if isinstance(error, NotFound) and route is not None and not root.has_route(route):
        return NotFound(f"there is no route {route!r}", hint=f"POST /v1/routes/{route} creates it")
    if isinstance(error, NotFound) and route is not None and error.case == "route-retired-at-daemon":
        return NotFound(error.message, hint=f"POST /v1/routes/{route} reactivates it")
    if is_admin:
        return error
    path = os.fspath(root.path)
    message, hint = without_path(error.message, root), "" if path in error.hint else error.hint
    if isinstance(error, HttpError):
        return HttpError(error.status, error.code, message, hint=hint, headers=error.headers, more=error.more)
    found = type(error)(message, hint=hint)
    if isinstance(error, Damaged) and isinstance(found, Damaged):
        found.last = error.last
    return found


def without_machine(found: object, root: Root) -> Any:
    """Return an answer without fields that name files or commands of the machine, and without the path of the root."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(each) for name, each in value.items() if name not in _OF_MACHINE}
        if isinstance(value, list):
            return [without(each) for each in value]
        return without_path(value, root) if isinstance(value, str) else value

    return without(msgspec.to_builtins(found))


def without_path(text: str, root: Root) -> str:
    """Return a text with paths below the root made relative to it, and with the path of the root removed."""
    path = os.fspath(root.path)
    text = text.removeprefix(f"{path}: ").replace(f"{path}/", "")
    return re.sub(rf"{re.escape(path)}(?![\w.-])", "the log", text)


def _of_system(error: OSError) -> Exception:
    """Return the client's error for an operating system error; ``error`` itself if it is a bug."""
    if isinstance(error, PermissionError):
        return NotPermitted.from_error(error)
    if (misplaced := wrong_type(error)) is not None:
        return misplaced
    if error.errno in (*DISK_ERRORS, errno.EMFILE, errno.ENFILE):
        return DiskFailure(f"{error.filename or 'the log'}: {error.strerror}", hint=room_commands(error=error))
    return error


def problem(error: Exception, **more: Any) -> Response:
    """Return the response to an error, with ``more`` fields, such as the durable records of a request."""
    found = _over_http(_of_system(error) if isinstance(error, OSError) else error)
    title = HTTPStatus(found.status).phrase
    shape = Problem(title, found.status, found.code, found.message, found.hint, **found.more | more)
    return Response(encoded(shape), found.status, found.headers, MEDIA_TYPE)


def _over_http(error: Exception) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, WaldError):
        return HttpError(500, "internal", "the gate has failed", hint="read its stderr for the error")
    status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    hint, more = error.hint, {}
    if isinstance(error, Damaged) and error.last:
        more["next"] = error.last + 1
        hint = "; ".join(filter(None, (f"?from={error.last + 1} continues after the unreadable records", hint)))
    return HttpError(status, code, error.message, hint=hint, more=more)
