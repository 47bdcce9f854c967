"""Leases that wait for a record: each until one comes, its time is over, its client has gone, or the gate ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.requests import ClientDisconnect, Request

from wald import aio
from wald.work.terms import Delivery
from wald_gate.presence import gone

Lease = Coroutine[None, None, list[Delivery]]


class Waiting:
    """The leases that wait, of all groups."""

    def __init__(self) -> None:
        self._leasing: set[asyncio.Task[list[Delivery]]] = set()
        self._is_over = False

    @property
    def count(self) -> int:
        """How many leases wait."""
        return len(self._leasing)

    async def leased(self, request: Request, work: aio.WorkGroup, consumer: str, lease: Lease) -> list[Delivery]:
        """What is leased; nothing, if the gate ends meanwhile.

        Raises:
            ClientDisconnect: the client has gone, and what was leased to it is given back.
            WaldError, OSError: as of :meth:`wald.WorkGroup.lease`.
        """
        leasing = asyncio.create_task(lease)
        leaving = asyncio.create_task(gone(request))
        self._leasing.add(leasing)
        try:
            if self._is_over:
                leasing.cancel()
            await asyncio.wait((leasing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and leasing.done() and not leasing.cancelled() and leasing.exception() is None:
                await work.nack(consumer, [delivery.record.sequence for delivery in leasing.result()])
            if leaving.done():
                raise ClientDisconnect
            return [] if leasing.cancelled() else leasing.result()
        finally:
            self._leasing.discard(leasing)
            leaving.cancel()
            leasing.cancel()  # if it waits still; it is withdrawn

    def end(self) -> None:
        """Answer all leases that wait with nothing, now and from now on."""
        self._is_over = True
        for leasing in self._leasing:
            leasing.cancel()
