"""Kill the daemon again and again under load, then count: what was acknowledged, and what of it is lost or doubled.

Used by the tests (a few kills) and by ``scripts/torture`` (as many as one has time for). The daemon is killed with
SIGKILL at random moments, also while it starts; the producers know nothing of it and go on.

socket  four producers; each request has a producer id and a number and is sent again until it is acknowledged
fifo    two writers hold the FIFO of a route each and write unique lines and, in between, the same line again and again
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import counted
from contents import errors, records
from running import Daemon, eventually
from threads import started

from wald.client.producer import Durable, Producer
from wald.daemon.pipes import readable_bytes

PRODUCERS = 4
WRITERS = 2
SETTINGS = {"WALD_SEGMENT_MAX_BYTES": "256KiB", "WALD_LOG_LEVEL": "error"}  # a cut every few turns
_MOMENT_SECONDS = 0.3  # the time to the next kill is at most this, from the moment the daemon is at work
_START_SECONDS = 0.6  # and this from the moment it is started
_SAME = b"tick"


@dataclass(slots=True)
class Outcome:
    """What was sent, and what became of it; ``faults`` is empty if the log kept its promises."""

    kills: int = 0
    attempted: int = 0
    acknowledged: int = 0
    read: int = 0
    lost: int = 0
    duplicated: int = 0
    unacknowledged_but_there: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        reported = ("kills", "attempted", "acknowledged", "read", "lost", "duplicated", "unacknowledged_but_there")
        return counted.table({name: getattr(self, name) for name in reported}, self.faults)


def torture(root: Path, *, mode: str, kills: int, seed: int, tell: Callable[[int], None] = lambda _: None) -> Outcome:
    """One log, one load, ``kills`` kills; the log is stopped afterwards.

    Args:
        mode: "socket" or "fifo".
        seed: of the moments and of the records; what the machine does in between is its own.
        tell: called after each kill with how many there were.
    """
    chance = random.Random(seed)
    with Daemon(root, env=SETTINGS, anew=True) as daemon:
        load: _Load = _Sockets(daemon, seed) if mode == "socket" else _Fifos(daemon, seed)
        try:
            for number in range(1, kills + 1):
                _let_work(daemon, load, chance)
                daemon.kill()
                tell(number)
                daemon.spawn()
            daemon.await_ready()
        finally:
            load.stop()
        outcome = Outcome(kills)
        load.wait()
        assert daemon.stop() == 0, daemon.log
    load.judge(outcome)
    outcome.faults += errors(root)
    found = [record.sequence for record in records(root)]
    if sorted(found) != list(range(1, len(found) + 1)):
        outcome.faults.append("sequences have gaps")
    return outcome


def _let_work(daemon: Daemon, load: _Load, chance: random.Random) -> None:
    """Return at a random moment: of a start, or of the work that follows it."""
    pause = threading.Event()
    if chance.random() < 0.25:
        pause.wait(chance.uniform(0, _START_SECONDS))
        return
    daemon.await_ready()
    before = load.progress()
    eventually(lambda: load.progress() != before)
    pause.wait(chance.uniform(0, _MOMENT_SECONDS))


class _Load:
    """Threads that write until they are stopped."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []

    def start(self, write: Callable[[int], None], count: int) -> None:
        self._threads = [
            started(f"producer {number}", partial(write, number), self._failures) for number in range(count)
        ]

    def stop(self) -> None:
        self._stopping.set()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a producer is stuck"

    def progress(self) -> int:
        raise NotImplementedError

    def judge(self, outcome: Outcome) -> None:
        raise NotImplementedError


