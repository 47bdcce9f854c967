"""Consumer, Producer and WorkGroup for asyncio.

A producer uses the daemon's socket from the event loop. A consumer reads files in a thread and waits in the event loop;
a change of threads takes some 50 µs for each record, or for each batch with :meth:`Consumer.batches`. A work group has
a thread that answers many tasks at once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import wald.consumer
import wald.work.group
from wald.client.asynchronous import AsyncReceipt, Producer
from wald.format.names import DEFAULT_GROUP
from wald.format.records import Record
from wald.log import Log
from wald.reading.assembler import Batch
from wald.retention.missing import OnMissing
from wald.work.commit_loop import LeaseRequest, MakeAnswer, Request
from wald.work.deliveries import Refusal
from wald.work.group import Order
from wald.work.journal import Failure
from wald.work.owner import Delivery, Leased, Pending

__all__ = ["AsyncReceipt", "Consumer", "Job", "Producer", "WorkGroup", "Worker"]

P = ParamSpec("P")
T = TypeVar("T")
_POLL_FIRST_SECONDS, _POLL_LAST_SECONDS = 0.001, 0.050


class _Thread:
    """Thread that runs calls in sequence; after it has ended, calls run in asyncio's threads.

    A call runs even if its task is cancelled before the call starts.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wald.aio")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(self.start(call, *args, **kwargs))  # otherwise a queued call would never start

    def start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a call."""
        return asyncio.get_running_loop().run_in_executor(self._executor, partial(call, *args, **kwargs))

    @property
    def has_ended(self) -> bool:
        return self._executor is None

    def end(self, last: Callable[[], None] | None = None) -> None:
        if self._executor is not None:
            if last is not None:
                self._executor.submit(last)
            self._executor.shutdown(wait=False)
            self._executor = None


class Consumer:
    """:class:`wald.Consumer` for ``async with`` and ``async for``, with the same arguments except ``cancel``.

    The constructor reads a small file in the calling thread. Waiting for records blocks no thread, so a task that waits
    may be cancelled, for example by ``asyncio.timeout`` or ``asyncio.wait_for``. The record before the wait then counts
    as processed; the same iterator, or a new loop, continues with the next record.

    Example::

        async with aio.Consumer("/var/spool/wald", "orders", group="billing", follow=True) as consumer:
            async for record in consumer:
                await handle(record)
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        route: str,
        group: str = DEFAULT_GROUP,
        *,
        follow: bool = False,
        commit_records: int = 10_000,
        commit_bytes: int = 16 << 20,
        commit_seconds: float = 1.0,
        on_missing: OnMissing = None,
    ) -> None:
        self._consumer = wald.consumer.Consumer(
            at,
            route,
            group,
            follow=follow,
            commit_records=commit_records,
            commit_bytes=commit_bytes,
            commit_seconds=commit_seconds,
            on_missing=on_missing,
        )
        self._thread = _Thread()
        self._delivered = 0  # sequence of the last record that a task received

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._thread.run(self._consumer.__exit__, kind, error, traceback)
        finally:
            self._thread.end()

    def __aiter__(self) -> AsyncIterator[Record]:
        """Iterate over records. Each is processed when the next one is requested.

        Raises:
            WaldError: see :meth:`wald.Consumer.batches`.
        """
        return _Polling(self._thread, self._consumer.poll_records(), self._deliver)

    def batches(self) -> AsyncIterator[Batch]:
        """Iterate over batches of records. Each is processed when the next one is requested.

        Raises:
            WaldError: see :meth:`wald.Consumer.batches`.
        """
        return _Polling(self._thread, self._consumer.poll_batches(), self._deliver)

    async def commit(self) -> None:
        """See :meth:`wald.Consumer.commit`."""
        await self._thread.run(self._consumer.commit, self._delivered)

    def _deliver(self, item: Record | Batch) -> None:
        self._delivered = item.sequence if isinstance(item, Record) else item.last_sequence


class _Polling(AsyncIterator[T]):
    """Asynchronous iterator over ``source``, which yields None when a reader has to wait.

    If a task is cancelled during a step, the step continues in the thread, and the next call receives its result.
    """

    def __init__(self, thread: _Thread, source: Iterator[T | None], deliver: Callable[[T], None]) -> None:
        self._thread = thread
        self._source = source
        self._deliver = deliver
        self._step: asyncio.Future[T | None] | None = None
        self._is_over = False

    async def __anext__(self) -> T:
        pause = _POLL_FIRST_SECONDS
        while not self._thread.has_ended:
            if self._step is None:
                self._step = self._thread.start(self._read)
            item = await asyncio.shield(self._step)
            self._step = None
            if item is not None:
                self._deliver(item)
                return item
            if self._is_over:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _POLL_LAST_SECONDS)
        raise StopAsyncIteration

    def _read(self) -> T | None:
        """Return the next item, or None if no item is available yet or the source is exhausted."""
        try:
            return next(self._source)
        except StopIteration:
            self._is_over = True
            return None


