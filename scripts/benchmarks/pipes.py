"""FIFO to durable log: beside cat and the pipe loggers on tmpfs, beside dd and cat with a sync on disk.

Each contender is fed by `cat DATA > FIFO`. Its time ends when its reading process has read everything and exited (and
synced, where that is the comparison); ours when the head says that every line is durable. Ours runs with its default
settings, so segments are cut and sealed meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import Daemon, Stage, produce

_WALD = "wald"
_UNSEALED = "wald, nothing to seal"
_PLAIN = "wald, plain reads"


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    missing: list[str] = []
    peaks: list[int] = []
    if stage.memory is not None:
        contenders: dict[str, Callable[[], float]] = {
            _WALD: partial(_ours, stage, stage.memory, peaks),
            "cat": partial(_theirs, stage, stage.memory, _cat),
        }
        for name, command in (("s6-log", _s6_log), ("svlogd", _svlogd), ("multilog", _multilog)):
            if shutil.which(name):
                contenders[name] = partial(_theirs, stage, stage.memory, command)
            else:
                missing.append(name)
        samples = Samples.alternate(contenders, stage.repeat)
        goals = {"cat": Goal(0.6), "s6-log": Goal(2.5), "svlogd": Goal(5), "multilog": Goal(5)}
        rows += samples.rows("FIFO to log, on tmpfs", "MB/s", (_WALD, "everything durable"), goals)
    else:
        missing.append("a tmpfs at /dev/shm")
    samples = Samples.alternate(
        {
            _WALD: partial(_ours, stage, stage.disk, peaks),
            "dd conv=fdatasync": partial(_theirs, stage, stage.disk, _dd),
            "cat, then sync": partial(_theirs, stage, stage.disk, _cat_and_sync),
        },
        stage.repeat,
    )
    goals = {"dd conv=fdatasync": Goal(0.9), "cat, then sync": None}
    rows += samples.rows("FIFO to log, on disk", "MB/s", (_WALD, "a sync per commit"), goals)
    for name, where in (("on tmpfs", stage.memory), ("on disk", stage.disk)):
        if where is None:
            continue
        samples = Samples.alternate(
            {
                _WALD: partial(_ours, stage, where, peaks),
                _UNSEALED: partial(_ours, stage, where, peaks, **stage.one_segment),
                _PLAIN: partial(_plain, stage, where, **stage.one_segment),
            },
            stage.repeat,
        )
        group = f"What it costs the turn, {name}"
        rows += samples.rows(group, "MB/s", (_WALD, "sealing beside it"), {_UNSEALED: Goal(0.9)})
        rows += samples.rows(group, "MB/s", (_UNSEALED, "no byte leaves the pipe too early"), {_PLAIN: None})
    rows.append(
        Row("Memory", "the daemon's peak (VmHWM), MiB", "max", max(peaks) / (1 << 20), goal=Goal(64, at_most=True))
    )
    return rows, missing


def _ours(stage: Stage, where: Path, peaks: list[int], **settings: object) -> float:
    root = stage.fresh(where)
    with Daemon(root, **settings) as daemon:
        seconds = daemon.feed(stage.data, stage.lines)
        peaks.append(daemon.peak_bytes())
        daemon.kill()
    _remove(root)
    return stage.data_bytes / 1e6 / seconds


def _plain(stage: Stage, where: Path, **settings: object) -> float:
    root = stage.fresh(where)
    with Daemon(root, command=[sys.executable, "-m", "benchmarks.plain"], **settings) as daemon:
        seconds = daemon.feed(stage.data, stage.lines)
        daemon.kill()
    _remove(root)
    return stage.data_bytes / 1e6 / seconds


def _theirs(stage: Stage, where: Path, command: Callable[[Path, Path], Sequence[object]]) -> float:
    folder = stage.fresh(where)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    words = list(map(str, command(fifo, folder)))
    reader = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = time.perf_counter()
    with produce(stage.data, fifo):
        if reader.wait():
            raise RuntimeError(f"{' '.join(words)}: exit code {reader.returncode}")
        seconds = time.perf_counter() - began
    _remove(folder)
    return stage.data_bytes / 1e6 / seconds


def _remove(folder: Path) -> None:
    """Nothing of one measurement may weigh on the next."""
    shutil.rmtree(folder)
    os.sync()


def _cat(fifo: Path, folder: Path) -> Sequence[object]:
    return ["sh", "-c", 'exec cat < "$1" > "$2"', "sh", fifo, folder / "out"]


def _cat_and_sync(fifo: Path, folder: Path) -> Sequence[object]:
    return ["sh", "-c", 'cat < "$1" > "$2" && sync -d "$2"', "sh", fifo, folder / "out"]


def _dd(fifo: Path, folder: Path) -> Sequence[object]:
    return ["dd", "bs=1M", "conv=fdatasync", f"if={fifo}", f"of={folder / 'out'}"]


def _svlogd(fifo: Path, folder: Path) -> Sequence[object]:
    (folder / "config").write_text("s67108864\nn0\n")  # our segment's size, and nothing is ever deleted
    return ["sh", "-c", 'exec svlogd "$2" < "$1"', "sh", fifo, folder]


def _s6_log(fifo: Path, folder: Path) -> Sequence[object]:
    return ["sh", "-c", 'exec s6-log n1000 s67108864 "$2" < "$1"', "sh", fifo, folder / "out"]


def _multilog(fifo: Path, folder: Path) -> Sequence[object]:
    return ["sh", "-c", 'exec multilog n1000 s16777215 "$2" < "$1"', "sh", fifo, folder / "out"]
