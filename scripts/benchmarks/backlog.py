"""A long backlog, 10,000 sealed segments of 1,000 routes: one look of wald-reclaim and of wald explain.

The segments are made without a daemon: real indexes, with a batch of one record for each route that is in them, over a
frame that is never read. Once a tenth of the routes is in each segment, and once, which is the worst there can be, all.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from array import array
from pathlib import Path

import zstandard

from benchmarks.report import Goal, Row
from benchmarks.stage import Stage, environment, peak_bytes
from wald.files.disk import Disk
from wald.files.identity import create_root, read_identity
from wald.files.layout import Root
from wald.files.routes import add_route
from wald.format.head import Head, encode_head
from wald.format.names import Kind
from wald.format.sealed_index import (
    BatchTable,
    Frame,
    FrameTable,
    RouteEntry,
    RouteTable,
    SealedIndex,
    encode_sealed_index,
    encode_seek_table,
)

_SECONDS, _MIB = Goal(10, at_most=True), Goal(64, at_most=True)


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    rows = []
    segments, routes = (500, 50) if stage.quick else (10_000, 1_000)
    for count, share in ((segments // 10, 10), (segments, 10), (segments, 1)):
        present = routes // share
        root = _backlog(stage.fresh(stage.fast), count, routes, present)
        group = f"{count:,} sealed segments, {present:,} of {routes:,} routes in each"
        rows += _rows(group, "wald explain", root, ["wald", "explain"])
        rows += _rows(group, "wald-reclaim, all held back", root, ["wald_reclaim"])
        for route in range(routes):
            root.cursor(f"r{route}", "processed").write_text(f"{count * present}\n")
        rows += _rows(group, "wald-reclaim, all of it read", root, ["wald_reclaim", "--grace", "0"])
        left = sum(1 for _ in root.segments.glob("*.wal.zst"))
        assert left == 1, f"{left} segments are left"  # the newest one stays
        shutil.rmtree(root.path)
    return rows, []


def _rows(group: str, what: str, root: Root, command: list[str]) -> list[Row]:
    module, *words = command
    line = [sys.executable, "-m", module, *words, "--root", root.path]
    peak = 0
    before, began = _processor_seconds(), time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, env=environment()) as process:
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            time.sleep(0.005)
    seconds = time.perf_counter() - began
    assert process.returncode == 0, f"{what}: exit {process.returncode}"
    return [
        Row(group, what, "s", seconds, goal=_SECONDS),
        Row(group, what, "s of a processor", _processor_seconds() - before),
        Row(group, what, "MiB, max", peak / 2**20, goal=_MIB),
    ]


def _processor_seconds() -> float:
    """What the children so far have used; where others keep the machine busy, it says more than the time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _backlog(path: Path, segments: int, routes: int, present: int) -> Root:
    """A root with so many segments, each of a record of ``present`` routes in turn, and a cursor at 0 of each route."""
    disk = Disk()
    root = create_root(path, disk, now="2026-11-21T10:00:00Z")
    log_id = read_identity(root).log_id
    for route in range(routes):
        add_route(root, disk, f"r{route}")
        root.cursor(f"r{route}", "processed").write_text("0\n")
    stored = zstandard.ZstdCompressor().compress(bytes(1 << 16))
    for number in range(segments):
        base = 1 + number * present
        names = [f"r{(number * present + i) % routes}" for i in range(present)]
        root.segment(base, Kind.SEALED).write_bytes(sealed_segment(log_id, base, names, number, stored))
    last = segments * present
    root.head.write_bytes(encode_head(Head(last, 1 + (segments - 1) * present, 1 << 16, 1, segments)))
    return root


def sealed_segment(log_id: bytes, base: int, names: list[str], time_ns: int, stored: bytes) -> bytes:
    """The bytes of a segment with a record of each route in ``names`` from ``base`` on; ``stored`` is its frame."""
    routes, ids = len(names), range(len(names))
    frame = Frame(0, len(stored), 0, 1 << 16, base, base + routes, time_ns, time_ns, tuple(ids))
    index = SealedIndex(
        log_id=log_id,
        base_sequence=base,
        next_sequence=base + routes,
        raw_bytes=1 << 16,
        epoch=1,
        salt=0,
        frames=FrameTable.from_frames([frame]),
        routes=RouteTable.from_entries([RouteEntry(name, 1, base + i, base + i, 64) for i, name in enumerate(names)]),
        sha256=bytes(32),
        damage=[],
    )
    table = BatchTable(
        array("Q", [64 + i for i in ids]),
        array("Q", [base + i for i in ids]),
        array("I", [1] * routes),
        array("I", ids),
        array("q", [time_ns] * routes),
    )
    frame = encode_sealed_index(index, table)
    return stored + frame + encode_seek_table([(len(stored), 1 << 16), (len(frame), 0)])
