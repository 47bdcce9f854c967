"""Threads for reading clients: reader threads, which clients use in turn, and the watcher of the head."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Generic, TypeVar

from wald.log import Log
from wald.reading.scanner import Arrivals, read_arrivals

T = TypeVar("T")
STEP_SECONDS = 0.05  # after which a long read yields its thread until its client's next turn


class ReadThreads(ThreadPoolExecutor):
    """Thread pool that serves clients in least-recently-served order.

    There are few threads, because they share the interpreter with writes. A client with many reads delays only its own.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="wald-gate-read")
        self._free = threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, client: str, call: Callable[[], T]) -> T:
        """Run a long call in a thread when it is the client's turn."""
        await self._turn(client)
        loop = asyncio.get_running_loop()
        running = self.submit(call)
        # a call whose client has left keeps its thread until it is done
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release))
        return await asyncio.wrap_future(running)

    async def walk(self, client: str, way: Generator[None, None, T]) -> T:
        """Run a generator in steps, one per turn of the client; it yields where a step may end."""
        while not (found := await self.run(client, partial(_step, way))):
            pass
        return found[0]

    async def _turn(self, client: str) -> None:
        """Wait for a free thread, and reserve it for the client."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                if client in self._waiting:  # the turn is still the client's
                    self._waiting.move_to_end(client, last=False)
                self._release()
            raise

    def _release(self) -> None:
        """Give a thread to the next client."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns and turns[0].done():  # cancelled
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[client] = turns
                return
        self._free += 1


def _step(way: Generator[None, None, T]) -> list[T]:
    """Run a generator for a short time; return its result in a list, which is empty if it has not ended."""
    until = time.monotonic() + STEP_SECONDS
    try:
        next(way)
        while time.monotonic() < until:
            next(way)
    except StopIteration as end:
        return [end.value]
    return []


_FIRST_SECONDS, _LAST_SECONDS = 0.001, 0.050  # between two looks, as of readers of a log; each takes some 10 µs
_SHARE = 1 / 16  # of the time without arrivals: the delay with which a record may be seen


class SharedRead(Generic[T]):
    """A call in a thread, shared by all requests that arrive while the call before it runs.

    A request never gets the result of a call that began before the request arrived.
    """

    def __init__(self, read: Callable[[], T], threads: ThreadPoolExecutor) -> None:
        self._read = read
        self._threads = threads
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running), name="wald-gate-shared-read")
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())  # all requests may be gone
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read)


class Watch:
    """One client's interest in a route."""

    def __init__(self, following: HeadWatcher) -> None:
        self._following = following
        self._has_come = True
        self._first = 0
        self._woken: asyncio.Future[None] | None = None

    def clear(self) -> int:
        """Start to read the records that have arrived."""
        first = self._first if self._has_come else self._following.last + 1
        self._has_come, self._first = False, 0
        return first

    def find(self, first: int) -> None:
        """Wake the client for a record; 0 if its sequence is unknown."""
        self._first = first if not self._has_come else min(first, self._first)
        self._has_come = True
        self.wake()

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def wait(self, seconds: float | None) -> bool:
        """Return True once a record has arrived since :meth:`clear`; False after a timeout, or when the gate ends."""
        if not self._has_come and not self._following.is_over:
            self._woken = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken
        return self._has_come


class HeadWatcher:
    """Watcher of the head that wakes clients when their route has new records.

    One thread reads the headers of newly durable records for all clients. Clients of other routes neither wake nor
    read.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.last = 0  # the last durable record at the latest check
        self.is_over = False  # True once the gate is ending
        self._watches: dict[str, set[Watch]] = {}
        self._look_now = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, route: str) -> Iterator[Watch]:
        """Watch a route; the caller must first read the records that were durable before."""
        watch = Watch(self)
        self._watches.setdefault(route, set()).add(watch)
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, args=(loop,), name="wald-gate-head", daemon=True)
            self._thread.start()
        self._look_now.set()
        try:
            yield watch
        finally:
            of_route = self._watches[route]
            of_route.discard(watch)
            if not of_route:
                del self._watches[route]

    def look(self) -> None:
        """Check the log immediately, because a client's record has become durable."""
        if self._watches:
            self._look_now.set()

    def end(self) -> None:
        self.is_over = True
        self._look_now.set()
        for watch in self._every():
            watch.wake()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the log while clients follow it; a disk that hangs blocks only this thread."""
        while not self.is_over:
            if not self._watches:
                self._pause(None)
                continue
            try:
                self._look_on(loop)
            except Exception:  # noqa: BLE001 - the clients read for themselves and report it
                self._pause(_LAST_SECONDS)
            self._deliver(loop, Arrivals(None, 0))

    def _look_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver arrivals until no client follows, or an older copy of the log was restored."""
        silent, last = 0.0, 0
        with closing(read_arrivals(self._log.view())) as looks:
            for found in looks:
                if found.routes is None or found.routes or found.last != last:
                    silent, last = 0.0, found.last
                    self._deliver(loop, found)
                seconds = min(max(_FIRST_SECONDS, silent * _SHARE), _LAST_SECONDS)
                silent += seconds
                self._pause(seconds)
                if not self._watches or self.is_over:
                    return

    def _deliver(self, loop: asyncio.AbstractEventLoop, found: Arrivals) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._take, found)

    def _pause(self, seconds: float | None) -> None:
        self._look_now.wait(seconds)
        self._look_now.clear()

    def _take(self, found: Arrivals) -> None:
        """Wake the clients of the routes with new records, in the event loop."""
        self.last = found.last
        if found.routes is None:
            for watch in self._every():
                watch.find(0)
            return
        for route, first in found.routes.items():
            for watch in self._watches.get(route, ()):
                watch.find(first)

    def _every(self) -> list[Watch]:
        return [watch for of_route in self._watches.values() for watch in of_route]
