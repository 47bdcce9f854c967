"""One of several workers: has the command process what it was leased, and settles each record.

    leased ─▶ try ─▶ exit 0 ───────────────────────▶ acknowledged
               ▲       │ else
               └─ pause ┤ in halves, from the third failure on
                        ├ a single record ─▶ given back, for a longer while each time
                        └ its last try ────▶ given up

A record that fails alone is given back, so the worker goes on with others. How often it has failed alone is in the
journal of the group, and outlives any crash: a try of a batch that it was part of is none of its own.

What a worker was leased it has until it settles it. Its leases do not end by time: they would while this process is
stopped, and then a second worker would get records whose command still runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from wald.errors import InvalidInput
from wald.format.records import Record
from wald.work.dead_letters import dead_letter, fits
from wald.work.group import WorkGroup
from wald.work.owner import Delivery
from wald.work.ownership import worker_name
from wald_drain.command_file import UNKEPT
from wald_drain.counts import Result
from wald_drain.job import Drain, variables
from wald_drain.keeper import not_started
from wald_drain.portions import Portion
from wald_drain.retries import (
    UNKNOWN,
    NextStep,
    ending,
    failure,
    is_failure,
    next_step,
    pause_seconds,
    reason,
    tries_of,
)
from wald_drain.runner import Runner
from wald_drain.worker_file import WorkerFile

_PAUSE_MAX_SECONDS = 1.0  # of a worker whose single records fail; each record waits longer


@dataclass(slots=True)
class Trouble:
    """A record that has failed alone.

    Attributes:
        since: when it failed first, by the monotonic clock.
        tries: how often it failed; runs: with those that were no tries.
        last: how it failed the last time, as text.
    """

    since: float
    tries: int = 0
    runs: int = 0
    last: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the workers of a group share.

    Attributes:
        troubles: by sequence; only the worker that has a record touches its own.
        failing_since: of each worker whose batch fails, since when.
    """

    drain: Drain
    work: WorkGroup
    troubles: dict[int, Trouble] = field(default_factory=dict)
    failing_since: dict[str, float] = field(default_factory=dict)

    def recall(self, got: Sequence[Delivery]) -> None:
        """Take over from the journal how often records have failed in an earlier drain."""
        for sequence in [record.sequence for record, tries in got if tries > 1]:
            if sequence not in self.troubles and (failure := self.work.failed(sequence)) and failure.tries:
                self.troubles[sequence] = Trouble(time.monotonic(), failure.tries, failure.tries, failure.reason)

    def forget_passed(self) -> None:
        """Forget troubles with records that an operator has passed over."""
        for sequence in [each for each in list(self.troubles) if each <= self.work.floor]:
            self.troubles.pop(sequence, None)

    @property
    def oldest_failure(self) -> float:
        """Since when something fails that is not processed, by the monotonic clock; 0: nothing does."""
        since = [each.since for each in list(self.troubles.values())] + list(self.failing_since.values())
        return min(since, default=0.0)


