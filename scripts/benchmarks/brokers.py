"""Servers that wald is compared with, each in a separate folder and as durable as it can be, and their producers.

A client has one request in flight, and sends the next when it is answered. It is the same for wald, its gate, Redis and
NATS, in a separate process: all connections in one loop, the bytes of a request made once, and an answer only checked
for being one. Run as a program:

    brokers ADDRESS KIND CLIENTS RECORDS SECONDS     RECORDS a request; prints requests per second

KIND is wald, http, redis or nats; ADDRESS a socket, or HOST:PORT.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.stage import ROUTE

Address = str | tuple[str, int]
"""Path of a unix socket, or a host and a port."""
_START_SECONDS = 10.0


@contextmanager
def redis(folder: Path) -> Iterator[Path]:
    """Start a Redis that syncs its file before it answers; yield its socket."""
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
    """Start a NATS server with JetStream; yield its address, as it has no unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    command = ["nats-server", "-c", _nats_settings(folder, address[1], synced=synced)]
    with _served(command, folder, address, b"PING\r\n", b"INFO"):
        yield address


def nats_can_sync(folder: Path) -> bool:
    """Return True if this NATS server can sync each write: `sync_interval` came with 2.10."""
    settings = _nats_settings(folder, 4222, synced=True)
    return subprocess.run(["nats-server", "-t", "-c", settings], capture_output=True, check=False).returncode == 0


@contextmanager
def beanstalkd(folder: Path) -> Iterator[Path]:
    """Start a beanstalkd that syncs each write; yield its socket."""
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
    """Parse the address in a command: a path, or HOST:PORT."""
    host, colon, port = text.rpartition(":")
    return (host, int(port)) if colon else text


def text_of(address: Address) -> str:
    """Return an address for a command."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _nats_settings(folder: Path, port: int, *, synced: bool) -> Path:
    path = folder / "nats.conf"
    always = ", sync_interval: always" if synced else ""
    path.write_text(f'listen: "127.0.0.1:{port}"\nping_interval: "1h"\njetstream {{ store_dir: "{folder}"{always} }}\n')
    return path


@contextmanager
def _served(command: list[object], folder: Path, address: Address, request: bytes, answer: bytes) -> Iterator[None]:
    """Run a server, starting with its first answer; its output goes to ``folder``."""
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


RECORD = (
    b'10.10.20.30 - - [1700000000.123456] "GET /a/0123456789.html" 200 12345 "agent/12.345 (like nothing else at all)"'
)
_CHUNK = 1 << 16
_NATS_PING = b"PING\r\n"  # a while after a connection began


class Exchange(NamedTuple):
    """A request, and the way to recognise its answer.

    Attributes:
        good: beginning of a good answer.
        mark, marks: the answer is complete with this number of these bytes.
        hello: sent at the beginning of the connection; its answer ends with a newline.
    """

    request: bytes
    good: bytes
    mark: bytes = b"\n"
    marks: int = 1
    hello: bytes = b""


def wald_exchange(records: int, _client: int = 0) -> Exchange:
    payload = (RECORD + b"\n") * records
    return Exchange(b"PUB %s %d\n%s" % (ROUTE.encode(), len(payload), payload), b"OK ")


def http_exchange(records: int, _client: int) -> Exchange:
    """Return a request as curl sends it; the answer is one JSON object."""
    payload = (RECORD + b"\n") * records
    head = (
        f"POST /v1/routes/{ROUTE}/records HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return Exchange(head.encode() + payload, b"HTTP/1.1 200 ", b"}")


def redis_exchange(records: int, _client: int) -> Exchange:
    """Return ``records`` pipelined XADDs; each is answered by a bulk string, which is two lines."""
    words = (b"XADD", ROUTE.encode(), b"*", b"v", RECORD)
    command = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return Exchange(command * records, b"$", marks=2 * records)


def nats_exchange(records: int, client: int) -> Exchange:
    """Return ``records`` messages, each answered by a message, which is two lines; needs a stream."""
    inbox = b"a%d" % client
    options = {"verbose": False, "pedantic": False, "headers": False, "lang": "none", "version": "1"}
    message = b"PUB %s %s %d\r\n%s\r\n" % (ROUTE.encode(), inbox, len(RECORD), RECORD)
    hello = b"CONNECT %s\r\nSUB %s 1\r\n" % (json.dumps(options).encode(), inbox)
    return Exchange(message * records, b"MSG %s 1 " % inbox, marks=2 * records, hello=hello)


def requests_per_second(address: Address, exchanges: Sequence[Exchange], seconds: float) -> float:
    """Run a client for each of ``exchanges``."""
    clients: dict[int, tuple[socket.socket, Exchange]] = {}
    begun: dict[int, bytes] = {}  # received part of an answer
    poller = select.epoll()
    for exchange in exchanges:
        connection = connected(address)
        if exchange.hello:
            connection.sendall(exchange.hello)
            connection.recv(_CHUNK)
        clients[connection.fileno()] = connection, exchange
        poller.register(connection, select.EPOLLIN)
    for descriptor, (connection, exchange) in clients.items():
        begun[descriptor] = b""
        connection.sendall(exchange.request)
    answered = 0
    began = time.perf_counter()
    end = began + seconds
    while (now := time.perf_counter()) < end:
        for descriptor, _ in poller.poll():
            connection, (request, good, mark, marks, _) = clients[descriptor]
            answer = begun[descriptor] + connection.recv(_CHUNK)
            if answer.startswith(_NATS_PING):
                connection.sendall(b"PONG\r\n")
                answer = answer.removeprefix(_NATS_PING)
            elif not answer.startswith(good) or b"error" in answer:
                raise SystemExit(f"refused: {answer[:200]!r}")
            if answer.count(mark) == marks:
                answered += 1
                answer = b""
                connection.sendall(request)
            begun[descriptor] = answer
    return answered / (now - began)


EXCHANGES = {"wald": wald_exchange, "http": http_exchange, "redis": redis_exchange, "nats": nats_exchange}

if __name__ == "__main__":
    address, kind, clients, records, seconds = sys.argv[1:]
    exchanges = [EXCHANGES[kind](int(records), client) for client in range(int(clients))]
    print(requests_per_second(address_of(address), exchanges, float(seconds)))
