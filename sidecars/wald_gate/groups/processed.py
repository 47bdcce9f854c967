"""Producers that wait until a group has processed their records: one task looks at the groups for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import ClientDisconnect, Request

from wald.errors import NotFound, NotProcessed, WaldError
from wald.log import Log
from wald.work.snapshot import Progress, Unprocessed, not_processed, pause
from wald_gate.presence import gone

_Key = tuple[str, str]


class _Waiter:
    """A producer that waits, until ``over`` is done."""

    def __init__(self, unprocessed: Unprocessed) -> None:
        self.unprocessed = unprocessed
        self.error: WaldError | OSError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def key(self) -> _Key:
        """Route and group of the wait."""
        return self.unprocessed.route, self.unprocessed.group

    def end(self) -> None:
        """Wait no longer."""
        if not self.over.done():
            self.over.set_result(None)


class Processed:
    """Waits for what groups of a log process, also if another process works for them."""

    def __init__(self, log: Log, threads: ThreadPoolExecutor) -> None:
        self._log = log
        self._threads = threads
        self._waiters: set[_Waiter] = set()
        self._looks: asyncio.Task[None] | None = None
        self._is_over = False

    async def expected(self, route: str, group: str) -> Unprocessed:
        """What a group is to process of records that are sent to ``route`` from now on; none yet.

        Raises:
            NotFound: there is no such route, or no such group on it.
        """

        def begin() -> Unprocessed:
            unprocessed = Unprocessed(route, group)
            try:
                Progress(self._log, route, group).read()
            except NotFound as error:
                raise NotFound(error.message, hint="GET /v1/routes shows the groups that have") from None
            return unprocessed

        return await asyncio.get_running_loop().run_in_executor(self._threads, begin)

    async def wait(self, request: Request, unprocessed: Unprocessed, seconds: float) -> None:
        """Return once all of it was processed.

        Raises:
            NotProcessed: it was not for so many seconds, or until the gate ends.
            NotFound: the group is gone.
            ClientDisconnect: the client has gone.
        """
        sent, began = unprocessed.count, time.monotonic()
        waiter, leaving = _Waiter(unprocessed), asyncio.create_task(gone(request))
        self._waiters.add(waiter)
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look(), name="wald-gate-processed")
        try:
            if not self._is_over:
                waits = (waiter.over, leaving)
                await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(waiter)
            leaving.cancel()
        if leaving.done():
            raise ClientDisconnect
        if waiter.error is not None:
            raise waiter.error
        if unprocessed.count:
            error = not_processed(self._log, unprocessed, sent, time.monotonic() - began)
            where = f"GET /v1/routes/{unprocessed.route}/cursors/{unprocessed.group}"
            raise NotProcessed(error.message, hint=f"{where} shows how far it is; do not send them again")

    def end(self) -> None:
        """Let none wait any more."""
        self._is_over = True
        for waiter in self._waiters:
            waiter.end()

    async def _look(self) -> None:
        """Look at the groups for as long as there are producers that wait for them."""
        loop = asyncio.get_running_loop()
        progress: dict[_Key, Progress] = {}
        seconds = 0.0
        while self._waiters:
            waiters = list(self._waiters)
            wanted = {waiter.key for waiter in waiters}
            progress = {key: known for key, known in progress.items() if key in wanted}
            began = time.monotonic()
            await loop.run_in_executor(self._threads, self._look_once, waiters, progress)
            ended = [waiter for waiter in waiters if waiter.error is not None or not waiter.unprocessed.count]
            for waiter in ended:
                waiter.end()
            seconds = pause(0.0 if ended else seconds, time.monotonic() - began)
            await asyncio.sleep(seconds)
        self._looks = None

    def _look_once(self, waiters: Sequence[_Waiter], progress: dict[_Key, Progress]) -> None:
        """In a thread: look at each group once, for all who wait for it."""
        failed: dict[_Key, WaldError | OSError] = {}
        for key in {waiter.key for waiter in waiters}:
            try:
                if key not in progress:
                    progress[key] = Progress(self._log, *key)
                progress[key].read()
            except (WaldError, OSError) as error:
                failed[key] = error
        for waiter in waiters:
            try:
                if waiter.key in failed:
                    raise failed[waiter.key]
                waiter.unprocessed.update(progress[waiter.key])
            except (WaldError, OSError) as error:
                waiter.error = error
