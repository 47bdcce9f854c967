"""Leases that wait for a record, and producers that wait until a group has processed their records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import ClientDisconnect

from wald import aio
from wald.errors import NotFound, NotProcessed, WaldError
from wald.log import Log
from wald.work.snapshot import Progress, Unprocessed, not_processed, pause
from wald_gate.http.exchange import Exchange
from wald_gate.problems import HttpError
from wald_gate.shapes import Leased


class Got(NamedTuple):
    """The leased records and their JSON."""

    leased: Leased
    body: bytes


@dataclass(eq=False)
class _WaitingLease:
    """A lease that waits; ``refused`` is the reason for which it was cancelled."""

    judge: Callable[[], None]
    leasing: asyncio.Task[Got]
    refused: Exception | None = None


class WaitingLeases:
    """Leases of all groups that wait for a record."""

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
        """Cancel the leases of clients that the file of tokens no longer admits."""
        for waiter in self._waiters:
            try:
                waiter.judge()
            except HttpError as error:
                waiter.refused = error
                waiter.leasing.cancel()

    def end(self) -> None:
        """Answer all waiting leases with nothing, now and later."""
        self._is_over = True
        for waiter in self._waiters:
            waiter.leasing.cancel()


_Key = tuple[str, str]


class _WaitingProducer:
    """A producer that waits until ``over`` is done."""

    def __init__(self, unprocessed: Unprocessed) -> None:
        self.unprocessed = unprocessed
        self.key: _Key = (unprocessed.route, unprocessed.group)
        self.error: WaldError | OSError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Processed:
    """Producers that wait for a group; one task watches the groups for all of them, whichever process owns them."""

    def __init__(self, log: Log, threads: ThreadPoolExecutor) -> None:
        self._log = log
        self._threads = threads
        self._waiters: set[_WaitingProducer] = set()
        self._looks: asyncio.Task[None] | None = None
        self._is_over = False

    async def expected(self, route: str, group: str) -> Unprocessed:
        """Return an empty set of records that a group is to process; NotFound if there is no such group."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, lambda: Progress(self._log, route, group).read())
        except NotFound as error:
            raise NotFound(error.message, hint="GET /v1/routes shows the groups that have") from None
        return Unprocessed(route, group)

    async def wait(self, request: Exchange, unprocessed: Unprocessed, seconds: float) -> None:
        """Return once the group has processed the records."""
        sent, began = unprocessed.count, time.monotonic()
        waiter, leaving = _WaitingProducer(unprocessed), asyncio.create_task(request.receive())
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
        """End all waits."""
        self._is_over = True
        for waiter in self._waiters:
            waiter.end()

    async def _look(self) -> None:
        """Watch the groups while producers wait for them."""
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

    def _look_once(self, waiters: Sequence[_WaitingProducer], progress: dict[_Key, Progress]) -> None:
        """Read each group once for all producers, in a thread."""
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
                waiter.error = failed.get(waiter.key)
                if waiter.error is None:
                    waiter.unprocessed.update(progress[waiter.key])
            except (WaldError, OSError) as error:
                waiter.error = error
