"""Setting of the measurements: a daemon in a fresh root, the same data for all contenders, a FIFO and its producer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Self

import wald
from wald.client.producer import Producer

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ROUTE = "bench"
PATIENCE_SECONDS = 300.0
_START_SECONDS = 20.0
_BLOCK_BYTES = (
    32 << 20
)  # generated once and repeated; frames and windows are smaller, so no compressor sees the repetition
_TMPFS_MAGIC = 0x01021994


@dataclass
class Stage:
    """Two places to write, the data, and the number of repetitions.

    Attributes:
        memory: a directory on tmpfs, or None.
        data: a file of lines, in memory if possible.
    """

    memory: Path | None
    disk: Path
    data: Path
    data_bytes: int
    lines: int
    repeat: int
    quick: bool
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def fresh(self, where: Path) -> Path:
        """Create a directory below ``where``."""
        path = where / f"{next(self._numbers)}"
        path.mkdir()
        return path

    def lines_file(self, lines: int) -> Path:
        """Create a file of the first lines of the data."""
        path = self.fresh(self.fast) / "lines"
        with self.data.open("rb") as data, path.open("wb") as file:
            file.writelines(islice(data, lines))
        return path

    @property
    def one_segment(self) -> dict[str, object]:
        """Settings that put all of the data into one segment, so that nothing is cut or sealed."""
        return {"segment_max_bytes": self.data_bytes + self.data_bytes // 50 + (1 << 20)}

    @property
    def fast(self) -> Path:
        return self.memory or self.disk


@contextmanager
def set_up(megabytes: int, repeat: int, quick: bool) -> Iterator[Stage]:
    """Create the places and the data, and remove them afterwards."""
    name = f"wald-bench-{os.getpid()}"
    shared = Path("/dev/shm")
    memory = shared / name if shared.is_dir() and os.access(shared, os.W_OK) and is_tmpfs(shared) else None
    disk = Path(os.environ.get("TMPDIR") or Path.cwd()) / f".{name}"
    try:
        for place in (memory, disk):
            if place is not None:
                place.mkdir()
        data = (memory or disk) / "data"
        length, lines = generate(data, megabytes * 1_000_000)
        yield Stage(memory, disk, data, length, lines, repeat, quick)
    finally:
        for place in (memory, disk):
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)


def is_tmpfs(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [mount for mount in mounts if path == Path(mount[1]) or Path(mount[1]) in path.parents]
    return max(holding, key=lambda mount: len(mount[1]))[2] == "tmpfs"


def generate(path: Path, length: int) -> tuple[int, int]:
    """Write about ``length`` bytes of lines of about 122 bytes, like an access log's; return bytes and lines."""
    chance = random.Random(1)
    pages = [f"/{chance.choice('abcdefgh')}/{chance.getrandbits(40):x}.html" for _ in range(5000)]
    agents = [
        f"agent/{chance.randrange(100)}.{chance.randrange(1000)} (like nothing else, and then some)" for _ in range(50)
    ]
    block: list[str] = []
    written = 0
    while written < min(_BLOCK_BYTES, length):
        at = written / 1e5
        line = (
            f"10.{chance.randrange(256)}.{chance.randrange(256)}.{chance.randrange(256)} - - [{1.7e9 + at:.6f}] "
            f'"GET {chance.choice(pages)}" {chance.choice((200, 200, 200, 304, 404))} {chance.randrange(100_000)} '
            f'"{chance.choice(agents)}"\n'
        )
        block.append(line)
        written += len(line)
    data = "".join(block).encode()
    total = lines = 0
    with path.open("wb") as file:
        while total < length:
            part = data if length - total >= len(data) else data[: data.rfind(b"\n", 0, length - total) + 1]
            if not part:
                break
            file.write(part)
            total += len(part)
            lines += part.count(b"\n")
    return total, lines


class Daemon:
    """`wald run` on a fresh root with one route, as a separate process."""

    def __init__(self, root: Path, *, command: list[str] | None = None, **settings: object) -> None:
        self.root = root
        self._command = command or [sys.executable, "-m", "wald", "run"]
        given = {f"WALD_{name.upper()}": str(value) for name, value in settings.items()}
        self._environment = environment() | {"WALD_FREE_SPACE_MIN": "0", "WALD_LOG_LEVEL": "error"} | given
        self.process = self._start()
        with self.connect() as producer:
            producer.command("ROUTE", "ADD", ROUTE, "fifo")

    @property
    def fifo(self) -> Path:
        return self.root / "routes" / ROUTE / "in"

    @property
    def socket(self) -> Path:
        return self.root / "wald.sock"

    def connect(self) -> Producer:
        return Producer(self.socket, connect_for=_START_SECONDS)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self._command, "--root", self.root], env=self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()
        with self.connect() as producer:
            producer.command("PING")

    def wait_for(self, sequence: int) -> None:
        """Return when the head has reached ``sequence``: everything up to it is durable."""
        log = wald.open(self.root)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (head := log.head()) is None or head.sequence < sequence:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the head is at {head.sequence if head else 0}, not at {sequence}")
            time.sleep(0.0005)

    def feed(self, data: Path, lines: int) -> float:
        """Return the seconds from the start of the producer until everything it wrote is durable."""
        began = time.perf_counter()
        with produce(data, self.fifo):
            self.wait_for(lines)
            return time.perf_counter() - began

    def peak_bytes(self) -> int:
        """Return its peak resident memory."""
        return peak_bytes(self.process.pid)


def peak_bytes(pid: int) -> int:
    """Return a process's peak resident memory since it began to run its program; 0 if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


@contextmanager
def produce(data: Path, fifo: Path) -> Iterator[None]:
    """Run the producer of every contender: `cat DATA > FIFO`."""
    with subprocess.Popen(["sh", "-c", 'exec cat "$1" > "$2"', "sh", data, fifo]) as process:
        yield
        process.wait()


def environment() -> dict[str, str]:
    paths = [str(REPOSITORY / folder) for folder in (".", "sidecars", "scripts")] + [os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def in_python(module: str, *words: object) -> str:
    """Run a module of this package in a fresh interpreter; return its output."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout


def timed(command: list[object] | str, *, shell: bool = False) -> float:
    """Return the seconds a command takes; it must succeed, and its output is discarded."""
    began = time.perf_counter()
    words = command if isinstance(command, str) else [str(word) for word in command]
    subprocess.run(words, shell=shell, check=True, stdout=subprocess.DEVNULL, env=environment())
    return time.perf_counter() - began
