"""Consumer, Producer and WorkGroup for asyncio: their calls run in threads, and the event loop goes on meanwhile.

A log is files, and a socket whose answers wait for the disk; an event loop can wait for neither without a thread. Each
object has one thread, which keeps its calls in order. Each record costs a change of threads, some 50 µs; with
:meth:`Consumer.batches` each batch costs one. A work group has a thread that answers many tasks at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import wald.client.producer
import wald.consumer
import wald.work.group
from wald.client.payloads import Time, Value
from wald.client.producer import Durable
from wald.format.names import DEFAULT_GROUP
from wald.format.records import Record
from wald.log import Log
from wald.reading.assembler import Batch
from wald.retention.missing import OnMissing
from wald.work.arguments import Order
from wald.work.asks import Make
from wald.work.deliveries import Refusal
from wald.work.sharing import Leased
from wald.work.tasks import Tasks
from wald.work.terms import Failure, Pending

P = ParamSpec("P")
T = TypeVar("T")


class _Thread:
    """A thread that runs one call after the other; calls after its end run in a thread of asyncio.

    A call whose task is cancelled is carried out all the same, even if it has not begun yet.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wald.aio")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        done = asyncio.get_running_loop().run_in_executor(self._executor, partial(call, *args, **kwargs))
        return await asyncio.shield(done)  # without it a call that waits for the thread would never begin

    def call_later(self, call: Callable[[], object]) -> None:
        """Run a call after those already queued, without waiting for it."""
        if self._executor is not None:
            self._executor.submit(call)

    def end(self, last: Callable[[], None] | None = None) -> None:
        """End the thread, behind a last call if there is one."""
        if self._executor is not None:
            if last is not None:
                self._executor.submit(last)
            self._executor.shutdown(wait=False)
            self._executor = None


class Consumer:
    """As :class:`wald.Consumer`, with ``async with`` and ``async for``; arguments are the same but ``cancel``.

    Making one reads a small file at once, not in its thread.

    If a task is cancelled while it waits for the next record, for example by ``asyncio.timeout``, the wait and the loop
    end. The last record that it got counts as processed, as in :class:`wald.Consumer`; a new loop gets the next one.

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
        self._stopped = threading.Event()
        self._is_closed = False
        self._consumer = wald.consumer.Consumer(
            at,
            route,
            group,
            follow=follow,
            cancel=self._stopped,
            commit_records=commit_records,
            commit_bytes=commit_bytes,
            commit_seconds=commit_seconds,
            on_missing=on_missing,
        )
        self._thread = _Thread()
        self._last = 0  # sequence of the last record that a task got, which one that was cancelled has not

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._stopped.set()
        try:
            await self._thread.run(self._consumer.__exit__, kind, error, traceback)
        finally:
            self._thread.end()

    async def __aiter__(self) -> AsyncGenerator[Record, None]:
        """Iterate over records; each is processed once the next one is asked for.

        Raises:
            WaldError: as :meth:`wald.Consumer.batches`.
        """
        async for record in self._each(iter(self._consumer)):
            self._last = record.sequence
            yield record

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Iterate over batches of records; each batch is processed once the next one is asked for.

        Raises:
            WaldError: as :meth:`wald.Consumer.batches`.
        """
        async for batch in self._each(self._consumer.batches()):
            self._last = batch.last_sequence
            yield batch

    async def commit(self) -> None:
        """As :meth:`wald.Consumer.commit`."""
        await self._thread.run(self._consumer.commit, self._last)

    async def _each(self, source: Generator[T]) -> AsyncGenerator[T, None]:
        while True:
            try:
                each = await self._thread.run(next, source, None)
            except asyncio.CancelledError:
                self._stopped.set()  # ends the wait in the thread, which would block the next call
                self._thread.call_later(partial(self._end_loop, source))
                raise
            if each is None:
                return
            yield each

    def _end_loop(self, source: Generator[object]) -> None:
        source.close()
        if not self._is_closed:
            self._stopped.clear()


