"""A token typed into a form, and a session for it."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.responses import RedirectResponse, Response

from wald.errors import InvalidInput
from wald_gate.call import Call
from wald_gate.page.frame import HEADERS, bare, base_of
from wald_gate.problems import HttpError

_FORM = "application/x-www-form-urlencoded"
_FORM_BYTES, _FORM_FIELDS = 4 << 10, 8


async def form(call: Call) -> Response:
    """The form."""
    return bare(call, "login.html", {"wrong": False})


async def log_in(call: Call) -> Response:
    """A session for the token that was typed; the form again if it is not known."""
    if call.media_type != _FORM:
        raise HttpError(415, "media-type", f"{call.media_type or 'no media type'}: this takes a form")
    body = await call.state.limits.read(call.request, "a form", _FORM_BYTES)
    try:
        fields = parse_qs(body.decode("ascii", "replace"), max_num_fields=_FORM_FIELDS)
    except ValueError:
        raise InvalidInput("the form has too many fields", hint="token=…") from None
    token = fields.get("token", [""])[0].strip()
    response = RedirectResponse(base_of(call.request), 303, HEADERS)
    try:
        call.state.sessions.begin(call.request, response, token)
    except HttpError as error:
        if error.status != 401:
            raise
        return bare(call, "login.html", {"wrong": True}, status=401)
    return response


async def log_out(call: Call) -> Response:
    """The end of the session."""
    response = RedirectResponse(base_of(call.request) + "login", 303, HEADERS)
    call.state.sessions.end(call.request, response)
    return response
