"""An owner of a work group on the route of the benchmarks, in a process of its own. Run as a program:

    owners ROOT GROUP half ORDER RECORDS SPARE     leases RECORDS and acknowledges every second one, then leases others
    owners ROOT GROUP again ORDER RECORDS SPARE    leases what has come back, in a process after that one
    owners ROOT GROUP through LEASED               leases and acknowledges all there is, LEASED at a time

The last thing each does is to print an object of JSON. It ends as a killed one does: nothing is closed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import wald
from benchmarks.stage import ROUTE, peak_bytes

_WORKER = "worker-1"
_BATCH = 100
_LEASES = 500  # or fewer, so that not all that is open is leased
_LEASES_SECONDS = 10.0
_LONG_SECONDS = 3600.0


def half(root: str, group: str, order: str, records: int, spare: int) -> dict[str, Any]:
    """Those with an even sequence are acknowledged."""
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
    """Seconds of each of some leases, acknowledged in between, and the most memory until then and after them."""
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
