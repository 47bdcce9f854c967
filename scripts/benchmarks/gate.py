"""The gate: records over HTTP, compared with the daemon's socket, Redis Streams and NATS JetStream, and their latency.

Clients, gate and daemon share the processors. All contenders have the same client, which makes its requests once and
checks only the beginning and the end of an answer. HTTP and NATS are reached over TCP, the others over a unix socket.

Run as a program, it follows a route over HTTP and prints how long records take to arrive:

    gate GATE ADDRESS SECONDS    appends at ADDRESS, the gate or the daemon's socket; prints p50 and p99 in µs

One record is in flight at a time. It is appended up to 20 ms after the previous one has arrived, so that a follower
cannot know when to look. The time ends when its event arrives.
"""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks import brokers
from benchmarks.brokers import Address, address_of, connected
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import Daemon, Stage, environment, in_python

_GROUP = "The gate: HTTP, on disk, a sync before every answer"
_LATENCY = "The gate: from an append to the event of a client that follows"
_BATCH = 1000
_PIPELINED = 64
_SERVES = re.compile(r"serves .* on http://(\S+)")
_SYNCED, _UNSYNCED = "NATS JetStream", "NATS JetStream, no sync"
_LEASED_PER_SECOND = 200_000  # of a worker that is faster the time ends earlier


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    seconds = 0.7 if stage.quick else 3.0
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(stage.fresh(stage.disk)))
        with daemon.connect() as producer:
            producer.command("ROUTE", "ADD", FOLLOWED)
        address = stack.enter_context(gate(daemon.root))
        clients = partial(_requests, seconds=seconds)
        records = min(int(_LEASED_PER_SECOND * seconds), stage.lines)
        names = (f"g{number}" for number in count())

        def worker(address: object, kind: str) -> float:
            return float(in_python("queues", address, kind, "hundred", next(names), records, seconds))

        values = stage.lines_file(records)
        daemon.feed(values, records)
        leased: dict[str, Callable[[], float]] = {"wald": partial(worker, address, "gate")}
        many: dict[str, Callable[[], float]] = {
            "wald": lambda: _BATCH * clients(address, "http", 8, _BATCH),
            "the daemon's socket": lambda: _BATCH * clients(daemon.socket, "wald", 8, _BATCH),
        }
        one: dict[str, Callable[[], float]] = {
            "wald": partial(clients, address, "http", 64, 1),
            "the daemon's socket": partial(clients, daemon.socket, "wald", 64, 1),
        }
        if shutil.which("redis-server"):
            redis = stack.enter_context(brokers.redis(stage.fresh(stage.disk)))
            in_python("queues", redis, "redis", "fill", values, records)
            leased["Redis Streams"] = partial(worker, redis, "redis")
            many["Redis Streams, 64 a time"] = lambda: _PIPELINED * clients(redis, "redis", 8, _PIPELINED)
            one["Redis Streams"] = partial(clients, redis, "redis", 64, 1)
        if shutil.which("nats-server"):
            folder = stage.fresh(stage.disk)
            synced = brokers.nats_can_sync(folder)
            nats = brokers.text_of(stack.enter_context(brokers.nats(folder, synced=synced)))
            in_python("queues", nats, "nats", "fill", values, records)
            leased[_SYNCED if synced else _UNSYNCED] = partial(worker, nats, "nats")
            one[_SYNCED if synced else _UNSYNCED] = partial(clients, nats, "nats", 64, 1)
        rows = [
            *Samples.alternate(leased, stage.repeat).rows(
                _GROUP,
                "records/s",
                ("wald", "lease and acknowledge, 100 each"),
                dict.fromkeys(["Redis Streams", _SYNCED, _UNSYNCED], Goal(1)),
            ),
            *Samples.alternate(many, stage.repeat).rows(
                _GROUP,
                "records/s",
                ("wald", "8 clients × 1,000 lines"),
                {"Redis Streams, 64 a time": Goal(5), "the daemon's socket": Goal(0.5)},
            ),
            *Samples.alternate(one, stage.repeat).rows(
                _GROUP,
                "acks/s",
                ("wald", "64 clients × 1 record"),
                dict.fromkeys(["Redis Streams", _SYNCED, _UNSYNCED, "the daemon's socket"]),
            ),
            *_latencies(stage, address, daemon, seconds),
        ]
    return rows, [name for name in ("redis-server", "nats-server") if not shutil.which(name)]


