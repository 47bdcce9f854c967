"""Producers on a socket: each client has one request under way, and sends the next when it is answered.

The same client for wald, its gate, Redis and NATS, in a process of its own: all connections in one loop, the bytes of a
request made once, and of an answer only looked at whether it is one. Run as a program:

    clients ADDRESS KIND CLIENTS RECORDS SECONDS     RECORDS a request; prints requests per second

KIND is wald, http, redis or nats; ADDRESS a socket, or HOST:PORT.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.brokers import Address, address_of, connected
from benchmarks.stage import ROUTE

RECORD = (
    b'10.10.20.30 - - [1700000000.123456] "GET /a/0123456789.html" 200 12345 "agent/12.345 (like nothing else at all)"'
)
_CHUNK = 1 << 16
_NATS_PING = b"PING\r\n"  # a while after a connection began


class Exchange(NamedTuple):
    """A request, and how its answer is known.

    Attributes:
        good: what the answer begins with.
        mark, marks: the answer is complete with so many of these bytes.
        hello: what the connection begins with; its answer ends with a newline.
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
    """As curl sends it; the answer is one JSON object."""
    payload = (RECORD + b"\n") * records
    head = (
        f"POST /v1/routes/{ROUTE}/records HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return Exchange(head.encode() + payload, b"HTTP/1.1 200 ", b"}")


def redis_exchange(records: int, _client: int) -> Exchange:
    """``records`` pipelined XADDs; each is answered by a bulk string, which is two lines."""
    words = (b"XADD", ROUTE.encode(), b"*", b"v", RECORD)
    command = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return Exchange(command * records, b"$", marks=2 * records)


def nats_exchange(records: int, client: int) -> Exchange:
    """``records`` messages; each is answered by a message, which is two lines. A stream has to be there."""
    inbox = b"a%d" % client
    options = {"verbose": False, "pedantic": False, "headers": False, "lang": "none", "version": "1"}
    message = b"PUB %s %s %d\r\n%s\r\n" % (ROUTE.encode(), inbox, len(RECORD), RECORD)
    hello = b"CONNECT %s\r\nSUB %s 1\r\n" % (json.dumps(options).encode(), inbox)
    return Exchange(message * records, b"MSG %s 1 " % inbox, marks=2 * records, hello=hello)


def requests_per_second(address: Address, exchanges: Sequence[Exchange], seconds: float) -> float:
    """Of a client for each of ``exchanges``."""
    clients: dict[int, tuple[socket.socket, Exchange]] = {}
    begun: dict[int, bytes] = {}  # what has come of an answer
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
