"""A good client alongside hostile ones: how long it waits for an OK, and whether it always gets a connection.

The hostile clients belong to another user if root runs this; a good one to the daemon's user unless a row says
otherwise. Measurements without and with each kind of them take turns. In the second part the limits are the default
ones, so the hostile clients use all places that they can get; a user at its own limit has no guarantee.

The clients run in separate processes, which become the user with the id USER:

    hostile SOCKET USER good RECORDS SECONDS    one request at a time; prints the median and the 99th percentile of µs
    hostile SOCKET USER newcomer SECONDS        a new connection every 100 ms; prints how many got no answer
    hostile SOCKET USER idle|half|mute|storm COUNT    prints a line when all are connected, and stays until stdin ends
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.brokers import wald_exchange
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Daemon, Stage, environment

_GROUP = "One good client beside hostile ones, on disk"
_PLACES = "New connections beside hostile ones, default limits"
_MANY = {"connections_max": 4096, "connections_per_user": 4096}
_CROWD = 1000
_KINDS = {  # each that reads no reply sends some 10,000 records before nothing more is taken from it
    "idle": (_CROWD, "1,000 that send nothing"),
    "half": (_CROWD, "1,000 half-sent requests"),
    "mute": (50, "50 that read no reply"),
    "storm": (50, "a storm of connections"),
}
_CALM_SECONDS = 0.2
_GOOD_USER, _OTHER_USER = 54331, 54332  # they need no entry in the user database


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    seconds = 0.5 if stage.quick else 2.0
    rows = [*_latency(stage, seconds), *_places(stage, seconds)]
    return rows, [] if os.geteuid() == 0 else ["other users (only root can be another)"]


def _latency(stage: Stage, seconds: float) -> list[Row]:
    times: dict[str, list[tuple[float, float]]] = {}

    rows: list[Row] = []
    with _daemon(stage, **_MANY) as daemon:

        def alone(name: str, records: int) -> float:
            _calm(daemon)
            answer = _start(os.geteuid(), daemon.socket, "good", records, seconds).communicate()[0]
            median, late = map(float, answer.split())
            times.setdefault(name, []).append((median, late))
            return late

        def beside(kind: str, records: int) -> float:
            with _hostile(_other(_OTHER_USER), daemon.socket, kind, _KINDS[kind][0]):
                return alone(kind, records)

        for records in (1, 1000):
            contenders: dict[str, Callable[[], float]] = {}
            for kind in _KINDS:
                contenders[f"alone {kind}"] = partial(alone, f"alone {kind}", records)
                contenders[kind] = partial(beside, kind, records)
            times.clear()
            late = Samples.alternate(contenders, stage.repeat)
            median = Samples({name: [each for each, _ in found] for name, found in times.items()})
            for kind, (_, words) in _KINDS.items():
                what = f"{words}, {records:,} a request"
                for samples, which, goal in ((median, "p50", None), (late, "p99", Goal(2, at_most=True))):
                    row = samples.rows(_GROUP, f"µs {which}", (kind, what), {f"alone {kind}": goal})[0]
                    rows.append(replace(row, peer="alone"))
        rows.append(
            Row(
                _GROUP, "the daemon's peak (VmHWM)", "MiB", daemon.peak_bytes() / (1 << 20), goal=Goal(64, at_most=True)
            )
        )
    return rows


def _places(stage: Stage, seconds: float) -> list[Row]:
    """Return the connections without an answer: of the daemon's user, of another, and of the hostile clients' user."""
    rows = []
    for kind, (_, words) in _KINDS.items():
        with _daemon(stage) as daemon, _hostile(_other(_OTHER_USER), daemon.socket, kind, _CROWD):
            good = [
                _start(user, daemon.socket, "newcomer", 2 * seconds)
                for user in (os.geteuid(), _other(_GOOD_USER), _other(_OTHER_USER))
            ]
            refused = [int(process.communicate()[0]) for process in good]
        for user, number in zip(("the daemon's user", "another user", "the same user"), refused, strict=True):
            goal = None if user == "the same user" else Goal(0, at_most=True)
            what = words.removeprefix("1,000 ").removeprefix("50 ")
            rows.append(Row(_PLACES, f"{what}, {user}", "refused", number, goal=goal))
    return rows


@contextmanager
def _daemon(stage: Stage, **settings: object) -> Iterator[Daemon]:
    with Daemon(stage.fresh(stage.disk), socket_mode="0666", **settings) as daemon:
        daemon.root.chmod(0o755)
        yield daemon


def _other(user_id: int) -> int:
    return user_id if os.geteuid() == 0 else os.geteuid()


@contextmanager
def _hostile(user_id: int, path: Path, kind: str, count: int) -> Iterator[None]:
    with _start(user_id, path, kind, count) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.stdin.close()


def _calm(daemon: Daemon) -> None:
    """Wait until the daemon has processed everything that hostile clients have sent."""
    with daemon.connect() as producer:
        before = -1
        while (records := json.loads(producer.command("STAT"))["records"]) != before:
            before = records
            time.sleep(_CALM_SECONDS)


def _start(user_id: int, path: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.hostile", *map(str, (path, user_id, *words))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


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
    """Return the number of new connections that got no answer."""
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
    """Send only a line, half of the payload, or a byte each second: a third of the connections each."""
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
    """Send requests as long as the socket accepts some, and read no reply."""
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
    """Connect and disconnect, ``count`` at a time."""
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
"""Behaviour of each kind, and its pause between two steps."""


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