class WorkGroup:
    """Asynchronous :class:`wald.WorkGroup`, opened by ``async with``.

    Tasks may share a work group. A task that waits for a record needs no thread, and all calls of one round of the
    event loop share one sync. The records of a cancelled lease are returned at once, which counts as one try each. Any
    other cancelled call still takes effect.

    Example::

        async with aio.WorkGroup("/var/spool/wald", "orders", "billing") as work:
            async for job in work.worker("worker-1", wait=1):
                await handle(job.record)
                await job.ack()
    """

    def __init__(
        self,
        at: str | os.PathLike[str] | Log,
        route: str,
        group: str = DEFAULT_GROUP,
        *,
        order: Order = "log",
        window: int = wald.work.group.WINDOW,
        max_tries: int | None = None,
        dead_letter: str = wald.work.group.DEAD_LETTER,
        daemon: Path | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._make = partial(
            wald.work.group.WorkGroup,
            at,
            route,
            group,
            order=order,
            window=window,
            max_tries=max_tries,
            dead_letter=dead_letter,
            daemon=daemon,
            report=report,
        )
        self._group: wald.work.group.WorkGroup | None = None
        self._task_calls: _TaskCalls | None = None
        self._thread = _Thread()

    async def __aenter__(self) -> Self:
        try:
            await self._thread.run(self._open)
        except BaseException:
            self._thread.end(self._close)  # a cancelled call still opens the group
            raise
        assert self._group is not None
        self._task_calls = _TaskCalls(self._group)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._thread.run(self._close)
        finally:
            self._thread.end()

    @property
    def floor(self) -> int:
        """See :attr:`wald.WorkGroup.floor`."""
        return self._work.floor

    @property
    def given_up(self) -> int:
        """See :attr:`wald.WorkGroup.given_up`."""
        return self._work.given_up

    @property
    def has_failed(self) -> bool:
        """See :attr:`wald.WorkGroup.has_failed`."""
        return self._work.has_failed

    def worker(
        self,
        name: str,
        *,
        max_records: int = 1,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = float("inf"),
    ) -> Worker:
        """Like :meth:`wald.WorkGroup.worker`, but iterate with ``async for``."""
        return Worker(self, name, max_records, max_bytes, lease_for, wait)

    async def lease(
        self,
        worker: str,
        max_records: int = 100,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = 0.0,
        *,
        done: Collection[int] = (),
    ) -> Leased:
        """See :meth:`wald.WorkGroup.lease`."""
        return await self.lease_as(Leased, worker, max_records, max_bytes, lease_for, wait, done=done)

    async def lease_as(
        self,
        make: MakeAnswer[T],
        worker: str,
        max_records: int = 100,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = 0.0,
        *,
        done: Collection[int] = (),
    ) -> T:
        """Like :meth:`lease`, but return an answer made by ``make``, such as JSON.

        Args:
            make: called in the event loop, usually during the sync, with the records in shares of one batch each, and
                the rejected records of ``done``. Its answer is discarded if the sync fails or the task is cancelled.
        """
        request = self._work.requests.lease(worker, max_records, max_bytes, lease_for, wait, done, make)
        return await self._tasks.call(request)

    async def ack(self, worker: str, sequences: Collection[int]) -> list[Refusal]:
        """See :meth:`wald.WorkGroup.ack`."""
        return await self._tasks.call(self._work.requests.ack(worker, sequences))

    async def nack(
        self, worker: str, sequences: Collection[int], delay: float = 0.0, reason: str = "", tries: int | None = None
    ) -> list[Refusal]:
        """See :meth:`wald.WorkGroup.nack`."""
        return await self._tasks.call(self._work.requests.nack(worker, sequences, delay, reason, tries))

    async def failed(self, sequence: int) -> Failure | None:
        """See :meth:`wald.WorkGroup.failed`."""
        return await self._tasks.call(self._work.requests.failed(sequence))

    async def give_up(
        self, worker: str, sequences: Collection[int], reason: str, tries: int | None = None
    ) -> list[Refusal]:
        """See :meth:`wald.WorkGroup.give_up`."""
        return await self._tasks.call(self._work.requests.give_up(worker, sequences, reason, tries))

    async def extend(self, worker: str, sequences: Collection[int], lease_for: float = 30.0) -> list[Refusal]:
        """See :meth:`wald.WorkGroup.extend`."""
        return await self._tasks.call(self._work.requests.extend(worker, sequences, lease_for))

    async def release(self, worker: str) -> int:
        """See :meth:`wald.WorkGroup.release`."""
        return await self._tasks.call(self._work.requests.release(worker))

    async def skip(self, first: int, last: int) -> int:
        """See :meth:`wald.WorkGroup.skip`."""
        return await self._thread.run(self._work.skip, first, last)

    async def claim(self, min_idle: float) -> int:
        """See :meth:`wald.WorkGroup.claim`."""
        return await self._tasks.call(self._work.requests.claim(min_idle))

    async def pending(self) -> list[Pending]:
        """Like :meth:`wald.WorkGroup.pending`, but return a list."""
        return await self._tasks.call(self._work.requests.pending())

    def _open(self) -> None:
        self._group = self._make()

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()

    @property
    def _work(self) -> wald.work.group.WorkGroup:
        return self._tasks.group

    @property
    def _tasks(self) -> _TaskCalls:
        if self._task_calls is None:
            raise RuntimeError("use a WorkGroup for asyncio in an async with block")
        return self._task_calls


class Job(Delivery):
    """Asynchronous :class:`wald.work.group.Job`; its methods are coroutines."""

    worker: Worker

    def __new__(cls, worker: Worker, delivery: Delivery) -> Self:
        self = super().__new__(cls, delivery.record, delivery.tries)
        self.worker = worker
        return self

    async def ack(self) -> bool:
        return not await self.worker.group.ack(self.worker.name, [self.sequence])

    async def nack(self, delay: float = 0.0, reason: str = "", tries: int | None = None) -> bool:
        return not await self.worker.group.nack(self.worker.name, [self.sequence], delay, reason, tries)

    async def extend(self, lease_for: float | None = None) -> bool:
        seconds = self.worker.lease_for if lease_for is None else lease_for
        return not await self.worker.group.extend(self.worker.name, [self.sequence], seconds)

    async def give_up(self, reason: str, tries: int | None = None) -> bool:
        return not await self.worker.group.give_up(self.worker.name, [self.sequence], reason, tries)


@dataclass(eq=False)
class Worker:
    """Asynchronous :class:`wald.work.group.Worker`, for ``async for``."""

    group: WorkGroup
    name: str
    _max_records: int
    _max_bytes: int
    lease_for: float
    _wait: float

    async def __aiter__(self) -> AsyncIterator[Job]:
        wanted = self.name, self._max_records, self._max_bytes, self.lease_for, self._wait
        while leased := await self.group.lease(*wanted):
            rest = deque(leased)
            try:
                while rest:
                    yield Job(self, rest.popleft())
            finally:
                if rest:
                    await self.group.nack(self.name, [delivery.sequence for delivery in rest])


class _TaskCalls:
    """Calls from tasks of the running event loop; requests of one loop iteration go to the commit loop together."""

    def __init__(self, group: wald.work.group.WorkGroup) -> None:
        self.group = group
        self._commit_loop = group.commit_loop
        self._loop = asyncio.get_running_loop()
        self._requests: list[Request[Any]] = []
        self._unanswered: dict[Request[Any], asyncio.Future[None]] = {}

    async def call(self, request: Request[T]) -> T:
        """Submit a request and return its answer; a lease is withdrawn if the task is cancelled."""
        request.receiver = self
        self._unanswered[request] = answered = self._loop.create_future()
        if not self._requests:
            self._loop.call_soon(self._submit)  # after the other tasks of this loop iteration
        self._requests.append(request)
        try:
            await answered
        except asyncio.CancelledError:
            self._unanswered.pop(request, None)
            if isinstance(request, LeaseRequest):
                self._loop.call_soon(self._commit_loop.withdraw, request)  # after its submission
            raise
        return request.answer()

    def deliver(self, requests: Sequence[Request[Any]]) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._wake, requests)

    def prepare_early(self, requests: Sequence[Request[Any]]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_prepare, requests)

    def _submit(self) -> None:
        requests, self._requests = self._requests, []
        self._commit_loop.submit(requests)

    def _wake(self, requests: Sequence[Request[Any]]) -> None:
        for request in requests:
            answered = self._unanswered.pop(request, None)
            if answered is not None and not answered.done():
                answered.set_result(None)


def _prepare(requests: Sequence[Request[Any]]) -> None:
    for request in requests:
        request.prepare()
