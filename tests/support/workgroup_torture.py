"""Kill all processes around a work group repeatedly, and judge their notes.

producer    a thread; batches with keys and times, never far ahead of the cursor
owner       a process with the group; its workers are threads, some of which die with what they have
sidecars    wald-reclaim without grace, and a reader of the dead letters, in one thread
faults      SIGKILL of owner and daemon; SIGTERM and SIGSTOP of the owner; failing and slow system calls
            of the owner; its wall clock set; CUT
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import workgroup_owner
from clocks import Clock
from contents import errors
from running import Daemon, eventually, run, sidecar
from torturing import Faults, Tally, started
from tracing import traced
from workgroup_oracle import History, Letter, calls_of

import wald
from wald.client.producer import Producer
from wald.files.ledger_read import entries_of
from wald.format.records import NOT_BEFORE
from wald.work.group import Order

ROUTE, GROUP, DEAD = "jobs", "work", "dead_letter"
ORDERS: tuple[Order, ...] = ("log", "key")
WINDOW = 3000
MAX_TRIES = 5
AHEAD = 4000  # maximum lead of the producer over the cursor, in sequences
STUCK_SECONDS = 120.0
SETTINGS = {"WALD_SEGMENT_MAX_BYTES": "64KiB", "WALD_LOG_LEVEL": "error"}
_CALLS = ("fdatasync", "fsync", "rename", "pwritev")


def torture_workers(
    place: Path, *, order: Order, kills: int, seed: int, tell: Callable[[int], None] = lambda _: None
) -> Tally:
    """Torture one log and one group with at least ``kills`` SIGKILLs; the log is stopped afterwards.

    Args:
        place: a directory, which keeps the notes of all processes.
        seed: for the timing of kills and the faults; the timing of the machine still varies.
        tell: called after each fault with the number of kills.
    """
    place.mkdir(parents=True)
    chance = random.Random(seed)
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(place / "root", env=SETTINGS, anew=True))
        assert daemon.ask(f"ROUTE ADD {ROUTE}").startswith("OK")
        scene = _Scene(place, daemon, order, chance)
        stack.callback(scene.abandon)
        scene.begin()
        while scene.outcome.counts["kills"] < kills and not scene.outcome.wrong:
            scene.disturb()
            scene.settle()
            tell(scene.outcome.counts["kills"])
        scene.finish()
        assert daemon.stop() == 0, daemon.log
    return scene.judge()


class _Scene:
    """All processes and threads around one group."""

    def __init__(self, place: Path, daemon: Daemon, order: Order, chance: random.Random) -> None:
        self.outcome = Tally()
        self._place = place
        self._daemon = daemon
        self._chance = chance
        self._log = wald.open(daemon.root)
        self._history = History(order, MAX_TRIES)
        self._clock = Clock(place / "clock")
        self._stopping, self._over = threading.Event(), threading.Event()
        self._owner: subprocess.Popen[bytes] | None = None
        self._answered = 0

    def begin(self) -> None:
        self._spawn_owner()
        self._producer = started("producer", self._produce, self.outcome.wrong, hushed=self._over)
        self._sidecars = started("sidecars", self._reclaim, self.outcome.wrong, hushed=self._over)

    def disturb(self) -> None:
        error = self._chance.choice(("EIO", "ENOSPC"))
        faults: Faults = {
            "owner killed": (5, self._kill_owner),
            "owner killed while it starts": (1, self._kill_owner_while_it_starts),
            "daemon killed": (3, self._kill_daemon),
            "owner ended": (1, self._end_owner),
            "owner stopped for a while": (1, self._stop_owner),
            "calls that fail": (2, lambda: self._trace(f"error={error}:when={self._chance.randrange(1, 30)}")),
            "calls that take long": (1, lambda: self._trace("delay_enter=30ms")),
            "clock set": (2, lambda: self._clock.set(self._chance.choice((0, 3, -3)) * 10**9)),
            "cut": (1, self._cut),
        }
        self.outcome.disturb(self._chance, faults)

    def settle(self) -> None:
        """Restart all processes that have ended, and wait until records are acknowledged."""
        if self._daemon.process.poll() is not None:
            self._daemon.spawn()
        self._see_to_owner()
        if self._chance.random() < 0.25:
            threading.Event().wait(self._chance.uniform(0, 0.6))
            return
        self._answered = self._answers_of_owner()
        eventually(lambda: self._see_to_owner() and (self._goes_on() or self.outcome.wrong), timeout=STUCK_SECONDS)
        threading.Event().wait(self._chance.uniform(0, 0.4))

    def finish(self) -> None:
        """Wait until all sent records are processed."""
        self._daemon.await_ready()
        self._clock.set(0)
        self._stopping.set()
        self._producer.join(STUCK_SECONDS)
        assert not self._producer.is_alive(), "the producer is stuck"
        last = max(self._history.sent)
        try:
            eventually(
                lambda: self._see_to_owner() and (self._cursor() >= last or self.outcome.wrong), timeout=STUCK_SECONDS
            )
        except TimeoutError:
            self.outcome.wrong.append(f"the cursor is {self._cursor()}, and does not reach {last}")
        self._end_owner()
        self._over.set()
        self._sidecars.join(STUCK_SECONDS)
        self._read_dead_letters()

    def abandon(self) -> None:
        """Stop everything."""
        self._stopping.set()
        self._over.set()
        if self._owner is not None:
            self._owner.kill()
            self._owner.wait()

    def judge(self) -> Tally:
        history, outcome = self._history, self.outcome
        for life in range(outcome.counts["owners"]):
            history.calls += calls_of(life, self._notes_of(life))
        outcome.wrong += history.judge() + errors(self._daemon.root)
        tries = [given.tries for call in history.calls for given in call.given]
        reclaimed = entries_of(self._daemon.root / "ledger/reclaim.jsonl")
        outcome.counts.update(
            {
                "sent": len(history.sent),
                "deliveries": len(tries),
                "again": sum(each > 1 for each in tries),
                "acknowledged": len({s for call in history.calls if call.kind == "ack" for s in call.sequences}),
                "dead letters": len(history.letters),
                "segments reclaimed": sum(entry["event"] == "reclaimed" for entry in reclaimed),
            }
        )
        return outcome

    # The owner.

    def _spawn_owner(self) -> None:
        life = self.outcome.counts["owners"]
        self.outcome.counts["owners"] += 1
        options = {
            "root": os.fspath(self._daemon.root),
            "route": ROUTE,
            "group": GROUP,
            "order": self._history.order,
            "window": WINDOW,
            "max_tries": MAX_TRIES,
            "notes": os.fspath(self._notes_of(life)),
            "seed": self._chance.randrange(1 << 32),
        }
        with (self._place / "owner.log").open("ab") as log:
            line = [sys.executable, workgroup_owner.__file__, json.dumps(options)]
            self._owner = subprocess.Popen(line, env=os.environ | self._clock.env, stderr=log)

    def _notes_of(self, life: int) -> Path:
        path = self._place / f"owner-{life}.notes"
        path.touch()
        return path

    def _see_to_owner(self) -> bool:
        """Restart it if it has exited, as it may after a disk failure; return True."""
        assert self._owner is not None
        if (code := self._owner.poll()) is None:
            return True
        if code not in (0, 3, -signal.SIGKILL, -signal.SIGTERM):  # the last one: it was not yet ready for the signal
            log = (self._place / "owner.log").read_text()
            self.outcome.wrong.append(f"owner {self.outcome.counts['owners'] - 1} ended with {code}: {log[-1500:]}")
        self._spawn_owner()
        self._answered = 0
        return True

    def _goes_on(self) -> bool:
        """True if the owner has answered more requests since then."""
        return self._answers_of_owner() > self._answered

    def _answers_of_owner(self) -> int:
        return self._notes_of(self.outcome.counts["owners"] - 1).read_bytes().count(b'"refused"')

    # Faults.

    def _kill_owner(self) -> None:
        assert self._owner is not None
        self._owner.kill()
        self._owner.wait()
        self.outcome.counts["kills"] += 1

    def _kill_owner_while_it_starts(self) -> None:
        self._kill_owner()
        self._spawn_owner()
        threading.Event().wait(self._chance.uniform(0, 0.6))
        self._kill_owner()

    def _kill_daemon(self) -> None:
        self._daemon.kill()
        self.outcome.counts["kills"] += 1

    def _end_owner(self) -> None:
        assert self._owner is not None
        self._owner.terminate()
        try:
            self._owner.wait(STUCK_SECONDS)
        except subprocess.TimeoutExpired:
            self.outcome.wrong.append("an owner does not end")
            self._owner.kill()
            self._owner.wait()

    def _stop_owner(self) -> None:
        assert self._owner is not None
        self._owner.send_signal(signal.SIGSTOP)
        threading.Event().wait(self._chance.uniform(0.1, 1.5))
        self._owner.send_signal(signal.SIGCONT)

    def _trace(self, what: str) -> None:
        assert self._owner is not None
        calls = ",".join(self._chance.sample(_CALLS, self._chance.randrange(1, 4)))
        ended_before = suppress(AssertionError, TimeoutError)
        with ended_before, traced(self._owner.pid, self._place / "trace", f"inject={calls}:{what}", threads=True):
            threading.Event().wait(self._chance.uniform(0.3, 1.0))

    def _cut(self) -> None:
        with suppress(OSError):  # it has not started yet
            self._daemon.ask("CUT")

    # Background activity.

    def _cursor(self) -> int:
        return self._log.cursor(ROUTE, GROUP).sequence

    def _produce(self) -> None:
        chance = random.Random(self._chance.random())
        numbers: list[int] = []
        sequences: list[int] = []
        with Producer(self._daemon.root, retry_for=STUCK_SECONDS) as producer:
            while not self._stopping.is_set():
                full = time.monotonic() + 1  # a group may wait for further records before it moves its cursor
                while sequences and sequences[-1] - self._cursor() > AHEAD and time.monotonic() < full:
                    self._stopping.wait(0.05)
                new = [len(numbers) + number for number in range(chance.choice((1, 5, 50)))]
                numbers += new
                late = time.time_ns() + chance.randrange(1_500_000_000)
                producer.send(
                    ROUTE,
                    [b"%d" % number + b" " * chance.randrange(300) for number in new],
                    keys=[f"k{chance.randrange(40)}" if chance.random() < 0.8 else None for _ in new],
                    headers=[{NOT_BEFORE: str(late)} if chance.random() < 0.03 else None for _ in new],
                )
                sequences += [s for first, last in producer.acknowledged() for s in range(first, last + 1)]
                self._stopping.wait(chance.uniform(0, 0.05))
            sequences += [s for first, last in producer.flush() for s in range(first, last + 1)]
        self._history.sent = dict(zip(sequences, numbers, strict=True))

    def _reclaim(self) -> None:
        while not self._over.wait(0.7):
            self._read_dead_letters()
            done = run(sidecar("reclaim", "--root", self._daemon.root, "--grace", "0"))
            if done.returncode not in (0, 3):
                self.outcome.wrong.append(f"wald-reclaim ended with {done.returncode}: {done.stderr.decode()[-500:]}")

    def _read_dead_letters(self) -> None:
        last = 0
        for record in self._log.records(DEAD, "cursor") if (self._daemon.root / "routes" / DEAD).exists() else ():
            headers, last = json.loads(record.headers or b"{}"), record.sequence
            letter = Letter(int(headers["wald.origin.sequence"]), int(headers["wald.tries"]), int(record.value))
            self._history.letters.append(letter)
        if last:
            self._log.set_cursor(DEAD, last)