class _Sockets(_Load):
    def __init__(self, daemon: Daemon, seed: int) -> None:
        super().__init__()
        self._root = daemon.root
        self._seed = seed
        self._sent: list[list[bytes]] = [[] for _ in range(PRODUCERS)]
        self._acknowledged: list[list[int]] = [[] for _ in range(PRODUCERS)]  # the sequence of each, as it was told
        daemon.ask("ROUTE ADD shared")
        self.start(self._write, PRODUCERS)

    def progress(self) -> int:
        return sum(map(len, self._acknowledged))

    def _write(self, number: int) -> None:
        chance = random.Random(self._seed + number)
        sent, acknowledged = self._sent[number], self._acknowledged[number]

        def note(durable: list[Durable]) -> None:
            for first, last in durable:
                acknowledged.extend(range(first, last + 1))

        with Producer(self._root, retry_for=120) as producer:
            while not self._stopping.is_set():
                count = chance.choice((1, 1, 5, 50))
                lines = [b"%d %d %s" % (number, len(sent) + i, b"." * chance.randrange(200)) for i in range(count)]
                sent += lines
                producer.publish("shared", b"".join(line + b"\n" for line in lines))
                note(producer.acknowledged())
            note(producer.flush())

    def judge(self, outcome: Outcome) -> None:
        outcome.faults += self._failures
        found = {record.sequence: record.value for record in records(self._root)}
        times = Counter(found.values())
        outcome.read = len(found)
        outcome.duplicated = sum(count - 1 for count in times.values())
        for number, (sent, sequences) in enumerate(zip(self._sent, self._acknowledged, strict=True)):
            outcome.attempted += len(sent)
            outcome.acknowledged += len(sequences)
            wrong = [line for line, sequence in zip(sent, sequences, strict=False) if found.get(sequence) != line]
            outcome.lost += len(wrong)
            outcome.unacknowledged_but_there += sum(line in times for line in sent[len(sequences) :])
            mine = [value for value in found.values() if value.startswith(b"%d " % number)]
            if mine != sent[: len(mine)]:
                outcome.faults.append(f"producer {number}: its records are not in the order in which it sent them")
            if len(sequences) != len(sent) and not self._failures:
                outcome.faults.append(
                    f"producer {number}: {len(sent) - len(sequences)} records were never acknowledged"
                )
        if outcome.lost or outcome.duplicated:
            outcome.faults.append("acknowledged records are lost or doubled")


class _Fifos(_Load):
    """Nothing acknowledges a line to who writes to a FIFO: what the pipe took counts."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        super().__init__()
        self._daemon = daemon
        self._seed = seed
        self._sent: list[list[bytes]] = [[] for _ in range(WRITERS)]
        for number in range(WRITERS):
            assert daemon.ask(f"ROUTE ADD pipe{number} fifo").startswith("OK")
        self.start(self._write, WRITERS)

    def progress(self) -> int:
        return sum(map(len, self._sent))

    def _write(self, number: int) -> None:
        chance = random.Random(self._seed + number)
        sent = self._sent[number]
        # Both ends, as a service manager holds it: the pipe outlives the daemon, and a write never meets a broken one.
        descriptor = os.open(self._daemon.root / f"routes/pipe{number}/in", os.O_RDWR)
        while not self._stopping.is_set():
            lines = [_SAME] * chance.randrange(1, 50)
            if chance.random() < 0.5:
                lines = [b"%d %s" % (len(sent) + i, b"." * chance.randrange(300)) for i in range(chance.randrange(40))]
            if chance.random() < 0.01:
                lines = [b"%d %s" % (len(sent), b"long" * chance.randrange(400_000))]
            data = memoryview(b"".join(line + b"\n" for line in lines))
            while data:
                data = data[os.write(descriptor, data) :]
            sent += lines
        eventually(lambda: readable_bytes(descriptor) == 0)
        os.close(descriptor)

    def judge(self, outcome: Outcome) -> None:
        outcome.faults += self._failures
        for number, sent in enumerate(self._sent):
            found = [record.value for record in records(self._daemon.root, f"pipe{number}")]
            outcome.attempted += len(sent)
            outcome.acknowledged += len(sent)
            outcome.read += len(found)
            missing, surplus = Counter(sent) - Counter(found), Counter(found) - Counter(sent)
            outcome.lost += missing.total()
            outcome.duplicated += surplus.total()
            if found != sent:
                at = next((i for i, pair in enumerate(zip(sent, found, strict=False)) if pair[0] != pair[1]), len(sent))
                outcome.faults.append(f"pipe{number}: line {at + 1} of {len(sent)} is not the one that was written")
