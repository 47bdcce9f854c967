"""Leases that wait for a record, and producers that wait until a group has processed their records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import ClientDisconnect

from wald import aio
from wald.errors import NotFound, NotProcessed, WaldError
from wald.log import Log
from wald.work.snapshot import Progress, Unprocessed, not_processed, pause
from wald_gate.http.exchange import Exchange
from wald_gate.problems import HttpError
from wald_gate.responses import while_there
from wald_gate.shapes import Leased


class Got(NamedTuple):
    """The leased records and their JSON."""

    leased: Leased
    body: bytes


@dataclass(eq=False)
class _WaitingLease:
    """A waiting lease; ``refused`` is the reason for its cancellation."""

    judge: Callable[[], None]
    leasing: asyncio.Task[Got]
    refused: Exception | None = None


class WaitingLeases:
    """Leases, of all groups, that wait for a record."""

    def __init__(self) -> None:
        self._waiters: set[_WaitingLease] = set()
        self._is_over = False

    @property
    def count(self) -> int:
        return len(self._waiters)

    async def leased(
        self,
        request: Exchange,
        judge: Callable[[], None],
        work: aio.WorkGroup,
        worker: str,
        lease: Coroutine[None, None, Got],
    ) -> Got | None:
        """Return the leased records; None if the gate ends first."""
        waiter = _WaitingLease(judge, asyncio.create_task(lease))
        leasing, leaving = waiter.leasing, asyncio.create_task(request.receive())
        self._waiters.add(waiter)
        try:
            if self._is_over:
                leasing.cancel()
            await asyncio.wait((leasing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                waiter.refused = ClientDisconnect()
            if waiter.refused is not None:
                if leasing.done() and not leasing.cancelled() and leasing.exception() is None:
                    await work.nack(worker, [record.sequence for record in leasing.result().leased.records])
                raise waiter.refused
            return None if leasing.cancelled() else leasing.result()
        finally:
            self._waiters.discard(waiter)
            leaving.cancel()
            leasing.cancel()  # if it waits still; it is withdrawn

    def judge(self) -> None:
        """Cancel the leases of clients that the token file no longer admits."""
        for waiter in self._waiters:
            try:
                waiter.judge()
            except HttpError as error:
                waiter.refused = error
                waiter.leasing.cancel()

    def end(self) -> None:
        """Answer all current and future waiting leases with no records."""
        self._is_over = True
        for waiter in self._waiters:
            waiter.leasing.cancel()


class Processed:
    """Producers that wait for groups; one task watches a group for all of them, whichever process owns it."""

    def __init__(self, log: Log, threads: ThreadPoolExecutor) -> None:
        self._log = log
        self._threads = threads
        self._waiters: dict[tuple[str, str], dict[asyncio.Future[None], Unprocessed]] = {}  # by route and group
        self._watching: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def expected(self, route: str, group: str) -> Unprocessed:
        """Return an empty set of records for a group to process; raise NotFound if there is no such group."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, lambda: Progress(self._log, route, group).read())
        except NotFound as error:
            raise NotFound(error.message, hint="GET /v1/routes shows the groups that have") from None
        return Unprocessed(route, group)

    async def wait(self, request: Exchange, unprocessed: Unprocessed, seconds: float) -> None:
        """Return once the group has processed the records."""
        sent, began, key = unprocessed.count, time.monotonic(), (unprocessed.route, unprocessed.group)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if key not in self._waiters:
            self._waiters[key] = {}
            watching = asyncio.create_task(self._watch(*key), name="wald-gate-processed")
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
        waiters = self._waiters[key]
        waiters[over] = unprocessed
        try:
            if not self._is_over:
                with suppress(TimeoutError):
                    await while_there(request, asyncio.wait_for(over, seconds))
        finally:
            del waiters[over]
        if unprocessed.count:
            error = not_processed(self._log, unprocessed, sent, time.monotonic() - began)
            where = f"GET /v1/routes/{unprocessed.route}/cursors/{unprocessed.group}"
            raise NotProcessed(error.message, hint=f"{where} shows how far it is; do not send them again")

    def end(self) -> None:
        """End all waits."""
        self._is_over = True
        for waiters in self._waiters.values():
            for over in waiters:
                _end(over)

    async def _watch(self, route: str, group: str) -> None:
        """Read the progress of a group in a thread, once for all producers, while some wait."""
        loop, waiters = asyncio.get_running_loop(), self._waiters[route, group]
        progress: Progress | None = None
        seconds = 0.0

        def update(left: Sequence[Unprocessed]) -> None:
            nonlocal progress
            progress = progress or Progress(self._log, route, group)
            progress.read()
            for each in left:
                each.update(progress)

        try:
            while waiters:
                began, seen = time.monotonic(), dict(waiters)
                try:
                    await loop.run_in_executor(self._threads, update, list(seen.values()))
                except (WaldError, OSError) as error:
                    for over in seen:
                        _end(over, error)
                ended = [over for over, left in seen.items() if over.done() or not left.count]
                for over in ended:
                    _end(over)
                seconds = pause(0.0 if ended else seconds, time.monotonic() - began)
                await asyncio.sleep(seconds)
        finally:
            del self._waiters[route, group]


def _end(over: asyncio.Future[None], error: Exception | None = None) -> None:
    if over.done():
        return
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)
