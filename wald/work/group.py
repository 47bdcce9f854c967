"""Work group: many workers share a route, and each record is leased to one of them and acknowledged individually."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import index
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self, TypeVar, get_args

from wald.errors import InvalidInput, NotFound, Refused
from wald.files.disk import Disk
from wald.format.names import DEFAULT_GROUP, check_group, check_route
from wald.format.work import TRIES_MAX, JournalStart
from wald.hints import command_line
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.selection import select
from wald.retention.cursor_moves import EarlierReclaim, start_position
from wald.retention.cursors import CursorState
from wald.retention.missing import Missing
from wald.segments.durable_end import OpenHead
from wald.work.commit_loop import AckRequest, CommitLoop, LeaseRequest, MakeAnswer, Request
from wald.work.dead_letters import Maintenance
from wald.work.deliveries import Refusal
from wald.work.journal import Failure, Journal, Replay, discard
from wald.work.owner import FOREVER_SECONDS, Clock, Delivery, Leased, LeaseOrder, Owner, Pending, Rules
from wald.work.ownership import ControlServer, Ownership, require_no_command
from wald.work.source import Source
from wald.work.strict import CursorJournal, resume
from wald.work.window import Run

T = TypeVar("T")
Order = Literal["log", "key", "strict"]
WINDOW = 1_000_000
DEAD_LETTER = "dead_letter"
WORKER_MAX = 200
_NS = 1_000_000_000
_READ_SECONDS = 5.0
_RETRY_SECONDS = 0.02
_LOGGER = logging.getLogger("wald.work")


class RequestBuilder:
    """Validates arguments and builds requests, because an error in the commit loop would fail all workers."""

    def __init__(self, log: Log, owner: Owner, clock: Clock) -> None:
        self._log = log
        self._owner = owner
        self._clock = clock

    def lease(
        self,
        worker: str,
        max_records: int,
        max_bytes: int,
        lease_for: float,
        wait: float,
        done: Collection[int],
        make: MakeAnswer[T],
    ) -> LeaseRequest[T]:
        max_records, max_bytes, lease_ns = index(max_records), index(max_bytes), _nanoseconds("lease_for", lease_for)
        if max_records < 1 or max_bytes < 1 or not lease_ns:
            raise InvalidInput(
                f"max_records {max_records}, max_bytes {max_bytes}, lease_for {lease_for!r}: each must be above 0",
                hint="max_records 100, max_bytes 1048576, lease_for 30",
            )
        order = LeaseOrder(worker, max_records, max_bytes, lease_ns)
        until_ns = self._clock.monotonic_ns() + _nanoseconds("wait", wait)
        return LeaseRequest(order, (worker, _checked(worker, done)), make, until_ns=until_ns)

    def ack(self, worker: str, sequences: Collection[int]) -> AckRequest:
        return AckRequest((worker, _checked(worker, sequences)))

    def nack(
        self, worker: str, sequences: Collection[int], delay: float, reason: str, tries: int | None
    ) -> Request[list[Refusal]]:
        named, delay_ns, text = _checked(worker, sequences), _nanoseconds("delay", delay), _storable(reason)
        count = 0 if tries is None else index(tries)
        durable = delay_ns > 0 or count > 0
        return Request(lambda: self._owner.give_back(worker, named, delay_ns, text, count), durable=durable)

    def failed(self, sequence: int) -> Request[Failure | None]:
        named = index(sequence)
        return Request(lambda: self._owner.failure(named))

    def give_up(
        self, worker: str, sequences: Collection[int], reason: str, tries: int | None
    ) -> Request[list[Refusal]]:
        named, text, head = _checked(worker, sequences), _storable(reason), self._log.head()
        count = None if tries is None else index(tries)
        durable = 0 if head is None else head.sequence
        return Request(lambda: self._owner.give_up(worker, named, text, count, durable), durable=True)

    def extend(self, worker: str, sequences: Collection[int], lease_for: float) -> Request[list[Refusal]]:
        named, lease_ns = _checked(worker, sequences), _nanoseconds("lease_for", lease_for)
        return Request(lambda: self._owner.extend(worker, named, lease_ns))

    def release(self, worker: str) -> Request[int]:
        _checked(worker, ())
        return Request(lambda: self._owner.release(worker))

    def claim(self, min_idle: float) -> Request[int]:
        idle_ns = _nanoseconds("min_idle", min_idle)
        return Request(lambda: self._owner.claim(idle_ns))

    def pending(self) -> Request[list[Pending]]:
        return Request(self._owner.pending)

    def skip(self, run: Run) -> Request[list[Run] | None]:
        return Request(lambda: self._owner.skip(run), durable=True)


class WorkGroup:
    """``group`` on ``route``, owned by this process until it is closed. Its methods are thread-safe.

    A record is leased to one worker at a time. An acknowledged record is never delivered again, even after a crash:
    :meth:`ack` returns once the acknowledgement is on disk. Any other record is redelivered when its lease ends, or at
    once if this process is restarted. The number of tries never decreases. First deliveries are in log order.

    Args:
        at: the root of the log, or the log.
        route: the route to work on.
        group: the group. Its cursor is the ack floor: all records up to it are done.
        order: "key": one worker at a time has records of a key, in their order. "strict": one worker at a time has
            records, in order; a record that is not done blocks later ones, and ``not_before`` is ignored. Progress is
            the cursor alone, which any program may move, so a restart forgets how often a record failed.
        window: maximum distance, in sequences, between the ack floor and the newest delivered record.
        max_tries: give a record up after this number of deliveries, at most 254; None: never.
        dead_letter: the route for records that are given up.
        daemon: the socket of the daemon that they are sent to; None: that of the log.
        report: called with a line for each record that is given up, each loss by a repair, and each failure in the
            background, most by another thread. None to log them to ``wald.work``, failures as warnings.
        clock: the clocks to use.
        ownership: the right to work for the group, if the caller already has it. The caller keeps it, and ensures that
        no command of an earlier ``wald-drain`` has records of the group.

    Raises:
        NotFound: there is no such log or route, or unprocessed records of the group were reclaimed.
        InvalidInput: an invalid name, or a number out of range.
        Locked: another process, or this one, already works for the group; or a killed ``wald-drain`` has left a
        command running. Damaged: the cursor or the journal cannot be trusted.
        NotPermitted: this user may not work for the group.

    Example::

        with wald.WorkGroup("/var/spool/wald", "orders", "billing") as work:
            for job in work.worker("worker-1", wait=1):
                handle(job.record)
                job.ack()
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
        report: Callable[[str], None] | None = None,
        clock: Clock = time,
        ownership: Ownership | None = None,
    ) -> None:
        rules = _rules(route, order, index(window), max_tries, dead_letter)
        self.log = at if isinstance(at, Log) else Log(at)
        self.log.root.require_route(route)
        self.route = route
        self.group = check_group(group)
        disk = Disk()
        with ExitStack() as stack:
            if ownership is None:
                ownership = stack.enter_context(Ownership(self.log.root, route, self.group, disk))
                require_no_command(self.log.root, route, self.group)
            floor = self._open_cursor(disk)
            start = JournalStart(self.log.identity.log_id, route, group, floor, floor + 1)
            journal: Journal | CursorJournal | None = None
            if rules.is_strict:
                replay = resume(self.log, disk, route, self.group, floor)
                floor = replay.deliveries.window.floor
                start = replace(start, floor=floor, end=floor + 1)
            else:
                replay = Replay(by_key=rules.by_key)
                journal = Journal(self.log.root, disk, start, replay.apply)
                stack.callback(journal.close)
                replay.end(floor)
                self._sort(replay)
            queue: SimpleQueue[Request[Any] | None] = SimpleQueue()
            to_do = threading.Event()
            lost: SimpleQueue[Missing] = SimpleQueue()
            end, skip = replay.deliveries.window.end, self._earlier_reclaim.skip
            source = Source(self.log, route, end, lambda: queue.put(None), lost.put, skip)
            stack.callback(source.close)
            self._owner = Owner(start, rules, replay, source, clock=clock, giving_up=to_do.set)
            self._requests = RequestBuilder(self.log, self._owner, clock)
            if journal is None:
                journal = CursorJournal(self.log, disk, start, self._owner, report or _LOGGER.info)
                stack.callback(journal.close)
            if not journal.is_new:
                journal.rewrite(self._owner.all_lines())
            log, head = self.log, OpenHead(self.log.root)
            stack.callback(head.close)
            self._loop = CommitLoop(
                self._owner, journal, queue, require=lambda: log.require_continuity(head.read()), name=route
            )
            stack.callback(self._loop.close)
            self._maintenance = Maintenance(
                self.log,
                route,
                group,
                floor,
                self._owner,
                self._loop,
                daemon=daemon or self.log.root.path,
                report=report,
                wake=to_do,
                lost=lost,
                moves_cursor=not rules.is_strict,
            )
            stack.callback(self._maintenance.close)
            warn = report or _LOGGER.warning
            self._control = ControlServer(self.log.root, route, self.group, self._apply_command, warn)
            stack.callback(self._control.close)
            self._descriptors = journal, ownership, head
            self._is_inherited, self._is_strict = False, rules.is_strict
            _GROUPS.add(self)
            stack.callback(_GROUPS.discard, self)
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def worker(
        self,
        name: str,
        *,
        max_records: int = 1,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = float("inf"),
    ) -> Worker:
        """Return an iterable of jobs for the worker ``name``; the arguments are those of :meth:`lease`.

        Iteration ends when no record has arrived for ``wait`` seconds.
        """
        return Worker(self, name, max_records, max_bytes, lease_for, wait)

    def lease(
        self,
        worker: str,
        max_records: int = 100,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = 0.0,
        *,
        done: Collection[int] = (),
    ) -> Leased:
        """Lease records to ``worker`` for ``lease_for`` seconds.

        Args:
            max_records, max_bytes: bounds on the records and their values; a single record may exceed the bytes.
            lease_for: seconds; infinite: until ``worker`` has settled the records, or is released.
            wait: seconds to wait for a first record; may be infinite.
            done: records to acknowledge first, as with :meth:`ack`; this is on disk when the call returns.

        Returns:
            the deliveries; the attribute ``refused`` has the records in ``done`` whose acknowledgement was rejected.

        Raises:
            Damaged, NotFound: the next record cannot be read; all earlier ones were delivered. A later lease retries.
            OSError: the journal cannot be written, or the log cannot be read.
        """
        return self._loop.call(self.requests.lease(worker, max_records, max_bytes, lease_for, wait, done, Leased))

    def ack(self, worker: str, sequences: Collection[int]) -> list[Refusal]:
        """Acknowledge records that ``worker`` has processed; on disk when this returns.

        Returns:
            the rejected records: another worker has them, they are being given up, or they were never delivered.
        """
        return self._loop.call(self.requests.ack(worker, sequences))

    def nack(
        self,
        worker: str,
        sequences: Collection[int],
        delay: float = 0.0,
        reason: str = "",
        tries: int | None = None,
    ) -> list[Refusal]:
        """Return records to the group, which redelivers them after ``delay`` seconds.

        A delay and ``tries`` are on disk when this returns.

        Args:
            reason: the reason, for a dead letter.
            tries: failures of each record, for a worker that counts them itself; :meth:`failed` returns them. They are
            recorded even if no worker has the record now.

        Returns:
            the records that ``worker`` does not have.
        """
        return self._loop.call(self.requests.nack(worker, sequences, delay, reason, tries))

    def failed(self, sequence: int) -> Failure | None:
        """Return why a record was last returned and how often it has failed; None if no worker reported that."""
        return self._loop.call(self.requests.failed(sequence))

    def give_up(self, worker: str, sequences: Collection[int], reason: str, tries: int | None = None) -> list[Refusal]:
        """Give up records of ``worker``, regardless of their tries; on disk when this returns.

        They become dead letters soon afterwards, or once a daemon runs.

        Args:
            reason, tries: for the headers of the dead letter; tries defaults to the number of deliveries.

        Returns:
            the records that ``worker`` does not have.
        """
        return self._loop.call(self.requests.give_up(worker, sequences, reason, tries))

    def extend(self, worker: str, sequences: Collection[int], lease_for: float = 30.0) -> list[Refusal]:
        """Extend the leases of records of ``worker`` to ``lease_for`` seconds from now.

        Returns:
            the records that ``worker`` does not have.
        """
        return self._loop.call(self.requests.extend(worker, sequences, lease_for))

    def release(self, worker: str) -> int:
        """Give all records of ``worker`` back to the group; return their number."""
        return self._loop.call(self.requests.release(worker))

    def skip(self, first: int, last: int) -> int:
        """Mark records done without processing them; on disk when this returns.

        A worker that has one of them can no longer acknowledge it, and gets no error.

        Args:
            first, last: both ends included; records of other routes in between are ignored.

        Returns:
            the number of records that were not done before.

        Raises:
            NotFound: no record of the range is pending for the group.
            Damaged: the records cannot be read.
            Refused: the range reaches beyond the window.
        """
        found = [(batch.first_sequence, batch.last_sequence) for batch in self._unfinished(first, last)]
        if not found:
            raise NotFound(
                f"records {first} to {last} of route {self.route} are not pending for group {self.group}",
                hint=command_line(self.log.root.path, f"group show {self.route} {self.group}"),
            )
        if self._is_strict and any(self._unfinished(self.floor + 1, found[0][0] - 1)):
            raise Refused(
                f"record {found[0][0]} of route {self.route} is not the next one of group {self.group}, which "
                f"processes records in order",
                hint=command_line(self.log.root.path, f"cursor show {self.route} --group {self.group}"),
            )
        run = Run(found[0][0], found[-1][1])
        until = time.monotonic() + _READ_SECONDS
        while (skipped := self._loop.call(self.requests.skip(run))) is None:
            if time.monotonic() > until:
                raise Refused(
                    f"record {run.last} of route {self.route} is beyond the window of the group, which begins at "
                    f"the ack floor {self.floor}",
                    hint=command_line(self.log.root.path, f"group show {self.route} {self.group}"),
                )
            time.sleep(_RETRY_SECONDS)
        return sum(each.size for each in skipped)

    def claim(self, min_idle: float) -> int:
        """Return all records leased at least ``min_idle`` seconds ago to the group; return their number."""
        return self._loop.call(self.requests.claim(min_idle))

    def pending(self) -> Iterator[Pending]:
        """Return the leased records, in order."""
        yield from self._loop.call(self.requests.pending())

    @property
    def requests(self) -> RequestBuilder:
        """Builder of requests to the commit loop."""
        if self._is_inherited:
            raise ValueError("the work group belongs to the parent process; open one after the fork")
        return self._requests

    @property
    def commit_loop(self) -> CommitLoop:
        return self._loop

    @property
    def given_up(self) -> int:
        """Number of records that this owner has made dead letters."""
        return self._owner.given_up

    @property
    def letter_errors(self) -> dict[int, Exception]:
        """Errors of dead letters that could not be written, by sequence; each is retried every second."""
        return dict(self._maintenance.letter_errors)

    @property
    def floor(self) -> int:
        """The ack floor: all records up to it are done."""
        return self._owner.floor

    @property
    def has_failed(self) -> bool:
        """True if the journal could not be written: all calls raise that error until the group is reopened."""
        return self._loop.has_failed

    def close(self) -> None:
        """Move the cursor to the ack floor, and let another process work for the group."""
        if self._is_inherited:
            return
        try:
            self._control.close()
            self._maintenance.close()
            self._loop.close()
            self._maintenance.move_cursor()
        finally:
            self._held.close()

    def leave_in_child(self) -> None:
        """Close the parent's files; called in the child of a fork, before anything else there."""
        self._is_inherited = True
        self._control.leave_in_child()
        for each in self._descriptors:
            each.close()

    def _open_cursor(self, disk: Disk) -> int:
        """Return the position of the group's cursor; create the cursor of a new group."""
        is_new = self.log.cursor(self.route, self.group).state is CursorState.ABSENT
        self._earlier_reclaim = EarlierReclaim(self.log.root, self.route, self.group, is_new=is_new)
        if is_new:
            discard(self.log.root, disk, self.route, self.group)  # of a removed group with this name
            after, _ = start_position(self.log.view(), self.route, self.group)
            self.log.set_cursor(self.route, after, self.group)
        return select(self.log.view(), self.route, "cursor", None, self.group).floor(self.route) - 1

    def _unfinished(self, first: int, last: int) -> Iterator[Batch]:
        """Return the batches of a range that may have pending records."""
        first = max(first, self.floor + 1)
        if first > last:
            return iter(())
        return self.log.batches(self.route, first, last, on_missing=self._earlier_reclaim.skip)

    def _apply_command(self, command: Mapping[str, Any]) -> int:
        """Apply a JSON request of another process; return the number of records."""
        match command:
            case {"do": "skip", "first": int(first), "last": int(last)}:
                return self.skip(first, last)
            case {"do": "release", "worker": str(worker)}:
                return self.release(worker)
        raise InvalidInput("the owner of the group does not support this request", hint="it may run an older wald")

    def _sort(self, replay: Replay) -> None:
        """Add the keys of the open records for an order by key; the journal does not contain them."""
        window = replay.deliveries.window
        if replay.deliveries.by_key and window.open:
            skip = self._earlier_reclaim.skip
            for batch in self.log.batches(self.route, window.floor + 1, window.end - 1, on_missing=skip):
                keys = batch.rows().keys or [None] * batch.count
                replay.deliveries.sort(Run(batch.first_sequence, batch.last_sequence), keys)


