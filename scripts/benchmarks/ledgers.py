"""Ledgers of 100,000 lines each: reading all lines, questions about a record, the last hour, and wald-reclaim."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import zstandard

from benchmarks.backlog import sealed_segment
from benchmarks.ledgerdata import LINES, RECORDS, ROUTES
from benchmarks.report import Goal, Row
from benchmarks.stage import Stage, environment, in_python
from wald.files.disk import Disk
from wald.files.identity import create_root, read_identity
from wald.files.layout import Root
from wald.files.routes import add_route
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
    """Time reading every line, with its checksum and the chain, and zstdcat with json.loads, which checks neither."""
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
    """Medians of seconds, and the most memory."""
    seconds, peaks = zip(*(_run(root, command, answer) for _ in range(stage.repeat)), strict=True)
    spread = min(seconds), max(seconds)
    return [
        Row(group, what, "s", statistics.median(seconds), goal=_SECONDS, spread=spread),
        Row(group, what, "MiB, max", max(peaks), goal=_MIB),
    ]


def _run(root: Root, command: list[object], answer: str) -> tuple[float, float]:
    """Seconds and MiB of a command, which must print ``answer``."""
    *printed, spent = in_python("spent", sys.executable, "-m", *command, "--root", root.path).splitlines()
    assert any(answer in line for line in printed), f"{command}: {printed[-1:]}"
    seconds, peak = spent.split()
    return float(seconds), int(peak) / 2**20


def _root(path: Path, entries: int) -> Root:
    """A root with the ledgers, and a few sealed segments that no group has read."""
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
            [sys.executable, "-m", "benchmarks.ledgerdata", root.ledger / name, str(entries), str(now_ns)],
            env=environment(),
        )
        for name in LINES
    ]
    assert [writer.wait() for writer in writers] == [0] * len(writers)
    return root
