"""What a thread asks of the owner of a work group, and how it waits for the answer.

Threads that are answered together go on one after the other: each wakes the next one. As one thread of Python runs at a
time, all at once would stand in each other's way; that took 2.5 times as many context switches. A thread that may be
interrupted is woken by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from wald.errors import WaldError
from wald.work.claims import Named
from wald.work.deliveries import Refusal
from wald.work.sharing import Share, Wanted

T = TypeVar("T")
Make = Callable[[Sequence[Share], Sequence[Refusal]], T]


class Inbox(Protocol):
    """Takes answers for those who ask without a thread that waits."""

    def put(self, asks: Sequence[Ask[Any]]) -> None:
        """Take in asks that are answered; called by any thread."""

    def foretell(self, asks: Sequence[LeaseAsk[Any]]) -> None:
        """Take in leases that are answered once the disk has them; called by any thread."""


class Ask(Generic[T]):
    """Something that a thread asks for.

    Args:
        carry_out: what is to be done in a turn.
        durable: whether the answer waits until what was written is on disk.

    Attributes:
        result: the answer.
        error: what is raised instead.
        named: who acknowledges which records; a turn does that first, for all who ask.
        is_alone: whether its thread wakes no other one.
        inbox: where the answer goes, if no thread waits for it.
        lock: held until the thread may go on.
        then: what is called by its thread then: it wakes the next one.
    """

    __slots__ = ("_what", "durable", "error", "inbox", "is_alone", "is_answered", "lock", "named", "result", "then")
    result: T

    def __init__(self, carry_out: Callable[[], T] | None = None, *, durable: bool = False) -> None:
        self._what = carry_out
        self.error: BaseException | None = None
        self.named: Named = "", ()
        self.then: Callable[[], object] | None = None
        self.lock = threading.Lock()
        self.lock.acquire()
        self.durable = durable
        self.is_alone = False
        self.inbox: Inbox | None = None
        self.is_answered = False

    def carry_out(self) -> None:
        """Do it, if the turn does not do it for several at once; that something cannot be read is an answer, too."""
        if self._what is not None:
            try:
                self.result = self._what()
            except (WaldError, OSError) as error:
                self.error = error

    def fail(self, error: BaseException | None) -> None:
        """Answer with an error; or without, by what it has by now."""
        self.error = self.error or error
        answer([self])

    def wait(self, seconds: float = -1) -> bool:
        """Return once there is an answer; False if there was none within so many seconds."""
        if not self.lock.acquire(timeout=seconds):
            return False
        if self.then is not None:
            self.then()
        return True

    def answer(self) -> T:
        """The answer, or the error."""
        if self.error is not None:
            raise self.error
        return self.result


class AckAsk(Ask[list[Refusal]]):
    """An acknowledgement, which a turn carries out with all others.

    Args:
        named: who acknowledges which records.
    """

    __slots__ = ()

    def __init__(self, named: Named) -> None:
        super().__init__(durable=True)
        self.result = []
        self.named = named


class LeaseAsk(Ask[T]):
    """A lease. While there is nothing to lease, it waits until ``until_ns`` of the clock that is never set.

    Args:
        named: who acknowledges which records before; that is on disk when it is answered.
        make: makes the answer of what was leased, and of the records for which the acknowledgement did not count.

    Attributes:
        refused: those.
    """

    __slots__ = ("_make", "refused", "until_ns", "wanted")

    def __init__(self, wanted: Wanted, named: Named, make: Make[T], *, until_ns: int) -> None:
        super().__init__(durable=bool(named[1]))
        self._make: Make[T] | None = make
        self.wanted = wanted
        self.named = named
        self.refused: Sequence[Refusal] = ()
        self.until_ns = until_ns

    @property
    def is_served(self) -> bool:
        """Whether there was something, or an error."""
        return bool(self.wanted.got) or self.error is not None

    def look(self) -> None:
        """Take in what it has got."""
        if not self.wanted.got:
            self.error = self.wanted.error
        elif not self.durable:  # so that the number of tries never goes down
            self.durable = any(max(tries) > 1 for _, tries in self.wanted.got)

    def prepare(self) -> None:
        """Make the answer, if that is not done yet; by the thread that gets it, so that no turn waits for it."""
        if self._make is not None and self.error is None:
            make, self._make = self._make, None
            try:
                self.result = make(self.wanted.got, self.refused)
            except Exception as error:  # noqa: BLE001 - who asks gets it
                self.error = error

    def answer(self) -> T:
        self.prepare()
        return super().answer()


def answer(asks: Iterable[Ask[Any]], then: Callable[[], object] | None = None) -> bool:
    """Let those go on who have asked; whether threads do, one after the other, the last of which calls ``then``."""
    first = before = None
    elsewhere: dict[Inbox, list[Ask[Any]]] = {}
    for ask in asks:
        ask.is_answered = True
        if ask.inbox is not None:
            elsewhere.setdefault(ask.inbox, []).append(ask)
            continue
        if ask.is_alone:
            ask.lock.release()
            continue
        if before is None:
            first = ask
        else:
            before.then = ask.lock.release
        before = ask
    for inbox, some in elsewhere.items():
        inbox.put(some)
    if first is None or before is None:
        return False
    before.then = then
    first.lock.release()
    return True


def foretell(asks: Iterable[Ask[Any]]) -> None:
    """Have answers prepared that are given once the disk has what was written, where no thread waits for them."""
    elsewhere: dict[Inbox, list[LeaseAsk[Any]]] = {}
    for ask in asks:
        if ask.inbox is not None and isinstance(ask, LeaseAsk):
            elsewhere.setdefault(ask.inbox, []).append(ask)
    for inbox, some in elsewhere.items():
        inbox.foretell(some)
