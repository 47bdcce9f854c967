"""Kill a gate and its daemon repeatedly under HTTP load, then check every answered request.

The producers repeat each request with its Idempotency-Key until the answer is 200; the workers lease, acknowledge,
release and extend. Clients are not told about the kills. The promises of docs/http.md and docs/work.md:

- a record answered with 200 is in the log once, in its order, from the sequence ``first`` to the sequence ``last``;
  repeating the request after its 200 gets the same answer
- a worker receives the record that the log has at that sequence
- a record whose acknowledgement was answered is in no later lease
- each record is acknowledged, and the cursor reaches the end
- RECLAIM concurrently deletes records that all groups have read, without effect on the other promises; a reader gets
  each record once. It follows the route as Server-Sent Events, and reconnects with the last id. Its cursor passes only
  records whose requests were answered: the keys of the others are stored only in the log, so they must not be deleted
  (docs/http.md, "Repeating a request").
- a gate exits with 0 at SIGTERM, and no process writes a traceback
"""

import base64
import gzip
import http.client
import json
import random
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from contents import errors, records
from full_disk import fill
from gating import BILLING, NDJSON, ORDERS, TEXT, Answer, Body, Gate
from running import Daemon, eventually, launched, sidecar
from torturing import Faults, Tally, started

import wald

ROUTE, GROUP, READER = "orders", "billing", "reader"
PRODUCERS, WORKERS = 8, 8
SETTINGS = {"WALD_SEGMENT_MAX_BYTES": "1MiB", "WALD_LOG_LEVEL": "error"}  # a cut every few requests
STUCK_SECONDS = 90.0
_NO_ROOM = 7  # an exit code
_BYTES = "application/octet-stream"
_BODIES = [
    (TEXT, "", 1),
    (TEXT, "", 50),
    (TEXT, "gzip", 3000),
    (NDJSON, "", 40),
    (NDJSON, "gzip", 500),
    (_BYTES, "", 1),
]
_AGAIN = (408, 409, 429, 503)  # docs/http.md: send it again
_LATER = (429, 503)
_NO_ANSWER = (OSError, http.client.HTTPException)


class _Posted(NamedTuple):
    """A request that was answered with 200."""

    values: list[str]
    first: int
    last: int


class _Leased(NamedTuple):
    """A leased record and the time of the lease request, in seconds of the monotonic clock."""

    sequence: int
    value: str
    asked_at: float


def torture_gate(
    root: Path, *, kills: int, seed: int, small_disk: bool = False, tell: Callable[[int], None] = lambda _: None
) -> Tally:
    """Torture one log with a daemon and a gate, which are stopped afterwards.

    Args:
        seed: for the timing of kills and the records; the timing of the machine still varies.
        small_disk: True if ``root`` is on a separate disk, which may be filled.
        tell: called after each kill with the number of kills.
    """
    with Daemon(root, env=SETTINGS, anew=True) as daemon:
        daemon.ask(f"ROUTE ADD {ROUTE}")
        with Gate(root, anew=True) as gate:
            for group in (GROUP, READER):
                gate.make_group(group, ROUTE)
            scene = _Scene(daemon, gate, random.Random(seed), small_disk=small_disk)
            try:
                scene.begin()
                while scene.outcome.counts["kills"] < kills and not scene.outcome.wrong:
                    scene.let_work()
                    scene.disturb()
                    tell(scene.outcome.counts["kills"])
                scene.finish()
            finally:
                scene.abandon()
            scene.end("gate", gate)
        scene.end("daemon", daemon)
        return scene.judge()


