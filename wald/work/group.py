"""A work group: many workers share a route, each record is leased to one of them and acknowledged by itself."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from operator import index
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from wald.errors import InvalidInput, NotFound, Refused
from wald.files.disk import Disk
from wald.format.names import DEFAULT_GROUP, check_group
from wald.format.work import JournalStart
from wald.hints import command_line
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.selection import select
from wald.retention.cursor_moves import start_position
from wald.retention.cursors import CursorState
from wald.retention.missing import Missing, skip_lost
from wald.work.arguments import Order, rules_of
from wald.work.calls import Calls
from wald.work.commands import require_none
from wald.work.deliveries import Deliveries, Refusal
from wald.work.journal import Journal, discard
from wald.work.owner import Owner
from wald.work.ownership import Ownership
from wald.work.replay import Replayed
from wald.work.requests import Requests
from wald.work.sharing import Leased
from wald.work.source import Source
from wald.work.terms import Clock, Failure, Pending
from wald.work.turns import Turns
from wald.work.upkeep import Upkeep
from wald.work.window import Run

if TYPE_CHECKING:
    from wald.work.tasks import Tasks

WINDOW = 1_000_000
DEAD_LETTER = "dead_letter"
_NS = 1_000_000_000
_READ_SECONDS = 5.0
_AGAIN_SECONDS = 0.02


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
        max_tries: give a record up after so many deliveries, up to 254; None: never.
        dead_letter: the route for records that are given up.
        daemon: where records that are given up are sent: the daemon's socket, or None for that of the log.
        report: gets a line for each record that is given up, for each loss by a repair, and for each failure in the
            background; called by another thread. None to log them to ``wald.work``, failures as warnings.
        clock: what time it is.
        ownership: the right to work for the group, if the caller has it already; it stays the caller's, who also sees
            to it that no command of an earlier ``wald-drain`` has records of the group.

    Raises:
        NotFound: there is no such log or route, or records that the group has not processed were reclaimed.
        InvalidInput: an illegal name, or a number out of range.
        Locked: another process works for this group, or this one does already; or a killed ``wald-drain`` has left a
            command running.
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
        report: Callable[[str], None] | None = None,
        clock: Clock = time,
        ownership: Ownership | None = None,
    ) -> None:
        rules = rules_of(route, order, index(window), max_tries, dead_letter)
        self.log = at if isinstance(at, Log) else Log(at)
        self.log.root.require_route(route)
        self.route = route
        self.group = check_group(group)
        disk = Disk()
        with ExitStack() as stack:
            if ownership is None:
                ownership = stack.enter_context(Ownership(self.log.root, route, self.group, disk))
                require_none(self.log.root, route, self.group)
            floor = self._enter(disk)
            start = JournalStart(self.log.identity.log_id, route, group, floor, floor + 1)
            replayed = Replayed(by_key=rules.by_key)
            journal = Journal(self.log.root, disk, start, replayed.carry_out)
            stack.callback(journal.close)
            replayed.end(floor)
            self._sort(replayed.deliveries)
            arrived: SimpleQueue[None] = SimpleQueue()
            to_do = threading.Event()
            lost: SimpleQueue[Missing] = SimpleQueue()
            source = Source(self.log, route, replayed.deliveries.window.end, lambda: arrived.put(None), lost.put)
            stack.callback(source.close)
            self._owner = Owner(start, rules, replayed, source, clock=clock, giving_up=to_do.set)
            self._calls = Calls(self.log, self._owner, clock)
            if not journal.is_new:
                journal.rewrite(self._owner.snapshot())
            self._turns = Turns(self._owner, journal, arrived, require=self.log.require_continuity, name=route)
            stack.callback(self._turns.close)
            self._upkeep = Upkeep(
                self.log,
                route,
                group,
                floor,
                self._owner,
                self._turns,
                daemon=daemon or self.log.root.path,
                report=report,
                wake=to_do,
                lost=lost,
            )
            stack.callback(self._upkeep.close)
            self._requests = Requests(self.log.root, route, self.group, self._carry_out)
            stack.callback(self._requests.close)
            self._descriptors = journal, ownership
            self._is_inherited = False
            _GROUPS.add(self)
            stack.callback(_GROUPS.discard, self)
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
        *,
        done: Collection[int] = (),
    ) -> Leased:
        """Records for ``consumer``, which has them for ``lease_for`` seconds.

        Args:
            max_records, max_bytes: of values, at most; a single record may have more.
            lease_for: infinite: until ``consumer`` has settled them, or is released.
            wait: how many seconds to wait for a record, if there is none; it may be infinite.
            done: records that it has processed, as for :meth:`ack`, but in one turn with the lease; on disk when this
                returns.

        Returns:
            the records with how often each was delivered; its attribute ``refused`` has those of ``done`` for which it
            did not count, as of :meth:`ack`.

        Raises:
            Damaged, NotFound: the next record cannot be read; all before it were delivered. A later lease tries again.
            OSError: the journal cannot be written, or the log cannot be read.
        """
        return self._turns.ask(self.calls.lease(consumer, max_records, max_bytes, lease_for, wait, done, Leased))

    def ack(self, consumer: str, sequences: Collection[int]) -> list[Refusal]:
        """Take in that ``consumer`` has processed these records; on disk when this returns.

        Returns:
            those for which it did not count: another consumer has them by now, they are being given up, or they were
            never delivered.
        """
        return self._turns.ask(self.calls.ack(consumer, sequences))

    def nack(
        self,
        consumer: str,
        sequences: Collection[int],
        delay: float = 0.0,
        reason: str = "",
        tries: int | None = None,
    ) -> list[Refusal]:
        """Give records back, which are delivered again, after ``delay`` seconds.

        A delay and ``tries`` are on disk when this returns.

        Args:
            reason: why, for the dead letter, should it come to that.
            tries: how often each has failed, for a worker that counts by itself; :meth:`failed` says it again. It is
                taken in also for a record that no worker has by now.
        """
        return self._turns.ask(self.calls.nack(consumer, sequences, delay, reason, tries))

    def failed(self, sequence: int) -> Failure | None:
        """Why a record came back the last time, and how often it has failed; None: that was not said."""
        return self._turns.ask(self.calls.failed(sequence))

    def give_up(
        self, consumer: str, sequences: Collection[int], reason: str, tries: int | None = None
    ) -> list[Refusal]:
        """Give up records that ``consumer`` has, however often they were delivered; on disk when this returns.

        They become dead letters soon after that; without a daemon, when there is one.

        Args:
            reason, tries: for the headers of the dead letter; tries None: how often it was delivered.

        Returns:
            those for which it did not count, as the consumer does not have them.
        """
        return self._turns.ask(self.calls.give_up(consumer, sequences, reason, tries))

    def extend(self, consumer: str, sequences: Collection[int], lease_for: float = 30.0) -> list[Refusal]:
        """Lease records for ``lease_for`` seconds from now on that ``consumer`` has.

        Returns:
            those for which it did not count, as of :meth:`ack`.
        """
        return self._turns.ask(self.calls.extend(consumer, sequences, lease_for))

    def release(self, consumer: str) -> int:
        """Take back all that ``consumer`` has; returns how many records that were."""
        return self._turns.ask(self.calls.release(consumer))

    def skip(self, first: int, last: int) -> int:
        """Take in that records are done that no worker has processed; on disk when this returns.

        A worker that has one of them cannot acknowledge it any more, and no error says so.

        Args:
            first, last: both ends included; records of other routes between them do not matter.

        Returns:
            how many records that was for; those that were done before do not count.

        Raises:
            NotFound: no record of the route is there that the group may not have done.
            Damaged: the records cannot be read.
            Refused: they are further from the ack floor than the window reaches.
        """
        found = [(batch.first_sequence, batch.last_sequence) for batch in self._unfinished(first, last)]
        if not found:
            raise NotFound(
                f"records {first} to {last} of route {self.route} are not pending for group {self.group}",
                hint=command_line(self.log.root.path, f"group show {self.route} {self.group}"),
            )
        run = Run(found[0][0], found[-1][1])
        until = time.monotonic() + _READ_SECONDS
        while (skipped := self._turns.ask(self.calls.skip(run))) is None:
            if time.monotonic() > until:
                raise Refused(
                    f"record {run.last} of route {self.route} is beyond the window of the group, which begins at "
                    f"the ack floor {self.floor}",
                    hint=command_line(self.log.root.path, f"group show {self.route} {self.group}"),
                )
            time.sleep(_AGAIN_SECONDS)
        return sum(each.size for each in skipped)

    def claim(self, min_idle: float) -> int:
        """Take back all that was leased at least ``min_idle`` seconds ago; returns how many records that were."""
        return self._turns.ask(self.calls.claim(min_idle))

    def pending(self) -> Iterator[Pending]:
        """What was delivered and is not acknowledged, in order."""
        yield from self._turns.ask(self.calls.pending())

    @property
    def calls(self) -> Calls:
        """What threads may ask, and the tasks of :meth:`tasks`."""
        if self._is_inherited:
            raise ValueError("the work group is that of the parent process; open one after the fork")
        return self._calls

    def tasks(self) -> Tasks:
        """What the tasks of the event loop that runs ask by."""
        from wald.work.tasks import Tasks  # asyncio is slow to import

        return Tasks(self._turns)

    @property
    def given_up(self) -> int:
        """How many records this owner has made dead letters."""
        return self._owner.given_up

    @property
    def floor(self) -> int:
        """The ack floor: everything up to it is done."""
        return self._owner.floor

    @property
    def has_failed(self) -> bool:
        """Whether the journal could not be written: all calls raise that error, until the group is opened again."""
        return self._turns.has_failed

    def close(self) -> None:
        """Move the cursor to the ack floor, and let another process work for the group."""
        if self._is_inherited:
            return
        try:
            self._requests.close()
            self._upkeep.close()
            self._turns.close()
            self._upkeep.move_cursor()
        finally:
            self._held.close()

    def leave_in_child(self) -> None:
        """Let go of what is the parent's; called in the child of a fork, before anything else there."""
        self._is_inherited = True
        for each in self._descriptors:
            each.close()

    def _enter(self, disk: Disk) -> int:
        """Up to where the group has processed the route, by its cursor; a new group gets one."""
        if self.log.cursor(self.route, self.group).state is CursorState.ABSENT:
            discard(self.log.root, disk, self.route, self.group)  # of a group of this name that was removed
            after, _ = start_position(self.log.view(), self.route, self.group)
            self.log.set_cursor(self.route, after, self.group)
        return select(self.log.view(), self.route, "cursor", None, self.group).floor(self.route) - 1

    def _unfinished(self, first: int, last: int) -> Iterator[Batch]:
        """The records of a range that the group may not have done."""
        first = max(first, self.floor + 1)
        found = self.log.batches(self.route, first, last, on_missing=skip_lost)
        return found if first <= last else iter(())

    def _carry_out(self, asked: Mapping[str, Any]) -> int:
        """What a command asks; ``Any``: it is JSON."""
        match asked:
            case {"do": "skip", "first": int(first), "last": int(last)}:
                return self.skip(first, last)
            case {"do": "release", "consumer": str(consumer)}:
                return self.release(consumer)
        raise InvalidInput("the owner of the group does not know this request", hint="it may run an older wald")

    def _sort(self, deliveries: Deliveries) -> None:
        """Give an order by key to the records that the journal knows, which says nothing of keys."""
        window = deliveries.window
        if deliveries.by_key and window.open:
            for batch in self.log.batches(self.route, window.floor + 1, window.end - 1, on_missing=skip_lost):
                keys = batch.rows().keys or [None] * batch.count
                deliveries.sort(Run(batch.first_sequence, batch.last_sequence), keys)


def _leave_in_child() -> None:
    for group in list(_GROUPS):
        group.leave_in_child()


_GROUPS: weakref.WeakSet[WorkGroup] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_in_child)
