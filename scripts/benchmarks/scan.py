"""Reads a root inside the process, without the start of an interpreter in the number. Run as a program:

scan ROOT raw        seconds to take every batch's raw bytes
scan ROOT batches    seconds to make an Arrow batch of every stored batch
scan ROOT arrow      seconds for Log.to_arrow_reader, which puts small batches together
scan ROOT sequence   median ms to the first record from a random sequence
scan ROOT time       the same from a random time
scan ROOT recover    MB/s of recovery, from page cache, median of five
scan ROOT seal       seconds to seal every raw segment
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import wald
from benchmarks.stage import ROUTE
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.log import Log
from wald.reading.selection import Start
from wald.writing.recovery import recover
from wald.writing.sealing import seal, segments_to_seal

_LOOKS = 300
_NO_BASE = 1 << 63


def raw_seconds(log: Log) -> float:
    return _seconds(lambda: (len(batch.raw()) for batch in log.batches(ROUTE)))


def batches_seconds(log: Log) -> float:
    return _seconds(lambda: (batch.to_arrow().num_rows for batch in log.batches(ROUTE)))


def arrow_seconds(log: Log) -> float:
    return _seconds(lambda: (batch.num_rows for batch in log.to_arrow_reader(ROUTE)))


def first_ms(log: Log, places: Iterator[Start]) -> float:
    taken = []
    for place in places:
        began = time.perf_counter()
        next(iter(log.records(ROUTE, place)))
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def sequences(log: Log) -> Iterator[Start]:
    chance = random.Random(2)
    head = log.head()
    assert head is not None
    yield from (chance.randint(1, head.sequence) for _ in range(_LOOKS))


def times(log: Log) -> Iterator[Start]:
    chance = random.Random(3)
    head = log.head()
    assert head is not None
    # The last record's own time: a later cut has moved the head's.
    first, last = (next(iter(log.records(ROUTE, place))).append_time_ns for place in ("earliest", head.sequence))
    yield from (datetime.fromtimestamp(chance.uniform(first, last - 1_000_000) / 1e9, UTC) for _ in range(_LOOKS))


def recover_rate(root: Path) -> float:
    found = []
    for _ in range(5):
        here = Root(root)
        began = time.perf_counter()
        report = recover(here, Disk(), log_id=read_identity(here).log_id, epoch=99, now_ns=time.time_ns()).report
        found.append(report.scanned_bytes / 1e6 / (time.perf_counter() - began))
    return statistics.median(found)


def seal_seconds(root: Path) -> float:
    here, disk = Root(root), Disk()
    ledger = Ledger(here.ledger / "segments.jsonl", disk)
    began = time.perf_counter()
    for segment in segments_to_seal(here, _NO_BASE):
        seal(here, segment, disk, ledger, now=time.time_ns)
    seconds = time.perf_counter() - began
    ledger.close()
    return seconds


def _seconds(read: Callable[[], Iterator[int]]) -> float:
    next(read())  # loads modules, which are not part of the number
    began = time.perf_counter()
    if not sum(read()):
        raise SystemExit("nothing was read")
    return time.perf_counter() - began


if __name__ == "__main__":
    root, what = Path(sys.argv[1]), sys.argv[2]
    if what in ("recover", "seal"):
        print(recover_rate(root) if what == "recover" else seal_seconds(root))
    else:
        log = wald.open(root)
        wholly = {"raw": raw_seconds, "batches": batches_seconds, "arrow": arrow_seconds}
        print(wholly[what](log) if what in wholly else first_ms(log, {"sequence": sequences, "time": times}[what](log)))
