"""Threads that read the log: few, because they share one interpreter with writes, and used by clients in turn.

A client with many reads delays only its own. Writes and /healthz do not use these threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
STEP_SECONDS = 0.05  # after which a long read gives up its thread until its client's next turn


class ReadThreads:
    """A thread pool that serves next the waiting client whose last turn is longest ago."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="wald-gate-read")
        self._free = threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    async def run(self, client: str, call: Callable[[], T]) -> T:
        """Run a long call in a thread when it is the client's turn."""
        await self._turn(client)
        loop = asyncio.get_running_loop()
        running = self._pool.submit(call)

        def end(_: Future[T]) -> None:
            loop.call_soon_threadsafe(self._release)

        running.add_done_callback(end)  # a call whose client has left keeps its thread until it is done
        return await asyncio.wrap_future(running)

    async def walk(self, client: str, way: Generator[None, None, T]) -> T:
        """Run a generator in steps of some time, each when it is the client's turn.

        Args:
            way: yields where a step may end, and returns its result.
        """
        while not (found := await self.run(client, partial(_step, way))):
            pass
        return found[0]

    def submit(self, call: Callable[[], None]) -> None:
        """Run a short call in a thread."""
        self._pool.submit(call)

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
    """Run a generator for some time; return its result in a list, which is empty if it has not ended."""
    until = time.monotonic() + STEP_SECONDS
    try:
        next(way)
        while time.monotonic() < until:
            next(way)
    except StopIteration as end:
        return [end.value]
    return []
