"""A raw segment: how fast it is sealed beside `gzip -6`, and how fast a start reads through it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import Daemon, Stage, in_python, timed

_SEALED_BYTES = 64_000_000  # gzip takes seconds for it


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    part = stage.fresh(stage.fast) / "data"
    with stage.data.open("rb") as file:
        lines = file.readlines(min(_SEALED_BYTES, stage.data_bytes))
    part.write_bytes(b"".join(lines))
    root = _raw(stage, part, len(lines), kill=False)
    segment = next(root.glob("segments/*.wal"))
    rate = segment.stat().st_size / 1e6
    kept = segment.with_name("kept")
    os.link(segment, kept)

    def sealed() -> float:
        if not segment.exists():
            os.link(kept, segment)
        for old in root.glob("segments/*.zst"):
            old.unlink()
        return rate / float(in_python("scan", root, "seal"))

    contenders = {"wald": sealed}
    missing = []
    for name, command in (("gzip -6", ["gzip", "-6c"]), ("zstd -3", ["zstd", "-3cq", "--single-thread"])):
        if shutil.which(name.split()[0]):
            contenders[name] = lambda command=command: rate / timed([*command, kept])
        else:
            missing.append(name.split()[0])
    samples = Samples.alternate(contenders, stage.repeat)
    rows = samples.rows(
        "Sealing", "MB/s", ("wald", "compress, sync, read back, compare"), {"gzip -6": Goal(5), "zstd -3": None}
    )
    root = _raw(stage, stage.data, stage.lines, kill=True)
    recovered = float(in_python("scan", root, "recover"))
    rows.append(
        Row("Recovery", f"of one raw segment of {stage.data_bytes / 1e6:.0f} MB", "MB/s", recovered, goal=Goal(1000))
    )
    return rows, missing


def _raw(stage: Stage, data: Path, lines: int, *, kill: bool) -> Path:
    """A root with everything in one raw segment, after a stop or a kill."""
    root = stage.fresh(stage.fast)
    with Daemon(root, **stage.one_segment) as daemon:
        daemon.feed(data, lines)
        if kill:
            daemon.kill()
    return root
