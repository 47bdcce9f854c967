"""Answers in gzip, for clients that ask for it with Accept-Encoding."""

from __future__ import annotations

import gzip
import re

from starlette.requests import Request
from starlette.responses import Response

from wald_gate.state import State

LEVEL = 1  # higher levels take a multiple of the time to save a tenth
_BYTES_MIN = 1024  # below, an answer fits into a packet anyway
_MEDIA_TYPES = ("application/json", "application/x-ndjson", "text/plain")  # no pages: these have secrets of sessions
_NOT_WANTED = re.compile(r"[ \t]*q[ \t]*=[ \t]*0(\.0*)?[ \t]*", re.IGNORECASE)


def wants_gzip(request: Request) -> bool:
    """Return True if the client accepts gzip."""
    for each in request.headers.get("accept-encoding", "").split(","):
        name, _, weight = each.partition(";")
        if name.strip().lower() in ("gzip", "x-gzip"):
            return not _NOT_WANTED.fullmatch(weight)
    return False


async def compressed(request: Request, response: Response, state: State) -> Response:
    """Return a response in gzip, if it is long, in one piece, and the client accepts that."""
    media_type = response.headers.get("content-type", "").partition(";")[0]
    if type(response) is not Response or response.status_code != 200 or media_type not in _MEDIA_TYPES:
        return response
    response.headers.add_vary_header("Accept-Encoding")
    if len(response.body) < _BYTES_MIN or not wants_gzip(request):
        return response
    response.body = await state.in_thread(gzip.compress, bytes(response.body), LEVEL, mtime=0)
    response.headers["content-length"] = str(len(response.body))
    response.headers["content-encoding"] = "gzip"
    return response