@contextmanager
def gate(root: Path) -> Iterator[str]:
    """Start a gate of the log in ``root``; yield its HOST:PORT."""
    command = [sys.executable, "-m", "wald_gate", "--root", root, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = _SERVES.search(line)
            if found is None:
                raise RuntimeError(f"wald-gate has not begun: {line}{process.stderr.read()}")
            yield found[1]
        finally:
            process.terminate()


def _requests(address: object, kind: str, clients: int, records: int, *, seconds: float) -> float:
    return float(in_python("brokers", address, kind, clients, records, seconds))


def _latencies(stage: Stage, address: str, daemon: Daemon, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for what, appended, is_busy in (
        ("appended over HTTP", address, False),
        ("appended at the daemon's socket", daemon.socket, False),
        ("over HTTP, beside 8 clients × 1,000 lines", address, True),
    ):
        found = Samples({"p50": [], "p99": []})
        for _ in range(stage.repeat):
            with _load(address, seconds) if is_busy else ExitStack():
                times = in_python("gate", address, appended, seconds).split()
            for name, value in zip(found.values, times, strict=True):
                found.values[name].append(float(value))
        rows += [Row(_LATENCY, f"{what}, {name}", "µs", found.median(name)) for name in found.values]
    return rows


@contextmanager
def _load(address: str, seconds: float) -> Iterator[None]:
    """Run clients that fill the gate during the block, and somewhat longer."""
    command = [sys.executable, "-m", "benchmarks.brokers", address, "http", "8", str(_BATCH), str(seconds + 1)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()):
        yield


FOLLOWED = "followed"
"""The route."""
_PAUSE_SECONDS = 0.02
_PATIENCE_SECONDS = 10.0


def latencies(gate: Address, address: Address, seconds: float) -> list[float]:
    """Return the seconds of each record."""
    chance = random.Random(1)
    appending = connected(address)
    over_http = not isinstance(address, str)
    with _following(gate) as events:
        found: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            time.sleep(chance.uniform(0, _PAUSE_SECONDS))
            value = b"record %d" % len(found)
            began = time.perf_counter()
            appending.sendall(_request(value, over_http=over_http))
            _wait_for(events, b'"' + value + b'"')
            found.append(time.perf_counter() - began)
            _wait_for(appending, b"}" if over_http else b"\n")
    return found


def _following(gate: Address) -> socket.socket:
    events = connected(gate)
    events.settimeout(_PATIENCE_SECONDS)
    events.sendall(
        b"GET /v1/routes/%s/records?from=end&format=events HTTP/1.1\r\nHost: [::]\r\n\r\n" % FOLLOWED.encode()
    )
    _wait_for(events, b"nothing new")  # sent as soon as it follows
    return events


def _request(value: bytes, *, over_http: bool) -> bytes:
    if not over_http:
        return b"PUB %s %d\n%s\n" % (FOLLOWED.encode(), len(value) + 1, value)
    head = "POST /v1/routes/%s/records HTTP/1.1\r\nHost: [::]\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
    return (head % (FOLLOWED, len(value))).encode() + value


def _wait_for(connection: socket.socket, text: bytes) -> None:
    data = b""
    while text not in data:
        more = connection.recv(1 << 16)
        assert more, data
        data += more


if __name__ == "__main__":
    gate, address, seconds = sys.argv[1:]
    times = sorted(latencies(address_of(gate), address_of(address), float(seconds)))
    print(1e6 * times[len(times) // 2], 1e6 * times[len(times) * 99 // 100])
