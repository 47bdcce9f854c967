"""The servers that wald is measured beside, each in a folder of its own, as durable as it can be."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Address = str | tuple[str, int]
"""Of a unix socket, or a host and a port."""
_START_SECONDS = 10.0


@contextmanager
def redis(folder: Path) -> Iterator[Path]:
    """The socket of a Redis that syncs its file before it answers."""
    path = folder / "redis.sock"
    settings = {
        "--port": "0",
        "--unixsocket": path,
        "--dir": folder,
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--save": "",
        "--auto-aof-rewrite-percentage": "0",
    }
    words = [str(word) for pair in settings.items() for word in pair]
    with _served(["redis-server", *words], folder, str(path), b"PING\r\n", b"+PONG"):
        yield path


@contextmanager
def nats(folder: Path, *, synced: bool) -> Iterator[Address]:
    """The address of a NATS server with JetStream; it has no unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    command = ["nats-server", "-c", _nats_settings(folder, address[1], synced=synced)]
    with _served(command, folder, address, b"PING\r\n", b"INFO"):
        yield address


def nats_can_sync(folder: Path) -> bool:
    """Whether this NATS server can sync each write: `sync_interval` came with 2.10."""
    settings = _nats_settings(folder, 4222, synced=True)
    return subprocess.run(["nats-server", "-t", "-c", settings], capture_output=True, check=False).returncode == 0


@contextmanager
def beanstalkd(folder: Path) -> Iterator[Path]:
    """The socket of a beanstalkd that syncs each write."""
    path = folder / "beanstalkd.sock"
    command = ["beanstalkd", "-b", folder, "-f", "0", "-l", f"unix:{path}"]
    with _served(command, folder, str(path), b"stats-tube default\r\n", b"OK"):
        yield path


def connected(address: Address) -> socket.socket:
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def address_of(text: str) -> Address:
    """An address as it stands in a command: a path, or HOST:PORT."""
    host, colon, port = text.rpartition(":")
    return (host, int(port)) if colon else text


def text_of(address: Address) -> str:
    """An address for a command."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _nats_settings(folder: Path, port: int, *, synced: bool) -> Path:
    path = folder / "nats.conf"
    always = ", sync_interval: always" if synced else ""
    path.write_text(f'listen: "127.0.0.1:{port}"\nping_interval: "1h"\njetstream {{ store_dir: "{folder}"{always} }}\n')
    return path


@contextmanager
def _served(command: list[object], folder: Path, address: Address, request: bytes, answer: bytes) -> Iterator[None]:
    """The server that ``command`` starts, from its first answer on; what it says is in ``folder``."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
    try:
        _until(lambda: _answers(address, request, answer), str(command[0]))
        yield
    finally:
        process.terminate()
        process.wait()


def _until(true: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} does not answer")
        time.sleep(0.01)


def _answers(address: Address, request: bytes, answer: bytes) -> bool:
    try:
        with connected(address) as connection:
            connection.sendall(request)
            return connection.recv(100).startswith(answer)
    except OSError:
        return False
