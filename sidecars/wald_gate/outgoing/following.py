"""Waiting for records of a route: one thread looks at the log for all clients that follow it.

The thread reads the headers of newly durable records, and wakes the clients of their routes. Clients of other routes
neither wake nor read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from wald.log import Log
from wald.reading.scanner import Arrivals, read_arrivals

_FIRST_SECONDS, _LAST_SECONDS = 0.001, 0.050  # between two looks, as of readers of a log; each takes some 10 µs
_SHARE = 1 / 16  # of the time that nothing has come for: so much later a record may be seen


class Watch:
    """One client's interest in a route."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._has_come = True
        self._first = 0
        self._woken: asyncio.Future[None] | None = None

    def clear(self) -> int:
        """Begin to read the records that have arrived so far.

        Returns:
            the first record after the previous reading that may belong to the route; 0 if any may.
        """
        first = self._first if self._has_come else self._following.last + 1
        self._has_come, self._first = False, 0
        return first

    def find(self, first: int) -> None:
        """Wake the client for a record.

        Args:
            first: its sequence; 0 if unknown, or if it may not exist.
        """
        self._first = first if not self._has_come else min(first, self._first)
        self._has_come = True
        self.wake()

    def wake(self) -> None:
        """End the client's wait."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def wait(self, seconds: float | None) -> bool:
        """Return True once a record has arrived since :meth:`clear`; False after ``seconds``, or when the gate ends.

        Args:
            seconds: None for no timeout.
        """
        if not self._has_come and not self._following.is_over:
            self._woken = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken
        return self._has_come


class Following:
    """Wakes the clients that follow a route when it has new records.

    Attributes:
        last: the last durable record at the latest check.
        is_over: nothing is waited for any more, as the gate is about to end.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.last = 0
        self.is_over = False
        self._watches: dict[str, set[Watch]] = {}
        self._look_now = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, route: str) -> Iterator[Watch]:
        """Watch a route. The caller reads once the records that were durable before."""
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
        """Check the log now, because a client's record has become durable."""
        if self._watches:
            self._look_now.set()

    def end(self) -> None:
        """Let none wait any more."""
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
