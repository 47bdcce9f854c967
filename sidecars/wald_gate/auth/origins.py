"""Origins of requests: other sites, which are refused, and clients behind reverse proxies.

The page of another site can make a browser send requests to the gate, whose Origin then names that site. It can also
make its own host name resolve to the address of the gate (DNS rebinding), so that Host names the site. Programs send no
Origin. An IP address in Host is safe, because it cannot resolve to another address.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.requests import Request
from starlette.types import Scope

from wald_gate.auth.clients import PEER
from wald_gate.problems import HttpError

_SAFE = ("GET", "HEAD", "OPTIONS")
_LOCAL = "localhost"
_ADDRESS_MAX = 64  # characters, more than the longest address has
_FOR, _PROTO = b"x-forwarded-for", b"x-forwarded-proto"
_SCHEMES = ("http", "https")


def require_own_page(request: Request) -> None:
    """Raise HttpError 403 for a change that the page of another site has made a browser send."""
    origin = request.headers.get("origin")
    if origin is not None and request.method not in _SAFE:
        host = request.headers.get("host", "")
        if origin.partition("://")[2] != host:
            raise HttpError(403, "other-origin", f"a page of {origin[:200]} may not do this on {host[:200]}")


def require_own_name(request: Request, hosts: Collection[str], *, guarded: bool) -> None:
    """Raise HttpError 421 for a host that is not among the names of the gate; if ``guarded``, it needs none."""
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
        """Set the address and the scheme of a request to the client's if a trusted proxy has sent it.

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
        """Return True if the address of a peer is that of a trusted proxy."""
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
    """Parse an address; an IPv4 address in an IPv6 one is itself. None if it is not an address."""
    try:
        found = ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