class Job(Delivery):
    """A delivery to a :class:`~wald.work.group.Worker`.

    The methods return False if the call was rejected because the worker no longer has the record. A job that is not
    settled is redelivered when its lease ends.
    """

    worker: Worker

    def __new__(cls, worker: Worker, delivery: Delivery) -> Self:
        self = super().__new__(cls, delivery.record, delivery.tries)
        self.worker = worker
        return self

    def ack(self) -> bool:
        """Acknowledge the record; on disk when this returns."""
        return not self.worker.group.ack(self.worker.name, [self.sequence])

    def nack(self, delay: float = 0.0, reason: str = "", tries: int | None = None) -> bool:
        """Return the record to the group, as :meth:`WorkGroup.nack` does."""
        return not self.worker.group.nack(self.worker.name, [self.sequence], delay, reason, tries)

    def extend(self, lease_for: float | None = None) -> bool:
        """Extend the lease to ``lease_for`` seconds from now; None: those of the worker."""
        seconds = self.worker.lease_for if lease_for is None else lease_for
        return not self.worker.group.extend(self.worker.name, [self.sequence], seconds)

    def give_up(self, reason: str, tries: int | None = None) -> bool:
        """Make the record a dead letter, as :meth:`WorkGroup.give_up` does."""
        return not self.worker.group.give_up(self.worker.name, [self.sequence], reason, tries)


