"""Accepts TLS connections: each has its place before its handshake, of which many may be slow, or never come.

asyncio says that there is a connection once its handshake is done. So these are accepted and counted here, and handed
over to asyncio then. A handshake waits for its client, as a connection without a request does, and makes way like one.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from wald_gate.transport.alerts import CLIENT
from wald_gate.transport.connection import Bounds, Connection

_AT_ONCE = 8  # are accepted before the loop serves open connections: each handshake takes about a millisecond of it
_PAUSE_SECONDS = 1.0  # when there are no descriptors left, as asyncio does


class TlsListener:
    """Accepts what comes to a socket that listens.

    Args:
        tls: the certificates of a new connection. They are of the time of its handshake: what was loaded into a context
            does not leave it again, and a session that began with one goes on without asking for certificates.
        make: a connection, as yet without a transport.
    """

    def __init__(
        self, listener: socket.socket, tls: Callable[[], ssl.SSLContext], bounds: Bounds, make: Callable[[], Connection]
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._bounds = bounds
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[_Handshake] = set()
        self._is_closed = False
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Take no more connections, and end the handshakes."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.end_handshakes()

    def end_handshakes(self) -> None:
        """End those that are under way."""
        for handshake in self._handshakes:
            handshake.make_way()

    def _begin(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptors, or no memory
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_SECONDS, self._begin)
                return
            client = str(address[0])
            if self._bounds.enter(client):
                self._start(accepted, client)
            else:
                self._bounds.leave(client)
                accepted.close()

    def _start(self, accepted: socket.socket, client: str) -> None:
        connection = self._make()
        connection.client_place = client
        task = self._loop.create_task(self._hand_over(accepted, connection))
        handshake = _Handshake(task)
        self._bounds.idle[handshake] = None
        self._handshakes.add(handshake)

        def end(_: asyncio.Task[None]) -> None:  # not in the task: one that makes way before its first step has none
            self._bounds.idle.pop(handshake, None)
            self._handshakes.discard(handshake)
            if not connection.is_made:
                accepted.close()
                self._bounds.leave(client)

        task.add_done_callback(end)

    async def _hand_over(self, accepted: socket.socket, connection: Connection) -> None:
        CLIENT.set(connection.client_place)  # of this task, and of what the loop does for its connection
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls(),
                ssl_handshake_timeout=self._bounds.limits.head_timeout,
            )
        except OSError:  # the client has gone, speaks no TLS, or was too slow
            pass


class _Handshake:
    """One that is under way."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task

    def make_way(self) -> None:
        self.task.cancel()
