"""Clients of requests: identity, rights, and the site and address that a request comes from.

A client is authenticated by token, certificate, peer of a unix socket, or session. A browser cannot send a token with
every request, so it gets a session: a cookie with a random number that this process alone maps to a token. The token is
checked with every request, so its removal from the file ends the session.

The page of another site can make a browser send requests to the gate, whose Origin then names that site. It can also
make its own host name resolve to the address of the gate (DNS rebinding), so that Host names the site. Programs send no
Origin. An IP address in Host is safe, because it cannot resolve to another address.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from wald.errors import WaldError
from wald.hints import user_name
from wald_gate.auth.tokens import Client, Right, clients_in, digest_of, is_user
from wald_gate.problems import HttpError

CERTIFICATE = "wald.certificate"
"""Key in the scope of a request: the common name of the client's certificate."""
PEER = "wald.peer"
"""Key in the scope of a request: the number of the user at the other end of a unix socket."""
_SCHEME = "bearer "
_SESSIONS_MAX = 1000
_SESSIONS_OF_CLIENT = 50  # then the least recently used one of that client ends
_IDLE_SECONDS = 12 * 3600.0
_WRONG_MAX = 10  # unknown tokens from one address, within …
_WRONG_SECONDS = 60.0
_ADDRESSES_MAX = 10_000


ANYONE = Client("anyone", admin=True)
"""The client on loopback without a token file: every user of this machine."""


class Rights:
    """The clients in the token file; without a file, everyone has all rights."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._clients: dict[tuple[str, str], Client] = {}  # by way and what they are known by
        self.edition = 0  # grows when the file changes or a client CA is removed; endless answers end then
        self.read()

    @property
    def are_asked_for(self) -> bool:
        return self._path is not None

    def read(self) -> None:
        """Reload the file; after an error, the previous clients remain."""
        if self._path is not None:
            found = {(each.way, each.known_by): each for each in clients_in(self._path)}
            self.edition += found != self._clients
            self._clients = found

    def warnings(self) -> Iterator[str]:
        """Yield warnings about likely mistakes in the file."""
        if self._path is not None and not self._clients:
            yield f"{self._path}: it names no client, so every request over TCP is refused"
        for way, name in self._clients:
            if way == "user" and not is_user(name):
                yield f"{self._path}: there is no user {name!r} on this machine"

    def client(self, authorization: str | None, user: int | None, certificate: str | None = None) -> Client:
        """Authenticate a client by its header, its user on a unix socket, or its certificate's name."""
        if authorization is not None:
            if self._path is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
                raise _unknown("not a bearer token" if self._path else "this gate has no token file")
            # The time of the look-up reveals nothing about known tokens, because a client cannot choose a digest.
            digest = digest_of(authorization[len(_SCHEME) :].strip())
            if (found := self._clients.get(("sha256", digest))) is None:
                raise _unknown("unknown token")
            return found
        if user is not None:
            return self._of_user(user)
        if self._path is None:
            return ANYONE
        if certificate is None:
            raise _unknown("the request has no token")
        if (found := self._clients.get(("certificate", certificate))) is None:
            hint = '{"name": …, "certificate": NAME, "read": ["ROUTE"]} in the file of --tokens'
            raise _unknown(f"the certificate of {certificate} has no rights on this gate", hint)
        return found

    def _of_user(self, user: int) -> Client:
        name = user_name(user)
        if user in (0, os.geteuid()):
            return Client(name, admin=True)
        if (found := self._clients.get(("user", name))) is None:
            hint = f'{{"name": "{name}", "user": "{name}", "read": ["ROUTE"]}} in the file of --tokens'
            raise HttpError(403, "not-permitted", f"user {name} has no rights on this gate", hint=hint)
        return found


@dataclass(slots=True)
class _Session:
    client: str
    authorization: str
    used: float


