"""A line about each request on stderr, or about those alone that the gate could not carry out.

What a client has sent is in it as JSON in ASCII, cut short, and without the query and the headers. So a line is one
line, changes no terminal, and has no token.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from wald_gate.problems import MEDIA_TYPE

_PATH_MAX = 256
_SERVER_ERROR = 500
_NOT_PROCESSED = 504  # in time, as the client has asked; the gate did what it should
_log = logging.getLogger("wald_gate.requests")


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, as the log names it.

    Attributes:
        client: the name of the token or the user; "" if it is not known.
        address: of the client, or of the last proxy that is not trusted; "" on the unix socket.
    """

    method: str
    path: str
    client: str
    address: str

    @classmethod
    def of(cls, scope: Scope, client: str = "") -> Sent:
        return cls(scope["method"], scope["path"], client, str((scope["client"] or ("",))[0]))


class RequestLog:
    """Where the lines go.

    Args:
        every: write one for each request, and not for answers of 500 and above only, but for 504.
    """

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def note(self, sent: Sent, response: Response, seconds: float) -> None:
        """Write a line about a request, if one is wanted.

        Args:
            seconds: until the answer began.
        """
        failed = response.status_code >= _SERVER_ERROR and response.status_code != _NOT_PROCESSED
        if not (failed or self._every):
            return
        line = _line(sent, response.status_code, seconds)
        if failed and response.media_type == MEDIA_TYPE:
            line["detail"] = msgspec.json.decode(response.body)["detail"]
        _write(line)

    def note_broken(self, sent: Sent, status: int, seconds: float, why: str) -> None:
        """Write a line about an answer that was broken off after it had begun.

        Args:
            seconds: until then.
        """
        _write(_line(sent, status, seconds) | {"detail": f"broken off: {why}"})


def _line(sent: Sent, status: int, seconds: float) -> dict[str, object]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": sent.client,
        "address": sent.address,
        "method": sent.method,
        "path": sent.path[:_PATH_MAX],
        "status": status,
        "seconds": round(seconds, 6),
    }


def _write(line: dict[str, object]) -> None:
    _log.info("%s", json.dumps(line).replace("\x7f", "\\u007f"))
