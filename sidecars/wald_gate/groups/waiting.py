"""Leases that wait: until a record or the gate's end comes, or their time, their client or its right is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from wald import aio
from wald_gate.groups.shapes import Leased
from wald_gate.presence import gone
from wald_gate.problems import HttpError


class Got(NamedTuple):
    """What a consumer has got, and the JSON that says so."""

    leased: Leased
    body: bytes


@dataclass(eq=False)
class _Waiter:
    """A lease that waits.

    Attributes:
        judge: raises if its client is not admitted any more.
        refused: why it waits no longer.
    """

    judge: Callable[[], None]
    leasing: asyncio.Task[Got]
    refused: Exception | None = None

    @property
    def has_got(self) -> bool:
        """Whether there was something."""
        return self.leasing.done() and not self.leasing.cancelled() and self.leasing.exception() is None


class Waiting:
    """The leases that wait, of all groups."""

    def __init__(self) -> None:
        self._waiters: set[_Waiter] = set()
        self._is_over = False

    @property
    def count(self) -> int:
        """How many leases wait."""
        return len(self._waiters)

    async def leased(
        self,
        request: Request,
        judge: Callable[[], None],
        work: aio.WorkGroup,
        consumer: str,
        lease: Coroutine[None, None, Got],
    ) -> Got | None:
        """What is leased; None, if the gate ends meanwhile.

        Args:
            judge: raises an HttpError if the client is not admitted any more.

        Raises:
            ClientDisconnect: the client has gone, and what was leased to it is given back.
            HttpError: as of ``judge``; what was leased to the client is given back.
            WaldError, OSError: as of :meth:`wald.WorkGroup.lease`.
        """
        waiter = _Waiter(judge, asyncio.create_task(lease))
        leasing, leaving = waiter.leasing, asyncio.create_task(gone(request))
        self._waiters.add(waiter)
        try:
            if self._is_over:
                leasing.cancel()
            await asyncio.wait((leasing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                waiter.refused = ClientDisconnect()
            if waiter.refused is not None:
                if waiter.has_got:
                    await work.nack(consumer, [record.sequence for record in leasing.result().leased.records])
                raise waiter.refused
            return None if leasing.cancelled() else leasing.result()
        finally:
            self._waiters.discard(waiter)
            leaving.cancel()
            leasing.cancel()  # if it waits still; it is withdrawn

    def judge(self) -> None:
        """End those whose clients are not admitted any more, as the file of tokens says something else now."""
        for waiter in self._waiters:
            try:
                waiter.judge()
            except HttpError as error:
                waiter.refused = error
                waiter.leasing.cancel()

    def end(self) -> None:
        """Answer all leases that wait with nothing, now and from now on."""
        self._is_over = True
        for waiter in self._waiters:
            waiter.leasing.cancel()
