"""The server: listens on TCP and on a unix socket, speaks TLS, and bounds what connections take."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from wald.errors import InvalidInput
from wald_gate.settings import Settings
from wald_gate.transport.alerts import Context, Handshake
from wald_gate.transport.certificates import server_context
from wald_gate.transport.connection import Bounds, Connection
from wald_gate.transport.expiry import first_expiry
from wald_gate.transport.handshakes import TlsListener
from wald_gate.transport.unix import UnixListener

_log = logging.getLogger("wald_gate")
_BACKLOG = 1024
_PATHS_SECONDS = 1.0  # between checks of the paths of unix sockets
_HEADERS = (  # of every answer
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer, Chromium sends "Origin: null" with a form
)
_GRACE_SECONDS = 10  # for requests under way, at the end
_LAST_SECONDS = 1  # for those to let go of what they have that did not end in that time


@dataclass(frozen=True)
class Listening:
    """Where and how the gate listens.

    Attributes:
        host, port: of TCP; host "" for none.
        path: of a unix socket, or None.
        certificate, key: files in PEM; None: no TLS.
        authorities: certificates of which a client may show a descendant; None: none is asked for.
        inherited: sockets that systemd handed over; with them, host, port and path are not used.
    """

    host: str
    port: int
    path: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    authorities: Path | None = None
    inherited: Sequence[socket.socket] = ()

    @classmethod
    def of(cls, settings: Settings, inherited: Sequence[socket.socket] = ()) -> Listening:
        """
        Raises:
            InvalidInput: an address is none; settings do not fit together; or other machines could connect, without TLS
                or without tokens.
        """
        named = (settings.uds, settings.certificate, settings.key, settings.authorities)
        path, certificate, key, authorities = (Path(each) if each else None for each in named)
        found = cls(*_address(settings.listen), path, certificate, key, authorities, inherited)
        if found.key is not None and found.certificate is None:
            raise InvalidInput(
                "--key: there is no certificate that it belongs to", hint="--certificate FILE --key FILE"
            )
        if found.authorities is not None and not (found.certificate and settings.tokens):
            raise InvalidInput(
                "--authorities: certificates of clients need TLS, and a file that says who may do what",
                hint='--certificate FILE --tokens FILE, with lines as {"name": "shop", "certificate": "shop.example"}',
            )
        if not (found.host or found.path or inherited):
            raise InvalidInput("no address to listen on", hint="--listen 127.0.0.1:7700, or --uds PATH")
        missing = [name for name, there in (("TLS", found.certificate), ("tokens", settings.tokens)) if not there]
        if missing and not settings.insecure and not all(map(_is_loopback, found.hosts)):
            raise InvalidInput(
                f"{' and '.join(found.hosts)}: other machines can connect there, without {' and '.join(missing)}",
                hint="--certificate FILE --key FILE --tokens FILE; --insecure, if a proxy in front provides both",
            )
        return found

    @property
    def hosts(self) -> list[str]:
        """The names or addresses of TCP."""
        if self.inherited:
            return [str(each.getsockname()[0]) for each in self.inherited if each.family != socket.AF_UNIX]
        return [self.host] if self.host else []

    def tls(self) -> Context | None:
        """The certificates, read now; errors are those of :func:`wald_gate.transport.certificates.server_context`."""
        if self.certificate is None:
            return None
        return server_context(self.certificate, self.key or self.certificate, self.authorities)

    def expiries(self) -> dict[str, float]:
        """When the first certificate in each file expires, in seconds since 1970; nothing of one it cannot read."""
        found = {}
        for name, path in (("certificate", self.certificate), ("authorities", self.authorities)):
            if path is not None:
                with suppress(OSError, ValueError):
                    found[name] = first_expiry(path)
        return found

    def unlikely(self) -> Iterator[str]:
        """Which files have a certificate that has expired, so that none will be content with it."""
        files = {"certificate": self.certificate, "authorities": self.authorities}
        for name, at in self.expiries().items():
            if at <= time.time():
                yield f"{files[name]}: a certificate in it has expired on {datetime.fromtimestamp(at, UTC):%Y-%m-%d}"


class Server:
    """Serves an application on what ``listening`` says.

    Args:
        bounds: of the connections.

    Attributes:
        addresses: where it listens, once it does.
    """

    def __init__(self, application: ASGIApp, listening: Listening, bounds: Bounds) -> None:
        self._protocol: type[Connection] = type("BoundConnection", (Connection,), {"bounds": bounds})
        self._bounds = bounds
        self._listening = listening
        self._handshake = type("BoundHandshake", (Handshake,), {"bounds": bounds, "reported": {}})
        self._tls = self._read_tls()
        self._config = uvicorn.Config(
            application,
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._config.load()
        self._state = ServerState()
        self._servers: list[asyncio.Server | TlsListener | UnixListener] = []
        self._watching: asyncio.Task[None] | None = None
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Listen.

        Raises:
            InvalidInput: the address is in use, or is none of this machine.
        """
        listening = self._listening
        self._tick()
        if listening.inherited:
            await self._inherit(listening.inherited)
        elif listening.host:
            try:
                sockets = _listeners(listening.host, listening.port)
            except OSError as error:
                where = f"--listen {listening.host}:{listening.port}"
                raise InvalidInput(f"{where}: {error.strerror}", hint="ss -ltnp lists the ports in use") from None
            for each in sockets:
                await self._listen(each)
            self.addresses.append(self._address(sockets[0]))
        if listening.path is not None and not listening.inherited:
            await self._listen_at(listening.path)
            self.addresses.append(str(listening.path))
        self._watching = asyncio.create_task(self._watch_paths())

    def read_certificates(self) -> bool:
        """Take new certificates, for connections from now on.

        Returns:
            whether an authority is none any more. Then connections that have shown a certificate count as if they had
            not, and end once they have answered.

        Raises:
            InvalidInput: they cannot be read; the old ones stay.
        """
        before, self._tls = self._tls, self._read_tls()
        if _authorities(before) <= _authorities(self._tls):
            return False
        for server in self._servers:
            if isinstance(server, TlsListener):
                server.end_handshakes()
        for connection in list(self._bounds.open):
            connection.distrust()
        return True

    async def stop(self) -> None:
        """Take no more connections, and end when the requests under way are answered, or after some seconds."""
        if self._watching is not None:
            self._watching.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await _ended(self._state.tasks, _GRACE_SECONDS)
        for connection in list(self._state.connections):
            connection.transport.abort()  # who waits for a client hears of it, and ends
        await _ended(self._state.tasks, _LAST_SECONDS)
        for task in list(self._state.tasks):
            task.cancel()
        await _ended(self._state.tasks, _LAST_SECONDS)
        for server in self._servers:
            if isinstance(server, UnixListener):
                server.remove()

    async def _inherit(self, sockets: Sequence[socket.socket]) -> None:
        """Take the connections of sockets that are systemd's, which outlive this process.

        Raises:
            InvalidInput: one takes no connections.
        """
        for each in sockets:
            if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise InvalidInput(
                    f"systemd handed over {each.getsockname()}, which accepts no connections",
                    hint="ListenStream=, and no Accept=yes",
                )
            self.addresses.append(self._address(each))
            if each.family == socket.AF_UNIX:
                await self._listen_at(Path(os.fsdecode(each.getsockname())), each)
            else:
                await self._listen(each)

    async def _listen_at(self, path: Path, given: socket.socket | None = None) -> None:
        """Accept the connections of a unix socket."""
        server = UnixListener(self._connection, path, _BACKLOG, given)
        await server.start()
        self._servers.append(server)

    async def _watch_paths(self) -> None:
        """Recreate unix sockets whose paths were removed, and report files that took their place."""
        while True:
            await asyncio.sleep(_PATHS_SECONDS)
            for server in self._servers:
                try:
                    happened = await server.restore() if isinstance(server, UnixListener) else ""
                except OSError as error:  # such as no descriptor left: tried again a second later
                    happened = f"a unix socket that was removed cannot be made again yet: {error}"
                if happened:
                    _log.warning("wald-gate: %s", happened)
                if isinstance(happened, InvalidInput):
                    _log.warning("  hint: %s", happened.hint)

    async def _listen(self, listener: socket.socket) -> None:
        """Take the connections of a socket of TCP, over TLS if there are certificates."""
        if self._tls is not None:
            self._servers.append(TlsListener(listener, self._certificates, self._bounds, self._connection))
        else:
            loop = asyncio.get_running_loop()
            self._servers.append(await loop.create_server(self._connection, sock=listener, backlog=_BACKLOG))

    def _address(self, listener: socket.socket) -> str:
        """The address of a socket, as a client writes it."""
        if listener.family == socket.AF_UNIX:
            return str(listener.getsockname())
        host, port = listener.getsockname()[:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def _read_tls(self) -> Context | None:
        tls = self._listening.tls()
        if tls is not None:
            tls.sslobject_class = self._handshake
        return tls

    def _certificates(self) -> ssl.SSLContext:
        assert self._tls is not None
        return self._tls

    def _connection(self) -> Connection:
        return self._protocol(config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        """Keep the Date of answers."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *_HEADERS]
        asyncio.get_running_loop().call_later(1.0, self._tick)


def _authorities(tls: Context | None) -> frozenset[bytes]:
    return tls.authorities if tls is not None else frozenset()


async def _ended(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    if tasks:
        await asyncio.wait(list(tasks), timeout=seconds)


def _address(given: str) -> tuple[str, int]:
    if not given:
        return "", 0
    host, colon, port = given.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidInput(f"--listen {given}: is not HOST:PORT", hint="--listen 127.0.0.1:7700")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - --insecure is asked for


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen, one for each address that the name has.

    Raises:
        OSError: the name has none, or one is in use, or none of this machine.
    """
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
        except OSError as error:
            failed = error
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # as of IPv6, which may be switched off
                break
    else:
        if sockets or failed is None:
            return sockets
    for each in sockets:
        each.close()
    assert failed is not None
    raise failed


def _is_loopback(host: str) -> bool:
    """Whether only this machine can connect there, by all addresses that the name has now.

    Raises:
        InvalidInput: the name has no address.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise InvalidInput(f"--listen {host}: {error.strerror}", hint="--listen 127.0.0.1:7700") from None
    return all(ip_address(address.partition("%")[0]).is_loopback for address in found)