class Worker:
    """Worker number ``runner.worker``, for one thread.

    Attributes:
        name: by which its group knows it.
        file: what says which records its command has.
    """

    def __init__(self, shared: Shared, runner: Runner, file: WorkerFile) -> None:
        self.name = worker_name(runner.worker)
        self._shared, self._drain = shared, shared.drain
        self._runner = runner
        self.file = file
        self._failures = 0  # of single records, one after the other
        self._not_ours: set[bytes | None] = set()  # keys whose records have come back, and with them those behind

    def process(self, leased: Sequence[Record]) -> None:
        """Settle all records of a lease; after ``stop`` is set, give back those that are left."""
        self._not_ours.clear()
        for portion in self._portions(leased):
            parts = [portion]
            while parts:
                part = self._ours(parts.pop())
                if part is None:
                    continue
                step = self._try_alone(part) if part.count == 1 else self._try(part, halved=part is not portion)
                if step is NextStep.LEAVE:
                    self._shared.work.release(self.name)
                    return
                if step is NextStep.HALVE:
                    parts.extend(reversed(part.halves()))
        self._shared.failing_since.pop(self.name, None)

    def _portions(self, leased: Sequence[Record]) -> Iterator[Portion]:
        """First all that is neither in trouble nor behind such a record by its key; then the others one by one."""
        troubles = self._shared.troubles
        keys = {record.key for record in leased if record.sequence in troubles} if self._by_key else set()
        keys.discard(None)
        apart = {record.sequence for record in leased if record.sequence in troubles or record.key in keys}
        together = [record for record in leased if record.sequence not in apart]
        if together:
            yield Portion(together)
        for record in leased:
            if record.sequence in apart:
                yield Portion([record])

    def _ours(self, part: Portion) -> Portion | None:
        """What of a part has not come back with an earlier record of its key; None if all has."""
        if self._not_ours.isdisjoint(record.key for record in part.records):
            return part
        records = [record for record in part.records if record.key not in self._not_ours]
        return Portion(records) if records else None

    def _try(self, part: Portion, *, halved: bool) -> NextStep:
        """Have the command process several records; COMMIT if it has, HALVE, SKIPPED or LEAVE if not."""
        shared, number = self._shared, 1
        tries = tries_of(part.count, halved=halved, tries=self._drain.job.tries)
        for runs in count(1):
            if runs > 1 and shared.work.floor >= part.last:
                return NextStep.SKIPPED
            exit_code = self._run(part, number)
            if exit_code is None:
                return NextStep.LEAVE
            step = next_step(exit_code, number=number, tries=tries, count=part.count, stopping=self._drain.is_stopping)
            if step is NextStep.COMMIT:
                shared.failing_since.pop(self.name, None)
                self._acknowledge(part)
                return step
            shared.failing_since.setdefault(self.name, time.monotonic())
            seconds = pause_seconds(1 if step is NextStep.HALVE else runs)
            self._report(part, step, exit_code, number, seconds)
            if step is NextStep.LEAVE or self._drain.stop.wait(seconds):
                return NextStep.LEAVE
            if step is NextStep.HALVE:
                return step
            number += step is NextStep.RETRY
        raise AssertionError("unreachable")

    def _try_alone(self, part: Portion) -> NextStep:
        """Have the command process a single record, once; it is settled in any case, but for LEAVE.

        One that has failed often enough in an earlier drain, which was killed or had more tries, is given up at once.
        """
        shared, record = self._shared, part.records[0]
        trouble = shared.troubles.get(record.sequence) or Trouble(time.monotonic())
        if self._drain.job.tries is not None and trouble.tries >= self._drain.job.tries:
            return self._give_up(record, trouble)
        number = trouble.tries + 1
        exit_code = self._run(part, number)
        if exit_code is None:
            return NextStep.LEAVE
        step = next_step(
            exit_code, number=number, tries=self._drain.job.tries, count=1, stopping=self._drain.is_stopping
        )
        if step is NextStep.COMMIT:
            shared.troubles.pop(record.sequence, None)
            self._acknowledge(part)
            return step
        trouble.runs += 1
        seconds = pause_seconds(trouble.runs)
        self._report(part, step, exit_code, number, seconds)
        if step is NextStep.LEAVE:
            return step
        trouble.last = ending(exit_code)
        if step is NextStep.GIVE_UP:
            trouble.tries = number
            return self._give_up(record, trouble)
        trouble.tries = number if step is NextStep.RETRY else trouble.tries
        self._give_back(record, trouble, seconds)
        limited = self._drain.job.tries is not None and step is NextStep.RETRY
        pause = 0.0 if limited else min(_PAUSE_MAX_SECONDS, pause_seconds(self._failures))
        return NextStep.LEAVE if self._drain.stop.wait(pause) else step

    def _run(self, part: Portion, number: int) -> int | None:
        """Run the command and count the run; its exit code, or None if drain is stopping."""
        environment = variables(self._drain.consumer, part, number) | {"WALD_WORKER": str(self._runner.worker)}
        began = time.monotonic()
        exit_code = self._exit_code(part, number, environment)
        if exit_code is None:
            return None
        now = time.monotonic()
        failed = Result.FAILURE if is_failure(exit_code) else Result.LATER
        self._drain.counts.ran(failed if exit_code else Result.SUCCESS, now - began, now=now)
        return exit_code

    def _exit_code(self, part: Portion, number: int, environment: Mapping[str, str]) -> int | None:
        """Run the command to its end; None if drain is stopping before that.

        If the keeper is killed, the exit code is UNKNOWN, once the command has ended.
        """
        run = secrets.randbits(62)
        if not self.file.wait(self._drain.stop, self._report_waiting) or self._drain.is_stopping:
            return None
        stdin = part.encoded(self._drain.job.stdin_format)
        self.file.begin(run, [record.sequence for record in part.records], number)
        try:
            self._runner.run({"run": run}, self.file.descriptor, stdin, environment)
        except OSError:
            self.file.settle()  # the command was not started, so this is no try at the next start either
            raise
        outcome = self.file.outcome(run)
        if outcome is None:
            self.file.settle()  # nothing will ever say how it ends, nor at the next start
            self.file.renew()  # the command may be running: until it has ended, the records are with that
            return UNKNOWN if self.file.wait(self._drain.stop, self._report_waiting, UNKEPT) else None
        exit_code, error = outcome
        if error:
            raise not_started(self._runner.command, error)
        return exit_code

    def _acknowledge(self, part: Portion) -> None:
        shared = self._shared
        self._failures = 0
        shared.work.ack(self.name, [record.sequence for record in part.records])
        self.file.settle()
        now_ns = self._drain.consumer.now_ns()
        self._drain.counts.processed(part.count, now_ns=now_ns, failing_since=shared.oldest_failure)

    def _give_back(self, record: Record, trouble: Trouble, seconds: float) -> None:
        """Give a record back, for so long."""
        self._leave_key(record)
        self._failures += 1
        shared = self._shared
        shared.troubles[record.sequence] = trouble
        shared.work.nack(self.name, [record.sequence], delay=seconds, reason=trouble.last, tries=trouble.tries)
        self.file.settle()

    def _give_up(self, record: Record, trouble: Trouble) -> NextStep:
        self._leave_key(record)
        shared = self._shared
        shared.troubles.pop(record.sequence, None)
        letter = dead_letter(record, {}, self._drain.job.dead_letter)
        if not fits(letter, bytes_max=self._drain.job.letter_max_bytes):
            raise InvalidInput(
                f"{self._drain.consumer.named(record.sequence, record.sequence)}: cannot be a dead letter: more than "
                f"{self._drain.job.letter_max_bytes} bytes",
                hint="fix the command, or start wald-drain without --tries",
            )
        self._failures = 0
        why = reason(trouble.last, trouble.tries)
        shared.work.give_up(self.name, [record.sequence], why, trouble.tries)
        self.file.settle()
        self._drain.counts.gave_up(1, failing_since=shared.oldest_failure)
        return NextStep.GIVE_UP

    def _leave_key(self, record: Record) -> None:
        """Take in that a record is not ours any more, nor those that follow it by its key."""
        if self._by_key and record.key is not None:
            self._not_ours.add(record.key)

    @property
    def _by_key(self) -> bool:
        return self._drain.job.order == "key"

    def _report(self, part: Portion, step: NextStep, exit_code: int, number: int, seconds: float) -> None:
        named = self._drain.consumer.named(part.first, part.last)
        self._drain.report(failure(named, step, exit_code, number, self._drain.job.tries, seconds))

    def _report_waiting(self, text: str) -> None:
        self._drain.report_of_route(f"{self.name}: {text}")
