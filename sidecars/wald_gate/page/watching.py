"""Taking pictures of the log while there are viewers: one task and one thread for all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from wald.log import Log
from wald_gate.page.picture import Camera, Picture

_INTERVAL_SECONDS = 1.0
_FRESH_SECONDS = 2.0  # a picture that is younger is shown to who comes
_log = logging.getLogger("wald_gate")


class Watching:
    """The newest picture of a log, taken again every second while there are viewers.

    Attributes:
        newest: None before the first one.
    """

    def __init__(self, log: Log) -> None:
        self._camera = Camera(log)
        self.newest: Picture | None = None
        self._taken = 0.0
        self._viewers = 0
        self._is_over = False
        self._moved = asyncio.Event()
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

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
        """A picture that is a few seconds old at most."""
        while self.newest is None or time.monotonic() - self._taken > _FRESH_SECONDS:
            await self._take()
        return self.newest

    async def newer(self, number: int) -> Picture | None:
        """The newest picture, once it is another than that of ``number``; None: the gate is about to end."""
        while not self._is_over:
            if self.newest is not None and self.newest.number > number:
                return self.newest
            await self._moved.wait()
        return None

    def end(self) -> None:
        """Let none wait any more."""
        self._is_over = True
        self._moved.set()

    async def _take_pictures(self) -> None:
        while self._viewers and not self._is_over:
            began = time.monotonic()
            try:
                await self._take()
            except Exception:  # noqa: BLE001 - a bug; pages are old then and say so
                _log.exception("no picture of the log")
            await asyncio.sleep(max(0.0, began + _INTERVAL_SECONDS - time.monotonic()))

    async def _take(self) -> None:
        async with self._busy:
            self.newest = await asyncio.to_thread(self._camera.take)
            self._taken = time.monotonic()
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
