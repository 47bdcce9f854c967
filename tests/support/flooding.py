"""Many connections that have something to say before the daemon looks: it is stopped, they write, it goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from running import Client, Daemon, eventually


def connected(daemon: Daemon, count: int, closing: ExitStack) -> list[Client]:
    """Connections that have a place."""
    clients = [closing.enter_context(Client(daemon.socket_path)) for _ in range(count)]
    for client in clients:
        assert client.ask(b"PING\n") == "OK pong"
    return clients


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Whatever is sent in here the daemon finds at once, when it goes on."""
    daemon.process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{daemon.process.pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)
