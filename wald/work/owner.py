"""What the owner of a work group does in a turn, and the lines of the journal that say so; it waits for nothing.

One thread at a time may call a method, which :mod:`wald.work.turns` sees to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from wald.errors import WaldError
from wald.format.records import Record, not_before
from wald.format.work import PAGE_RECORDS, Commit, DeadRecord, FailureReason, JournalLine, JournalStart, WorkerLease
from wald.reading.assembler import Rows
from wald.work.claims import Named
from wald.work.deliveries import Part, Refusal, Settled
from wald.work.replay import Replayed, note, written
from wald.work.sharing import Wanted, hand_out, share
from wald.work.source import Lost, Source
from wald.work.terms import Clock, Failure, Pending, Rules
from wald.work.window import Run, State

_NS = 1_000_000_000
_FOR_EVER_NS = 1 << 62
_REASON_MAX = 500  # letters; kept in memory for each record that came back
_NOTHING = Rows("", 0, 0, 0, ())
_LOOK_NS = 1 * _NS  # while a record waits for a time of a clock that may be set


class DeadLetter(NamedTuple):
    """What is to become a dead letter.

    Attributes:
        may_be_sent: whether its dead letter may be in the log already.
    """

    record: Record
    dead: DeadRecord
    may_be_sent: bool


class Owner:
    """Leases and acknowledgements of one group.

    Attributes:
        given_up: how many records it has made dead letters.

    Args:
        start: whose journal it is.
        replayed: what the journal says.
        giving_up: called when a record is to be given up: :meth:`next_dead_letter` gives it out.
    """

    def __init__(
        self,
        start: JournalStart,
        rules: Rules,
        replayed: Replayed,
        source: Source,
        *,
        clock: Clock,
        giving_up: Callable[[], None],
    ) -> None:
        self.clock = clock
        self._start = start
        self._rules = rules
        self._deliveries = replayed.deliveries
        self._source = source
        self._failures = replayed.failures
        self._dead = replayed.dead
        self._to_give_up: deque[int] = deque()
        self.given_up = 0
        self._passed = 0  # up to here an operator has moved the cursor
        self._giving_up = giving_up
        self._lines: list[Commit] = [Commit()]
        for sequence in self._dead:
            if self._deliveries.window.state(sequence) is State.FREE:
                self._give_up(sequence)

    @property
    def floor(self) -> int:
        """Everything up to it is done."""
        return self._deliveries.window.floor

    @property
    def has_read(self) -> bool:
        """Whether what was there at the start was read to its end."""
        return self._source.is_at_end

    @property
    def owes_dead_letter(self) -> bool:
        """Whether there is a record to be given up."""
        return bool(self._to_give_up)

    def begin(self) -> None:
        """Take in what time it is."""
        self._deliveries.expire(self.clock.monotonic_ns())
        self._deliveries.wake(self.clock.time_ns())
        self._came_back([])

    def taken_lines(self) -> list[Commit]:
        """What has happened since this was called the last time."""
        lines, self._lines = self._lines, [Commit()]
        return [line for line in lines if line]

    def snapshot(self) -> Iterator[JournalLine]:
        """All that the journal has to say."""
        since_1970_ns = self.clock.time_ns() - self.clock.monotonic_ns()
        return written(self._start, self._deliveries, self._failures, self._dead, since_1970_ns)

    def next_change_ns(self) -> float:
        """When a lease ends or a record may be due, by the clock that is never set."""
        end, due = self._deliveries.next_end_ns, self._deliveries.next_due_ns
        changes = float("inf") if end is None else end
        if due is not None:
            changes = min(changes, self.clock.monotonic_ns() + min(_LOOK_NS, max(0, due - self.clock.time_ns())))
        return changes

    def lease(self, wanted: Sequence[Wanted]) -> None:
        """Give those who wait what comes next, in their order; who gets nothing while there is something, gets why."""
        now_ns = self.clock.monotonic_ns()
        waiting = deque(wanted)
        while waiting:
            try:
                if not self._deliver_next(waiting, now_ns):
                    break
            except (WaldError, OSError) as error:
                waiting.popleft().error = error
                self._deliveries.close()
        self._deliveries.close()
        wall_ns = self.clock.time_ns()
        self._lines[-1].leased += [
            WorkerLease(each.consumer, wall_ns + each.lease_ns, each.runs) for each in wanted if each.runs
        ]

    def finish(self, named: Sequence[Named]) -> list[list[Refusal]]:
        """Take in what consumers have processed; of each, the records for which it does not count.

        What is being given up may be a dead letter already, so it counts for none of them.
        """
        dead = self._dead
        counted = [(each, [s for s in sequences if s not in dead]) for each, sequences in named] if dead else named
        settled = self._deliveries.finish(counted)
        for (_, sequences), refused in zip(named, settled.refused, strict=True) if dead else ():
            refused += [Refusal(sequence, "") for sequence in sequences if sequence in dead]
        self._finished(settled.runs)
        return settled.refused

    def give_back(
        self, consumer: str, sequences: Sequence[int], delay_ns: int, reason: str, tries: int
    ) -> list[Refusal]:
        """Take in that ``consumer`` has not processed records; those for which it does not count.

        Args:
            tries: how often each has failed; 0: not counted. It counts also for what no consumer has by now.
        """
        due_ns = self.clock.time_ns() + delay_ns if delay_ns > 0 else None
        settled = self._deliveries.give_back((consumer, sequences), due_ns=due_ns)
        self._came_back(settled.runs)
        if due_ns is not None:
            self._settling().due += [(sequence, due_ns) for sequence in _each(settled)]
        runs: list[tuple[int, int]] = list(settled.runs)
        if tries:
            runs += (Run(s, s) for s, holder in settled.refused[0] if not holder and self._was_delivered(s))
        if runs and (reason or tries):
            why = FailureReason(reason[:_REASON_MAX], tries, runs)
            note(self._failures, why)
            self._settling().reasons.append(why)
        return settled.refused[0]

    def failure(self, sequence: int) -> Failure | None:
        """Why an open record came back the last time; None: it did not, or that was not said."""
        return self._failures.get(sequence)

    def give_up(
        self, consumer: str, sequences: Sequence[int], reason: str, tries: int | None, durable: int
    ) -> list[Refusal]:
        """Take in that ``consumer`` has given records up; those for which it does not count.

        Args:
            durable: as of :meth:`next_dead_letter`.
        """
        settled = self._deliveries.give_back((consumer, sequences))
        reason, now_ns, route = reason[:_REASON_MAX], self.clock.time_ns(), self._rules.dead_letter
        for sequence in _each(settled):
            tried = self._deliveries.window.tries(sequence) if tries is None else tries
            self._dead[sequence] = dead = DeadRecord(sequence, tried, reason, now_ns, route, durable)
            self._settling().dead.append(dead)
            self._give_up(sequence)
        return settled.refused[0]

    def extend(self, consumer: str, sequences: Sequence[int], lease_ns: int) -> list[Refusal]:
        """Lease records for longer that ``consumer`` has; those for which it does not count."""
        now_ns = self.clock.monotonic_ns()
        settled = self._deliveries.extend((consumer, sequences), now_ns=now_ns, until_ns=now_ns + lease_ns)
        if settled.runs:
            held = WorkerLease(consumer, self.clock.time_ns() + lease_ns, list(settled.runs))
            self._settling().extended.append(held)
        return settled.refused[0]

    def release(self, consumer: str) -> int:
        """Take back all that ``consumer`` has; how many records that were."""
        return self._taken_back(self._deliveries.release(consumer))

    def claim(self, idle_ns: int) -> int:
        """Take back all that was leased so long ago; how many records that were."""
        return self._taken_back(self._deliveries.claim(self.clock.monotonic_ns() - idle_ns))

    def skip(self, run: Run) -> list[Run] | None:
        """Take in that records are done without having been processed; which those were.

        None: not all of them were read yet.

        Raises:
            Damaged, NotFound: they cannot be read.
        """
        while self._deliveries.window.end <= run.last:
            if not self._take_in():
                return None
        skipped = list(self._deliveries.window.open_in(run))
        self._deliveries.finish_all(run)
        self._finished(skipped)
        return skipped

    def pending(self) -> list[Pending]:
        """What was delivered and is not acknowledged, in order."""
        now_ns = self.clock.monotonic_ns()
        tries = self._deliveries.window.tries
        return [
            Pending(
                run.first,
                run.last,
                lease.consumer,
                max(0, now_ns - lease.since_ns) / _NS,
                (lease.until_ns - now_ns) / _NS,
                tries(run.first),
            )
            for run, lease in self._deliveries.out()
            if lease.consumer
        ]

    def next_dead_letter(self, durable: int) -> DeadLetter | None:
        """The next record that is to be given up; None if there is none.

        Args:
            durable: a sequence up to which the log is durable.
        """
        for _ in range(len(self._to_give_up)):
            self._to_give_up.rotate(-1)  # so that one that cannot be read stops no other
            sequence = self._to_give_up[-1]
            if not self._deliveries.window.is_open(sequence):  # passed over meanwhile
                self._to_give_up.pop()
                continue
            record = next(self._read(Run(sequence, sequence)).records(sequence, sequence), None)
            if record is None:
                continue
            may_be_sent = sequence in self._dead
            if not may_be_sent:
                tries = self._deliveries.window.tries(sequence)
                known = self._failures.get(sequence)
                reason = (known and known.reason) or "its leases ended without an acknowledgement"
                dead = DeadRecord(sequence, tries, reason, self.clock.time_ns(), self._rules.dead_letter, durable)
                self._dead[sequence] = dead
                self._settling().dead.append(dead)
            self._to_give_up.pop()
            return DeadLetter(record, self._dead[sequence], may_be_sent)
        return None

    def unsettled(self) -> dict[str, int]:
        """Return the routes of dead letters that may be in the log, each with a sequence before all of them."""
        routes: dict[str, int] = {}
        for dead in self._dead.values():
            routes[dead.route] = min(dead.after, routes.get(dead.route, dead.after))
        return routes

    def gave_up(self, sequence: int) -> None:
        """Take in that the dead letter of a record is durable."""
        self.given_up += 1
        self._finished(self._deliveries.finish([("", [sequence])]).runs)

    def not_given_up(self, sequence: int) -> None:
        """Take in that it is not known whether a record became a dead letter; it is the last to be tried again."""
        self._to_give_up.append(sequence)

    def pass_over(self, sequence: int) -> None:
        """Take in that everything up to ``sequence`` is done, whatever consumers have of it."""
        self._passed = sequence
        run = Run(self.floor + 1, min(sequence, self._deliveries.window.end - 1))
        if run.size > 0:
            self._deliveries.finish_all(run)
            self._finished([run])

    def _deliver_next(self, waiting: deque[Wanted], now_ns: int) -> bool:
        """Deliver the next run of records, and remove those from ``waiting`` that get no more; False: there is none."""
        sharing = (
            [waiting[0]] if self._deliveries.is_offering else list(islice(waiting, PAGE_RECORDS))
        )  # a run is in a page
        run = self._next_run(sum(each.records_max for each in sharing))
        if run is None:
            return False
        rows = self._read(run)
        if shares := list(share(rows.values_of(*run), sharing)):
            parts = [Part(each.consumer, now_ns + each.lease_ns, count) for each, count in shares]
            run = Run(run.first, run.first + sum([part.size for part in parts]) - 1)
            hand_out(rows, run, self._deliveries.deliver(run, parts, now_ns=now_ns), shares)
        last, _ = shares[-1] if shares else (sharing[0], 0)
        if last.is_over:
            self._deliveries.close()
        while waiting and waiting[0].is_over:
            waiting.popleft()
        return True

    def _next_run(self, records_max: int) -> Run | None:
        """The next records to deliver; those that were delivered too often are given up instead."""
        while True:
            run = self._deliveries.first_free()
            if run is None:
                if not self._take_in():
                    return None
                continue
            last = min(run.last, run.first + records_max - 1, self.floor + self._rules.window)
            if last < run.first:
                return None
            run = Run(run.first, last)
            if self._rules.max_tries is None and not self._dead:
                return run
            over = next((s for s in range(run.first, run.last + 1) if self._is_over(s)), None)
            if over != run.first:
                return run if over is None else Run(run.first, over - 1)
            self._give_up(over)

    def _is_over(self, sequence: int) -> bool:
        max_tries = self._rules.max_tries
        tried_out = max_tries is not None and self._deliveries.window.tries(sequence) >= max_tries
        return tried_out or sequence in self._dead

    def _read(self, run: Run) -> Rows:
        """The batch with the first record of a run; no records if that one is lost, and done with it."""
        try:
            return self._source.rows(run.first)
        except Lost as lost:
            self._deliveries.finish_all(lost.run)
            self._finished([lost.run])
            return _NOTHING

    def _was_delivered(self, sequence: int) -> bool:
        window = self._deliveries.window
        return window.is_open(sequence) and window.tries(sequence) > 0

    def _give_up(self, sequence: int) -> None:
        """Hold a record until it is a dead letter, so that no worker gets it."""
        self._deliveries.hold(Run(sequence, sequence), "", until_ns=self.clock.monotonic_ns() + _FOR_EVER_NS)
        self._to_give_up.append(sequence)
        self._giving_up()

    def _take_in(self) -> bool:
        """Take the next batch into the window; returns whether there was one, and room."""
        run = self._source.next(self.floor)
        window = self._deliveries.window
        if run is None or (window.open and run.last - window.floor > self._rules.window):
            return False
        rows = self._source.take()
        if rows is None:
            window.pass_over(run.last)
            return True
        now_ns = self.clock.time_ns()
        waiting = [
            (sequence, due_ns)
            for sequence, headers in enumerate(rows.headers or (), rows.first)
            if headers is not None and (due_ns := not_before(headers)) > now_ns
        ]
        keys = (rows.keys or [None] * rows.count) if self._rules.by_key else None
        self._deliveries.take_in(run, keys, waiting)
        line = self._lines[-1]
        line.read.append((run.first, run.last))
        line.due += waiting
        if run.first <= self._passed:
            passed = Run(run.first, min(run.last, self._passed))
            self._deliveries.finish_all(passed)
            self._finished([passed])
        return True

    def _finished(self, runs: Collection[Run]) -> None:
        if not runs:
            return
        self._settling().done += runs
        for known in (self._failures, self._dead):
            for sequence in [each for run in runs for each in run.among(known)] if known else ():
                del known[sequence]

    def _taken_back(self, runs: Collection[Run]) -> int:
        self._came_back(runs)
        return sum(run.size for run in runs)

    def _came_back(self, runs: Collection[Run]) -> None:
        """Write down what came back, and what did with it."""
        if back := [*runs, *self._deliveries.followers()]:
            self._settling().returned += back

    def _settling(self) -> Commit:
        """The line for what is settled: behind what was leased in this turn, it is another one."""
        line = self._lines[-1]
        if line.read or line.leased:
            self._lines.append(line := Commit())
        return line


def _each(settled: Settled) -> Iterator[int]:
    for run in settled.runs:
        yield from range(run.first, run.last + 1)
