"""Turns: one thread at a time carries out what all of them ask for, with one write and one sync for all.

    asked ─▶ settled (ack, nack, …) ─▶ leased ─▶ written ─▶ answered ─▶ synced ─▶ answered what has to be on disk

A thread that asks while no turn is under way carries out one itself. What is asked meanwhile is left to a thread that
is there for it, so that no worker works for others for long. That thread also ends leases when their time has come.

While the threads that were answered go on, one after the other, no turn begins, unless a time has come: most of them
ask again at once, and then one turn and one sync are for all.

After a failed write or sync the contents of the disk are unknown, so no further request is executed. The same holds
once another log, an older copy of the log, or another journal is at the path: the next owner reads that one. A log that
is gone may return, for example with a mount: its requests fail, and each turn checks again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from wald.errors import Gone, Replaced
from wald.work.asks import AckAsk, Ask, LeaseAsk, answer, foretell
from wald.work.journal import Journal
from wald.work.owner import Owner

T = TypeVar("T")
_NS = 1_000_000_000
_START_NS = 5 * _NS
_ALIVE_SECONDS = 1.0
_LOOK_SECONDS = 60.0  # longer waits are in several parts


class Turns:
    """The turns of ``owner``, which ``journal`` makes durable.

    Args:
        require: raises an error if the journal no longer belongs to the log at the path; called in each turn.
        wake: gets anything when there may be something to lease. A queue, as Ctrl-C may leave an event locked.
    """

    def __init__(
        self,
        owner: Owner,
        journal: Journal,
        wake: SimpleQueue[None],
        *,
        require: Callable[[], None],
        name: str,
    ) -> None:
        self._owner = owner
        self._require = require
        self._journal = journal
        self._asked: deque[Ask[Any]] = deque()
        self._waiting: deque[LeaseAsk[Any]] = deque()  # in the order in which they have come
        self._turn = threading.Lock()  # held while one is carried out
        self._chains: deque[None] = deque()  # of threads that go on, one after the other
        self._wake = wake
        self._wakes_ns = float("inf")
        self._failed: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"wald-work-turns-{name}", daemon=True)
        self._thread.start()

    def ask(self, ask: Ask[T]) -> T:
        """Carry ``ask`` out, and return its answer.

        Raises:
            OSError: the journal cannot be written, now or earlier.
            Replaced: the path has, or had, another log or an older copy.
            ValueError: the group is closed.
        """
        if threading.current_thread() is threading.main_thread():
            self._ask_interruptibly(ask)
        else:
            self._asked.append(ask)
            self._try_turn(ask)
            ask.wait()
        return ask.answer()

    @property
    def has_failed(self) -> bool:
        """Whether nothing is carried out any more."""
        return self._failed is not None

    def send(self, asks: Sequence[Ask[Any]]) -> None:
        """Have asks carried out by the thread that is there for it; the answers go where each ask says."""
        self._asked.extend(asks)
        self._wake.put(None)
        if self._closed:
            self._try_turn()

    def withdrawal(self, ask: LeaseAsk[Any]) -> Ask[None]:
        """What ends a lease that is not waited for any more, so that no record goes where it is not seen."""
        withdrawal = Ask(lambda: self._withdraw(ask))
        withdrawal.is_alone = True  # no thread waits for its answer, so none would wake the next one
        return withdrawal

    def close(self) -> None:
        """End. Threads that wait for a record get none."""
        self._closed = True
        self._wake.put(None)
        self._thread.join()

    def _ask_interruptibly(self, ask: Ask[Any]) -> None:
        """Ask from the thread that Ctrl-C may interrupt anywhere: it carries out no turn, and wakes no other thread."""
        ask.is_alone = True
        try:
            self._asked.append(ask)
            self._wake.put(None)
            while True:
                if not self._thread.is_alive():  # the group was closed
                    self._try_turn()
                if ask.wait(_ALIVE_SECONDS):
                    return
        except BaseException:
            if isinstance(ask, LeaseAsk):
                self.send([self.withdrawal(ask)])
            raise

    def _withdraw(self, ask: LeaseAsk[Any]) -> None:
        if ask in self._waiting:
            self._waiting.remove(ask)
        elif runs := ask.wanted.runs:
            sequences = [sequence for first, last in runs for sequence in range(first, last + 1)]
            self._owner.give_back(ask.wanted.consumer, sequences, 0, "", 0)

    def _try_turn(self, ask: Ask[Any] | None = None) -> None:
        """Carry out a turn, if none is under way; what is asked during it is left to the thread that is there for it.

        Args:
            ask: that of this thread, which is busy until the end of the turn.
        """
        if self._chains and not self._closed:  # more will ask; its last thread sees to it
            return
        if self._turn.acquire(blocking=self._closed):  # the last turn of that thread may be under way
            try:
                self._carry_out(ask)
                more = self._next_ns() < self._wakes_ns
            finally:
                self._turn.release()
            if more or (self._asked and not self._chains):
                self._wake.put(None)
                if self._closed:  # that thread has ended
                    self._try_turn()

    def _run(self) -> None:
        seconds: float | None = None
        while not self._closed:
            self._sleep(seconds)
            with self._turn:
                self._carry_out()
                while self._asked and not self._chains:
                    self._carry_out()
                self._wakes_ns = self._next_ns()
            never = self._wakes_ns == float("inf")
            left_ns = 0 if never else self._wakes_ns - self._owner.clock.monotonic_ns()
            seconds = None if never else min(max(0.0, left_ns / _NS), _LOOK_SECONDS)
            if self._asked and not self._chains:
                self._wake.put(None)
        with self._turn:  # so that the last one is over
            self._carry_out()

    def _sleep(self, seconds: float | None) -> None:
        with suppress(Empty):
            self._wake.get(timeout=seconds)
            while True:
                self._wake.get_nowait()

    def _carry_out(self, own: Ask[Any] | None = None) -> None:
        """One turn."""
        asks = [self._asked.popleft() for _ in range(len(self._asked))]
        waiting = list(self._waiting)  # also those that get something now, which fails if it cannot be written
        try:
            if self._failed is not None:
                raise _again(self._failed)
            if self._closed:
                self._journal.sync()  # for what was done before those leases that wait
                raise ValueError("the work group is closed")
            with suppress(OSError):  # a failure to open files does not prove another log
                self._require()
                self._journal.require_place()
            self._settle(asks, own)
        except Exception as error:  # noqa: BLE001 - each thread that asks gets it
            if not self._closed and self._failed is None and not isinstance(error, Gone):
                self._failed = error
            for ask in asks:
                if not ask.is_answered:
                    ask.fail(_again(error))
            for ask in waiting:
                if not ask.is_answered:
                    ask.fail(None if self._closed else _again(error))  # if the group was closed: with nothing
            self._waiting.clear()

    def _settle(self, asks: Sequence[Ask[Any]], own: Ask[Any] | None) -> None:
        self._owner.begin()
        settled: list[Ask[Any]] = []
        self._acknowledge([ask for ask in asks if ask.named[1]])
        for ask in asks:
            if isinstance(ask, LeaseAsk):
                self._waiting.append(ask)
            else:
                ask.carry_out()
                settled.append(ask)
        settled += self._lease()
        settled.sort(key=lambda ask: ask is own)  # its thread wakes no other one before the end
        self._journal.append(self._owner.taken_lines())
        if self._journal.has_grown:
            self._journal.rewrite(self._owner.snapshot())
        self._answer(ask for ask in settled if not ask.durable)
        if any(ask.durable for ask in (*settled, *self._waiting)):
            foretell(ask for ask in settled if ask.durable)
            self._journal.sync()
            self._answer(ask for ask in settled if ask.durable)

    def _answer(self, asks: Iterable[Ask[Any]]) -> None:
        """Let those go on who have asked."""
        self._chains.append(None)
        if not answer(asks, self._end_chain):
            self._chains.pop()

    def _end_chain(self) -> None:
        """Called by the last thread of a chain, when it goes on."""
        self._chains.pop()
        if self._asked:
            self._wake.put(None)

    def _acknowledge(self, asks: Sequence[Ask[Any]]) -> None:
        """Carry out all acknowledgements at once."""
        for ask, refused in zip(asks, self._owner.finish([ask.named for ask in asks]), strict=True):
            if isinstance(ask, AckAsk):
                ask.result = refused
            elif isinstance(ask, LeaseAsk):
                ask.refused = refused

    def _lease(self) -> list[LeaseAsk[Any]]:
        """The leases among those that wait that have an answer now."""
        self._owner.lease([ask.wanted for ask in self._waiting])
        now_ns = self._owner.clock.monotonic_ns()
        answered = []
        for _ in range(len(self._waiting)):
            ask = self._waiting.popleft()
            ask.look()
            if ask.is_served or self._patience_ns(ask) <= now_ns:
                answered.append(ask)
            else:
                self._waiting.append(ask)
        return answered

    def _next_ns(self) -> float:
        """When those who wait are to be looked at again, by the clock that is never set."""
        if not self._waiting:
            return float("inf")
        return min(self._owner.next_change_ns(), *map(self._patience_ns, self._waiting))

    def _patience_ns(self, ask: LeaseAsk[Any]) -> int:
        """Until when a lease waits: at a start it may take a moment until what is there was read."""
        return ask.until_ns if self._owner.has_read else ask.until_ns + _START_NS


def _again(error: Exception) -> Exception:
    """The same for another thread; raised again and again, one error would keep the frames of all of them."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    if isinstance(error, Replaced):
        return type(error)(error.message, hint=error.hint)
    return (
        ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"the work group failed: {error!r}")
    )
