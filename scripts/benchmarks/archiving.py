"""Records into bundles, read back and proven, beside what a shell does: `split`, `tar -cz`, `sha256sum`; and `zstd`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.reading import sealed_root
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Stage, in_python, timed

_GZIP_BYTES = 400_000_000  # gzip takes seconds for it
_BUNDLES = 4
_SHELL = """
cd "$2" && split -l "$3" "$1" part- && for part in part-*; do tar -czf "$part.tar.gz" "$part"; done &&
sha256sum *.tar.gz > digests
"""


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
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
        """Seconds; by a new group to a new place, so that there is everything to do each time."""
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
        "zst, one core": lambda: rate / float(in_python("packing", whole, "zst")),
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
    """What the processes that ``run`` waits for use of all cores together."""
    before = os.times()
    run()
    after = os.times()
    return (after.children_user - before.children_user) + (after.children_system - before.children_system)
