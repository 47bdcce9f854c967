"""A work group: many workers share a route, each record is leased to one of them and acknowledged by itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from wald.errors import InvalidInput, WaldError
from wald.format.names import DEFAULT_GROUP, check_group
from wald.format.record import Record
from wald.format.work import Commit, Dead, Line, Start
from wald.log import Log
from wald.store.files.disk import Disk
from wald.store.reading.selection import select
from wald.store.retention.beginning import beginning
from wald.store.retention.cursors import CursorState
from wald.work.burial import bury
from wald.work.commits import Commits
from wald.work.deadletters import Undeliverable
from wald.work.deliveries import Deliveries, Refusal, Settled
from wald.work.journal import Journal, discard
from wald.work.ownership import Ownership
from wald.work.replay import pages, replay
from wald.work.source import Source
from wald.work.window import Run

Order = Literal["log", "key"]
NOT_BEFORE = "wald.not-before"
WINDOW = 1_000_000
_NS = 1_000_000_000
_CURSOR_RECORDS = 10_000
_CURSOR_SECONDS = 1.0
_BURIAL_NS = 3600 * _NS
DEAD_LETTER = "dead_letter"


class Delivery(NamedTuple):
    """A record that a worker has got.

    Attributes:
        tries: how often it was delivered, this time included.
    """

    record: Record
    tries: int


@dataclass(frozen=True, slots=True)
class Pending:
    """Records that were delivered and are not acknowledged.

    Attributes:
        first, last: sequences, both ends included.
        consumer: the one that has them.
        idle: seconds since they were leased; left: until the lease ends.
        tries: how often the first of them was delivered.
    """

    first: int
    last: int
    consumer: str
    idle: float
    left: float
    tries: int


class WorkGroup:
    """``group`` on ``route``, owned by this process until it is closed. Its methods may be called by many threads.

    A record is leased to one worker at a time. Acknowledged, it is never delivered again, over any crash: :meth:`ack`
    returns when that is on disk. Otherwise it is delivered again, when its lease is over, or at once if this process
    was started again. How often it was delivered never goes down. It is first delivered in the order of the log.

    Args:
        at: the root of the log, or the log.
        route: the route to work on.
        group: the group. Its cursor is the ack floor: everything up to it is done.
        order: "key": records of one key are with one worker at a time, and come in their order.
        window: how many sequences may lie between the ack floor and the newest record that was delivered.
        max_tries: give a record up after so many deliveries; None: never.
        dead_letter: the route for records that are given up.
        daemon: where records that are given up are sent: the daemon's socket, or None for that of the log.
        report: gets a line for each record that is given up.

    Raises:
        NotFound: there is no such log or route, or records that the group has not processed were reclaimed.
        InvalidInput: the name of the group is illegal.
        Locked: another process works for this group.
        Damaged: the cursor or the journal cannot be trusted.
        NotPermitted: this user may not.

    Example::

        with wald.WorkGroup("/var/spool/wald", "orders", "billing") as work:
            for delivery in work.lease("worker-1", wait=10):
                handle(delivery.record)
                work.ack("worker-1", [delivery.record.sequence])
    """

    def __init__(
        self,
        at: str | PathLike[str] | Log,
        route: str,
        group: str = DEFAULT_GROUP,
        *,
        order: Order = "log",
        window: int = WINDOW,
        max_tries: int | None = None,
        dead_letter: str = DEAD_LETTER,
        daemon: Path | None = None,
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        if dead_letter == route and max_tries is not None:
            raise InvalidInput(
                f"route {route}: cannot be its own dead-letter route", hint="dead_letter is the name of another route"
            )
        self.log = at if isinstance(at, Log) else Log(at)
        self.log.root.require_route(route)
        self.route = route
        self.group = check_group(group)
        self._by_key = order == "key"
        self._window = window
        self._max_tries = max_tries
        self._dead_letter = dead_letter
        self._daemon = daemon or self.log.root.path
        self._report = report
        self._dead: dict[int, Dead] = {}
        self._reasons: dict[int, str] = {}
        self._disk = Disk()
        self._changed = threading.Condition()
        self._moving = threading.Lock()
        with ExitStack() as stack:
            stack.enter_context(Ownership(self.log.root, route, self.group, self._disk))
            self._floor = self._enter()
            self._cursor_moves = time.monotonic() + _CURSOR_SECONDS
            start = Start(self.log.identity.log_id, route, group, self._floor, self._floor + 1)
            self._journal = Journal(self.log.root, self._disk, start)
            stack.callback(self._journal.close)
            self._deliveries = self._replayed()
            self._commits = Commits(self._journal, self._changed, lambda: self._snapshot(self._deliveries))
            self._source = Source(self.log, route, self._deliveries.window.end, self._changed)
            stack.callback(self._source.close)
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def lease(
        self,
        consumer: str,
        max_records: int = 100,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = 0.0,
    ) -> list[Delivery]:
        """Records for ``consumer``, which has them for ``lease_for`` seconds.

        Args:
            max_records, max_bytes: of values, at most; a single record may have more.
            wait: how many seconds to wait for a record, if there is none.

        Raises:
            Damaged, NotFound: the next record cannot be read; all before it were delivered.
            OSError: the journal cannot be written.
        """
        if not consumer or max_records < 1 or lease_for <= 0:
            raise InvalidInput(
                "a lease for no consumer, of no records, or for no time",
                hint="consumer is a name; max_records and lease_for are above 0",
            )
        until = time.monotonic() + wait
        with self._changed:
            while True:
                self._look_at_clocks()
                self._give_up()
                got = self._deliver(consumer, max_records, max_bytes, lease_for)
                seconds = min(until, self._next_change()) - time.monotonic()
                if got or time.monotonic() >= until:
                    break
                self._changed.wait(max(0.0, seconds))
            end = self._commits.written
        if any(delivery.tries > 1 for delivery in got):
            self._commits.wait(end)  # so that the number of tries never goes down
        return got

    def ack(self, consumer: str, sequences: Collection[int]) -> list[Refusal]:
        """Take in that ``consumer`` has processed these records; on disk when this returns.

        Returns:
            those for which it did not count: another consumer has them by now, or they were never delivered.
        """
        with self._changed:
            settled = self._deliveries.finish(consumer, sequences)
            self._commit(settled, Commit(done=list(settled.runs)))
            end = self._commits.written
        self._commits.wait(end)
        self._move_cursor()
        return settled.refused

    def nack(self, consumer: str, sequences: Collection[int], delay: float = 0.0, reason: str = "") -> list[Refusal]:
        """Give records back, which are delivered again, after ``delay`` seconds; a delay is on disk when this returns.

        Args:
            reason: why, for the dead letter, should it come to that.
        """
        with self._changed:
            due = time.time_ns() + int(delay * _NS) if delay > 0 else None
            settled = self._deliveries.give_back(consumer, sequences, due_ns=due)
            waiting = [(s, due) for run in settled.runs for s in range(run.first, run.last + 1)] if due else []
            if reason and self._max_tries is not None:
                self._reasons |= {s: reason for run in settled.runs for s in range(run.first, run.last + 1)}
            self._commit(settled, Commit(back=list(settled.runs), due=waiting))
            end = self._commits.written
        if waiting:
            self._commits.wait(end)
        return settled.refused

    def extend(self, consumer: str, sequences: Collection[int], lease_for: float = 30.0) -> list[Refusal]:
        """Lease records for ``lease_for`` seconds from now on that ``consumer`` has."""
        with self._changed:
            now = time.monotonic_ns()
            return self._deliveries.extend(consumer, sequences, now_ns=now, until_ns=now + int(lease_for * _NS)).refused

    def release(self, consumer: str) -> int:
        """Take back all that ``consumer`` has; returns how many records that were."""
        with self._changed:
            return self._freed(self._deliveries.release(consumer))

    def claim(self, min_idle: float) -> int:
        """Take back all that was leased at least ``min_idle`` seconds ago; returns how many records that were."""
        with self._changed:
            return self._freed(self._deliveries.claim(time.monotonic_ns() - int(min_idle * _NS)))

    def pending(self) -> Iterator[Pending]:
        """What was delivered and is not acknowledged, in order."""
        with self._changed:
            now = time.monotonic_ns()
            window = self._deliveries.window
            found = [
                Pending(
                    run.first,
                    run.last,
                    lease.consumer,
                    (now - lease.since_ns) / _NS,
                    (lease.until_ns - now) / _NS,
                    window.tries(run.first),
                )
                for run, lease in self._deliveries.out()
            ]
        yield from found

    @property
    def floor(self) -> int:
        """The ack floor: everything up to it is done."""
        return self._deliveries.window.floor

    def close(self) -> None:
        """Move the cursor to the ack floor, and let another process work for the group."""
        try:
            self._move_cursor(at_once=True)
        finally:
            self._held.close()

    def _enter(self) -> int:
        """Up to where the group has processed the route, by its cursor; a new group gets one."""
        if self.log.cursor(self.route, self.group).state is CursorState.ABSENT:
            discard(self.log.root, self._disk, self.route, self.group)  # of a group of this name that was removed
            begins = beginning(self.log.view(), self.route, self.group)
            self.log.set_cursor(self.route, begins.sequence - 1, self.group)
        return select(self.log.view(), self.route, "cursor", None, self.group).floor(self.route) - 1

    def _replayed(self) -> Deliveries:
        """What the journal says of the records above the cursor."""
        lines = self._journal.lines
        start = next((line for line in lines if isinstance(line, Start)), None)
        deliveries = Deliveries(self._floor if start is None else start.floor, by_key=self._by_key)
        for line in lines:
            replay(deliveries, line)
            if isinstance(line, Commit) and line.dead is not None:
                self._dead[line.dead.sequence] = line.dead
        self._dead = {s: dead for s, dead in self._dead.items() if deliveries.window.is_open(s)}
        deliveries.window.pass_over(self._floor)
        deliveries.finish_all(Run(0, self._floor))
        if self._by_key and deliveries.window.open:
            window = deliveries.window
            for batch in self.log.batches(self.route, window.floor + 1, window.end - 1):
                keys = [record.key for record in batch.records()]
                deliveries.sort(Run(batch.first_sequence, batch.last_sequence), keys)
        deliveries.wake(time.time_ns())
        if len(lines) > 1:
            self._journal.rewrite(self._snapshot(deliveries))
        return deliveries

    def _snapshot(self, deliveries: Deliveries) -> Iterator[Line]:
        window = deliveries.window
        yield Start(self.log.identity.log_id, self.route, self.group, window.floor, window.end)
        yield from pages(deliveries)
        for dead in self._dead.values():
            yield Commit(dead=dead)

    def _deliver(self, consumer: str, max_records: int, max_bytes: int, lease_for: float) -> list[Delivery]:
        now = time.monotonic_ns()
        until = now + int(lease_for * _NS)
        got: list[Delivery] = []
        out: list[tuple[int, int]] = []
        taken_in: list[tuple[int, int]] = []
        due: list[tuple[int, int]] = []
        while len(got) < max_records and max_bytes > 0:
            run = self._deliveries.first_free()
            if run is not None and self._is_over(run.first):
                break  # the next lease gives it up
            if run is None:
                if not self._take_in(taken_in, due):
                    break
                continue
            last = min(run.last, run.first + max_records - len(got) - 1)
            last = next((s - 1 for s in range(run.first + 1, last + 1) if self._is_over(s)), last)
            records = self._source.records(run.first, last)
            fitting: list[Record] = []
            for record in records:
                if (got or fitting) and len(record.value) > max_bytes:
                    max_bytes = 0
                    break
                max_bytes -= len(record.value)
                fitting.append(record)
            if not fitting:
                break
            part = Run(fitting[0].sequence, fitting[-1].sequence)
            self._deliveries.deliver(part, consumer, now_ns=now, until_ns=until)
            tries = self._deliveries.window.tries  # the count, this time included
            got += [Delivery(record, tries(record.sequence)) for record in fitting]
            out.append((part.first, part.last))
        self._deliveries.close()
        if out or taken_in or due:
            until_ns = time.time_ns() + int(lease_for * _NS)
            self._commits.write(Commit(taken_in=taken_in, out=out, to=consumer, until_ns=until_ns, due=due))
        return got

    def _give_up(self) -> None:
        """Make dead letters of the records that come next and were delivered too often."""
        while (run := self._deliveries.first_free()) and self._is_over(run.first):
            sequence = run.first
            now = time.monotonic_ns()
            self._deliveries.deliver(Run(sequence, sequence), "", now_ns=now, until_ns=now + _BURIAL_NS)
            self._deliveries.close()
            self._changed.release()
            try:
                self._bury(sequence)
            finally:
                self._changed.acquire()

    def _is_over(self, sequence: int) -> bool:
        tries = self._deliveries.window.tries(sequence)
        return sequence in self._dead or (self._max_tries is not None and tries >= self._max_tries)

    def _bury(self, sequence: int) -> None:
        """Make a dead letter of a record that this thread has; without a daemon it is tried again a second later."""
        with self._changed:
            (record,) = self._source.records(sequence, sequence)
            dead = self._dead.get(sequence)
            if dead is None:
                tries = self._deliveries.window.tries(sequence) - 1  # without this one
                reason = self._reasons.get(sequence, "its leases ended without an acknowledgement")
                dead = self._dead[sequence] = Dead(sequence, tries, reason, time.time_ns(), self._dead_letter)
                self._commits.write(Commit(dead=dead))
            written = self._commits.written
        self._commits.wait(written)
        named = f"{self.route} {sequence}"
        try:
            first, _ = bury(self.log, self._daemon, self.group, record, dead)
        except (WaldError, Undeliverable, OSError) as error:
            with self._changed:
                self._deliveries.give_back("", [sequence], due_ns=time.time_ns() + _NS)
            self._report(f"{named}: cannot be given up: {error}; tried again in 1 s")
            return
        with self._changed:
            del self._dead[sequence]
            self._reasons.pop(sequence, None)
            settled = self._deliveries.finish("", [sequence])
            self._commit(settled, Commit(done=list(settled.runs)))
            written = self._commits.written
        self._commits.wait(written)
        self._report(f"{named}: given up: {dead.reason}; sent to {dead.route} as {first}")

    def _take_in(self, taken_in: list[tuple[int, int]], due: list[tuple[int, int]]) -> bool:
        """Take the next batch into the window; returns whether there was one, and room."""
        batch = self._source.next()
        window = self._deliveries.window
        if batch is None or (window.open and batch.last_sequence - window.floor > self._window):
            return False
        self._source.take()
        run = Run(batch.first_sequence, batch.last_sequence)
        records = self._source.records(run.first, run.last)
        waiting = [(r.sequence, at) for r in records if (at := _not_before(r)) and at > time.time_ns()]
        keys = [record.key for record in records] if self._by_key else None
        self._deliveries.take_in(run, keys, waiting)
        taken_in.append((run.first, run.last))
        due += waiting
        return True

    def _look_at_clocks(self) -> None:
        self._deliveries.expire(time.monotonic_ns())
        self._deliveries.wake(time.time_ns())

    def _next_change(self) -> float:
        """When a lease ends or a record is due, by the monotonic clock in seconds."""
        times = [float("inf")]
        if (end := self._deliveries.next_end_ns) is not None:
            times.append(end / _NS)
        if (due := self._deliveries.next_due_ns) is not None:
            times.append(time.monotonic() + min(1.0, (due - time.time_ns()) / _NS))  # the clock may be set meanwhile
        return min(times)

    def _freed(self, runs: Collection[Run]) -> int:
        if runs:
            self._changed.notify_all()
        return sum(run.size for run in runs)

    def _commit(self, settled: Settled, line: Commit) -> None:
        if settled.runs:
            self._commits.write(line)
            self._changed.notify_all()

    def _move_cursor(self, *, at_once: bool = False) -> None:
        """Move the cursor to the ack floor, if it is time to."""
        if not self._moving.acquire(blocking=at_once):
            return
        try:
            floor = self.floor
            due = at_once or time.monotonic() >= self._cursor_moves or floor - self._floor >= _CURSOR_RECORDS
            if due and floor > self._floor:
                self.log.set_cursor(self.route, floor, self.group)
                self._floor = floor
                self._cursor_moves = time.monotonic() + _CURSOR_SECONDS
        finally:
            self._moving.release()


def _not_before(record: Record) -> int:
    """When a record is due at the earliest, in ns since 1970; 0 if it does not say."""
    if record.headers is None or NOT_BEFORE.encode() not in record.headers:
        return 0
    try:
        return int(json.loads(record.headers)[NOT_BEFORE])
    except (ValueError, KeyError, TypeError):
        return 0
