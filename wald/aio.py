"""Consumer and Producer for asyncio: each call runs in a thread, and the event loop goes on meanwhile.

A log is files, and a socket whose answers wait for the disk; an event loop can wait for neither without a thread. Each
object has one thread, which keeps its calls in order. Each record costs a change of threads, some 50 µs; with
:meth:`Consumer.batches` each batch costs one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import wald.client.producer
import wald.consumer
from wald.client.payloads import Time, Value
from wald.client.producer import Durable
from wald.format.names import DEFAULT_GROUP
from wald.format.record import Record
from wald.store.reading.batches import Batch
from wald.store.retention.missing import OnMissing

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

    def end(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


class Consumer:
    """As :class:`wald.Consumer`, with ``async with`` and ``async for``; arguments are the same but ``cancel``.

    Making one reads a small file at once, not in its thread.

    A task that is cancelled while it waits for the next record ends the wait. The record that it has processed last is
    then processed, as in :class:`wald.Consumer`; the one that it did not get comes again.

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

    async def _each(self, source: Iterator[T]) -> AsyncGenerator[T, None]:
        while (each := await self._thread.run(next, source, None)) is not None:
            yield each


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
        times: Sequence[Time] | None = None,
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