@dataclass(eq=False)
class Worker:
    """A worker of a group: an iterable of jobs, made by :meth:`WorkGroup.worker`.

    When a loop ends early, records leased together with the last job are returned to the group.
    """

    group: WorkGroup
    name: str
    _max_records: int
    _max_bytes: int
    lease_for: float
    _wait: float

    def __iter__(self) -> Iterator[Job]:
        """Lease records and yield them as jobs."""
        wanted = self.name, self._max_records, self._max_bytes, self.lease_for, self._wait
        while leased := self.group.lease(*wanted):
            rest = deque(leased)
            try:
                while rest:
                    yield Job(self, rest.popleft())
            finally:
                if rest:
                    sequences = [delivery.sequence for delivery in rest]
                    self.group.commit_loop.finish(self.group.requests.nack(self.name, sequences, 0.0, "", None))


def _rules(route: str, order: Order, window: int, max_tries: int | None, dead_letter: str) -> Rules:
    if order not in get_args(Order):
        raise InvalidInput(f"order {order!r}: must be one of {', '.join(get_args(Order))}", hint='order "log"')
    if window < 1:
        raise InvalidInput(f"window {window}: must be above 0", hint="window 1000000")
    if max_tries is not None and not 1 <= max_tries <= TRIES_MAX:
        raise InvalidInput(f"max_tries {max_tries}: must be None, or 1 to {TRIES_MAX}", hint="max_tries 5")
    if check_route(dead_letter) == route and max_tries is not None:
        raise InvalidInput(
            f"route {route}: cannot be its own dead-letter route", hint="set dead_letter to the name of another route"
        )
    return Rules(order == "key", window, max_tries, dead_letter, order == "strict")


def _checked(worker: object, sequences: Collection[int]) -> list[int]:
    if not (isinstance(worker, str) and 0 < len(worker) <= WORKER_MAX and worker.isprintable()):
        raise InvalidInput(
            f"worker {str(worker)[:40]!r}: must be text of 1 to {WORKER_MAX} printable characters, on one line",
            hint='worker "worker-1"',
        )
    return sorted(map(index, sequences))


def _storable(reason: object) -> str:
    """Escape characters that UTF-8 cannot encode, such as those of a non-text file name."""
    return str(reason).encode(errors="backslashreplace").decode()


def _nanoseconds(name: str, seconds: float) -> int:
    """Convert a duration; a very long one becomes :data:`FOREVER_SECONDS`."""
    if not seconds >= 0:
        raise InvalidInput(f"{name} {seconds!r}: must be 0 or more, in seconds", hint=f"{name} 30, or 0.5")
    return int(min(seconds, FOREVER_SECONDS) * _NS)


def _leave_in_child() -> None:
    for group in list(_GROUPS):
        group.leave_in_child()


_GROUPS: weakref.WeakSet[WorkGroup] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_in_child)
