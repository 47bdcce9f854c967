"""Waiting for records to come: one task looks at the head for all clients that follow the log."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from wald.errors import WaldError
from wald.log import Log

_FIRST_SECONDS, _LAST_SECONDS = 0.001, 0.050  # between two looks, as of readers of a log; each takes some 10 µs
_SHARE = 1 / 16  # of the time that nothing has come for: so much later a record may be seen


class Following:
    """Wakes those who wait when the head has moved.

    Attributes:
        is_over: nothing is waited for any more, as the gate is about to end.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._head = 0
        self.is_over = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._looks: asyncio.Task[None] | None = None

    async def beyond(self, sequence: int, seconds: float | None) -> bool:
        """Return True once a record behind ``sequence`` is durable, False after so many seconds or when it is over.

        Args:
            seconds: None: without an end.
        """
        if self._head > sequence:
            self._see()  # the log may have been copied back: then there is less than there was
        if self._head > sequence or self.is_over:
            return self._head > sequence
        moved = asyncio.get_running_loop().create_future()
        self._waiting.add(moved)
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look(), name="wald-gate-head")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self._head <= sequence and not self.is_over:
                        await moved
                        moved = self._again(moved)
            return self._head > sequence
        finally:
            self._waiting.discard(moved)

    def move(self, sequence: int) -> None:
        """Take in that a record is durable."""
        if sequence > self._head:
            self._head = sequence
            self._wake()

    def end(self) -> None:
        """Let none wait any more."""
        self.is_over = True
        self._wake()

    def _see(self) -> None:
        with suppress(WaldError, OSError):  # who reads reports it
            if (head := self._log.head()) is not None:
                self._head = min(self._head, head.sequence)
                self.move(head.sequence)

    def _wake(self) -> None:
        for moved in self._waiting:
            if not moved.done():
                moved.set_result(None)

    def _again(self, moved: asyncio.Future[None]) -> asyncio.Future[None]:
        self._waiting.discard(moved)
        following: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(following)
        return following

    async def _look(self) -> None:
        """Look at the head for as long as there are clients that wait for it."""
        loop = asyncio.get_running_loop()
        moved_at = loop.time()
        while self._waiting:
            before = self._head
            self._see()
            if self._head > before:
                moved_at = loop.time()
            silent = loop.time() - moved_at
            await asyncio.sleep(min(max(_FIRST_SECONDS, silent * _SHARE), _LAST_SECONDS))
        self._looks = None
