"""Clients of one socket: a good one, whose requests are timed, and the hostile ones beside it.

Each runs in a process of its own, which becomes the user with the id USER:

    crowd SOCKET USER good RECORDS SECONDS    one request at a time; prints the median and the 99th percentile of µs
    crowd SOCKET USER newcomer SECONDS        a new connection every 100 ms; prints how many got no answer
    crowd SOCKET USER idle|half|mute|storm COUNT    prints a line when all are there, and stays until its stdin ends
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.clients import wald_exchange
from benchmarks.stage import ROUTE

_LARGE = 64 << 20
_KEPT = 200 << 10  # a payload of this length is awaited in memory
_NEWCOMER_SECONDS = 0.1
_TRICKLE_SECONDS = 1.0


def good(path: str, records: int, seconds: float) -> tuple[float, float]:
    request = wald_exchange(records).request
    times: list[float] = []
    connection = _connect(path)
    connection.sendall(b"PING\n")
    connection.recv(100)  # it has a place: how long that takes is a newcomer's affair
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.sendall(request)
        reply = connection.recv(1 << 16)
        times.append(time.perf_counter() - began)
        if not reply.startswith(b"OK "):
            raise SystemExit(f"refused: {reply[:200]!r}")
    times.sort()
    return 1e6 * times[len(times) // 2], 1e6 * times[len(times) * 99 // 100]


def newcomer(path: str, seconds: float) -> int:
    """How many of the new connections got no answer."""
    refused = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with _connect(path) as connection:
                connection.sendall(b"PING\n")
                refused += connection.recv(100) != b"OK pong\n"
        except OSError:
            refused += 1
        time.sleep(_NEWCOMER_SECONDS)
    return refused


def idle(path: str, count: int) -> Iterator[None]:
    connections = [_connect(path) for _ in range(count)]
    yield
    del connections


def half(path: str, count: int) -> Iterator[None]:
    """A third have sent a line only, a third half of their payload, and a third send a byte of it each second."""
    route = ROUTE.encode()
    announced = b"PUB %s %d\n" % (route, _LARGE)
    begun = b"PUB %s %d\n" % (route, _KEPT) + bytes(_KEPT // 2)
    connections = [_connect(path) for _ in range(count)]
    for number, connection in enumerate(connections):
        connection.settimeout(_TRICKLE_SECONDS)
        with contextlib.suppress(OSError):  # refused
            connection.sendall(begun if number % 3 == 1 else announced)
    while True:
        yield
        for connection in connections[2::3]:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")


def mute(path: str, count: int) -> Iterator[None]:
    """They send requests for as long as the socket takes some, and read no reply."""
    request = wald_exchange(1).request
    connections = [_connect(path) for _ in range(count)]
    for connection in connections:
        connection.setblocking(False)
    while True:
        for connection in connections:
            with contextlib.suppress(OSError):
                while connection.send(request * 100):
                    pass
        yield


def storm(path: str, count: int) -> Iterator[None]:
    """They come and go, ``count`` at a time."""
    while True:
        connections = [_connect(path) for _ in range(count)]
        yield
        for connection in connections:
            connection.close()


HOSTILE: dict[str, tuple[Callable[[str, int], Iterator[None]], float]] = {
    "idle": (idle, _TRICKLE_SECONDS),
    "half": (half, _TRICKLE_SECONDS),
    "mute": (mute, 0.01),
    "storm": (storm, 0.0),
}
"""What they do, and how long they rest between two steps of it."""


def stay(steps: Iterator[None], rest: float) -> None:
    next(steps)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], rest)[0]:
        next(steps, None)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


if __name__ == "__main__":
    path, user_id, kind, *words = sys.argv[1:]
    os.setuid(int(user_id))  # here, because other users may not be able to run this interpreter
    if kind == "good":
        print(*good(path, int(words[0]), float(words[1])))
    elif kind == "newcomer":
        print(newcomer(path, float(words[0])))
    else:
        act, rest = HOSTILE[kind]
        stay(act(path, int(words[0])), rest)
