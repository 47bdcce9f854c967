"""Ledgers of 100,000 lines each: reading all lines, questions about a record, the last hour, and wald-reclaim.

Each segment contains records of two routes. It was sealed, the records of one route were archived, and it was deleted;
the ledgers have a line for each of these. Segments follow each other at equal intervals, up to now. Run as a program:

    ledgers LEDGER LINES NOW_NS     write a ledger with wald's own writer; NOW_NS: time of the last line
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.archives import sealed_segment
from benchmarks.report import Goal, Row
from benchmarks.stage import Stage, environment, in_python
from wald.files.disk import Disk
from wald.files.identity import create_root, read_identity
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.routes import add_route
from wald.files.uptime import boot_id
from wald.format.head import Head, encode_head
from wald.format.names import Kind

_SECONDS, _MIB = Goal(1, at_most=True), Goal(64, at_most=True)
_LEFT = 20  # segments that are not deleted
_READ = """
import sys, time
from pathlib import Path
from wald.files.ledger_read import entries_of
began = time.perf_counter()
print(sum(entry["event"] == "sealed" for entry in entries_of(Path(sys.argv[1]))), time.perf_counter() - began)
"""
_PEER = """
import json, subprocess, sys, time
began = time.perf_counter()
reading = subprocess.Popen(["sh", "-c", 'zstdcat "${1%.jsonl}"-*.zst | cat - "$1"', "-", sys.argv[1]], stdout=-1)
print(sum(json.loads(line)["event"] == "sealed" for line in reading.stdout), time.perf_counter() - began)
"""


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    entries = 20_000 if stage.quick else 100_000
    root = _root(stage.fresh(stage.disk), entries)
    group = f"{len(LINES)} ledgers of {entries:,} lines"
    rows = _reading(stage, group, root, entries)
    archived = RECORDS * (entries // 2) + 1
    asked = (
        ("wald where, an archived record", f"{archived}: archived", ["wald", "where", archived]),
        ("wald where, a reclaimed record", ": reclaimed", ["wald", "where", archived + RECORDS - 1]),
        ("wald history --since 1h", "every deletion on record was allowed", ["wald", "history", "--since", "1h"]),
        ("wald-reclaim, all held back", "deleted: 0; kept: 20", ["wald_reclaim"]),
    )
    rows += [row for what, answer, command in asked for row in _rows(stage, group, what, root, command, answer)]
    for route in ROUTES:
        root.cursor(route, "processed").write_text(f"{RECORDS * entries + 2 * _LEFT}\n")
    command = ["wald_reclaim", "--require-archived"]
    rows += _rows(stage, group, "wald-reclaim --require-archived", root, command, "deleted: 0; kept: 20")
    shutil.rmtree(root.path)
    return rows, []


def _reading(stage: Stage, group: str, root: Root, entries: int) -> list[Row]:
    """Time reading every line with its checksum and the chain; zstdcat with json.loads checks nothing."""
    seconds: dict[str, list[float]] = {_READ: [], _PEER: []}
    for _ in range(stage.repeat):
        for program, times in seconds.items():
            command = [sys.executable, "-c", program, root.ledger / "segments.jsonl"]
            made = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
            found, spent = made.stdout.split()
            assert int(found) == entries
            times.append(float(spent))
    ours, theirs = (statistics.median(times) for times in seconds.values())
    spread = min(seconds[_READ]), max(seconds[_READ])
    return [
        Row(group, "every line of one, with its checksum and chain", "s", ours, goal=_SECONDS, spread=spread),
        Row(group, "every line of one", "s", ours, "zstdcat | json.loads", theirs, spread=spread),
    ]


def _rows(stage: Stage, group: str, what: str, root: Root, command: list[object], answer: str) -> list[Row]:
    """Return medians of seconds, and the peak memory."""
    seconds, peaks = zip(*(_run(root, command, answer) for _ in range(stage.repeat)), strict=True)
    spread = min(seconds), max(seconds)
    return [
        Row(group, what, "s", statistics.median(seconds), goal=_SECONDS, spread=spread),
        Row(group, what, "MiB, max", max(peaks), goal=_MIB),
    ]


def _run(root: Root, command: list[object], answer: str) -> tuple[float, float]:
    """Return the seconds and MiB of a command, which must print ``answer``."""
    *printed, spent = in_python("spent", sys.executable, "-m", *command, "--root", root.path).splitlines()
    assert any(answer in line for line in printed), f"{command}: {printed[-1:]}"
    seconds, peak = spent.split()
    return float(seconds), int(peak) / 2**20


def _root(path: Path, entries: int) -> Root:
    """Make a root with the ledgers, and a few sealed segments that no group has read."""
    disk = Disk()
    root = create_root(path, disk, now="2026-11-21T10:00:00Z")
    log_id = read_identity(root).log_id
    now_ns = time.time_ns()
    stored = zstandard.ZstdCompressor().compress(bytes(1 << 16))
    for route in ROUTES:
        add_route(root, disk, route)
        root.cursor(route, "processed").write_text("0\n")
    bases = [RECORDS * entries + 1 + len(ROUTES) * number for number in range(_LEFT)]
    for base in bases:
        root.segment(base, Kind.SEALED).write_bytes(sealed_segment(log_id, base, list(ROUTES), now_ns, stored))
    root.head.write_bytes(encode_head(Head(bases[-1] + 1, bases[-1], 1 << 16, 1, now_ns)))
    writers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ledgers", root.ledger / name, str(entries), str(now_ns)],
            env=environment(),
        )
        for name in LINES
    ]
    assert [writer.wait() for writer in writers] == [0] * len(writers)
    return root


ROUTES = ("access", "audit")
"""The records of the first one are archived."""
RECORDS = 250
"""In a segment; the last ten are of the other route."""
_OF_FIRST = 240
_SEGMENT_NS = 3600 * 10**9 * 3 // 13_000  # so that three ledgers have 13,000 lines of the last hour
_BOOT_SEGMENTS = 3_000_000  # a month

Entry = dict[str, Any]


def write(path: Path, entries: int, now_ns: int) -> None:
    """Write the ledger with the current file ``path``."""
    make, moments, disk = LINES[path.name], _Moments(entries, now_ns), _Unsynced()
    ledger = Ledger(path, disk)
    for number in range(entries):
        ledger.append(make(number, moments))
        ledger.cut()
    ledger.close()


class _Unsynced(Disk):
    """Disk that leaves syncing to the kernel, because a crash during a benchmark costs nothing."""

    def sync(self, descriptor: int) -> None: ...
    def sync_directory(self, path: Path) -> None: ...


class _Moments:
    """Times at which segments were sealed."""

    def __init__(self, segments: int, now_ns: int) -> None:
        self._first_ns = now_ns - segments * _SEGMENT_NS
        self._segments = segments

    def at(self, number: int) -> Entry:
        """Return the time members of a line; the last boot is this one."""
        later = (self._segments - 1 - number) // _BOOT_SEGMENTS
        boot = str(uuid.UUID(int=later)) if later else boot_id()
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        since_ns = (self._segments - 1 - number) % _BOOT_SEGMENTS * _SEGMENT_NS
        boottime_ns = max(0, now_ns - since_ns) if not later else _BOOT_SEGMENTS * _SEGMENT_NS - since_ns
        return {"at": self._first_ns + number * _SEGMENT_NS, "boot": boot, "boottime": boottime_ns}


def _digest(number: int) -> str:
    """Return a digest that compresses as badly as a real one."""
    return sha256(b"%d" % number).hexdigest()


def _sealed(number: int, moments: _Moments) -> Entry:
    base, bytes_ = RECORDS * number + 1, 64 << 20
    routes = [
        [ROUTES[0], _OF_FIRST, base, base + _OF_FIRST - 1, bytes_ - (1 << 20)],
        [ROUTES[1], RECORDS - _OF_FIRST, base + _OF_FIRST, base + RECORDS - 1, 1 << 19],
    ]
    moment = moments.at(number)
    return {
        "event": "sealed",
        "base": base,
        "last": base + RECORDS - 1,
        "raw_bytes": bytes_ + number % 1000,
        "bytes": (bytes_ + number % 1000) // 8,
        "sha256": _digest(number),
        "routes": routes,
        "epoch": 1,
        **moment,
        "earliest": moment["at"] - 2 * _SEGMENT_NS,
        "latest": moment["at"] - _SEGMENT_NS,
    }


def _reclaimed(number: int, moments: _Moments) -> Entry:
    base = RECORDS * number + 1
    last, last_of_first = base + RECORDS - 1, base + _OF_FIRST - 1
    routes = [
        {"route": ROUTES[0], "count": _OF_FIRST, "first": base, "last": last_of_first, "cursors": {"archived": last}},
        {
            "route": ROUTES[1],
            "count": RECORDS - _OF_FIRST,
            "first": last_of_first + 1,
            "last": last,
            "cursors": {"processed": last},
        },
    ]
    moment = moments.at(number)
    return {
        "event": "reclaimed",
        "base": base,
        "last": last,
        "at": moment.pop("at"),
        "rule": "read",
        "bytes": ((64 << 20) + number % 1000) // 8,
        "sha256": _digest(number),
        "routes": routes,
        **moment,
    }


def _archived(number: int, moments: _Moments) -> Entry:
    base = RECORDS * number + 1
    last = base + _OF_FIRST - 1
    bag = f"{ROUTES[0]}/{base:020}-{last:020}"
    name = f"{ROUTES[0]}-{base:020}"
    return {
        "event": "archived",
        "route": ROUTES[0],
        "group": "archived",
        "dest": "/srv/archive",
        "bag": bag,
        "bundle": f"{name}.tar.zst",
        "path": f"{bag}/data/{name}.tar.zst",
        "first": base,
        "last": last,
        "after": base - 1 - (RECORDS - _OF_FIRST if number else 0),
        "count": _OF_FIRST,
        "runs": [RECORDS - _OF_FIRST if number else 0, _OF_FIRST],
        "parts": [[base, f"{name}/records-00001.ndjson"]],
        "sha256": _digest(-number),
        "at": moments.at(number)["at"],
    }


LINES: dict[str, Callable[[int, _Moments], Entry]] = {
    "segments.jsonl": _sealed,
    "reclaim.jsonl": _reclaimed,
    "archive.jsonl": _archived,
}
"""The line about a segment by its number, for each ledger."""

if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