class Admission:
    """Authenticates requests, by the current token file or the session of a browser, and checks their rights."""

    def __init__(self, rights: Rights, log_id: bytes) -> None:
        self._rights = rights
        self._name = f"wald-{log_id.hex()[:12]}"  # of the cookie; browsers ignore the port
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()  # monotonic times of unknown tokens, by address

    def client(self, request: Request) -> tuple[Client, bool]:
        """Return the client, and True if a session authenticates it; credentials in the request take precedence."""
        authorization, scope = request.headers.get("authorization"), request.scope
        if authorization is None and "cookie" in request.headers and (client := self._of_session(request)) is not None:
            return client, True
        return self._rights.client(authorization, scope.get(PEER), scope.get(CERTIFICATE)), False

    def require(self, client: Client, right: Right, request: Request) -> None:
        """Raise HttpError 403 if the client does not have a right on the route and the group in the path."""
        route, group = request.path_params.get("route"), request.path_params.get("group")
        if not client.may(right, route, group):
            message = f"{client.name} may not do this: the client needs {right.of(route, group)}"
            hint = "the file of --tokens lists the rights of each client"
            raise HttpError(403, "not-permitted", message, hint=hint)

    def reauthorize(self, request: Request, right: Right) -> None:
        """Raise HttpError 401 or 403 if a waiting request would no longer be admitted."""
        self.require(self.client(request)[0], right, request)

    def _of_session(self, request: Request) -> Client | None:
        number, now = request.cookies.get(self._cookie(request), ""), time.monotonic()
        if (session := self._sessions.get(number)) is None:
            return None
        if now - session.used <= _IDLE_SECONDS:
            with suppress(WaldError):
                client = self._rights.client(session.authorization, None)
                session.used = now
                self._sessions.move_to_end(number)
                return client
        del self._sessions[number]
        return None

    def begin(self, request: Request, response: Response, token: str) -> None:
        """Start a session, and set its cookie in ``response``.

        A known token always begins a session, however many unknown ones have come from its address, which a proxy may
        share among clients. Tokens have 256 random bits, so the limit is against noise rather than guesses.
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
        number = secrets.token_urlsafe(32)
        self._set(request, response, number)
        own = [number for number, session in self._sessions.items() if session.client == client]
        if len(own) == _SESSIONS_OF_CLIENT:
            del self._sessions[own[0]]
        while len(self._sessions) >= _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        self._sessions[number] = _Session(client, authorization, time.monotonic())

    def end(self, request: Request, response: Response) -> None:
        self._set(request, response, "")

    def _require_few_wrong(self, address: str) -> None:
        began = time.monotonic() - _WRONG_SECONDS
        lately = [at for at in self._wrong.pop(address, ()) if at > began]
        if lately:
            self._wrong[address] = lately
        if len(lately) >= _WRONG_MAX:
            seconds = math.ceil(lately[0] - began)
            message = f"{_WRONG_MAX} wrong tokens have come from {address or 'this client'}: wait {seconds} s"
            raise HttpError(429, "too-many", message, retry=seconds)

    def _set(self, request: Request, response: Response, value: str) -> None:
        """End the session of a request, and set the cookie of another session; "" removes it."""
        self._sessions.pop(request.cookies.get(self._cookie(request), ""), None)
        response.set_cookie(
            self._cookie(request),
            value,
            max_age=None if value else 0,
            path="/",
            # behind a proxy, the origin of the login form shows that the browser uses TLS
            secure=request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://"),
            httponly=True,
            samesite="strict",
        )

    def _cookie(self, request: Request) -> str:
        """Return the cookie's name; with TLS, one that no plain connection can set (RFC 6265bis, section 4.1.3.2)."""
        return ("__Host-" if request.url.scheme == "https" else "") + self._name


def _unknown(why: str, hint: str = "Authorization: Bearer TOKEN") -> HttpError:
    return HttpError(401, "unauthorized", why, hint=hint, headers={"WWW-Authenticate": 'Bearer realm="wald"'})


_SAFE = ("GET", "HEAD", "OPTIONS")
_LOCAL = "localhost"
_ADDRESS_MAX = 64  # characters, more than the longest address has
_FOR, _PROTO = b"x-forwarded-for", b"x-forwarded-proto"
_SCHEMES = ("http", "https")


def require_own_page(request: Request) -> None:
    """Raise HttpError 403 for a change that another site's page made a browser send (CSRF)."""
    origin = request.headers.get("origin")
    if origin is not None and request.method not in _SAFE:
        host = request.headers.get("host", "")
        if origin.partition("://")[2] != host:
            raise HttpError(403, "other-origin", f"a page of {origin[:200]} may not do this on {host[:200]}")


def require_own_name(request: Request, hosts: Collection[str], *, guarded: bool) -> None:
    """Raise HttpError 421 if Host is not a name of the gate. If ``guarded``, any host is fine unless names are set."""
    if (guarded and not hosts) or PEER in request.scope:  # a unix socket, which no page can reach
        return
    name = _name_of(request.headers.get("host", ""))
    if not (
        name == _LOCAL or name in map(str.lower, hosts) or (len(name) <= _ADDRESS_MAX and _address(name) is not None)
    ):
        raise HttpError(421, "other-host", f"this is not {name[:200]!r}", hint=f"--host {name[:200]} accepts this name")


@lru_cache(64)
def _name_of(host: str) -> str:
    """Return Host in lower case without its port (RFC 9110, section 7.2)."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


class TrustedProxies:
    """Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; those of other peers are ignored."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ip_network(each) for each in networks]

    def apply(self, scope: Scope) -> None:
        """Set the address and the scheme of a request to those of the client if a trusted proxy sent it.

        The last address in X-Forwarded-For that does not belong to a trusted proxy is the client's: a client can write
        anything in front of it.
        """
        if not scope["client"] or not self.has(scope["client"][0]):
            return
        for found in _last_first(scope, _FOR):
            client = _address(found)
            if client is None:
                break
            scope["client"] = (str(client), 0)
            if not self.has(str(client)):
                break
        scheme = next(_last_first(scope, _PROTO), "").lower()
        if scheme in _SCHEMES:
            scope["scheme"] = scheme

    def has(self, address: str) -> bool:
        peer = _address(address) if self._networks else None
        return peer is not None and any(peer in each for each in self._networks)


def _last_first(scope: Scope, name: bytes) -> Iterator[str]:
    """Yield the items of a list that may be in several headers, the last one first."""
    for key, value in reversed(scope["headers"]):
        if key == name:
            for item in reversed(value.decode("latin-1").split(",")):
                yield item.strip()


@lru_cache(256)
def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address, or return None; an IPv4-mapped IPv6 address becomes IPv4."""
    try:
        found = ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
