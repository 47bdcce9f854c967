"""Archives and large backlogs.

Records into bundles, read back and proven, compared with `split`, `tar -cz`, `sha256sum` in a shell, and with `zstd`.

Then a backlog of 10,000 sealed segments of 1,000 routes: one pass of wald-reclaim and one `wald explain`. The segments
are
made without a daemon: real indexes, with a batch of one record for each of their routes, over a frame that is never
read. Each segment has a tenth of the routes, or, in the worst case, all of them.

Run as a program, it prints the seconds that one core takes to make a bundle of a whole route:

    archives ROOT CODEC
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import zstandard

import wald
from benchmarks.daemon import sealed_root
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Stage, environment, in_python, peak_bytes, timed
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
from wald_archive.bundle import Origin, bundle
from wald_archive.codecs import Codec

_GZIP_BYTES = 400_000_000  # gzip takes seconds for it
_BUNDLES = 4
_SHELL = """
cd "$2" && split -l "$3" "$1" part- && for part in part-*; do tar -czf "$part.tar.gz" "$part"; done &&
sha256sum *.tar.gz > digests
"""


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    rows, missing = _archiving(stage)
    return rows + _backlogs(stage), missing


def _archiving(stage: Stage) -> tuple[list[Row], list[str]]:
    missing = [name for name in ("split", "tar", "gzip", "zstd") if not shutil.which(name)]
    part = stage.fresh(stage.fast) / "data"
    with stage.data.open("rb") as file:
        lines = file.readlines(min(_GZIP_BYTES, stage.data_bytes))
    part.write_bytes(b"".join(lines))
    part_rate = part.stat().st_size / 1e6
    rate = stage.data_bytes / 1e6
    small = sealed_root(stage, part, len(lines))
    whole = sealed_root(stage, stage.data, stage.lines)

    sizes: dict[str, float] = {}

    def archived(root: Path, records: int, codec: str) -> float:
        """Archive for a new group to a new place, and return the seconds."""
        dest = stage.fresh(stage.fast)
        command = [sys.executable, "-m", "wald_archive", ROUTE, "--root", root, "--dest", dest]
        seconds = timed(
            [*command, "--group", dest.name, "--records-per-bundle", -(-records // _BUNDLES), "--codec", codec]
        )
        sizes[codec] = megabytes(dest.rglob(f"*.tar.{codec}"))
        shutil.rmtree(dest)
        return seconds

    def shell() -> float:
        place = stage.fresh(stage.fast)
        seconds = timed(["sh", "-ec", _SHELL, "sh", part, place, -(-len(lines) // _BUNDLES)])
        sizes["tar -cz"] = megabytes(place.glob("*.tar.gz"))
        shutil.rmtree(place)
        return seconds

    contenders: dict[str, Callable[[], float]] = {
        "gz": lambda: part_rate / archived(small, len(lines), "gz"),
        "zst": lambda: rate / archived(whole, stage.lines, "zst"),
        "zst, in all": lambda: rate / in_cpu_seconds(lambda: archived(whole, stage.lines, "zst")),
        "zst, one core": lambda: rate / float(in_python("archives", whole, "zst")),
    }
    if not missing:
        contenders["split, tar -cz, sha256sum"] = lambda: part_rate / shell()
        contenders["zstd -3, one thread"] = lambda: rate / timed(["zstd", "-3cq", "--single-thread", stage.data])
    samples = Samples.alternate(contenders, stage.repeat)
    group = "Archiving: log to bundles, synced, read back, proven"
    rows = samples.rows(group, "MB/s", ("gz", "wald-archive --codec gz"), {"split, tar -cz, sha256sum": Goal(5)})
    rows += samples.rows(group, "MB/s", ("zst", "wald-archive --codec zst"), {"zstd -3, one thread": None})
    if "tar -cz" in sizes:
        rows.append(Row(group, "what --codec gz leaves", "MB", sizes["gz"], "tar -cz", sizes["tar -cz"]))
    for name, what, goal in (
        ("zst, one core", "zst, on one core, log to bundle", Goal(200)),
        ("zst, in all", "zst, all of it, in a second of CPU time", None),
    ):
        rows.append(Row(group, what, "MB/s", samples.median(name), goal=goal, spread=samples.spread(name)))
    return rows, missing


def megabytes(paths: Iterable[Path]) -> float:
    return sum(path.stat().st_size for path in paths) / 1e6


def in_cpu_seconds(run: Callable[[], float]) -> float:
    """Return the CPU time of the processes that ``run`` waits for."""
    before = os.times()
    run()
    after = os.times()
    return (after.children_user - before.children_user) + (after.children_system - before.children_system)


def _pack(root: str, codec: str) -> None:
    log = wald.open(root)
    origin = Origin(log.identity.log_id.hex(), ROUTE, "bench", "wald bench", "2026-11-21T10:00:00Z")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
    bundle(log.batches(ROUTE), origin=origin, codec=Codec(codec), after=0, sink=len)
    print(time.perf_counter() - began)


_LOOK_SECONDS, _MIB = Goal(10, at_most=True), Goal(64, at_most=True)


def _backlogs(stage: Stage) -> list[Row]:
    rows = []
    segments, routes = (500, 50) if stage.quick else (10_000, 1_000)
    for count, share in ((segments // 10, 10), (segments, 10), (segments, 1)):
        present = routes // share
        root = _backlog(stage.fresh(stage.fast), count, routes, present)
        group = f"{count:,} sealed segments, {present:,} of {routes:,} routes in each"
        rows += _look(group, "wald explain", root, ["wald", "explain"])
        rows += _look(group, "wald-reclaim, all held back", root, ["wald_reclaim"])
        for route in range(routes):
            root.cursor(f"r{route}", "processed").write_text(f"{count * present}\n")
        rows += _look(group, "wald-reclaim, all of it read", root, ["wald_reclaim", "--grace", "0"])
        left = sum(1 for _ in root.segments.glob("*.wal.zst"))
        assert left == 1, f"{left} segments are left"  # the newest one stays
        shutil.rmtree(root.path)
    return rows


def _look(group: str, what: str, root: Root, command: list[str]) -> list[Row]:
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
        Row(group, what, "s", seconds, goal=_LOOK_SECONDS),
        Row(group, what, "s of a processor", _processor_seconds() - before),
        Row(group, what, "MiB, max", peak / 2**20, goal=_MIB),
    ]


def _processor_seconds() -> float:
    """Return the CPU time of the children so far, which other load distorts less than the elapsed time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _backlog(path: Path, segments: int, routes: int, present: int) -> Root:
    """Make a root with segments of a record of ``present`` routes in turn, and a cursor at 0 of each route."""
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
    """Return a segment with a record of each route in ``names``, starting at ``base``; ``stored`` is its frame."""
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


if __name__ == "__main__":
    _pack(*sys.argv[1:])
