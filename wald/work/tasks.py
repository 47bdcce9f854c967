"""The tasks of an event loop that ask a work group: all that they ask in one round of the loop goes to one turn.

    tasks ask ─▶ behind them in the loop: all to the thread of the turns ─▶ a turn ─▶ one call of the loop answers all

No task has a thread of its own, so thousands may wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from wald.work.asks import Ask, LeaseAsk
from wald.work.turns import Turns

T = TypeVar("T")


class Tasks:
    """The tasks of the loop that runs when this is made."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._asked: list[Ask[Any]] = []
        self._unanswered: dict[Ask[Any], asyncio.Future[None]] = {}

    async def ask(self, ask: Ask[T]) -> T:
        """As :meth:`Turns.ask`; what is leased to a task that was cancelled is given back."""
        ask.inbox = self
        self._unanswered[ask] = answered = self._loop.create_future()
        self._send(ask)
        try:
            await answered
        except asyncio.CancelledError:
            self._unanswered.pop(ask, None)
            if isinstance(ask, LeaseAsk):
                self._send(self._turns.withdrawal(ask))
            raise
        return ask.answer()

    def put(self, asks: Sequence[Ask[Any]]) -> None:
        """Take in asks that are answered, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and its tasks with it
            self._loop.call_soon_threadsafe(self._go_on, asks)

    def foretell(self, asks: Sequence[LeaseAsk[Any]]) -> None:
        """Have leases prepared whose turn waits for the disk, from any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_prepare, asks)

    def _send(self, ask: Ask[Any]) -> None:
        if not self._asked:
            self._loop.call_soon(self._send_all)  # behind the other tasks that go on in this round
        self._asked.append(ask)

    def _send_all(self) -> None:
        asked, self._asked = self._asked, []
        self._turns.send(asked)

    def _go_on(self, asks: Sequence[Ask[Any]]) -> None:
        for ask in asks:
            answered = self._unanswered.pop(ask, None)
            if answered is not None and not answered.done():
                answered.set_result(None)


def _prepare(asks: Sequence[LeaseAsk[Any]]) -> None:
    for ask in asks:
        ask.prepare()
