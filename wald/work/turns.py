"""Turns: one thread at a time carries out what all of them ask for, with one write and one sync for all.

    asked ─▶ settled (ack, nack, …) ─▶ leased ─▶ written ─▶ answered ─▶ synced ─▶ answered what has to be on disk

A thread that asks while no turn is under way carries out one itself. What is asked meanwhile is left to a thread that
is there for it, so that no worker works for others for long. That thread also ends leases when their time has come.

After a failed write or sync it is not known what is on disk, so nothing is carried out any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

from wald.errors import Interrupted
from wald.work.asks import Ask, LeaseAsk, answer
from wald.work.journal import Journal
from wald.work.owner import Owner

T = TypeVar("T")
_NS = 1_000_000_000


class Turns:
    """The turns of ``owner``, which ``journal`` makes durable.

    Args:
        wake: set when there may be something to lease.
    """

    def __init__(self, owner: Owner, journal: Journal, wake: threading.Event, *, name: str) -> None:
        self._owner = owner
        self._journal = journal
        self._asked: deque[Ask[Any]] = deque()
        self._waiting: deque[LeaseAsk] = deque()  # in the order in which they have come
        self._turn = threading.Lock()  # held while one is carried out
        self._wake = wake
        self._wakes_ns = float("inf")
        self._failed: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"wald-work-turns-{name}", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask[T]) -> T:
        """Carry ``ask`` out, and return its answer.

        Raises:
            OSError: the journal cannot be written, now or earlier.
            ValueError: the group is closed.
        """
        self._asked.append(ask)
        self._try_turn(ask)
        try:
            ask.wait()
        except BaseException:  # Ctrl-C, perhaps; the threads behind it go on all the same
            self._withdraw(ask)
            raise
        return ask.answer()

    def close(self) -> None:
        """End. Threads that wait for a record get none."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        with self._turn:  # so that the last one is over
            self._carry_out()
        if self._asked:
            self._try_turn()

    def _withdraw(self, ask: Ask[Any]) -> None:
        """Let a lease wait no longer; anything else is answered soon."""
        if isinstance(ask, LeaseAsk):
            withdrawal = Ask(lambda: ask.fail(None) if ask in self._waiting else None)
            self._asked.append(withdrawal)
            self._try_turn(withdrawal)
            withdrawal.wait()
        ask.wait()

    def _try_turn(self, ask: Ask[Any] | None = None) -> None:
        """Carry out a turn, if none is under way; what is asked during it is left to the other thread.

        Args:
            ask: that of this thread, which is busy until the end of the turn.
        """
        if self._turn.acquire(blocking=False):
            try:
                self._carry_out(ask)
                more = self._next_ns() < self._wakes_ns
            finally:
                self._turn.release()
            if more or self._asked:
                self._wake.set()
                if self._closed:  # that thread has ended
                    self._try_turn()

    def _run(self) -> None:
        seconds: float | None = None
        while not self._closed:
            self._wake.wait(seconds)
            self._wake.clear()
            with self._turn:
                self._carry_out()
                while self._asked:
                    self._carry_out()
                self._wakes_ns = self._next_ns()
            never = self._wakes_ns == float("inf")
            seconds = None if never else max(0.0, (self._wakes_ns - self._owner.clock.monotonic_ns()) / _NS)
            if self._asked:
                self._wake.set()

    def _carry_out(self, own: Ask[Any] | None = None) -> None:
        """One turn."""
        asks = [self._asked.popleft() for _ in range(len(self._asked))]
        try:
            if self._failed is not None:
                raise self._failed
            if self._closed:
                raise ValueError("the work group is closed")
            self._settle(asks, own)
        except BaseException as error:
            is_end = not isinstance(error, Exception)
            if is_end:
                self._failed = Interrupted("a turn of the work group was interrupted", hint="open the group again")
            elif not self._closed:
                self._failed = error
            for ask in asks:
                if not ask.is_answered:
                    ask.fail(self._failed or error)
            for ask in self._waiting:
                if not ask.is_answered:
                    ask.fail(self._failed)  # if the group was closed: with nothing
            self._waiting.clear()
            if is_end:
                raise

    def _settle(self, asks: Iterable[Ask[Any]], own: Ask[Any] | None) -> None:
        self._owner.begin()
        settled: list[Ask[Any]] = []
        for ask in asks:
            if isinstance(ask, LeaseAsk):
                ask.prepare()
                self._waiting.append(ask)
            else:
                ask.carry_out()
                settled.append(ask)
        settled += self._lease()
        settled.sort(key=lambda ask: ask is own)  # its thread can wake no other one before the end
        self._journal.append(self._owner.taken_lines())
        if self._journal.has_grown:
            self._journal.rewrite(self._owner.snapshot())
        answer(ask for ask in settled if not ask.durable)
        durable = [ask for ask in settled if ask.durable]
        if durable:
            self._journal.sync()
            answer(durable)

    def _lease(self) -> list[LeaseAsk]:
        """The leases among those that wait that have an answer now."""
        now_ns = self._owner.clock.monotonic_ns()
        answered = []
        nothing = False
        for _ in range(len(self._waiting)):
            ask = self._waiting.popleft()
            if ask.is_answered:  # it was withdrawn
                continue
            nothing = nothing or not ask.is_served()
            if nothing and ask.until_ns > now_ns:
                ask.prepare()
                self._waiting.append(ask)
            else:
                answered.append(ask)
        return answered

    def _next_ns(self) -> float:
        """When those who wait are to be looked at again, by the clock that is never set."""
        if not self._waiting:
            return float("inf")
        return min(self._owner.next_change_ns(), *(ask.until_ns for ask in self._waiting))
