"""The daemon and its readers.

FIFO to durable log, compared with cat and the pipe loggers on tmpfs, and with dd and cat with a sync on disk. Each
contender is fed by `cat DATA > FIFO`. Its time ends when its reading process has read everything and exited (and
synced, if that is the comparison); wald's when the head shows that every line is durable. wald runs with its default
settings, so segments are cut and sealed in the meantime.

Durable acknowledgements per second over the socket, compared with Redis Streams with `appendfsync always`. The clients
are the same program for both, so both numbers include its cost. One client with one record is compared with the disk
itself: one write of a record and one fdatasync.

Reading sealed segments back, to stdout, as raw bytes and as Arrow, compared with `zstd -dc`; the first record from
anywhere; sealing, compared with gzip and zstd; and recovery.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.brokers import RECORD, redis
from benchmarks.report import Goal, Row, Samples
from benchmarks.stage import ROUTE, Daemon, Stage, in_python, produce, timed

_WALD = "wald"
_UNSEALED = "wald, nothing to seal"
_PLAIN = "wald, plain reads"


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    missing: list[str] = []
    for part in (_pipes, _sockets, _reading, _sealing):
        found, absent = part(stage)
        rows += found
        missing += absent
    return rows, missing


def _pipes(stage: Stage) -> tuple[list[Row], list[str]]:
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
    """Remove a folder, and sync, so that one measurement does not affect the next."""
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


_BATCH = 1000
_PIPELINED = 64


def _sockets(stage: Stage) -> tuple[list[Row], list[str]]:
    seconds = 0.7 if stage.quick else 3.0
    missing: list[str] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(stage.fresh(stage.disk)))
        ours = partial(_requests, daemon.socket, "wald", seconds=seconds)
        one = {"wald, 64": partial(ours, clients=64, records=1)}
        many = {"wald": lambda: _BATCH * ours(clients=8, records=_BATCH)}
        if shutil.which("redis-server"):
            theirs = partial(_requests, stack.enter_context(redis(stage.fresh(stage.disk))), "redis", seconds=seconds)
            one["Redis Streams"] = partial(theirs, clients=64, records=1)
            many["Redis Streams, 64 a time"] = lambda: _PIPELINED * theirs(clients=8, records=_PIPELINED)
        else:
            missing.append("redis-server")
        sixty_four = Samples.alternate(one, stage.repeat)
        eight = Samples.alternate(many, stage.repeat)
        single = Samples.alternate(
            {
                "wald": lambda: 1e6 / ours(clients=1, records=1, seconds=seconds / 3),
                "bare write+fdatasync": lambda: _bare_us(stage.disk, seconds / 3),
            },
            3 * stage.repeat,  # short turns: the sync latency of a disk changes from one second to the next
        )
        group = "Sockets, on disk, a sync before every answer"
    rows = [
        *sixty_four.rows(group, "acks/s", ("wald, 64", "64 clients × 1 record"), {"Redis Streams": Goal(1)}),
        *eight.rows(group, "records/s", ("wald", "8 clients × 1,000 records"), {"Redis Streams, 64 a time": Goal(5)}),
        *single.rows(group, "µs", ("wald", "1 client × 1 record"), {"bare write+fdatasync": Goal(1.2, at_most=True)}),
    ]
    if missing:  # ours is worth showing all the same
        rows.append(Row(group, "64 clients × 1 record", "acks/s", sixty_four.median("wald, 64")))
        rows.append(Row(group, "8 clients × 1,000 records", "records/s", eight.median("wald")))
    return rows, missing


def _requests(path: Path, kind: str, *, clients: int, records: int, seconds: float) -> float:
    return float(in_python("brokers", path, kind, clients, records, seconds))


def _bare_us(where: Path, seconds: float) -> float:
    """Return the microseconds of one write of one record and one fdatasync, in an allocated file."""
    path = where / "bare"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, 64 << 20)
        os.fsync(descriptor)
        offset = written = 0
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            offset += os.pwrite(descriptor, RECORD, offset)
            os.fdatasync(descriptor)
            written += 1
        return (now - began) * 1e6 / written
    finally:
        os.close(descriptor)
        path.unlink()


_SMALL_BYTES = 10_000_000


def _reading(stage: Stage) -> tuple[list[Row], list[str]]:
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
    """Return a root in which all of ``data`` is sealed, without a daemon."""
    root = stage.fresh(stage.fast)
    with Daemon(root) as daemon:
        daemon.feed(data, lines)
        with daemon.connect() as producer:
            producer.command("CUT")
        while len(list(root.glob("segments/*.wal"))) > 1:
            time.sleep(0.01)
    return root


_SEALED_BYTES = 64_000_000  # gzip takes seconds for it


def _sealing(stage: Stage) -> tuple[list[Row], list[str]]:
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
    """Return a root with everything in one raw segment, after a stop or a kill."""
    root = stage.fresh(stage.fast)
    with Daemon(root, **stage.one_segment) as daemon:
        daemon.feed(data, lines)
        if kill:
            daemon.kill()
    return root
