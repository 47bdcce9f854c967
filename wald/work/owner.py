"""Owner of a work group: applies leases and acknowledgements to the window, and collects the journal lines.

It never blocks. The commit loop (:mod:`wald.work.commit_loop`) is its only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple, Protocol

from wald.errors import WaldError
from wald.format.records import Record, not_before
from wald.format.work import Commit, DeadRecord, FailureReason, JournalLine, JournalStart, WorkerLease
from wald.reading.assembler import Rows
from wald.work.deliveries import Deliveries, Named, Part, Refusal, Settled
from wald.work.journal import Failure, Replay, journal_lines, record_failure
from wald.work.source import Lost, Source
from wald.work.window import Run, State

FOREVER_SECONDS = 1e9
"""Duration of an endless lease."""
_NS = 1_000_000_000
_FOREVER_NS = 1 << 62
_ORDERS_MAX = 128  # filled at a time
_REASON_MAX = 500  # letters, which stay in memory for each returned record
_NO_ROWS = Rows("", 0, 0, 0, ())
_POLL_NS = 1 * _NS  # while a record waits for a time of the wall clock, which may be set


class Clock(Protocol):
    """The clocks of :mod:`time`: monotonic for leases, wall clock for due times."""

    def monotonic_ns(self) -> int:
        """Return the time of a clock that cannot be set."""

    def time_ns(self) -> int:
        """Return the nanoseconds since 1970; this clock may be set."""


class Delivery(NamedTuple):
    """A record leased to a worker.

    Attributes:
        tries: number of deliveries, including this one.
        sequence, key, value: those of the record.
    """

    record: Record
    tries: int

    @property
    def sequence(self) -> int:
        return self.record.sequence

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def value(self) -> bytes:
        return self.record.value


Share = tuple[Iterable[Record], bytes]
"""Delivered records, as an iterable to read once, and the tries of each."""
_new_delivery: Callable[[tuple[Record, int]], Delivery] = partial(tuple.__new__, Delivery)  # twice as fast


class Leased(list[Delivery]):
    """The deliveries of a lease.

    Attributes:
        refused: the records in ``done`` whose acknowledgement was rejected.
    """

    __slots__ = ("refused",)

    def __init__(self, shares: Iterable[Share], refused: Sequence[Refusal]) -> None:
        for records, tries in shares:
            self += map(_new_delivery, zip(records, tries, strict=True))
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Pending:
    """Consecutive records that a worker has leased.

    Attributes:
        first, last: sequences, both ends included.
        idle: seconds since they were leased.
        left: seconds until the lease ends.
        tries: deliveries of the first of them.
    """

    first: int
    last: int
    worker: str
    idle: float
    left: float
    tries: int


@dataclass(frozen=True, slots=True)
class Rules:
    """Delivery rules of a group, as in the arguments of :class:`wald.WorkGroup`."""

    by_key: bool
    window: int
    max_tries: int | None
    dead_letter: str
    is_strict: bool = False


class DeadLetter(NamedTuple):
    """A record to become a dead letter, which may be in the log already if ``may_be_sent``."""

    record: Record
    dead: DeadRecord
    may_be_sent: bool


class LeaseOrder:
    """A lease in progress: its remaining capacity and the delivered records.

    Attributes:
        records_max, bytes_max: remaining capacity; the first record may exceed the bytes.
        shares, runs: the delivered records and their runs.
        error: why it got no records.
    """

    __slots__ = ("bytes_max", "error", "lease_ns", "records_max", "runs", "shares", "worker")

    def __init__(self, worker: str, records_max: int, bytes_max: int, lease_ns: int) -> None:
        self.worker = worker
        self.records_max = records_max
        self.bytes_max = bytes_max
        self.lease_ns = lease_ns
        self.shares: list[Share] = []
        self.runs: list[tuple[int, int]] = []
        self.error: Exception | None = None

    @property
    def is_full(self) -> bool:
        return not (self.records_max and self.bytes_max)

    def reserve(self, values: Sequence[bytes], start: int) -> int:
        """Reserve capacity for the next values from ``start``; return how many fit."""
        lengths = list(map(len, values[start : start + self.records_max]))
        count, size = len(lengths), sum(lengths)
        if size >= self.bytes_max:
            count = max(sum(size <= self.bytes_max for size in accumulate(lengths)), 0 if self.shares else 1)
            size = self.bytes_max
        self.records_max -= count
        self.bytes_max -= size
        return count

    def add(self, run: tuple[int, int], records: Iterable[Record], tries: bytes) -> None:
        self.shares.append((records, tries))
        self.runs.append(run)


class Owner:
    """Leases and acknowledgements of one group.

    Args:
        giving_up: called when :meth:`next_dead_letter` has a record to return.

    Attributes:
        given_up: number of records that became dead letters.
        last_done: last record that is done; of a strict group, so are all before it.
    """

    def __init__(
        self,
        start: JournalStart,
        rules: Rules,
        replay: Replay,
        source: Source,
        *,
        clock: Clock,
        giving_up: Callable[[], None],
    ) -> None:
        self.clock = clock
        self._start = start
        self._rules = rules
        self._deliveries = replay.deliveries
        self._source = source
        self._failures = replay.failures
        self._dead = replay.dead
        self._to_give_up: deque[int] = deque()
        self.given_up = 0
        self.last_done = start.floor
        self._passed = 0  # an operator has moved the cursor to here
        self._giving_up = giving_up
        self._lines: list[Commit] = [Commit()]
        for sequence in self._dead:
            if self._deliveries.window.state(sequence) is State.FREE:
                self._give_up(sequence)

    @property
    def floor(self) -> int:
        """Ack floor: all records up to it are done."""
        return self._deliveries.window.floor

    @property
    def dead(self) -> Mapping[int, DeadRecord]:
        """Records that are being given up."""
        return self._dead

    @property
    def has_read(self) -> bool:
        """True once the records that existed at the start have been read."""
        return self._source.is_at_end

    @property
    def has_dead_letters(self) -> bool:
        return bool(self._to_give_up)

    def tick(self) -> None:
        """Expire leases and wake delayed records."""
        self._deliveries.expire(self.clock.monotonic_ns())
        self._deliveries.wake(self.clock.time_ns())
        self._record_returned([])

    def pop_lines(self) -> list[Commit]:
        """Return the journal lines for all changes since the last call."""
        lines, self._lines = self._lines, [Commit()]
        return [line for line in lines if line]

    def all_lines(self) -> Iterator[JournalLine]:
        """Return the lines of a compacted journal."""
        since_1970_ns = self.clock.time_ns() - self.clock.monotonic_ns()
        return journal_lines(self._start, self._deliveries, self._failures, self._dead, since_1970_ns)

    def next_change_ns(self) -> float:
        """Return when a lease ends or a record may be due, by the monotonic clock."""
        end, due = self._deliveries.next_end_ns, self._deliveries.next_due_ns
        changes = float("inf") if end is None else end
        if due is not None:
            changes = min(changes, self.clock.monotonic_ns() + min(_POLL_NS, max(0, due - self.clock.time_ns())))
        return changes

    def lease(self, orders: Sequence[LeaseOrder]) -> None:
        """Deliver the next records to the orders, first come, first served."""
        now_ns = self.clock.monotonic_ns()
        waiting = deque(orders)
        if self._rules.is_strict:
            waiting = deque(orders[:1] if orders and self._is_next_ready(orders[0]) else ())
        while waiting:
            try:
                if not self._deliver_next(waiting, now_ns):
                    break
            except (WaldError, OSError) as error:
                waiting.popleft().error = error
                self._deliveries.end_offer()
        self._deliveries.end_offer()
        wall_ns = self.clock.time_ns()
        self._lines[-1].leased += [
            WorkerLease(each.worker, wall_ns + each.lease_ns, each.runs) for each in orders if each.runs
        ]

    def acknowledge(self, named: Sequence[Named]) -> list[list[Refusal]]:
        """Mark processed records done; return each worker's refused records.

        A record that is being given up is refused, because its dead letter may exist already.
        """
        dead = self._dead
        living = [(worker, [s for s in sequences if s not in dead]) for worker, sequences in named] if dead else named
        if self._rules.is_strict:
            every = [self._finish_in_order(worker, sequences) for worker, sequences in living]
        else:
            settled = self._deliveries.finish(living)
            self._record_done(settled.runs)
            every = settled.refused
        for (_, sequences), refused in zip(named, every, strict=True) if dead else ():
            refused += [Refusal(sequence, "") for sequence in sequences if sequence in dead]
        return every

    def give_back(self, worker: str, sequences: Sequence[int], delay_ns: int, reason: str, tries: int) -> list[Refusal]:
        """Give unprocessed records of ``worker`` back to the group; return the refused ones.

        ``tries`` is the worker's own failure count, or 0; it is recorded even for records that no worker has.
        """
        due_ns = self.clock.time_ns() + delay_ns if delay_ns > 0 else None
        settled = self._deliveries.give_back((worker, sequences), due_ns=due_ns)
        self._record_returned(settled.runs)
        if self._rules.is_strict:  # later records wait for these
            self.release(worker)
        if due_ns is not None:
            for sequence in _each(settled):
                if self._is_over(sequence):  # without a try left, there is nothing to wait for
                    self._give_up(sequence)
                else:
                    self._settled_line().due.append((sequence, due_ns))
        runs: list[tuple[int, int]] = list(settled.runs)
        if tries:
            runs += (Run(s, s) for s, holder in settled.refused[0] if not holder and self._was_delivered(s))
        if runs and (reason or tries):
            why = FailureReason(reason[:_REASON_MAX], tries, runs)
            record_failure(self._failures, why)
            self._settled_line().reasons.append(why)
        return settled.refused[0]

    def failure(self, sequence: int) -> Failure | None:
        return self._failures.get(sequence)

    def give_up(
        self, worker: str, sequences: Sequence[int], reason: str, tries: int | None, durable: int
    ) -> list[Refusal]:
        """Start to give up records of ``worker``; return the refused ones. ``durable`` is the last durable record."""
        settled = self._deliveries.give_back((worker, sequences))
        reason, now_ns, route = reason[:_REASON_MAX], self.clock.time_ns(), self._rules.dead_letter
        for sequence in _each(settled):
            tried = self._deliveries.window.tries(sequence) if tries is None else tries
            self._dead[sequence] = dead = DeadRecord(sequence, tried, reason, now_ns, route, durable)
            self._settled_line().dead.append(dead)
            self._give_up(sequence)
        return settled.refused[0]

    def extend(self, worker: str, sequences: Sequence[int], lease_ns: int) -> list[Refusal]:
        """Extend the leases of records of ``worker``; return the refused ones."""
        now_ns = self.clock.monotonic_ns()
        settled = self._deliveries.extend((worker, sequences), now_ns=now_ns, until_ns=now_ns + lease_ns)
        if settled.runs:
            held = WorkerLease(worker, self.clock.time_ns() + lease_ns, list(settled.runs))
            self._settled_line().extended.append(held)
        return settled.refused[0]

    def release(self, worker: str) -> int:
        """Give all records of ``worker`` back to the group; return their number."""
        return self._record_returned(self._deliveries.release(worker))

    def claim(self, idle_ns: int) -> int:
        """Give all records leased at least ``idle_ns`` ago back to the group; return their number."""
        return self._record_returned(self._deliveries.claim(self.clock.monotonic_ns() - idle_ns))

    def skip(self, run: Run) -> list[Run] | None:
        """Mark records done without processing; return them, or None if not all have been read yet."""
        while self._deliveries.window.end <= run.last:
            if not self._read_next():
                return None
        skipped = list(self._deliveries.window.open_in(run))
        self._deliveries.finish_all(run)
        self._record_done(skipped)
        return skipped

    def pending(self) -> list[Pending]:
        """Return the leased records, in order."""
        now_ns = self.clock.monotonic_ns()
        tries = self._deliveries.window.tries
        return [
            Pending(
                run.first,
                run.last,
                lease.worker,
                max(0, now_ns - lease.since_ns) / _NS,
                (lease.until_ns - now_ns) / _NS,
                tries(run.first),
            )
            for run, lease in self._deliveries.out()
            if lease.worker
        ]

    def next_dead_letter(self, durable: int) -> DeadLetter | None:
        """Return the next record to give up, if any. ``durable`` is the last durable record."""
        for _ in range(len(self._to_give_up)):
            self._to_give_up.rotate(-1)  # so that an unreadable record blocks no other
            sequence = self._to_give_up[-1]
            if not self._deliveries.window.is_open(sequence):  # skipped in the meantime
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
                self._settled_line().dead.append(dead)
            self._to_give_up.pop()
            return DeadLetter(record, self._dead[sequence], may_be_sent)
        return None

    def dead_letter_positions(self) -> dict[str, int]:
        """Return each route that may have dead letters of open records, with a sequence that precedes them all."""
        routes: dict[str, int] = {}
        for dead in self._dead.values():
            routes[dead.route] = min(dead.after, routes.get(dead.route, dead.after))
        return routes

    def finish_dead_letter(self, sequence: int) -> None:
        """Mark a record done once its dead letter is durable."""
        self.given_up += 1
        self._record_done(self._deliveries.finish([("", [sequence])]).runs)

    def retry_dead_letter(self, sequence: int) -> None:
        """Retry, after all others, a record whose dead letter may or may not have been written."""
        self._to_give_up.append(sequence)

    def finish_through(self, sequence: int) -> None:
        """Mark all records up to ``sequence`` done, even if workers have them."""
        self._passed = sequence
        run = Run(self.floor + 1, min(sequence, self._deliveries.window.end - 1))
        if run.size > 0:
            self._deliveries.finish_all(run)
            self._record_done([run])

    def move(self, cursor: int) -> None:
        """Continue after ``cursor``, which may precede done records."""
        if cursor >= self.floor:
            self.finish_through(cursor)
            self.last_done = cursor
            return
        self._deliveries = Deliveries(cursor)
        self.last_done, self._passed = cursor, 0
        self._failures.clear()
        self._dead.clear()
        self._to_give_up.clear()
        self._source.restart(cursor + 1)

    def _is_next_ready(self, order: LeaseOrder) -> bool:
        """Read ahead for an order of a strict group; return True once it can be filled or all records are read.

        The error of an unreadable record is raised once all earlier records are done.
        """
        window, size = self._deliveries.window, 0
        try:
            while window.open < order.records_max and size < order.bytes_max:
                if (run := self._source.next(self.floor)) is None:
                    if not self._source.has_no_more():
                        return False
                    break
                size += self._source.next_bytes
                if not self._read_next() and self._source.next(self.floor) == run:
                    break  # the window is full
        except (WaldError, OSError) as error:
            if not window.open:
                order.error = error
        return window.next_is_free

    def _finish_in_order(self, worker: str, sequences: Sequence[int]) -> list[Refusal]:
        """Mark records done up to the first gap; refuse the others."""
        if not sequences:
            return []
        named, end = set(sequences), sequences[-1] + 1
        ahead = self._deliveries.window.open_in(Run(self.floor + 1, sequences[-1]))
        first = next((s for run in ahead for s in range(run.first, run.last + 1) if s not in named), end)
        settled = self._deliveries.finish([(worker, [s for s in sequences if s < first])])
        self._record_done(settled.runs)
        return settled.refused[0] + [Refusal(s, "") for s in sequences if s >= first]

    def _deliver_next(self, waiting: deque[LeaseOrder], now_ns: int) -> bool:
        """Deliver the next run, and remove full orders; return False if there are no records."""
        orders = [waiting[0]] if self._deliveries.is_offering else list(islice(waiting, _ORDERS_MAX))
        run = self._next_run(sum(each.records_max for each in orders))
        if run is None:
            return False
        rows = self._read(run)
        if shares := list(divide(rows.values_of(*run), orders)):
            parts = [Part(each.worker, now_ns + each.lease_ns, count) for each, count in shares]
            run = Run(run.first, run.first + sum([part.size for part in parts]) - 1)
            hand_out(rows, run, self._deliveries.deliver(run, parts, now_ns=now_ns), shares)
        last, _ = shares[-1] if shares else (orders[0], 0)
        if last.is_full:
            self._deliveries.end_offer()
        while waiting and waiting[0].is_full:
            waiting.popleft()
        return True

    def _next_run(self, records_max: int) -> Run | None:
        """Return the next records to deliver; give up those without tries left."""
        while True:
            run = self._deliveries.window.first_free(records_max)
            if run is None:
                if not self._read_next():
                    return None
                continue
            last = min(run.last, run.first + records_max - 1, self.floor + self._rules.window)
            if last < run.first or (self._rules.is_strict and self._is_blocked(run.first)):
                return None
            run = Run(run.first, last)
            if self._rules.max_tries is None and not self._dead:
                return run
            over = next((s for s in range(run.first, run.last + 1) if self._is_over(s)), None)
            if over != run.first:
                return run if over is None else Run(run.first, over - 1)
            self._give_up(over)

    def _is_blocked(self, sequence: int) -> bool:
        """Return True if an earlier record is delayed or being given up."""
        waiting = next(self._deliveries.window.runs(State.WAITING), None)
        given_up = [*self._to_give_up, *self._dead]
        return (waiting is not None and waiting.first < sequence) or min(given_up, default=sequence) < sequence

    def _is_over(self, sequence: int) -> bool:
        max_tries = self._rules.max_tries
        tried_out = max_tries is not None and self._deliveries.window.tries(sequence) >= max_tries
        return tried_out or sequence in self._dead

    def _read(self, run: Run) -> Rows:
        """Return the batch with the first record of a run; if that record is lost, mark it done and return None."""
        try:
            return self._source.rows(run.first)
        except Lost as lost:
            self._deliveries.finish_all(lost.run)
            self._record_done([lost.run])
            return _NO_ROWS

    def _was_delivered(self, sequence: int) -> bool:
        window = self._deliveries.window
        return window.is_open(sequence) and window.tries(sequence) > 0

    def _give_up(self, sequence: int) -> None:
        """Hold a record until its dead letter is durable, so that no worker gets it."""
        self._deliveries.hold(Run(sequence, sequence), "", until_ns=self.clock.monotonic_ns() + _FOREVER_NS)
        self._to_give_up.append(sequence)
        self._giving_up()

    def _read_next(self) -> bool:
        """Append the next batch to the window; return False if there is none or the window is full."""
        run = self._source.next(self.floor)
        window = self._deliveries.window
        if run is None or (window.open and run.last - window.floor > self._rules.window):
            return False
        rows = self._source.pop()
        if rows is None:
            window.extend_to(run.last)
            return True
        now_ns = self.clock.time_ns()
        waiting = [
            (sequence, due_ns)
            for sequence, headers in enumerate(rows.headers or (), rows.first)
            if headers is not None and (due_ns := not_before(headers)) > now_ns and not self._rules.is_strict
        ]
        keys = (rows.keys or [None] * rows.count) if self._rules.by_key else None
        self._deliveries.append(run, keys, waiting)
        line = self._lines[-1]
        line.read.append((run.first, run.last))
        line.due += waiting
        if run.first <= self._passed:
            passed = Run(run.first, min(run.last, self._passed))
            self._deliveries.finish_all(passed)
            self._record_done([passed])
        return True

    def _record_done(self, runs: Collection[Run]) -> None:
        if not runs:
            return
        self.last_done = max(self.last_done, *(run.last for run in runs))
        self._settled_line().done += runs
        for known in (self._failures, self._dead):
            for sequence in [each for run in runs for each in run.among(known)] if known else ():
                del known[sequence]

    def _record_returned(self, runs: Collection[Run]) -> int:
        """Record runs given back, and those that came back with them; return the number of records in ``runs``."""
        if returned := [*runs, *self._deliveries.pop_followers()]:
            self._settled_line().returned += returned
        return sum(run.size for run in runs)

    def _settled_line(self) -> Commit:
        """Return the journal line for settled records; a new one if this round has leased records."""
        line = self._lines[-1]
        if line.read or line.leased:
            self._lines.append(line := Commit())
        return line


def _each(settled: Settled) -> Iterator[int]:
    for run in settled.runs:
        yield from range(run.first, run.last + 1)


def divide(values: Sequence[bytes], orders: Iterable[LeaseOrder]) -> Iterator[tuple[LeaseOrder, int]]:
    """Divide consecutive values among the orders; yield each order with its count."""
    at = 0
    for each in orders:
        if at == len(values):
            return
        if count := each.reserve(values, at):
            at += count
            yield each, count


def hand_out(rows: Rows, run: Run, tries: bytes, shares: Sequence[tuple[LeaseOrder, int]]) -> None:
    """Add a run of delivered records to the orders.

    A single worker decodes its records lazily; for several workers, decoding all at once is faster.
    """
    records = rows.records(*run)
    if len(shares) == 1:
        shares[0][0].add(run, records, tries)
        return
    every, at = list(records), 0
    for order, count in shares:
        first = run.first + at
        order.add((first, first + count - 1), every[at : at + count], tries[at : at + count])
        at += count
