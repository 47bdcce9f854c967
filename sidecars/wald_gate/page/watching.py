"""Taking pictures of the log while there are viewers: one task and two threads for all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from wald.log import Log
from wald.status.rates import rest_seconds
from wald_gate.page.picture import Camera, Picture

_INTERVAL_SECONDS = 1.0
_FRESH_SECONDS = 2.0  # a picture that is younger is shown to who comes
_PATIENCE_SECONDS = 0.4  # who comes waits so long for a walk through all segments
_log = logging.getLogger("wald_gate")


class Watching:
    """The newest picture of a log, taken again every second while there are viewers."""

    def __init__(self, log: Log) -> None:
        self._camera = Camera(log)
        self._newest: Picture | None = None
        self._taken = self._walk_due = 0.0
        self._viewers = 0
        self._is_over = False
        self._moved = asyncio.Event()
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._walk: asyncio.Task[None] | None = None

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """While this is entered, pictures are taken."""
        self._viewers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_pictures(), name="wald-gate-pictures")
        try:
            yield
        finally:
            self._viewers -= 1

    async def picture(self) -> Picture:
        """A picture that is a few seconds old at most; of a large log, parts of it may be older, or missing."""
        while self._newest is None or time.monotonic() - self._taken > _FRESH_SECONDS:
            walk = self._begin_walk()
            if walk is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE_SECONDS):
                        await asyncio.shield(walk)
            await self._take()
        return self._newest

    async def newer(self, number: int) -> Picture | None:
        """The newest picture, once it is another than that of ``number``; None: the gate is about to end."""
        while not self._is_over:
            if self._newest is not None and self._newest.number > number:
                return self._newest
            await self._moved.wait()
        return None

    def end(self) -> None:
        """Let none wait any more."""
        self._is_over = True
        self._moved.set()

    async def _take_pictures(self) -> None:
        while self._viewers and not self._is_over:
            began = time.monotonic()
            self._begin_walk()
            await self._reported(self._take)
            await asyncio.sleep(max(0.0, began + _INTERVAL_SECONDS - time.monotonic()))

    async def _take(self) -> None:
        async with self._busy:
            self._newest = await asyncio.to_thread(self._camera.look)
            self._taken = time.monotonic()
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _begin_walk(self) -> asyncio.Task[None] | None:
        """Walk through the segments, unless it is done right now, or was a while ago that is long for its cost."""
        if (self._walk is None or self._walk.done()) and time.monotonic() >= self._walk_due:
            self._walk = asyncio.create_task(self._walk_through(), name="wald-gate-walk")
        return self._walk

    async def _walk_through(self) -> None:
        began = time.monotonic()
        await self._reported(lambda: asyncio.to_thread(self._camera.walk))
        took = time.monotonic() - began
        self._walk_due = time.monotonic() + rest_seconds(took, _INTERVAL_SECONDS)

    async def _reported(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except Exception:  # noqa: BLE001 - a bug; pages are old then and say so
            _log.exception("no picture of the log")
