"""The server: listens on TCP, with or without TLS, on a unix socket, and on sockets that systemd passes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from wald.errors import InvalidInput
from wald_gate.http.connection import Connection, LogResponse
from wald_gate.http.exchange import Application
from wald_gate.http.tls import CLIENT, Handshake, TlsContext, first_expiry, server_context
from wald_gate.limits import ConnectionPool
from wald_gate.settings import Settings

_log = logging.getLogger("wald_gate")
_BACKLOG = 1024
_PATH_MAX_BYTES = 107  # of a socket address
_MODE = 0o666  # every user may connect, and is authenticated then
_PATHS_SECONDS = 1.0  # between checks of the paths of unix sockets
_ACCEPTS_AT_ONCE = 8  # before the loop serves open connections: each handshake takes about a millisecond of CPU
_ACCEPT_PAUSE_SECONDS = 1.0  # when no descriptors are left, as asyncio does
_GRACE_SECONDS = 10  # for requests in flight, at the end
_UNSENT_SECONDS = 0.02  # between checks of what is not sent yet, at the end
_LAST_SECONDS = 1  # for requests that are cut off then, to release their resources


class Listening:
    """Addresses and certificates of the gate; with sockets that systemd has passed, the settings name no addresses.

    Raises InvalidInput if settings contradict each other, or other machines could connect without TLS or tokens.
    """

    def __init__(self, settings: Settings, inherited: Sequence[socket.socket] = ()) -> None:
        named = (settings.uds, settings.certificate, settings.key, settings.client_ca)
        self.path, self._certificate, self._key, self._client_ca = (Path(each) if each else None for each in named)
        self.host, self.port = _address(settings.listen)  # "" for no TCP
        self.inherited = inherited
        if self._key is not None and self._certificate is None:
            raise InvalidInput("--key: needs the certificate that it belongs to", hint="--certificate FILE --key FILE")
        if self._client_ca is not None and not (self._certificate and settings.tokens):
            raise InvalidInput(
                "--client-ca: client certificates need TLS and a token file",
                hint='--certificate FILE --tokens FILE, with lines as {"name": "shop", "certificate": "shop.example"}',
            )
        if not (self.host or self.path or inherited):
            raise InvalidInput("no address to listen on", hint="--listen 127.0.0.1:7700, or --uds PATH")
        hosts = [str(each.getsockname()[0]) for each in inherited if each.family != socket.AF_UNIX]
        if not inherited and self.host:
            hosts = [self.host]
        missing = [name for name, there in (("TLS", self._certificate), ("tokens", settings.tokens)) if not there]
        if missing and not settings.insecure and not all(map(_is_loopback, hosts)):
            raise InvalidInput(
                f"{' and '.join(hosts)}: other machines can connect there, without {' and '.join(missing)}",
                hint="--certificate FILE --key FILE --tokens FILE; --insecure, if a proxy in front provides both",
            )

    def tls(self) -> TlsContext | None:
        """Read the certificates; raise the errors of :func:`wald_gate.http.tls.server_context`."""
        if self._certificate is None:
            return None
        return server_context(self._certificate, self._key or self._certificate, self._client_ca)

    def expiries(self) -> dict[str, float]:
        """Return when the first certificate in each readable file expires, in seconds since 1970."""
        found = {}
        for name, path in (("certificate", self._certificate), ("authorities", self._client_ca)):
            if path is not None:
                with suppress(OSError, ValueError):
                    found[name] = first_expiry(path)
        return found

    def warnings(self) -> Iterator[str]:
        files = {"certificate": self._certificate, "authorities": self._client_ca}
        for name, at in self.expiries().items():
            if at <= time.time():
                yield f"{files[name]}: a certificate in it has expired on {datetime.fromtimestamp(at, UTC):%Y-%m-%d}"


class TlsListener:
    """Listener that counts TLS connections before their handshakes, which may be slow or never complete.

    asyncio reports a connection only after its handshake. So the listener accepts and counts connections itself, and
    then hands them to asyncio. An unfinished handshake may make way for another connection, like an idle connection.
    """

    def __init__(self, listener: socket.socket, server: Server) -> None:
        self._listener = listener
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Stop accepting connections, and cancel unfinished handshakes."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.end_handshakes()

    def end_handshakes(self) -> None:
        for handshake in self._handshakes:
            handshake.cancel()

    def _begin(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptors, or no memory
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._begin)
                return
            client = str(address[0])
            if self._server.pool.enter(client):
                self._start(accepted, client)
            else:
                self._server.pool.leave(client)
                accepted.close()

    def _start(self, accepted: socket.socket, client: str) -> None:
        connection, pool = self._server.connection(), self._server.pool
        connection.client_place = client
        handshake = self._loop.create_task(self._hand_over(accepted, connection))
        pool.idle[handshake] = handshake.cancel
        self._handshakes.add(handshake)

        def end(_: asyncio.Task[None]) -> None:  # a task that is cancelled before its first step has no `finally`
            pool.idle.pop(handshake, None)
            self._handshakes.discard(handshake)
            if not connection.is_made:
                accepted.close()
                pool.leave(client)

        handshake.add_done_callback(end)

    async def _hand_over(self, accepted: socket.socket, connection: Connection) -> None:
        CLIENT.set(connection.client_place)  # in this task, and in the callbacks of its connection
        limits = self._server.pool.limits
        with suppress(OSError):  # the client has left, does not speak TLS, or was too slow
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                # Read for each handshake: a loaded context keeps its previous certificates, and a resumed session
                # does not ask for certificates.
                ssl=self._server.tls,
                ssl_handshake_timeout=limits.head_timeout,
                ssl_shutdown_timeout=limits.send_timeout,
            )


def check_path(path: Path) -> None:
    """Check that a unix socket can be created at ``path``; raise InvalidInput if not."""
    parent = path.parent
    if len(os.fsencode(path)) > _PATH_MAX_BYTES:
        raise _refusal(path, f"the path is longer than {_PATH_MAX_BYTES} bytes", "--uds PATH, a shorter one")
    if not parent.is_dir():
        raise _refusal(path, f"the directory {parent} does not exist", f"mkdir {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _refusal(path, f"this user may not write to {parent}", f"ls -ld {parent}")
    if os.path.lexists(path) and not _is_socket(path):
        raise _refusal(path, "the file there is not a socket", f"ls -ld {path}; --uds PATH, another one")


class UnixListener:
    """Server on a unix socket whose path tmp cleaners and operators may remove; systemd keeps a ``given`` one."""

    def __init__(self, server: Server, path: Path, given: socket.socket | None = None) -> None:
        self._server = server
        self._path = path
        self._given = given
        self._listening: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._reported = ""

    async def start(self) -> None:
        """Listen; raise InvalidInput as :func:`check_path` does, or if another process listens there."""
        path, before, serve = self._path, self._listening, asyncio.get_running_loop().create_unix_server
        if self._given is not None:
            self._listening = await serve(self._server.connection, sock=self._given, backlog=_BACKLOG)
        else:
            check_path(path)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
                if probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT):
                    raise _refusal(path, "another process listens there", f"fuser {path}")
            try:
                path.unlink(missing_ok=True)
                self._listening = await serve(self._server.connection, path, backlog=_BACKLOG)
                path.chmod(_MODE)
            except OSError as error:
                raise _refusal(path, error.strerror or str(error), f"ls -ld {path.parent} {path}") from None
        self._identity = _identity_of(path)
        if before is not None:
            before.close()

    async def restore(self) -> None:
        """Recreate the socket if it is gone, and log what happened.

        A file that took its place is left alone, unless it is a socket on which no process listens.
        """
        found = _identity_of(self._path)
        if self._identity in (None, found):  # None: systemd made it in another mount namespace
            self._reported = ""
            return
        how = "removed" if found is None else "replaced"
        try:
            if self._given is not None:
                message = f"{self._path}: the socket that systemd made was {how}, and no client can connect"
                raise InvalidInput(message, hint="systemctl restart wald-gate.socket")
            await self.start()
        except InvalidInput as error:
            if error.message != self._reported:
                self._reported = error.message
                _log.warning("wald-gate: %s\n  hint: %s", error.message, error.hint)
        except OSError as error:  # such as no descriptor left; it tries again a second later
            _log.warning("wald-gate: a unix socket that was removed cannot be recreated yet: %s", error)
        else:
            self._reported = ""
            _log.warning("wald-gate: --uds %s: the socket was %s; recreated", self._path, how)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()

    def remove(self) -> None:
        """Remove the socket, unless it is systemd's, or another file has taken its place."""
        if self._given is None and self._identity is not None and _identity_of(self._path) == self._identity:
            self._path.unlink(missing_ok=True)


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of the file at ``path``; None without a file."""
    try:
        status = path.lstat()
    except (OSError, ValueError):  # ValueError: an abstract address
        return None
    return status.st_dev, status.st_ino


def _is_socket(path: Path) -> bool:
    """Return True for a socket, but not for a link to one, which may belong to another program."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _refusal(path: Path, reason: str, hint: str) -> InvalidInput:
    return InvalidInput(f"--uds {path}: {reason}", hint=hint)


