"""A log under combined load and faults, with every record accounted for.

producers   three over the socket, each on a separate route, and one that keeps a FIFO open and also writes equal and
            long lines; lines are numbered
consumers   one per route: reads from its cursor, expects the next number, moves the cursor
sidecars    wald-reclaim without grace, and wald-archive for the first route, as processes
faults      kills, stops, slow and failing system calls, a full disk, no descriptors, floods of CUT, jumping clocks

A number that is too high shows a loss, one that is too low a repeated record. Read records may be deleted immediately,
so a storm can last as long as needed; it consists of rounds, each with a separate log.
"""

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clocks import Clock
from contents import errors
from disturbed import invariants
from full_disk import fill, small_file_system
from running import Client, Daemon, eventually, run, sidecar
from torturing import Tally, started
from tracing import traced

import wald
from wald.client.producer import Producer
from wald.daemon.pipes import readable_bytes
from wald.errors import WaldError
from wald.files.layout import Root
from wald.files.ledger_read import entries_of
from wald.files.listing import list_segments

SOCKETS = tuple(f"socket{number}" for number in range(3))
FIFO = "fifo"
DISK_BYTES = 128 << 20
SIDECAR_SECONDS = 120.0  # limit for one of them under load
STUCK_SECONDS = 120.0  # limit for a stall, after any fault
SETTINGS = {"WALD_SEGMENT_MAX_BYTES": "64KiB", "WALD_FREE_SPACE_MIN": "4MiB", "WALD_LOG_LEVEL": "error"}
_CALLS = ("fdatasync", "fsync", "rename", "unlink", "ftruncate", "fallocate", "pwritev", "openat", "close")
_FAILING = ("fdatasync", "fsync", "rename", "unlink", "ftruncate", "fallocate", "pwritev")
_EQUAL = b"equal"  # a line that two reads of a pipe may mix up
_YEAR_NS = 365 * 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class Storm:
    """Faults and load of a run.

    Attributes:
        faults: each with its weight.
        delays: share of delayed calls among those that change files, and the longest delay in ms; "": none.
        pause_seconds: pause of a producer between two requests.
        cutters: number of connections that send nothing but CUT.
    """

    faults: Mapping[str, int]
    delays: str = ""
    pause_seconds: float = 0.0
    cutters: int = 0


KILLS = Storm({"kill": 3, "kill while it starts": 1}, pause_seconds=0.003)
MIXED = Storm(
    {
        "kill": 4,
        "kill while it starts": 1,
        "stop": 1,
        "slow calls": 3,
        "failing calls": 2,
        "full disk": 1,
        "no descriptors": 1,
        "flood of cuts": 3,
        "clock jumps": 2,
    },
    pause_seconds=0.003,
)
CUTS = Storm({"nothing": 1}, delays="0.02,3", pause_seconds=0.005, cutters=2)


