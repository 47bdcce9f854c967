"""Producers on a socket: each client has one request under way, and sends the next when it is answered.

The same client for wald and for Redis, in a process of its own. Run as a program:

    clients SOCKET wald|redis CLIENTS RECORDS SECONDS     RECORDS a request; prints requests per second
"""

from __future__ import annotations

import select
import socket
import sys
import time

from benchmarks.stage import ROUTE

RECORD = (
    b'10.10.20.30 - - [1700000000.123456] "GET /a/0123456789.html" 200 12345 "agent/12.345 (like nothing else at all)"'
)


def wald_request(records: int) -> tuple[bytes, int]:
    """The request, and how many newlines answer it."""
    payload = (RECORD + b"\n") * records
    return b"PUB %s %d\n%s" % (ROUTE.encode(), len(payload), payload), 1


def redis_request(records: int) -> tuple[bytes, int]:
    """``records`` pipelined XADDs; each is answered by a bulk string, which is two lines."""
    words = (b"XADD", ROUTE.encode(), b"*", b"v", RECORD)
    command = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return command * records, 2 * records


def requests_per_second(path: str, request: bytes, newlines: int, clients: int, seconds: float) -> float:
    connections: dict[int, socket.socket] = {}
    missing: dict[int, int] = {}
    poller = select.epoll()
    for _ in range(clients):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connections[connection.fileno()] = connection
        poller.register(connection, select.EPOLLIN)
    for descriptor, connection in connections.items():
        missing[descriptor] = newlines
        connection.sendall(request)
    answered = 0
    began = time.perf_counter()
    end = began + seconds
    while (now := time.perf_counter()) < end:
        for descriptor, _ in poller.poll():
            reply = connections[descriptor].recv(1 << 16)
            if reply[:1] not in b"O$0123456789-\r\n" or reply[:1] == b"-" or not reply:
                raise SystemExit(f"refused: {reply[:200]!r}")
            missing[descriptor] -= reply.count(b"\n")
            if missing[descriptor] == 0:
                answered += 1
                missing[descriptor] = newlines
                connections[descriptor].sendall(request)
    return answered / (now - began)


if __name__ == "__main__":
    path, kind, clients, records, seconds = sys.argv[1:]
    request, newlines = {"wald": wald_request, "redis": redis_request}[kind](int(records))
    print(requests_per_second(path, request, newlines, int(clients), float(seconds)))