class _Scene:
    """The daemon, the gate, and their clients, which are threads."""

    def __init__(self, daemon: Daemon, gate: Gate, chance: random.Random, *, small_disk: bool) -> None:
        self.outcome = Tally()
        self._daemon = daemon
        self._gate = gate
        self._chance = chance
        self._small_disk = small_disk
        self._faults: Faults = {
            "gate killed": (6, lambda: self._killed(gate)),
            "daemon killed": (5, lambda: self._killed(daemon)),
            "both killed": (5, lambda: self._killed(daemon, gate)),
            "gate killed while it starts": (2, self._kill_starting_gate),
            "gate stopped for a while": (2, lambda: self._stop(gate.process)),
            "daemon stopped for a while": (2, lambda: self._stop(daemon.process)),
            "gate ended": (2, self._end_gate),
            "daemon ended": (1, self._end_daemon),
            "cut": (2, self._cut),
            "disk full for a while": (2 if small_disk else 0, self._fill_disk),
        }
        self._stopping, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._posted: list[_Posted] = []
        self._leased: list[_Leased] = []
        self._found: dict[int, str] = {}  # by the reader
        self._last = 0
        self._settled: set[str] = set()  # values that were answered with 200, and may be deleted
        self._acknowledged: dict[int, float] = {}  # time of the answer
        self._unanswered: set[int] = set()  # acknowledgements that may have counted or not

    def begin(self) -> None:
        for number in range(PRODUCERS):
            self._start(f"producer {number}", self._produce, number)
        for number in range(WORKERS):
            self._start(f"worker {number}", self._work, f"worker-{number}")
        self._start("reader", self._read)
        self._start("reclaimer", self._reclaim)

    def _start(self, name: str, work: Callable[..., None], *what: object) -> None:
        chance = random.Random(self._chance.random())
        self._threads.append(started(name, lambda: work(chance, *what), self.outcome.wrong, hushed=self._over))

    def let_work(self) -> None:
        """Return at a random moment: during a start, or during the work after it."""
        if self._chance.random() < 0.25:
            self._pause(0.6)
            return
        before = len(self._posted), len(self._acknowledged)
        self._await(lambda: len(self._posted) > before[0] and len(self._acknowledged) > before[1])
        self._pause(0.5)

    def disturb(self) -> None:
        self.outcome.disturb(self._chance, self._faults)

    def finish(self) -> None:
        """Wait until all requests are answered and all records processed."""
        self._await_daemon()
        self._stopping.set()
        for thread in self._threads[:PRODUCERS]:
            thread.join(STUCK_SECONDS)
            if thread.is_alive():
                self.outcome.wrong.append(f"{thread.name} is stuck")
        last = max((posted.last for posted in self._posted), default=0)
        log = wald.open(self._daemon.root)
        with suppress(TimeoutError):
            self._await(lambda: self._last >= last)
        try:
            self._await(lambda: log.cursor(ROUTE, GROUP).sequence >= last)
        except TimeoutError:
            self.outcome.wrong.append(f"the cursor is {log.cursor(ROUTE, GROUP).sequence}, and does not reach {last}")

    def abandon(self) -> None:
        """Stop all clients."""
        self._stopping.set()
        self._over.set()
        for thread in self._threads:
            thread.join(STUCK_SECONDS)

    def end(self, name: str, program: Gate | Daemon) -> None:
        """Stop a process, which must exit with 0."""
        if (code := program.stop()) != 0:
            self.outcome.wrong.append(f"the {name} ended with {code}: {program.log[-1000:]}")

    def judge(self) -> Tally:
        outcome, wrong = self.outcome, self.outcome.wrong
        found = self._found
        left = {record.sequence: record.value.decode() for record in records(self._daemon.root, ROUTE)}
        wrong += [f"{at} is not what it was: {value}" for at, value in left.items() if found.get(at) != value][:5]
        times = Counter(found.values())
        at = {value: sequence for sequence, value in found.items()}
        sent = [value for posted in self._posted for value in posted.values]
        outcome.counts.update(
            {
                "requests": len(self._posted),
                "sent": len(sent),
                "read": len(found),
                "reclaimed": len(found) - len(left),
                "delivered": len(self._leased),
                "acknowledged": len(self._acknowledged),
            }
        )
        wrong += [f"{value} is in the log {times[value]} times" for value in sent if times[value] != 1][:5]
        if len(found) != len(sent):
            wrong.append(f"the log has {len(found)} records; {len(sent)} were sent")
        for posted in self._posted:
            places = [at.get(value, 0) for value in posted.values]
            if (places[0], places[-1]) != (posted.first, posted.last) or places != sorted(places):
                wrong.append(f"answered {posted.first} to {posted.last}; the log has it at {places[0]} to {places[-1]}")
        for leased in self._leased:
            value = found.get(leased.sequence)
            if value != leased.value:
                wrong.append(f"a worker got {leased.value} as {leased.sequence}; the log has {value}")
            if leased.asked_at > self._acknowledged.get(leased.sequence, float("inf")):
                wrong.append(f"{leased.sequence} came again after its acknowledgement was answered")
        lost = found.keys() - self._acknowledged.keys() - self._unanswered
        wrong += [f"{sequence} was never processed" for sequence in sorted(lost)[:5]]
        for name, text in (("gate", self._gate.log), ("daemon", self._daemon.log)):
            if "Traceback" in text:
                wrong.append(f"{name}: {text[text.index('Traceback') :][:2000]}")
        wrong += errors(self._daemon.root)
        return outcome

    # Restart of processes that have ended.

    def _await(self, condition: Callable[[], object]) -> None:
        """Return once the condition holds, or a promise is broken."""
        eventually(lambda: not self._is_alive() or self.outcome.wrong or condition(), timeout=STUCK_SECONDS)

    def _await_daemon(self) -> None:
        while self._is_alive() and not self._daemon.wait_or_ready():
            self._over.wait(0.1)

    def _is_alive(self) -> bool:
        """Return True if both run or should run: a daemon without space at its start (exit code 7) is restarted."""
        ended = {"gate": self._gate.process.poll(), "daemon": self._daemon.process.poll()}
        if ended["daemon"] == _NO_ROOM and "disk full for a while" in self.outcome.faults:
            self._daemon.spawn()
            del ended["daemon"]
        wrong = [f"the {name} has ended with {code}" for name, code in ended.items() if code is not None]
        self.outcome.wrong += wrong
        return not wrong

    # Faults.

    def _killed(self, *programs: Gate | Daemon) -> None:
        for program in self._chance.sample(programs, len(programs)):
            program.kill()
            self.outcome.counts["kills"] += 1
        self._pause(0.3)
        for program in programs:
            program.spawn()

    def _kill_starting_gate(self) -> None:
        self._killed(self._gate)
        self._pause(0.8)
        self._killed(self._gate)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        self._pause(2.0)
        process.send_signal(signal.SIGCONT)

    def _end_gate(self) -> None:
        self._gate.await_ready()
        self.end("gate", self._gate)
        self._gate.spawn()

    def _end_daemon(self) -> None:
        self._await_daemon()
        self.end("daemon", self._daemon)
        self._pause(0.3)
        self._daemon.spawn()

    def _cut(self) -> None:
        with suppress(OSError):  # it has not started yet
            self._daemon.ask("CUT")

    def _fill_disk(self) -> None:
        path = self._daemon.root.parent / "ballast"
        fill(path)
        self._pause(2.0)
        path.unlink()

    def _pause(self, seconds: float) -> None:
        self._over.wait(self._chance.uniform(0, seconds))

    # The producers.

    def _produce(self, chance: random.Random, number: int) -> None:
        sent = 0
        # Answered requests to repeat later. A full disk may keep a key from the table: then only the last one.
        before: deque[tuple[dict[str, str], bytes, Any]] = deque(maxlen=1 if self._small_disk else 50)
        while not self._stopping.is_set():
            media_type, encoding, count = chance.choice(_BODIES)
            width = chance.choice((8, 8, 200))
            values = [f"{number}-{sent + each}-{'x' * chance.randrange(width)}" for each in range(count)]
            sent += count
            plain = _body(values, media_type)
            headers = {"Content-Type": media_type, "Idempotency-Key": str(uuid.uuid4())}
            answer = self._posted_at_last(chance, headers, plain, encoding)
            if answer is None:
                return
            posted = _Posted(values, answer["first"], answer["last"])
            if answer["count"] != count:
                self.outcome.wrong.append(f"{count} records were sent, {answer['count']} were counted")
            before.append((headers, plain, answer))
            if chance.random() < 0.1:
                headers, plain, answer = chance.choice(before)
                again = self._posted_at_last(chance, headers, plain, chance.choice(("", "gzip")))
                self.outcome.counts["replayed"] += 1
                if again is not None and again != answer:
                    self.outcome.wrong.append(f"{answer} became {again} when it was sent again")
            with self._lock:
                self._posted.append(posted)
            self._settled.update(values)
            self._stopping.wait(chance.uniform(0, 0.1))

    def _posted_at_last(self, chance: random.Random, headers: dict[str, str], plain: bytes, encoding: str) -> Any:
        """Return the answer 200; None if the torture is over."""
        while not self._over.is_set():
            self.outcome.counts["attempts"] += 1
            body = gzip.compress(plain, 1) if encoding else plain
            sent = headers | ({"Content-Encoding": "gzip"} if encoding else {})
            if chance.random() < 0.03:
                self._cut_off(body[: chance.randrange(len(body))], sent, len(body))
            answer = ask(self._gate, "POST", ORDERS, body, sent)
            if answer is not None and answer.status == 200:
                return answer.json()
            if answer is not None and answer.status not in _AGAIN:
                self.outcome.wrong.append(f"a producer was answered {answer.status}: {answer.body.decode()}")
                return None
            encoding = chance.choice((encoding, "", "gzip"))
            self._over.wait(chance.uniform(0, 0.3))
        return None

    def _cut_off(self, begin: bytes, headers: dict[str, str], length: int) -> None:
        """Send the beginning of a body, and disconnect."""
        lines = [f"{name}: {value}" for name, value in headers.items() if name != "Content-Type"]
        more, media_type = length - len(begin), headers["Content-Type"]
        with suppress(OSError):
            self._gate.begin(f"POST {ORDERS}", *lines, body=begin, more=more, media_type=media_type).close()
        self.outcome.counts["cut off"] += 1

    # The workers.

    def _work(self, chance: random.Random, name: str) -> None:
        while not self._over.is_set():
            asked_at = time.monotonic()
            lease_for = chance.choice((0.5, 5.0))
            wanted = {"max_records": chance.choice((1, 20, 500)), "lease_for": lease_for, "wait": 0.5}
            given = self._asked("lease", name, **wanted)
            if given is None:
                self._over.wait(chance.uniform(0, 0.3))
                continue
            leased = [_Leased(each["sequence"], value_of(each), asked_at) for each in given["records"]]
            with self._lock:
                self.outcome.counts["leases"] += 1
                self._leased += leased
            sequences = [each.sequence for each in leased]
            if sequences and chance.random() < 0.1:
                self._asked("extend", name, sequences=sequences, lease_for=5.0)
            back = [each for each in sequences if chance.random() < 0.02]
            if back:
                self._asked("nack", name, sequences=back, delay=chance.choice((0.0, 0.5)), reason="chance")
            if done := sorted(set(sequences) - set(back)):
                self._acknowledge(name, done)

    def _acknowledge(self, name: str, done: list[int]) -> None:
        with self._lock:
            self._unanswered.update(done)
        answer = self._asked("ack", name, sequences=done)
        if answer is None:
            return
        answered_at = time.monotonic()
        refused = {each["sequence"] for each in answer["refused"]}
        with self._lock:
            for sequence in done:
                if sequence not in refused:
                    self._acknowledged.setdefault(sequence, answered_at)

    def _asked(self, verb: str, worker: str, **fields: Any) -> Any:
        """Return the answer; None without one, or if the request must be repeated."""
        answer = ask(self._gate, "POST", f"{BILLING}/{verb}", {"worker": worker, **fields})
        if answer is None or answer.status in (*_AGAIN, 423):
            return None
        if answer.status != 200:
            self.outcome.wrong.append(f"{verb} was answered {answer.status}: {answer.body.decode()}")
            return None
        return answer.json()

    # The reader of all records, and the deletion of those that it has read.

    def _read(self, _: random.Random) -> None:
        while not self._over.wait(0.05):
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(self._last)} if self._last else {})
            with suppress(*_NO_ANSWER), self._gate.asked("GET", ORDERS, headers=headers) as answer:
                if answer.status == 200:
                    self._take(answer)
                elif answer.status not in _LATER:
                    self.outcome.wrong.append(f"a reader was answered {answer.status}: {answer.read().decode()}")
                    return

    def _take(self, answer: http.client.HTTPResponse) -> None:
        while not self._over.is_set() and (line := answer.readline()):
            if not (line.startswith(b"data: ") and line.endswith(b"\n")):
                continue
            record = json.loads(line.removeprefix(b"data: "))
            if record["sequence"] != self._last + 1:
                self.outcome.wrong.append(f"{record['sequence']} came behind {self._last}")
            self._found[record["sequence"]] = value_of(record)
            self._last = record["sequence"]  # last, because another thread reads ``_found`` up to it

    def _reclaim(self, chance: random.Random) -> None:
        """Move the reader's cursor, and run ``wald-reclaim``; kill some of the runs."""
        passed, line = 0, sidecar("reclaim", "--root", self._daemon.root, "--grace", "0")
        while not self._over.wait(chance.uniform(0, 1.0)):
            following = passed
            while following < self._last and self._found[following + 1] in self._settled:
                following += 1
            answer = ask(self._gate, "PUT", f"/v1/routes/orders/cursors/{READER}", {"sequence": following})
            if answer is not None and answer.status == 200:
                passed = following
            elif answer is not None and answer.status not in _LATER:
                self.outcome.wrong.append(f"the cursor was answered {answer.status}: {answer.body.decode()}")
            with launched(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                if chance.random() < 0.2:
                    self._over.wait(chance.uniform(0, 0.3))
                    process.kill()
                    process.wait()
                    continue
                _, said = process.communicate(timeout=STUCK_SECONDS)
            self.outcome.counts["passes"] += 1
            if process.returncode != 0 and not (self._small_disk and process.returncode == _NO_ROOM):
                self.outcome.wrong.append(f"wald-reclaim ended with {process.returncode}: {said.decode()[-500:]}")


def _body(values: list[str], media_type: str) -> bytes:
    if media_type == _BYTES:
        return values[0].encode()
    lines = values if media_type == TEXT else [json.dumps({"value": value, "key": value[:1]}) for value in values]
    return "".join(f"{line}\n" for line in lines).encode()


def ask(gate: Gate, method: str, path: str, body: Body, headers: dict[str, str] | None = None) -> Answer | None:
    """Return the answer to a request; None without one."""
    try:
        return gate.ask(method, path, body, headers)
    except _NO_ANSWER:
        return None


def value_of(record: dict[str, Any]) -> str:
    """Return the value of a record in JSON."""
    return record["value"] if "value" in record else base64.b64decode(record["value_base64"]).decode()