class Producer:
    """As :class:`wald.Producer`, with ``async with``; it connects there, not when it is made.

    Tasks may share a producer: its calls are made in the order in which they were begun. A call whose task is
    cancelled is carried out all the same.

    Example::

        async with aio.Producer("/var/spool/wald") as producer:
            await producer.send("orders", ["4 apples", "1 pear"])
            print(await producer.flush())
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        *,
        producer_id: int | None = None,
        retry_for: float = 30.0,
        connect_for: float | None = None,
    ) -> None:
        self._make = partial(
            wald.client.producer.Producer, at, producer_id=producer_id, retry_for=retry_for, connect_for=connect_for
        )
        self._producer: wald.client.producer.Producer | None = None
        self._thread = _Thread()

    async def __aenter__(self) -> Self:
        self._producer = await self._thread.run(self._make)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._thread.run(self._connected.__exit__, kind, error, traceback)
        finally:
            self._thread.end()

    @property
    def unanswered(self) -> int:
        """As :attr:`wald.Producer.unanswered`."""
        return self._connected.unanswered

    async def send(
        self,
        route: str,
        values: Sequence[Value],
        *,
        keys: Sequence[Value | None] | None = None,
        times: Sequence[Time | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        not_before: Sequence[Time | None] | None = None,
    ) -> None:
        """As :meth:`wald.Producer.send`."""
        send = self._connected.send
        await self._thread.run(send, route, values, keys=keys, times=times, headers=headers, not_before=not_before)

    async def publish(self, route: str, payload: bytes, *, columns: bool = False) -> None:
        """As :meth:`wald.Producer.publish`."""
        await self._thread.run(self._connected.publish, route, payload, columns=columns)

    async def flush(self) -> list[Durable]:
        """As :meth:`wald.Producer.flush`."""
        return await self._thread.run(self._connected.flush)

    async def acknowledged(self) -> list[Durable]:
        """As :meth:`wald.Producer.acknowledged`."""
        return await self._thread.run(self._connected.acknowledged)

    @property
    def _connected(self) -> wald.client.producer.Producer:
        if self._producer is None:
            raise RuntimeError("a Producer for asyncio is used in an async with block")
        return self._producer


class WorkGroup:
    """As :class:`wald.WorkGroup`, with ``async with``; it is opened there, not when it is made.

    Tasks may share a work group. A task that waits for a record needs no thread, and one sync is for all tasks that ask
    in one round of the loop. A lease whose task is cancelled is given back at once, which counts as one try for each of
    its records; any other call is carried out all the same.

    Example::

        async with aio.WorkGroup("/var/spool/wald", "orders", "billing") as work:
            for record, _ in await work.lease("worker-1", wait=10):
                await handle(record)
                await work.ack("worker-1", [record.sequence])
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
        self._asking: Tasks | None = None
        self._thread = _Thread()

    async def __aenter__(self) -> Self:
        try:
            await self._thread.run(self._open)
        except BaseException:
            self._thread.end(self._close)  # if it is opened all the same, as the task was cancelled
            raise
        self._asking = self._work.tasks()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._thread.run(self._close)
        finally:
            self._thread.end()

    @property
    def floor(self) -> int:
        """As :attr:`wald.WorkGroup.floor`."""
        return self._work.floor

    @property
    def given_up(self) -> int:
        """As :attr:`wald.WorkGroup.given_up`."""
        return self._work.given_up

    @property
    def has_failed(self) -> bool:
        """As :attr:`wald.WorkGroup.has_failed`."""
        return self._work.has_failed

    async def lease(
        self,
        consumer: str,
        max_records: int = 100,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = 0.0,
        *,
        done: Collection[int] = (),
    ) -> Leased:
        """As :meth:`wald.WorkGroup.lease`."""
        return await self.lease_as(Leased, consumer, max_records, max_bytes, lease_for, wait, done=done)

    async def lease_as(
        self,
        make: Make[T],
        consumer: str,
        max_records: int = 100,
        max_bytes: int = 1 << 20,
        lease_for: float = 30.0,
        wait: float = 0.0,
        *,
        done: Collection[int] = (),
    ) -> T:
        """As :meth:`lease`, but returns what ``make`` makes, such as JSON.

        Args:
            make: gets the records in shares, each of one batch, and those of ``done`` for which it did not count. It is
                called in the event loop, as a rule while the disk takes in what is done. If that fails, or the task is
                cancelled meanwhile, what it has made is of no use.
        """
        calls = self._work.calls
        return await self._tasks.ask(calls.lease(consumer, max_records, max_bytes, lease_for, wait, done, make))

    async def ack(self, consumer: str, sequences: Collection[int]) -> list[Refusal]:
        """As :meth:`wald.WorkGroup.ack`."""
        return await self._tasks.ask(self._work.calls.ack(consumer, sequences))

    async def nack(
        self,
        consumer: str,
        sequences: Collection[int],
        delay: float = 0.0,
        reason: str = "",
        tries: int | None = None,
    ) -> list[Refusal]:
        """As :meth:`wald.WorkGroup.nack`."""
        return await self._tasks.ask(self._work.calls.nack(consumer, sequences, delay, reason, tries))

    async def failed(self, sequence: int) -> Failure | None:
        """As :meth:`wald.WorkGroup.failed`."""
        return await self._tasks.ask(self._work.calls.failed(sequence))

    async def give_up(
        self, consumer: str, sequences: Collection[int], reason: str, tries: int | None = None
    ) -> list[Refusal]:
        """As :meth:`wald.WorkGroup.give_up`."""
        return await self._tasks.ask(self._work.calls.give_up(consumer, sequences, reason, tries))

    async def extend(self, consumer: str, sequences: Collection[int], lease_for: float = 30.0) -> list[Refusal]:
        """As :meth:`wald.WorkGroup.extend`."""
        return await self._tasks.ask(self._work.calls.extend(consumer, sequences, lease_for))

    async def release(self, consumer: str) -> int:
        """As :meth:`wald.WorkGroup.release`."""
        return await self._tasks.ask(self._work.calls.release(consumer))

    async def skip(self, first: int, last: int) -> int:
        """As :meth:`wald.WorkGroup.skip`."""
        return await self._thread.run(self._work.skip, first, last)

    async def claim(self, min_idle: float) -> int:
        """As :meth:`wald.WorkGroup.claim`."""
        return await self._tasks.ask(self._work.calls.claim(min_idle))

    async def pending(self) -> list[Pending]:
        """As :meth:`wald.WorkGroup.pending`, all at once."""
        return await self._tasks.ask(self._work.calls.pending())

    def _open(self) -> None:
        self._group = self._make()

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()

    @property
    def _work(self) -> wald.work.group.WorkGroup:
        return _opened(self._group)

    @property
    def _tasks(self) -> Tasks:
        return _opened(self._asking)


def _opened(of_group: T | None) -> T:
    if of_group is None:
        raise RuntimeError("a WorkGroup for asyncio is used in an async with block")
    return of_group
