"""Work groups compared with Redis Streams, NATS JetStream and beanstalkd, and the cost of many open records.

All have the same records and answer an acknowledgement once it is synced, except a NATS server before 2.10, which
cannot: its row says so. The workers of wald are threads of the owner; the others are reached over a socket, by the
workers of `queues`. 64 workers are tasks or connections of one loop, or threads, and compared with the same.

Run as a program, it is an owner of a work group on the route of the benchmarks:

    work ROOT GROUP half ORDER RECORDS SPARE     leases RECORDS and acknowledges every second one, then leases others
    work ROOT GROUP again ORDER RECORDS SPARE    leases redelivered records, in a process after that one
    work ROOT GROUP through LEASED               leases and acknowledges all records, LEASED at a time

The last thing each does is to print an object of JSON. It ends as a killed process does: nothing is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import wald
from benchmarks import brokers
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Daemon, Stage, environment, in_python, peak_bytes
from wald.format.names import WORK_SUFFIX

_HUNDRED = "100 records a lease, one worker, on disk"
_SIXTY_FOUR = "1 record a lease, 64 workers, on disk"
_NATS, _NATS_UNSYNCED = "NATS JetStream", "NATS JetStream, no sync"
_GROUP = "owned"
_KEYS = 10_000
_LONGEST_PER_SECOND = 300_000  # records for a worker that is faster end before its time
_JOBS_PER_SECOND = 10_000  # of beanstalkd, which takes longer to put a job than to delete it
_LEASED = 1000
_SHORT = b"a line of some 40 bytes, for a journal\n"


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    beside, missing = _beside(stage)
    return [*beside, *_half(stage, "log"), *_half(stage, "key"), *_through(stage)], missing


def _beside(stage: Stage) -> tuple[list[Row], list[str]]:
    seconds = 0.5 if stage.quick else 3.0
    records = int(_LONGEST_PER_SECOND * seconds)
    data = stage.lines_file(min(records, stage.lines))
    records = min(records, stage.lines)
    names = (f"g{number}" for number in count())

    def worker(address: object, kind: str, what: str) -> float:
        return float(in_python("queues", address, kind, what, next(names), records, seconds))

    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(stage.fresh(stage.disk), **stage.one_segment))
        daemon.feed(data, records)
        hundred: dict[str, Callable[[], float]] = {"wald": partial(worker, daemon.root, "wald", "hundred")}
        single: dict[str, Callable[[], float]] = {
            "wald": partial(worker, daemon.root, "wald", "loop"),
            "wald, 64 threads": partial(worker, daemon.root, "wald", "threads"),
        }
        if shutil.which("redis-server"):
            redis = stack.enter_context(brokers.redis(stage.fresh(stage.disk)))
            in_python("queues", redis, "redis", "fill", data, records)
            hundred["Redis Streams"] = partial(worker, redis, "redis", "hundred")
            single["Redis, a loop"] = partial(worker, redis, "redis", "loop")
            single["Redis, 64 threads"] = partial(worker, redis, "redis", "threads")
        if shutil.which("nats-server"):
            folder = stage.fresh(stage.disk)
            synced = brokers.nats_can_sync(folder)
            host, port = stack.enter_context(brokers.nats(folder, synced=synced))
            nats = f"{host}:{port}"
            in_python("queues", nats, "nats", "fill", data, records)
            hundred[_NATS if synced else _NATS_UNSYNCED] = partial(worker, nats, "nats", "hundred")
        if shutil.which("beanstalkd"):
            tube = stack.enter_context(brokers.beanstalkd(stage.fresh(stage.disk)))
            hundred["beanstalkd"] = partial(
                _beanstalkd, tube, data, min(records, int(_JOBS_PER_SECOND * seconds)), seconds
            )
        hundred_samples = Samples.alternate(hundred, stage.repeat)
        single_samples = Samples.alternate(single, stage.repeat)
    goals = {"Redis Streams": Goal(2), _NATS: Goal(2), _NATS_UNSYNCED: Goal(2), "beanstalkd": Goal(1)}
    rows = hundred_samples.rows(_HUNDRED, "records/s", ("wald", "lease and acknowledge"), goals)
    rows += _with_ours(rows, hundred_samples, _HUNDRED)
    found = single_samples.rows(
        _SIXTY_FOUR, "records/s", ("wald", "lease and acknowledge, a loop"), {"Redis, a loop": Goal(1)}
    )
    found += single_samples.rows(
        _SIXTY_FOUR,
        "records/s",
        ("wald, 64 threads", "lease and acknowledge, 64 threads"),
        {"Redis, 64 threads": Goal(1)},
    )
    rows += found + _with_ours(found, single_samples, _SIXTY_FOUR)
    return rows, [name for name in ("redis-server", "nats-server", "beanstalkd") if not shutil.which(name)]


def _with_ours(rows: list[Row], samples: Samples, group: str) -> list[Row]:
    """Return our number, which is worth showing without a peer."""
    return [] if rows else [Row(group, "lease and acknowledge", "records/s", samples.median("wald"))]


def _beanstalkd(tube: Path, data: Path, records: int, seconds: float) -> float:
    """Measure with new jobs, because an acknowledged job is gone."""
    in_python("queues", tube, "beanstalkd", "fill", data, records)
    return float(in_python("queues", tube, "beanstalkd", "hundred", "-", records, seconds))


def _half(stage: Stage, order: str) -> list[Row]:
    """Measure an owner of many open records that ends as if killed, and its successor."""
    records, spare = (50_000, 110_000) if stage.quick else (1_000_000, 110_000)
    group = f"{records:,} delivered, every second one acknowledged" + (" by key" if order == "key" else "")
    root = _filled(stage, order, records + spare)
    runs: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    sizes = []
    for number in range(stage.repeat):
        name = f"{_GROUP}-{number}"
        runs.append(_run_owner(root, name, "half", order, records, spare))
        sizes.append(_journal_bytes(root, name) / 2**20)
        again.append(_run_owner(root, name, "again", order, records, spare))
    shutil.rmtree(root)
    of_log = order == "log"
    ms, mib, seconds = (Goal(bound, at_most=True) if of_log else None for bound in (5, 64, 1))
    return [
        Row(group, "the owner's peak (VmHWM)", "MiB", max(run["peak_after"] for run in runs) / 2**20, goal=mib),
        *_lease_rows(group, "lease of 100 new ones", runs, ms),
        Row(group, "journal, after a kill", "MiB", max(sizes)),
        Row(group, "restart to the first lease", "s", _median(again, "seconds"), goal=seconds),
        Row(group, "restart, the interpreter's start included", "s", _median(again, "with_start")),
        Row(group, "the next owner's peak (VmHWM)", "MiB", max(run["peak_after"] for run in again) / 2**20, goal=mib),
        *_lease_rows(group, "lease of 100 that came back", again, ms),
    ]


def _lease_rows(group: str, what: str, runs: list[dict[str, Any]], goal: Goal | None) -> list[Row]:
    times = sorted(1000 * seconds for run in runs for seconds in run["leases"])
    return [
        Row(group, what, "ms p50", times[len(times) // 2], goal=goal),
        Row(group, what, "ms p99", times[len(times) * 99 // 100], goal=goal),
    ]


def _median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def _filled(stage: Stage, order: str, records: int) -> Path:
    """Make a root with this number of records, without a daemon."""
    root = stage.fresh(stage.disk)
    with Daemon(root) as daemon:
        if order == "log":
            path = stage.fresh(stage.fast) / "lines"
            with path.open("wb") as file:
                for start in range(0, records, stage.lines):
                    with stage.data.open("rb") as lines:
                        file.writelines(islice(lines, min(stage.lines, records - start)))
            daemon.feed(path, records)
            path.unlink()
            return root
        with stage.data.open("rb") as lines, daemon.connect() as producer:
            values = [line[:-1] for line in islice(lines, _LEASED)]
            for start in range(0, records, _LEASED):
                producer.send(ROUTE, values, keys=[b"%d" % (1 + (start + i) % _KEYS) for i in range(_LEASED)])
    return root


def _run_owner(root: Path, *words: object) -> dict[str, Any]:
    before = time.monotonic()
    found = json.loads(in_python("work", root, *words))
    return found | {"with_start": found.get("at", before) - before}


def _through(stage: Stage) -> list[Row]:
    """Measure the largest size of the journal while everything is acknowledged in order."""
    records = 300_000 if stage.quick else 10_000_000
    root, path = stage.fresh(stage.disk), stage.fresh(stage.fast) / "lines"
    with path.open("wb") as file:
        for _ in range(0, records, 100_000):
            file.write(_SHORT * 100_000)
    with Daemon(root) as daemon:
        daemon.feed(path, records)
    path.unlink()
    largest = 0
    command = [sys.executable, "-m", "benchmarks.work", root, _GROUP, "through", str(_LEASED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        while process.poll() is None:
            largest = max(largest, _journal_bytes(root, _GROUP))
            time.sleep(0.001)
        assert process.stdout is not None
        found = json.load(process.stdout)
    shutil.rmtree(root)
    group = f"{records:,} records acknowledged in order"
    return [
        Row(group, "largest journal", "MiB", largest / 2**20, goal=Goal(1, at_most=True)),
        Row(group, "the owner's peak (VmHWM)", "MiB", found["peak"] / 2**20),
        Row(group, f"{_LEASED:,} a lease, one worker", "records/s", records / found["seconds"]),
    ]


def _journal_bytes(root: Path, group: str) -> int:
    """Return the size, including the new journal while it is rewritten."""
    total = 0
    for path in (root / "routes" / ROUTE / "cursors").glob(f"{group}{WORK_SUFFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


_WORKER = "worker-1"
_BATCH = 100
_LEASES = 500  # or fewer, so that not all that is open is leased
_LEASES_SECONDS = 10.0
_LONG_SECONDS = 3600.0


def half(root: str, group: str, order: str, records: int, spare: int) -> dict[str, Any]:
    """Acknowledge the records with an even sequence."""
    work = _owner(root, group, order, records, spare)
    acknowledged = 0
    while acknowledged < records // 2:
        got = work.lease(_WORKER, _BATCH, lease_for=_LONG_SECONDS, wait=_LONG_SECONDS)
        done = [delivery.record.sequence for delivery in got if delivery.record.sequence % 2 == 0]
        work.ack(_WORKER, done)
        acknowledged += len(done)
    return _leased(work, records)


def again(root: str, group: str, order: str, records: int, spare: int) -> dict[str, Any]:
    began = time.perf_counter()
    work = _owner(root, group, order, records, spare)
    got = work.lease(_WORKER, _BATCH, lease_for=_LONG_SECONDS)
    seconds, at = time.perf_counter() - began, time.monotonic()
    assert [delivery.tries for delivery in got] == [2] * _BATCH, got[:1]
    return {"seconds": seconds, "at": at} | _leased(work, records)


def through(root: str, group: str, leased: int) -> dict[str, Any]:
    work = wald.WorkGroup(root, ROUTE, group)
    last = wald.open(root).head().sequence
    began = time.perf_counter()
    while work.floor < last:
        got = work.lease(_WORKER, leased, wait=_LONG_SECONDS)
        work.ack(_WORKER, [delivery.record.sequence for delivery in got])
    return {"seconds": time.perf_counter() - began, "peak": peak_bytes(os.getpid())}


def _owner(root: str, group: str, order: str, records: int, spare: int) -> wald.WorkGroup:
    return wald.WorkGroup(root, ROUTE, group, order=order, window=records + spare)


def _leased(work: wald.WorkGroup, records: int) -> dict[str, Any]:
    """Return the seconds of some leases, acknowledged in between, and the peak memory before and after them."""
    peak = peak_bytes(os.getpid())
    times: list[float] = []
    end = time.perf_counter() + _LEASES_SECONDS
    while len(times) < min(_LEASES, records // (4 * _BATCH)) and (began := time.perf_counter()) < end:
        got = work.lease(_WORKER, _BATCH, lease_for=_LONG_SECONDS)
        times.append(time.perf_counter() - began)
        assert len(got) == _BATCH, len(got)
        work.ack(_WORKER, [delivery.record.sequence for delivery in got])
    return {"leases": times, "peak": peak, "peak_after": peak_bytes(os.getpid())}


if __name__ == "__main__":
    root, group, what, *words = sys.argv[1:]
    if what == "through":
        found = through(root, group, int(words[0]))
    else:
        found = (half if what == "half" else again)(root, group, words[0], *map(int, words[1:]))
    print(json.dumps(found), flush=True)
    os._exit(0)
