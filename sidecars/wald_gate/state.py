"""The parts of a running gate: the log, the connection to its daemon, limits, counts, and threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from wald.log import Log
from wald.status.schema import Head
from wald_gate.auth.clients import Admission, Rights
from wald_gate.groups.hosting import Groups
from wald_gate.groups.waits import Processed
from wald_gate.info.monitoring import Counts, Readiness, RequestLog
from wald_gate.limits import Allowances, ConnectionPool, Limits
from wald_gate.page.snapshot import SnapshotPublisher
from wald_gate.records_in.daemon import DaemonClient
from wald_gate.records_in.publisher import IdempotentPublisher
from wald_gate.records_out.threads import HeadWatcher, ReadThreads

P = ParamSpec("P")
T = TypeVar("T")


class SharedRead(Generic[T]):
    """A read of the disk in a thread, shared by all requests that arrive while the read before it runs.

    A request never gets the result of a read that began before the request arrived.
    """

    def __init__(self, read: Callable[[], T], threads: ThreadPoolExecutor) -> None:
        self._read = read
        self._threads = threads
        self._waiting: list[asyncio.Future[T]] = []
        self._task: asyncio.Task[None] | None = None

    async def result(self) -> T:
        """Return the result of a read that begins now or later; raise its error."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._waiting.append(answer)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(loop), name="wald-gate-shared-read")
        return await answer

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                found = await loop.run_in_executor(self._threads, self._read)
            except Exception as error:  # noqa: BLE001 - raised for every request that waits
                for each in waiting:
                    if not each.done():  # the request was cancelled
                        each.set_exception(error)
            else:
                for each in waiting:
                    if not each.done():
                        each.set_result(found)


@dataclass(frozen=True)
class State:
    """The parts of a gate, shared by all requests.

    Attributes:
        threads: threads for disk access other than reads of records.
        readers: threads that read the log for clients.
        head: the answer to ``GET /v1/head``, for a client that may know paths.
    """

    log: Log
    daemon: DaemonClient
    rights: Rights
    limits: Limits
    allowances: Allowances
    threads: ThreadPoolExecutor
    readers: ReadThreads
    head: SharedRead[Head]
    following: HeadWatcher
    pool: ConnectionPool
    counts: Counts
    readiness: Readiness
    request_log: RequestLog
    admission: Admission
    watching: SnapshotPublisher
    groups: Groups
    idempotent: IdempotentPublisher
    processed: Processed

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short disk access, or one that is part of a write, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, partial(call, *args, **kwargs))
