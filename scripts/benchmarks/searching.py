"""`wald read --grep` on sealed segments, compared with `zstdcat | grep -F`: a string in no, few or all records."""

from __future__ import annotations

import shutil
import sys

from benchmarks.daemon import sealed_root
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import Stage, timed

_COPIES = 4  # of the lines, so that a search takes much longer than its start
_PATTERNS = (("nowhere", "not-there-at-all"), ("in few records", '" 503 7777'), ("in every record", "GET"))


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    data = stage.fast / "searched"
    with data.open("wb") as copies:
        for _ in range(_COPIES):
            with stage.data.open("rb") as lines:
                shutil.copyfileobj(lines, copies, 1 << 20)
    root = sealed_root(stage, data, _COPIES * stage.lines)
    data.unlink()
    segments = " ".join(str(path) for path in sorted(root.glob("segments/*.wal.zst")))
    rate = _COPIES * stage.data_bytes / 1e9
    missing = [name for name in ("zstdcat", "grep") if not shutil.which(name)]
    rows = []
    for where, pattern in _PATTERNS:
        # A shell, because exit code 1 for no match must not fail.
        ours = f"{sys.executable} -m wald --root {root} read --prefix -F --grep '{pattern}' || test $? = 1"
        theirs = f"zstdcat {segments} | grep -aF '{pattern}' || test $? = 1"
        contenders = {"wald read --grep": lambda ours=ours: rate / timed(["sh", "-c", ours])}
        if not missing:
            contenders["zstdcat | grep -F"] = lambda theirs=theirs: rate / timed(["sh", "-c", theirs])
        samples = Samples.alternate(contenders, stage.repeat)
        goals = {} if missing else {"zstdcat | grep -F": None}
        rows += samples.rows("Search", "GB/s", ("wald read --grep", f"a string {where}"), goals)
        if where == "nowhere":
            reached = samples.median("wald read --grep")
            rows.append(Row("Search", "a string nowhere, start included", "GB/s", reached, goal=Goal(1)))
    return rows, missing
