"""Clients behind reverse proxies, which report the address and the scheme of a request in its headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.types import Scope

_FOR, _PROTO = b"x-forwarded-for", b"x-forwarded-proto"
_SCHEMES = ("http", "https")


class TrustedProxies:
    """Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; those of other peers are ignored.

    Args:
        networks: addresses and networks.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ip_network(each) for each in networks]

    def apply(self, scope: Scope) -> None:
        """Set the address and the scheme of a request to the client's if a trusted proxy has sent it.

        The last address in X-Forwarded-For that does not belong to a trusted proxy is the client's: a client can write
        anything in front of it.
        """
        peer = _address(scope["client"][0]) if self._networks and scope["client"] else None
        if peer is None or not self._is_trusted(peer):
            return
        client = peer
        for found in _last_first(scope, _FOR):
            forwarded = _address(found)
            if forwarded is None:
                break
            client = forwarded
            if not self._is_trusted(client):
                break
        if client != peer:
            scope["client"] = (str(client), 0)
        scheme = next(_last_first(scope, _PROTO), "").lower()
        if scheme in _SCHEMES:
            scope["scheme"] = scheme

    def has(self, address: str) -> bool:
        """Return True if the address of a peer is that of a trusted proxy."""
        peer = _address(address) if self._networks else None
        return peer is not None and self._is_trusted(peer)

    def _is_trusted(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in each for each in self._networks)


def _last_first(scope: Scope, name: bytes) -> Iterator[str]:
    """Yield the items of a list that may be in several headers, the last one first."""
    for key, value in reversed(scope["headers"]):
        if key == name:
            for item in reversed(value.decode("latin-1").split(",")):
                yield item.strip()


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address; an IPv4 address in an IPv6 one is itself. None if it is not an address."""
    try:
        found = ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
