"""Durable acknowledgements per second over the socket, beside Redis Streams with `appendfsync always`.

The clients are the same program for both, so its own cost is in both numbers. One client with one record is beside what
the disk itself takes: one write of a record and one fdatasync.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.brokers import redis
from benchmarks.clients import RECORD
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import Daemon, Stage, in_python

_BATCH = 1000
_PIPELINED = 64
_GROUP = "Sockets, on disk, a sync before every answer"


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    seconds = 0.7 if stage.quick else 3.0
    missing: list[str] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(stage.fresh(stage.disk)))
        ours = partial(_requests, daemon.socket, "wald", seconds=seconds)
        one = {"wald, 64": partial(ours, clients=64, records=1)}
        many = {"wald": lambda: _BATCH * ours(clients=8, records=_BATCH)}
        if shutil.which("redis-server"):
            theirs = partial(_requests, stack.enter_context(redis(stage.fresh(stage.disk))), "redis", seconds=seconds)
            one["Redis Streams"] = partial(theirs, clients=64, records=1)
            many["Redis Streams, 64 a time"] = lambda: _PIPELINED * theirs(clients=8, records=_PIPELINED)
        else:
            missing.append("redis-server")
        sixty_four = Samples.alternate(one, stage.repeat)
        eight = Samples.alternate(many, stage.repeat)
        single = Samples.alternate(
            {
                "wald": lambda: 1e6 / ours(clients=1, records=1, seconds=seconds / 3),
                "bare write+fdatasync": lambda: _bare_us(stage.disk, seconds / 3),
            },
            3 * stage.repeat,  # short turns: what a disk takes for a sync changes from one second to the next
        )
    rows = [
        *sixty_four.rows(_GROUP, "acks/s", ("wald, 64", "64 clients × 1 record"), {"Redis Streams": Goal(1)}),
        *eight.rows(_GROUP, "records/s", ("wald", "8 clients × 1,000 records"), {"Redis Streams, 64 a time": Goal(5)}),
        *single.rows(_GROUP, "µs", ("wald", "1 client × 1 record"), {"bare write+fdatasync": Goal(1.2, at_most=True)}),
    ]
    if missing:  # ours is worth showing all the same
        rows.append(Row(_GROUP, "64 clients × 1 record", "acks/s", sixty_four.median("wald, 64")))
        rows.append(Row(_GROUP, "8 clients × 1,000 records", "records/s", eight.median("wald")))
    return rows, missing


def _requests(path: Path, kind: str, *, clients: int, records: int, seconds: float) -> float:
    return float(in_python("clients", path, kind, clients, records, seconds))


def _bare_us(where: Path, seconds: float) -> float:
    """Microseconds of one write of one record and one fdatasync, in a file that is allocated already."""
    path = where / "bare"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, 64 << 20)
        os.fsync(descriptor)
        offset = written = 0
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            offset += os.pwrite(descriptor, RECORD, offset)
            os.fdatasync(descriptor)
            written += 1
        return (now - began) * 1e6 / written
    finally:
        os.close(descriptor)
        path.unlink()