class Server:
    """Serves an application at the addresses in ``listening``."""

    def __init__(
        self, application: Application, listening: Listening, pool: ConnectionPool, log_response: LogResponse
    ) -> None:
        self._application = application
        self._log_response = log_response
        self._listening = listening
        self.pool = pool
        self._handshake = type("PooledHandshake", (Handshake,), {"pool": pool, "reported": {}})
        self.tls = self._read_tls()
        self._servers: list[asyncio.Server | TlsListener | UnixListener] = []
        self._watching: asyncio.Task[None] | None = None
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Listen, or raise InvalidInput if the address is in use, or does not belong to this machine."""
        listening = self._listening
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
        """Use new certificates for new connections; keep the previous ones if the files cannot be read.

        Return True if a client CA was removed. Then open connections lose the rights of their client certificates, and
        are closed after their answers.
        """
        before, self.tls = self.tls, self._read_tls()
        if before is None or self.tls is None or before.authorities <= self.tls.authorities:
            return False
        for server in self._servers:
            if isinstance(server, TlsListener):
                server.end_handshakes()
        for connection in list(self.pool.open):
            connection.distrust()
        return True

    async def stop(self) -> None:
        """Stop accepting connections, and return once requests in flight are answered, after 12 s at the latest."""
        if self._watching is not None:
            self._watching.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.pool.open):
            connection.shut_down()
        await self._finish_answers()
        for connection in list(self.pool.open):
            connection.transport.abort()  # requests that wait for their client end
        await _finish(self.pool.tasks, _LAST_SECONDS)
        for task in list(self.pool.tasks):
            task.cancel()
        await _finish(self.pool.tasks, _LAST_SECONDS)
        for server in self._servers:
            if isinstance(server, UnixListener):
                server.remove()

    async def _finish_answers(self) -> None:
        """Wait until all requests, including pipelined ones that begin later, are answered and the answers are sent."""
        loop, tasks = asyncio.get_running_loop(), self.pool.tasks
        deadline = loop.time() + _GRACE_SECONDS
        while tasks or any(each.transport.get_write_buffer_size() for each in self.pool.open):
            left = deadline - loop.time()
            if left <= 0:
                return
            if tasks:
                await _finish(tasks, left)
            else:
                await asyncio.sleep(_UNSENT_SECONDS)

    async def _inherit(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on sockets from systemd, which outlive this process."""
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
        server = UnixListener(self, path, given)
        await server.start()
        self._servers.append(server)

    async def _watch_paths(self) -> None:
        """Recreate unix sockets whose paths were removed, and report files that took their place."""
        while True:
            await asyncio.sleep(_PATHS_SECONDS)
            for server in self._servers:
                if isinstance(server, UnixListener):
                    await server.restore()

    async def _listen(self, listener: socket.socket) -> None:
        """Accept connections on a TCP socket, with TLS if there are certificates."""
        if self.tls is not None:
            self._servers.append(TlsListener(listener, self))
        else:
            loop = asyncio.get_running_loop()
            self._servers.append(await loop.create_server(self.connection, sock=listener, backlog=_BACKLOG))

    def _address(self, listener: socket.socket) -> str:
        if listener.family == socket.AF_UNIX:
            return str(listener.getsockname())
        host, port = listener.getsockname()[:2]
        return f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def _read_tls(self) -> TlsContext | None:
        tls = self._listening.tls()
        if tls is not None:
            tls.sslobject_class = self._handshake
        return tls

    def connection(self) -> Connection:
        return Connection(self._application, self.pool, self._log_response)


async def _finish(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
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
    """Return listening sockets, one for each address of the name."""
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
    """Return True if only this machine can connect to any address of the name."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise InvalidInput(f"--listen {host}: {error.strerror}", hint="--listen 127.0.0.1:7700") from None
    return all(ip_address(address.partition("%")[0]).is_loopback for address in found)
