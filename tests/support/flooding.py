"""Requests on many connections that arrive while the daemon is stopped."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from running import Client, Daemon, eventually


def connected(daemon: Daemon, count: int, closing: ExitStack) -> list[Client]:
    """Return admitted connections."""
    clients = [closing.enter_context(Client(daemon.socket_path)) for _ in range(count)]
    for client in clients:
        assert client.ask(b"PING\n") == "OK pong"
    return clients


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Stop the daemon, so that it receives all requests of the block at once."""
    daemon.process.send_signal(signal.SIGSTOP)
    status = Path(f"/proc/{daemon.process.pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)
