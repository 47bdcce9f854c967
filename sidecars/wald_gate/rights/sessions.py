"""Sessions of browsers, which cannot send a token with each request: a cookie stands for a token that was typed once.

The cookie is a random number that means something to this process alone. Behind it stands the token, which is judged
with each request as if it had come with it: when it is removed from the file, the session ends.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from wald.errors import WaldError
from wald_gate.problems import HttpError
from wald_gate.rights.clients import Client, Rights

_SESSIONS_MAX = 1000
_SESSIONS_OF_CLIENT = 50  # beyond that the one that was not used for longest ends, and none of another client
_IDLE_SECONDS = 12 * 3600.0
_WRONG_MAX = 10  # tokens from one address, in …
_WRONG_SECONDS = 60.0
_ADDRESSES_MAX = 10_000


@dataclass(slots=True)
class _Session:
    client: str
    authorization: str
    used: float


class Sessions:
    """The sessions of one gate.

    Args:
        log_id: is part of the name of the cookie, as a browser sends it to every port of a machine.
    """

    def __init__(self, rights: Rights, log_id: bytes) -> None:
        self._rights = rights
        self._name = f"wald-{log_id.hex()[:12]}"
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()
        """When wrong tokens came from an address, on the monotonic clock."""

    def client(self, request: Request) -> Client | None:
        """Whose session a request belongs to; None: to none, or to one that has ended."""
        number = request.cookies.get(self._cookie(request), "")
        session = self._sessions.get(number)
        if session is None:
            return None
        now = time.monotonic()
        try:
            if now - session.used > _IDLE_SECONDS:
                raise TimeoutError
            client = self._rights.client(session.authorization, None)
        except (WaldError, TimeoutError):
            del self._sessions[number]
            return None
        session.used = now
        self._sessions.move_to_end(number)
        return client

    def begin(self, request: Request, response: Response, token: str) -> None:
        """Begin a session; ``response`` tells the browser.

        A token that is known begins one however many wrong ones have come from its address, which others may share: a
        proxy, the end of a tunnel. A token has 256 random bits, so guesses find none, and the limit is for the noise.

        Raises:
            HttpError: 401, the token is not known; 429, too many that are not have come from there.
        """
        authorization = f"Bearer {token}"
        address = request.client.host if request.client is not None else ""
        try:
            client = self._rights.client(authorization, None).name
        except HttpError:
            self._require_few_wrong(address)
            self._wrong.setdefault(address, []).append(time.monotonic())
            while len(self._wrong) > _ADDRESSES_MAX:
                self._wrong.popitem(last=False)
            raise
        self._forget(request)
        own = [number for number, session in self._sessions.items() if session.client == client]
        if len(own) == _SESSIONS_OF_CLIENT:
            del self._sessions[own[0]]
        while len(self._sessions) >= _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        number = secrets.token_urlsafe(32)
        self._sessions[number] = _Session(client, authorization, time.monotonic())
        self._set(request, response, number, None)

    def end(self, request: Request, response: Response) -> None:
        """End the session of a request, if it has one."""
        self._forget(request)
        self._set(request, response, "", 0)

    def _require_few_wrong(self, address: str) -> None:
        began = time.monotonic() - _WRONG_SECONDS
        lately = [at for at in self._wrong.pop(address, ()) if at > began]
        if lately:
            self._wrong[address] = lately
        if len(lately) >= _WRONG_MAX:
            seconds = math.ceil(lately[0] - began)
            raise HttpError(
                429,
                "too-many",
                f"{_WRONG_MAX} wrong tokens have come from {address or 'there'}: wait {seconds} s",
                headers={"Retry-After": str(seconds)},
            )

    def _forget(self, request: Request) -> None:
        self._sessions.pop(request.cookies.get(self._cookie(request), ""), None)

    def _set(self, request: Request, response: Response, value: str, max_age: int | None) -> None:
        response.set_cookie(
            self._cookie(request),
            value,
            max_age=max_age,
            path="/",
            secure=request.url.scheme == "https" or _is_behind_tls(request),
            httponly=True,
            samesite="strict",
        )

    def _cookie(self, request: Request) -> str:
        """With TLS under a name that no other host and no plain connection can set (RFC 6265bis, section 4.1.3.2)."""
        return ("__Host-" if request.url.scheme == "https" else "") + self._name


def _is_behind_tls(request: Request) -> bool:
    """Return True if the browser uses TLS to a proxy in front, according to the origin of its login form."""
    return request.headers.get("origin", "").startswith("https://")
