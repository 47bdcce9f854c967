"""Which site a request comes from: what a browser may be made to send is refused.

A page of another site can send requests to the gate (Origin names the site then), or have its own name resolve to the
address of the gate, so that the gate is of its site for the browser (DNS rebinding; Host is the name then). A program
sends no Origin. An address as Host was typed by no site, as an address does not resolve to another one.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

from starlette.requests import Request

from wald_gate.problems import HttpError
from wald_gate.rights.clients import PEER

_SAFE = ("GET", "HEAD", "OPTIONS")
_LOCAL = "localhost"


def require_own_page(request: Request) -> None:
    """
    Raises:
        HttpError: 403, the page of another site has let a browser send it, with the rights of its user.
    """
    origin = request.headers.get("origin")
    if request.method not in _SAFE and origin is not None:
        host = request.headers.get("host", "")
        if origin.partition("://")[2] != host:
            raise HttpError(403, "other-origin", f"a page of {origin[:200]} may not do this on {host[:200]}")


def require_own_name(request: Request, hosts: Collection[str], *, guarded: bool) -> None:
    """
    Args:
        hosts: the names of the gate.
        guarded: whether a client has to show who it is; then any name will do if ``hosts`` has none.

    Raises:
        HttpError: 421, the request is for another host.
    """
    if PEER in request.scope:  # a unix socket, which no page reaches
        return
    name = _name_of(request.headers.get("host", "")).lower().removesuffix(".")
    if (guarded and not hosts) or name == _LOCAL or name in map(str.lower, hosts) or _is_address(name):
        return
    raise HttpError(421, "other-host", f"this is not {name[:200]!r}", hint=f"--host {name[:200]}, if it is to be")


def _name_of(host: str) -> str:
    """Host without its port (RFC 9110, section 7.2)."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
