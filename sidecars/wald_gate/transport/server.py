"""The server: listens on TCP and on a unix socket, speaks TLS, and bounds what connections take."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from wald.errors import InvalidInput
from wald_gate.transport.connection import Bounds, Connection

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 1024
_GRACE_SECONDS = 10  # for requests under way, at the end
_SOCKET_MODE = 0o666  # each user may connect; what they may do is theirs to prove


@dataclass(frozen=True)
class Listening:
    """Where and how the gate listens.

    Attributes:
        host, port: of TCP; host "" for none.
        path: of a unix socket, or None.
        certificate, key: files in PEM; None: no TLS.
        authorities: certificates of which each client must show a descendant; None: none need.
        inherited: sockets that systemd handed over; with them, host, port and path are not used.
    """

    host: str
    port: int
    path: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    authorities: Path | None = None
    inherited: Sequence[socket.socket] = ()

    def require_safe(self, *, has_tokens: bool, insecure: bool) -> None:
        """
        Raises:
            InvalidInput: other machines could connect, without TLS or without tokens.
        """
        hosts = [each.getsockname()[0] for each in self.inherited if each.family != socket.AF_UNIX]
        if not self.inherited and self.host:
            hosts.append(self.host)
        if insecure or all(host in _LOOPBACK for host in hosts):
            return
        missing = [name for name, there in (("TLS", self.certificate), ("tokens", has_tokens)) if not there]
        if missing:
            raise InvalidInput(
                f"{' and '.join(hosts)}: other machines can connect there, without {' and '.join(missing)}",
                hint="--certificate FILE --key FILE --tokens FILE; --insecure, if something in front does both",
            )

    def tls(self) -> ssl.SSLContext | None:
        """The certificates, read now.

        Raises:
            InvalidInput: one cannot be read, or does not belong to its key.
        """
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load(context)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Read the certificates again, for connections from now on.

        Raises:
            InvalidInput: as of :meth:`tls`.
        """
        assert self.certificate is not None
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(path) for path in (self.certificate, self.key, self.authorities) if path is not None)
            raise InvalidInput(f"{files}: {error}", hint="openssl x509 -noout -text -in FILE") from None


class Server:
    """Serves an application on what ``listening`` says.

    Args:
        bounds: of the connections.

    Attributes:
        addresses: where it listens, once it does.
    """

    def __init__(self, application: ASGIApp, listening: Listening, bounds: Bounds) -> None:
        self._protocol: type[Connection] = type("BoundConnection", (Connection,), {"bounds": bounds})
        self._listening = listening
        self._tls = listening.tls()
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
        self._servers: list[asyncio.Server] = []
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Listen.

        Raises:
            InvalidInput: the address is in use, or is none of this machine.
        """
        loop, listening = asyncio.get_running_loop(), self._listening
        self._tick()
        if listening.inherited:
            await self._inherit(listening.inherited)
            return
        try:
            if listening.host:
                server = await loop.create_server(
                    self._connection, listening.host, listening.port, ssl=self._tls, backlog=_BACKLOG
                )
                self._servers.append(server)
                self.addresses.append(self._address(server.sockets[0]))
            if listening.path is not None:
                self._servers.append(await _unix_server(self._connection, listening.path))
                self.addresses.append(str(listening.path))
        except OSError as error:
            where = f"{listening.host}:{listening.port}" if error.errno and not self._servers else listening.path
            raise InvalidInput(
                f"--listen {where}: {error.strerror}", hint="ss -ltnp; --listen 127.0.0.1:7701"
            ) from None

    def read_certificates(self) -> None:
        """Take new certificates, for connections from now on.

        Raises:
            InvalidInput: they cannot be read; the old ones stay.
        """
        if self._tls is not None:
            self._listening.tls()  # first, as a context that has failed is of no use
            self._listening.load(self._tls)

    async def stop(self) -> None:
        """Take no more connections, and end when the requests under way are answered, or after some seconds."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(self._state.tasks, timeout=_GRACE_SECONDS)
            for task in late:
                task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._listening.path is not None and not self._listening.inherited:
            self._listening.path.unlink(missing_ok=True)

    async def _inherit(self, sockets: Sequence[socket.socket]) -> None:
        """Take the connections of sockets that are systemd's, which outlive this process.

        Raises:
            InvalidInput: one takes no connections.
        """
        loop = asyncio.get_running_loop()
        for each in sockets:
            if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise InvalidInput(
                    f"systemd handed over {each.getsockname()}, which takes no connections",
                    hint="ListenStream=, and no Accept=yes",
                )
            self.addresses.append(self._address(each))
            if each.family == socket.AF_UNIX:
                self._servers.append(await loop.create_unix_server(self._connection, sock=each, backlog=_BACKLOG))
            else:
                server = await loop.create_server(self._connection, sock=each, ssl=self._tls, backlog=_BACKLOG)
                self._servers.append(server)

    def _address(self, listener: socket.socket) -> str:
        """The address of a socket, as a client writes it."""
        if listener.family == socket.AF_UNIX:
            return str(listener.getsockname())
        host, port = listener.getsockname()[:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def _connection(self) -> Connection:
        return self._protocol(config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        """Keep the Date of answers."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        asyncio.get_running_loop().call_later(1.0, self._tick)


async def _unix_server(connection: Callable[[], asyncio.Protocol], path: Path) -> asyncio.Server:
    """A server at ``path``, in the place of one that has ended."""
    probe = socket.socket(socket.AF_UNIX)
    with probe, suppress(OSError):
        probe.connect(os.fspath(path))
        raise InvalidInput(f"--uds {path}: another process listens there", hint=f"fuser {path}")
    path.unlink(missing_ok=True)
    server = await asyncio.get_running_loop().create_unix_server(connection, path, backlog=_BACKLOG)
    path.chmod(_SOCKET_MODE)
    return server