def endure(
    scratch: Path,
    storm: Storm,
    *,
    seconds: float,
    seed: int,
    round_seconds: float = 90.0,
    tell: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Run rounds of ``storm`` until ``seconds`` are over or a promise is broken."""
    tally, chance, began = Tally(), random.Random(seed), time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 0 and not tally.wrong:
        _Round(scratch / f"round-{tally.counts['rounds']}", storm, chance, tally).go(min(left, round_seconds))
        tally.counts["rounds"] += 1
        tell(tally)
    return tally


class _Round:
    """One log from its first record until everything is read."""

    def __init__(self, place: Path, storm: Storm, chance: random.Random, tally: Tally) -> None:
        place.mkdir(parents=True)
        self._place = place
        self._storm = storm
        self._chance = chance
        self._tally = tally
        self._clock = Clock(place / "clock")
        self._full = threading.Event()

    def go(self, seconds: float) -> None:
        with ExitStack() as stack:
            disk = stack.enter_context(small_file_system(self._place / "disk", DISK_BYTES))
            env = SETTINGS | self._clock.env | {"DISTURBED_DELAYS": self._storm.delays}
            self._root = disk / "root"
            self._daemon = stack.enter_context(Daemon(self._root, env=env))
            self._load = _Load(self._daemon, self._storm, self._chance.randrange(1 << 32), self._full, self._tally)
            helpers = _Sidecars(self._root, self._place / "archive", self._full, self._tally)
            deadline = time.monotonic() + seconds
            try:
                while time.monotonic() < deadline and not self._tally.wrong:
                    self._disturb()
                    self._settle()
                self._load.finish()
                helpers.stop()
                assert self._daemon.stop() == 0, self._daemon.log
            except (AssertionError, OSError, WaldError, subprocess.SubprocessError) as error:
                self._tally.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                self._load.abandon()
                helpers.stop()
            self._judge()

    def _disturb(self) -> None:
        verbs: dict[str, Callable[[], None]] = {
            "kill": self._daemon.kill,
            "kill while it starts": self._kill_while_it_starts,
            "stop": self._stop,
            "slow calls": lambda: self._trace(
                f"inject={self._some(_CALLS)}:delay_enter={self._chance.choice((2, 20))}ms"
            ),
            "failing calls": self._fail,
            "full disk": self._fill,
            "no descriptors": self._take_descriptors,
            "flood of cuts": self._cut,
            "clock jumps": self._jump,
            "nothing": lambda: None,
        }
        weights = self._storm.faults
        self._tally.disturb(self._chance, {name: (weights[name], verbs[name]) for name in weights})

    def _settle(self) -> None:
        """Restart the daemon if it has ended; then records must flow and invariants hold."""
        if not self._daemon.wait_or_ready():  # by the fault, or a moment after it
            if self._daemon.process.returncode not in (0, -signal.SIGKILL):
                self._tally.faults[f"given up with {self._daemon.process.returncode}"] += 1
            self._daemon.spawn()
        self._daemon.await_ready()
        before = self._load.acknowledged
        eventually(lambda: self._load.acknowledged > before or self._tally.wrong, timeout=STUCK_SECONDS)
        with suppress(FileNotFoundError), self._load.lull():  # it has ended
            self._tally.wrong += invariants(self._daemon.process.pid, self._root)
        threading.Event().wait(self._chance.uniform(0, 0.3))

    def _kill_while_it_starts(self) -> None:
        self._daemon.kill()
        self._daemon.spawn()
        threading.Event().wait(self._chance.uniform(0, 0.6))
        self._daemon.kill()

    def _stop(self) -> None:
        assert self._daemon.stop() == 0, self._daemon.log

    def _some(self, calls: Sequence[str]) -> str:
        return ",".join(self._chance.sample(calls, self._chance.randrange(1, 4)))

    def _fail(self) -> None:
        """Let a few calls fail; a daemon that cannot continue ends and is restarted."""
        error, first = self._chance.choice(("EIO", "ENOSPC")), self._chance.randrange(1, 40)
        self._trace(f"inject={self._some(_FAILING)}:error={error}:when={first}+{self._chance.randrange(200, 2000)}")

    def _trace(self, expression: str) -> None:
        ended_before = suppress(AssertionError, TimeoutError)
        with ended_before, traced(self._daemon.process.pid, self._place / "trace", expression, threads=True):
            threading.Event().wait(self._chance.uniform(0.5, 2.0))

    def _fill(self) -> None:
        self._full.set()
        filler = self._root.parent / "filler"
        fill(filler)
        threading.Event().wait(self._chance.uniform(0.5, 2.0))
        filler.unlink()
        self._full.clear()

    def _take_descriptors(self) -> None:
        connections = []
        with suppress(OSError):
            for _ in range(600):
                connections.append(socket.socket(socket.AF_UNIX))
                connections[-1].settimeout(1)
                connections[-1].connect(os.fspath(self._daemon.socket_path))
        threading.Event().wait(self._chance.uniform(0, 1.0))
        for connection in connections:
            connection.close()

    def _cut(self) -> None:
        with suppress(OSError):
            for _ in range(self._chance.randrange(10, 60)):
                self._daemon.ask("CUT")

    def _jump(self) -> None:
        """Set most clocks wrong by seconds and some by years; at the end they are correct."""
        self._clock.set(self._chance.choice((0, 0, 10**10, -(10**10), _YEAR_NS, -_YEAR_NS)))

    def _judge(self) -> None:
        tally, load = self._tally, self._load
        tally.counts["acknowledged"] += load.acknowledged
        tally.counts["read"] += sum(load.read.values())
        tally.counts["lost"] += load.lost
        tally.counts["doubled"] += load.doubled
        if load.lost or load.doubled:
            tally.wrong.append("records are lost or doubled")
        with suppress(WaldError):
            tally.counts["cuts"] += _cuts(Root(self._root))
            tally.wrong += errors(self._root)
        if tally.wrong:
            subprocess.run(["cp", "-a", self._root, self._place / "left"], check=False)


def _cuts(root: Root) -> int:
    """Return the number of segments except the newest, including those only in ledgers."""
    bases = {segment.base_sequence for segment in list_segments(root).segments}
    for name in ("segments.jsonl", "reclaim.jsonl"):
        path = root.ledger / name
        bases |= {line["base"] for line in entries_of(path) if "base" in line}
    return max(0, len(bases) - 1)


class _Sidecars:
    """Sidecars that run concurrently with the daemon, one after the other."""

    def __init__(self, root: Path, archive: Path, full: threading.Event, tally: Tally) -> None:
        self._tally = tally
        self._full = full
        self._stopping = threading.Event()
        reclaim = sidecar("reclaim", "--root", root, "--grace", "0")
        pack = sidecar("archive", "pack", SOCKETS[0], "--root", root, "--group", "archive", "--dest", archive)
        pack += ["--records-per-bundle", "20000", "--codec", "none"]
        self._thread = started("sidecars", partial(self._work, [reclaim, reclaim, reclaim, pack]), self._tally.wrong)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2 * SIDECAR_SECONDS)

    def _work(self, lines: Sequence[Sequence[str]]) -> None:
        while not self._stopping.is_set():
            for line in lines:
                full = self._full.is_set()
                done = run(line, timeout=SIDECAR_SECONDS)
                self._tally.counts[line[2].removeprefix("wald_")] += 1
                if done.returncode not in (0, 3) and not full and not self._full.is_set():
                    self._tally.wrong.append(f"{line[2]} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
                if self._stopping.wait(0.5):
                    return


class _Load:
    """Producers, and a consumer for each, as threads.

    Attributes:
        acknowledged: lines that the daemon has acknowledged, and lines written to a FIFO.
        read: number of lines read in order, by route.
    """

    def __init__(self, daemon: Daemon, storm: Storm, seed: int, full: threading.Event, tally: Tally) -> None:
        self._tally = tally
        self.lost = self.doubled = 0
        self.read = dict.fromkeys((*SOCKETS, FIFO), 0)
        self._equal = Counter[str]()  # equal lines since the last numbered one
        self._sent = dict.fromkeys(self.read, 0)
        self._durable = dict.fromkeys(self.read, 0)
        self._daemon = daemon
        self._full = full
        self._pause = storm.pause_seconds
        self._stopping, self._abandoned, self._flowing = threading.Event(), threading.Event(), threading.Event()
        self._flowing.set()
        for name in SOCKETS:
            assert daemon.ask(f"ROUTE ADD {name}").startswith("OK")
        assert daemon.ask(f"ROUTE ADD {FIFO} fifo").startswith("OK")
        log = wald.open(daemon.root)
        for name in self.read:
            log.set_cursor(name, 0)
        log.set_cursor(SOCKETS[0], 0, "archive")
        self._writers = [
            self._started(name, partial(self._publish, name, seed + number)) for number, name in enumerate(SOCKETS)
        ]
        self._writers.append(self._started(FIFO, partial(self._feed, FIFO, seed - 1)))
        self._readers = [self._started(name, partial(self._consume, name)) for name in self.read]
        for _ in range(storm.cutters):
            self._started("cutter", self._cut)

    @property
    def acknowledged(self) -> int:
        return sum(self._durable.values())

    @contextmanager
    def lull(self) -> Iterator[None]:
        """Pause new requests: a log that is cut constantly cannot be examined."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def finish(self) -> None:
        """Stop the writers, and wait until everything is read."""
        self._stopping.set()
        for thread in self._writers + self._readers:
            thread.join(STUCK_SECONDS)
        assert not any(thread.is_alive() for thread in self._writers), "a producer is stuck"
        assert not any(thread.is_alive() for thread in self._readers), "a consumer is stuck"
        for name, sent in self._sent.items():
            if sent != self._durable[name] or sent != self.read[name]:
                self._tally.wrong.append(
                    f"{name}: {sent} sent, {self._durable[name]} durable, {self.read[name]} read in order"
                )

    def abandon(self) -> None:
        """Stop all remaining threads."""
        self._stopping.set()
        self._abandoned.set()

    def _started(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return started(name, work, self._tally.wrong, hushed=self._abandoned)

    def _goes_on(self) -> bool:
        self._flowing.wait()
        return not self._stopping.is_set()

    def _lines(self, name: str, chance: random.Random, *, equal: int = 0, padding_max: int = 200) -> bytes:
        """Return equal lines and numbered ones; the first of these contains the number of equal lines."""
        count = chance.choice((1, 1, 10, 200)) if padding_max <= 200 else 1
        first, self._sent[name] = self._sent[name], self._sent[name] + count
        padding = b"." * chance.randrange(padding_max)
        numbered = (b"%d %d %s\n" % (first + i, 0 if i else equal, padding) for i in range(count))
        return (_EQUAL + b"\n") * equal + b"".join(numbered)

    def _publish(self, name: str, seed: int) -> None:
        chance = random.Random(seed)
        with Producer(self._daemon.root, retry_for=STUCK_SECONDS) as producer:
            while self._goes_on():
                producer.publish(name, self._lines(name, chance))
                self._durable[name] += sum(last - first + 1 for first, last in producer.acknowledged())
                self._stopping.wait(self._pause)
            self._durable[name] += sum(last - first + 1 for first, last in producer.flush())

    def _feed(self, name: str, seed: int) -> None:
        chance = random.Random(seed)
        # Both ends, like a service manager: the pipe outlives the daemon.
        descriptor = os.open(self._daemon.root / f"routes/{name}/in", os.O_RDWR)
        try:
            while self._goes_on():
                padding_max = 1_600_000 if chance.random() < 0.01 else 200
                equal = chance.choice((0, chance.randrange(50)))
                data = memoryview(self._lines(name, chance, equal=equal, padding_max=padding_max))
                while data:
                    data = data[os.write(descriptor, data) :]
                self._durable[name] = self._sent[name]
                self._stopping.wait(self._pause)
            eventually(lambda: readable_bytes(descriptor) == 0, timeout=STUCK_SECONDS)
        finally:
            os.close(descriptor)

    def _cut(self) -> None:
        with Client(self._daemon.socket_path) as client:
            while self._goes_on():
                client.ask(b"CUT\n")

    def _consume(self, name: str) -> None:
        log = wald.open(self._daemon.root)
        done = 0
        while not self._abandoned.is_set():
            over = self._stopping.is_set() and not any(thread.is_alive() for thread in self._writers)
            for batch in log.batches(name, start=done + 1 if done else "cursor", limit=5000):
                for record in batch.records():
                    self._take(name, record.value)
                    done = record.sequence
            if done and not self._full.is_set():
                with suppress(OSError):  # the disk is full now; the next attempt will succeed
                    log.set_cursor(name, done)
            if over and self.read[name] >= self._sent[name]:
                return
            threading.Event().wait(0.02)

    def _take(self, name: str, value: bytes) -> None:
        if value == _EQUAL:
            self._equal[name] += 1
            return
        number, equal = map(int, value.split(b" ", 2)[:2])
        expected, surplus = self.read[name], self._equal.pop(name, 0) - equal
        self.lost += max(0, -surplus)
        self.doubled += max(0, surplus)
        if number > expected:
            self.lost += number - expected
        elif number < expected:
            self.doubled += 1
            return
        self.read[name] = number + 1
