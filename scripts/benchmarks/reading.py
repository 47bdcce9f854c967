"""Reading back what is sealed, to stdout, raw bytes and Arrow, beside `zstd -dc`; the first record from anywhere."""

from __future__ import annotations

import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Daemon, Stage, in_python, timed

_SMALL_BYTES = 10_000_000


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    missing = [name for name in ("zstd",) if not shutil.which(name)]
    whole = sealed_root(stage, stage.data, stage.lines)
    rows = []
    if not missing:
        segments = sorted(whole.glob("segments/*.wal.zst"))
        rate = stage.data_bytes / 1e6
        contenders = {
            "zstd -dc": lambda: rate / timed(["zstd", "-dcq", *segments]),
            "wald read": lambda: rate / timed([sys.executable, "-m", "wald", "--root", whole, "read", ROUTE]),
            "raw": lambda: rate / float(in_python("scan", whole, "raw")),
        }
        if find_spec("pyarrow"):
            contenders["batches"] = lambda: rate / float(in_python("scan", whole, "batches"))
            contenders["arrow"] = lambda: rate / float(in_python("scan", whole, "arrow"))
        else:
            missing.append("pyarrow")
        samples = Samples.alternate(contenders, stage.repeat)
        for name, what in (
            ("wald read", "wald read > /dev/null"),
            ("raw", "Batch.raw() in the process"),
            ("batches", "Batch.to_arrow(), one by one"),
            ("arrow", "Log.to_arrow_reader()"),
        ):
            if name in contenders:
                rows += samples.rows("Sealed segments, read back", "MB/s", (name, what), {"zstd -dc": Goal(0.8)})
    small_data = stage.fresh(stage.fast) / "data"
    with stage.data.open("rb") as file:
        lines = file.readlines(_SMALL_BYTES)
    small_data.write_bytes(b"".join(lines))
    small = sealed_root(stage, small_data, len(lines))
    for place in ("sequence", "time"):
        for root, length in ((whole, stage.data_bytes), (small, _SMALL_BYTES)):
            what = f"from any {place}, {length / 1e6:.0f} MB of log"
            number = float(in_python("scan", root, place))
            rows.append(Row("First record", what, "ms", number, goal=Goal(10, at_most=True)))
    return rows, missing


def sealed_root(stage: Stage, data: Path, lines: int) -> Path:
    """A root in which all of ``data`` is sealed, and no daemon runs any more."""
    root = stage.fresh(stage.fast)
    with Daemon(root) as daemon:
        daemon.feed(data, lines)
        with daemon.connect() as producer:
            producer.command("CUT")
        while len(list(root.glob("segments/*.wal"))) > 1:
            time.sleep(0.01)
    return root
