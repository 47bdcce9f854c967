"""The style and the script of the page: files of the package, read once."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.responses import Response

from wald_gate.call import Call
from wald_gate.problems import HttpError

_TYPES = {"wald.css": "text/css", "wald.js": "text/javascript", "wald.svg": "image/svg+xml"}
_CONTENT = {name: files(__package__).joinpath("assets", name).read_bytes() for name in _TYPES}
BUILD = hashlib.sha256(b"".join(_CONTENT.values())).hexdigest()[:16]
"""Changes with them: a page of an older gate is loaded again, and a browser may keep them for ever."""


async def asset(call: Call) -> Response:
    """One of the files."""
    name = call.request.path_params["name"]
    if name not in _CONTENT:
        raise HttpError(404, "no-such-path", f"there is no {call.request.url.path}")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(_CONTENT[name], 200, headers, _TYPES[name])
