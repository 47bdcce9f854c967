"""Worker that runs the command for the records of a lease, and settles them.

    leased ─▶ try ─▶ exit 0 ───────────────────────▶ acknowledged
               ▲       │ else
               └─ pause ┤ halved, starting at the third failure
                        └ a single record ─▶ strict: the same record again; given up after its last try
                                             otherwise: returned, for a longer time after each try; or given up

Once a record is returned, the worker continues with others. Its failed tries are in the group's journal and survive a
crash; tries as part of a batch do not count. A strict group forgets them when the process ends.

Leases do not expire: otherwise, while this process is suspended, a second worker would get records whose command still
runs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path

from wald.errors import DiskFailure, InvalidInput, Unavailable, WaldError
from wald.exposition import Histogram, Metric, Samples
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.format.records import Record
from wald.hints import command_line
from wald.work.dead_letters import Undeliverable, dead_letter, fits, prepare
from wald.work.group import Order, WorkGroup
from wald.work.owner import Delivery
from wald.work.ownership import worker_name
from wald_drain.process import (
    UNKEPT,
    UNKNOWN,
    NextStep,
    Runner,
    StateFile,
    cursor_identity,
    ending,
    failure,
    is_failure,
    next_step,
    pause_seconds,
    start_error,
    tries_of,
)
from wald_drain.redrive import Consumer

_PAUSE_MAX_SECONDS = 1.0  # of a worker whose single records fail; each record's own delay is longer
_LETTER_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Job:
    """Options of a drain."""

    command: tuple[str, ...]
    stdin_format: str  # "raw" or "json"
    records_max: int  # for one run of the command
    tries: int | None  # of a single record before it is given up; None: it never is
    dead_letter: str
    daemon: Path  # the root of the log, or the daemon's socket
    exit_at_end: bool
    order: Order = "strict"  # without workers
    letter_max_bytes: int = REQUEST_MAX_BYTES  # a larger dead letter is not sent


@dataclass(frozen=True, slots=True)
class RunContext:
    """State shared by the workers of a drain and its main thread."""

    consumer: Consumer
    job: Job
    counts: Counts
    stop: threading.Event  # once it is set, no command is started: after a signal, and after the error of a worker
    report: Callable[[str], None]  # gets a line for each event; called by many threads
    # set by a signal before ``stop``; on a busy machine long before
    stop_requested: threading.Event = field(default_factory=threading.Event)

    @property
    def is_strict(self) -> bool:
        return self.job.order == "strict"

    @property
    def is_stopping(self) -> bool:
        return self.stop.is_set() or self.stop_requested.is_set()

    def report_of_route(self, text: str) -> None:
        self.report(f"{self.consumer.route}: {text}")

    def undeliverable(self, sequence: int, why: str, remedy: str) -> InvalidInput:
        consumer = self.consumer
        skip = f"cursor set {consumer.route} {sequence} --group {consumer.group}"
        return InvalidInput(
            f"{consumer.named(sequence, sequence)}: cannot be a dead letter: {why}",
            hint=f"{remedy}, or skip this record: {command_line(consumer.log.root.path, skip)}",
        )


def stdin_of(records: Sequence[Record], form: str) -> bytes:
    """Return the stdin of the command: "raw" values with a newline each, or "json" as ``wald read`` writes it."""
    if form == "raw":
        return b"".join(record.value + b"\n" for record in records)
    return "".join(record.to_json() + "\n" for record in records).encode()


@dataclass(slots=True)
class FailureState:
    """Failures of a record that was tried alone."""

    since: float  # first failure, on the monotonic clock
    tries: int = 0
    runs: int = 0  # including those that do not count as tries
    last: str = ""  # ending of the last run


@dataclass(frozen=True, slots=True)
class Shared:
    """State that the workers of a group share."""

    context: RunContext
    work: WorkGroup
    # by sequence; only the worker that has a record touches its entry
    failures: dict[int, FailureState] = field(default_factory=dict)
    failing_since: dict[str, float] = field(default_factory=dict)  # the first failure of each worker's batch

    def recall(self, got: Sequence[Delivery]) -> None:
        """Read from the journal how often records failed in an earlier drain."""
        if self.context.is_strict:
            return
        for sequence in [record.sequence for record, tries in got if tries > 1]:
            if sequence not in self.failures and (known := self.work.failed(sequence)) and known.tries:
                self.failures[sequence] = FailureState(time.monotonic(), known.tries, known.tries, known.reason)

    def require_letters(self) -> None:
        """Raise the error of a dead letter that permanently blocks a strict group."""
        for sequence, error in self.work.letter_errors.items() if self.context.is_strict else ():
            if isinstance(error, Undeliverable):
                raise self.context.undeliverable(sequence, str(error), "raise request_max_bytes of the daemon")
            if isinstance(error, WaldError) and not isinstance(error, DiskFailure | Unavailable):
                raise error

    @property
    def oldest_failure(self) -> float:
        since = [each.since for each in list(self.failures.values())] + list(self.failing_since.values())
        return min(since, default=0.0)


class Worker:
    """Worker number ``runner.worker``, for one thread; ``file`` has the state of its command."""

    def __init__(self, shared: Shared, runner: Runner, file: StateFile) -> None:
        self.name = worker_name(runner.worker)
        self.file = file
        self._shared, self._context = shared, shared.context
        self._job, self._work = shared.context.job, shared.work
        self._runner = runner
        self._failures = 0  # consecutive failures of single records
        self._returned_keys: set[bytes | None] = set()  # keys of returned records: later ones were returned with them

    def process(self, leased: Sequence[Record]) -> None:
        """Settle all records of a lease; once drain is stopping, return the rest."""
        self._returned_keys.clear()
        for portion in self._portions(leased):
            parts = [portion]
            while parts:
                given = parts.pop()
                part = [record for record in given if record.key not in self._returned_keys]  # the others were returned
                if not part:
                    continue
                alone = len(part) == 1 and not self._context.is_strict
                step = self._try_alone(part[0]) if alone else self._try(part, halved=given is not portion)
                if step is NextStep.LEAVE or (step is NextStep.SKIPPED and self._context.is_strict):
                    self._work.release(self.name)
                    return
                if step is NextStep.HALVE:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
        self._shared.failing_since.pop(self.name, None)

    def _portions(self, leased: Sequence[Record]) -> Iterator[list[Record]]:
        """Yield records that neither failed alone nor follow such a record of their key; then the others singly."""
        failures = self._shared.failures
        keys = {record.key for record in leased if record.sequence in failures} if self._job.order == "key" else set()
        keys.discard(None)
        apart = {record.sequence for record in leased if record.sequence in failures or record.key in keys}
        if together := [record for record in leased if record.sequence not in apart]:
            yield together
        yield from ([record] for record in leased if record.sequence in apart)

    def _try(self, part: Sequence[Record], *, halved: bool) -> NextStep:
        """Run the command on a part until it succeeds, or the part is halved, given up or skipped."""
        shared, number, job = self._shared, 1, self._job
        tries = tries_of(len(part), halved=halved, tries=job.tries)
        for runs in count(1):
            if runs > 1 and self._was_skipped(part):
                return NextStep.SKIPPED
            exit_code = self._run(part, number)
            if exit_code is None:
                return NextStep.LEAVE
            stopping = self._context.is_stopping
            step = next_step(exit_code, number=number, tries=tries, count=len(part), stopping=stopping)
            if step is NextStep.COMMIT:
                shared.failing_since.pop(self.name, None)
                return self._acknowledge(part)
            since = shared.failing_since.setdefault(self.name, time.monotonic())
            seconds = pause_seconds(1 if step is NextStep.HALVE else runs)
            self._report(part, step, exit_code, number, seconds)
            if step is NextStep.GIVE_UP:
                shared.failing_since.pop(self.name, None)
                return self._give_up(part[0], FailureState(since, number, runs, ending(exit_code)))
            if step is NextStep.LEAVE or self._context.stop.wait(seconds):
                return NextStep.LEAVE
            if step is NextStep.HALVE:
                return step
            number += step is NextStep.RETRY
        raise AssertionError("unreachable")

    def _was_skipped(self, part: Sequence[Record]) -> bool:
        """Return True if an operator has moved the cursor of a strict group to or past its first record."""
        if not self._context.is_strict:
            return self._work.floor >= part[-1].sequence
        first = part[0].sequence
        if self._context.consumer.cursor.sequence < first:
            return False
        self._context.report_of_route(f"the cursor was moved past record {first}; continuing after it")
        return True

    def _try_alone(self, record: Record) -> NextStep:
        """Run the command once on a single record, and settle it, except for LEAVE.

        A record that has failed often enough in an earlier drain, which was killed or had more tries, is given up.
        """
        shared, part, job = self._shared, [record], self._job
        state = shared.failures.get(record.sequence) or FailureState(time.monotonic())
        if job.tries is not None and state.tries >= job.tries:
            return self._give_up(record, state)
        number = state.tries + 1
        exit_code = self._run(part, number)
        if exit_code is None:
            return NextStep.LEAVE
        step = next_step(exit_code, number=number, tries=job.tries, count=1, stopping=self._context.is_stopping)
        if step is NextStep.COMMIT:
            shared.failures.pop(record.sequence, None)
            return self._acknowledge(part)
        state.runs += 1
        seconds = pause_seconds(state.runs)
        self._report(part, step, exit_code, number, seconds)
        if step is NextStep.LEAVE:
            return step
        state.last = ending(exit_code)
        if step is NextStep.GIVE_UP:
            state.tries = number
            return self._give_up(record, state)
        if step is NextStep.RETRY:
            state.tries = number
        self._disown_key(record)
        self._failures += 1
        shared.failures[record.sequence] = state
        self._work.nack(self.name, [record.sequence], delay=seconds, reason=state.last, tries=state.tries)
        self.file.settle()
        limited = job.tries is not None and step is NextStep.RETRY
        pause = 0.0 if limited else min(_PAUSE_MAX_SECONDS, pause_seconds(self._failures))
        return NextStep.LEAVE if self._context.stop.wait(pause) else step

    def _run(self, part: Sequence[Record], number: int) -> int | None:
        """Run the command to its end, count the run and return the exit code; None if drain is stopping before that.

        If the keeper is killed, the exit code is UNKNOWN, once the command has ended.
        """
        began = time.monotonic()
        context, consumer, run = self._context, self._context.consumer, secrets.randbits(62)
        if not self.file.wait(context.stop, self._report_waiting) or context.is_stopping:
            return None
        environment = {
            "WALD_ROUTE": consumer.route,
            "WALD_GROUP": consumer.group,
            "WALD_FIRST": str(part[0].sequence),
            "WALD_LAST": str(part[-1].sequence),
            "WALD_COUNT": str(len(part)),
            "WALD_TRY": str(number),
        }
        cursor = None
        if context.is_strict:
            cursor = cursor_identity(consumer.cursor.path)
        else:
            environment["WALD_WORKER"] = str(self._runner.worker)
        stdin = stdin_of(part, self._job.stdin_format)
        self.file.begin(run, [record.sequence for record in part], number, cursor)
        try:
            self._runner.run(run, self.file.descriptor, stdin, environment)
        except OSError:
            self.file.settle()  # the command was not started, so the next start must not count a try
            raise
        outcome = self.file.outcome(run)
        if outcome is None:
            self.file.settle()  # its exit code is lost, even for the next start
            self.file.renew()  # the command may be running: until it has ended, it has the records
            if not self.file.wait(context.stop, self._report_waiting, UNKEPT):
                return None
            outcome = UNKNOWN, 0
        exit_code, error = outcome
        if error:
            raise start_error(self._runner.command, error)
        now = time.monotonic()
        failed = Result.FAILURE if is_failure(exit_code) else Result.LATER
        context.counts.ran(failed if exit_code else Result.SUCCESS, now - began, now=now)
        return exit_code

    def _acknowledge(self, part: Sequence[Record]) -> NextStep:
        self._failures = 0
        refused = self._work.ack(self.name, [record.sequence for record in part])
        self.file.settle()
        now_ns, oldest = self._context.consumer.now_ns(), self._shared.oldest_failure
        self._context.counts.settled(failing_since=oldest, processed=len(part), now_ns=now_ns)
        return NextStep.SKIPPED if refused else NextStep.COMMIT

    def _give_up(self, record: Record, state: FailureState) -> NextStep:
        """Give a record up; in a strict group, wait until it is a dead letter."""
        context, job, consumer = self._context, self._job, self._context.consumer
        self._disown_key(record)
        self._shared.failures.pop(record.sequence, None)
        if not fits(dead_letter(record, {}, job.dead_letter), job.letter_max_bytes):
            remedy = "fix the command, or start wald-drain without --tries"
            raise context.undeliverable(record.sequence, f"more than {job.letter_max_bytes} bytes", remedy)
        if context.is_strict:
            prepare(job.daemon, consumer.log.root, job.dead_letter)  # without a daemon, drain ends before the record
        self._failures = 0
        reason = f"{state.last} after {state.tries} {'try' if state.tries == 1 else 'tries'}"
        self._work.give_up(self.name, [record.sequence], reason, state.tries)
        self.file.settle()
        if context.is_strict:
            while self._work.floor < record.sequence:
                self._shared.require_letters()
                if context.stop.wait(_LETTER_POLL_SECONDS):
                    return NextStep.LEAVE
            self._work.ack(self.name, [])  # returns once the cursor is on disk
        context.counts.settled(failing_since=self._shared.oldest_failure, given_up=1)
        return NextStep.GIVE_UP

    def _disown_key(self, record: Record) -> None:
        """Note that a record and later ones of its key are no longer leased to this worker."""
        if self._job.order == "key" and record.key is not None:
            self._returned_keys.add(record.key)

    def _report(self, part: Sequence[Record], step: NextStep, exit_code: int, number: int, seconds: float) -> None:
        named = self._context.consumer.named(part[0].sequence, part[-1].sequence)
        self._context.report(failure(named, step, exit_code, number, self._job.tries, seconds))

    def _report_waiting(self, text: str) -> None:
        self._context.report_of_route(text if self._context.is_strict else f"{self.name}: {text}")


class Result(StrEnum):
    """Outcome of a run of the command."""

    SUCCESS = "success"
    LATER = "later"  # exit code 75
    FAILURE = "failure"


@dataclass(slots=True)
class Counts:
    """Counters that the threads of a drain write and the metrics server reads."""

    records: int = 0
    given_up: int = 0  # records that went to the dead-letter route
    runs: Counter[Result] = field(default_factory=Counter)
    run_seconds: Histogram = field(
        default_factory=lambda: Histogram(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
    )
    failing_since: float = 0.0  # first failure of records that are still unprocessed; 0 without one
    succeeded_ns: int = 0  # time of the last success in ns since 1970, or 0
    _changes: threading.Lock = field(default_factory=threading.Lock)

    def ran(self, result: Result, seconds: float, *, now: float) -> None:
        with self._changes:
            self.runs[result] += 1
            self.run_seconds.observe(seconds)
            if result is not Result.SUCCESS:
                self.failing_since = self.failing_since or now

    def settled(self, *, failing_since: float, processed: int = 0, given_up: int = 0, now_ns: int = 0) -> None:
        """Count records that were processed at ``now_ns`` or given up; others fail since ``failing_since``, or 0."""
        with self._changes:
            self.records += processed
            self.given_up += given_up
            self.failing_since, self.succeeded_ns = failing_since, now_ns or self.succeeded_ns


def of_drain(counts: Counts, route: str, group: str, now: float) -> Iterator[Metric]:
    """Yield the metrics of ``wald-drain``; ``now`` is on the monotonic clock."""
    labels, values = ("route", "group"), (route, group)
    meaning = "Records that the command processed"
    yield Metric("wald_drain_records_total", "counter", meaning, labels, {values: counts.records})
    meaning = "Records moved to the dead-letter route"
    yield Metric("wald_drain_dead_letters_total", "counter", meaning, labels, {values: counts.given_up})
    runs: Samples = {(*values, result.value): counts.runs[result] for result in Result}
    yield Metric("wald_drain_runs_total", "counter", "Runs of the command", (*labels, "result"), runs)
    meaning = "Duration of a run of the command"
    yield Metric("wald_drain_run_seconds", "histogram", meaning, labels, {values: counts.run_seconds})
    since = counts.failing_since  # written by another thread
    failing = max(0.0, now - since) if since else 0.0
    meaning = "Time for which the command has been failing on the next records"
    yield Metric("wald_drain_failing_seconds", "gauge", meaning, labels, {values: failing})
    succeeded: Samples = {values: counts.succeeded_ns / 1e9} if counts.succeeded_ns else {}
    meaning = "Time of the last successful run"
    yield Metric("wald_drain_last_success_timestamp_seconds", "gauge", meaning, labels, succeeded)
