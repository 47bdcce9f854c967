"""What a thread asks of the owner of a work group, and how it waits for the answer.

Threads that are answered together go on one after the other: each wakes the next one. As one thread of Python runs at a
time, all at once would stand in each other's way; that took 2.5 times as many context switches. A thread that may be
interrupted is woken by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from wald.errors import WaldError
from wald.work.terms import Delivery

T = TypeVar("T")


class Ask(Generic[T]):
    """Something that a thread asks for.

    Args:
        carry_out: what is to be done in a turn.
        durable: whether the answer waits until what was written is on disk.

    Attributes:
        is_alone: whether its thread wakes no other one.
        lock: held until the thread may go on.
        next: the one whose thread it then wakes.
    """

    __slots__ = ("_error", "_result", "_what", "durable", "is_alone", "is_answered", "lock", "next")

    def __init__(self, carry_out: Callable[[], T], *, durable: bool = False) -> None:
        self._what = carry_out
        self._result: T | None = None
        self._error: BaseException | None = None
        self.next: Ask[Any] | None = None
        self.lock = threading.Lock()
        self.lock.acquire()
        self.durable = durable
        self.is_alone = False
        self.is_answered = False

    def carry_out(self) -> None:
        """Do it; that something cannot be read is an answer, too."""
        try:
            self._result = self._what()
        except (WaldError, OSError) as error:
            self._error = error

    def fail(self, error: BaseException | None) -> None:
        """Answer with an error; or without, by what it has by now."""
        self._error = self._error or error
        answer([self])

    def wait(self, seconds: float = -1) -> bool:
        """Return once there is an answer; False if there was none within so many seconds."""
        if not self.lock.acquire(timeout=seconds):
            return False
        if self.next is not None:
            self.next.lock.release()
        return True

    def answer(self) -> T:
        """The answer, or the error."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # it was carried out


class LeaseAsk(Ask[list[Delivery]]):
    """A lease. While there is nothing to lease, it waits until ``until_ns`` of the clock that is never set.

    Args:
        before: what is to be done before that, and on disk when it is answered.
    """

    __slots__ = ("_before", "until_ns")

    def __init__(
        self,
        carry_out: Callable[[], list[Delivery]],
        *,
        until_ns: int,
        before: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(carry_out, durable=before is not None)
        self._result = []
        self._before = before
        self.until_ns = until_ns

    def prepare(self) -> None:
        """Do what is to be done before."""
        if self._before is not None:
            self._before()

    def is_served(self) -> bool:
        """Try to lease; whether there was something, or an error."""
        self.carry_out()
        if any(delivery.tries > 1 for delivery in self._result or ()):
            self.durable = True  # so that the number of tries never goes down
        return bool(self._result) or self._error is not None


def answer(asks: Iterable[Ask[Any]]) -> None:
    """Let the threads go on that have asked."""
    first = before = None
    for ask in asks:
        ask.is_answered = True
        if ask.is_alone:
            ask.lock.release()
            continue
        if before is None:
            first = ask
        else:
            before.next = ask
        before = ask
    if first is not None:
        first.lock.release()
