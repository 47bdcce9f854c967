"""The gate: records over HTTP beside the daemon's own socket, Redis Streams and NATS JetStream; and how fast they come.

Clients, gate and daemon share the processors. A client is the same program for all: it makes its requests once, and
only looks at what an answer begins and ends with. HTTP and NATS are reached over TCP, the others over a unix socket.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks import brokers
from benchmarks.followers import FOLLOWED
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
            return float(in_python("workers", address, kind, "hundred", next(names), records, seconds))

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
            in_python("workers", redis, "redis", "fill", values, records)
            leased["Redis Streams"] = partial(worker, redis, "redis")
            many["Redis Streams, 64 a time"] = lambda: _PIPELINED * clients(redis, "redis", 8, _PIPELINED)
            one["Redis Streams"] = partial(clients, redis, "redis", 64, 1)
        if shutil.which("nats-server"):
            folder = stage.fresh(stage.disk)
            synced = brokers.nats_can_sync(folder)
            nats = brokers.text_of(stack.enter_context(brokers.nats(folder, synced=synced)))
            in_python("workers", nats, "nats", "fill", values, records)
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
    """The HOST:PORT of a gate of the log in ``root``."""
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
    return float(in_python("clients", address, kind, clients, records, seconds))


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
                times = in_python("followers", address, appended, seconds).split()
            for name, value in zip(found.values, times, strict=True):
                found.values[name].append(float(value))
        rows += [Row(_LATENCY, f"{what}, {name}", "µs", found.median(name)) for name in found.values]
    return rows


@contextmanager
def _load(address: str, seconds: float) -> Iterator[None]:
    """Clients that fill the gate meanwhile, and somewhat longer."""
    command = [sys.executable, "-m", "benchmarks.clients", address, "http", "8", str(_BATCH), str(seconds + 1)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()):
        yield
