"""The leases of a work group: who has each, until when, and how many records are out by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

_TICK_NS = 100_000_000  # leases of one consumer that begin in one tick and end in one are one lease
_NUMBERS = (1 << 32) - 1
_KEPT = 1000  # by which nothing is out any more


@dataclass(slots=True)
class Lease:
    """What one consumer was given.

    Attributes:
        since_ns, until_ns: of a clock that is never set; each is the end of a tick.
        left: how many records are still out by it.
    """

    consumer: str
    since_ns: int
    until_ns: int
    left: int = 0


class Leases:
    """Leases, by their numbers."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._shared: dict[tuple[str, int, int], int] = {}  # the lease of a consumer, by its ticks
        self._ends: list[tuple[int, int]] = []  # a heap: when each lease ends
        self._max = _KEPT
        self._number = 0

    def __getitem__(self, number: int) -> Lease:
        return self._leases[number]

    def __iter__(self) -> Iterator[tuple[int, Lease]]:
        return iter(self._leases.items())

    @property
    def next_end_ns(self) -> int | None:
        """When the next lease ends."""
        return self._ends[0][0] if self._ends else None

    def number(self, consumer: str, now_ns: int, until_ns: int) -> int:
        """The number of a lease of ``consumer`` that ends at ``until_ns`` or hardly later."""
        since, until = -(-now_ns // _TICK_NS) * _TICK_NS, -(-until_ns // _TICK_NS) * _TICK_NS
        number = self._shared.get((consumer, since, until))
        if number is None:
            if len(self._leases) >= self._max:
                self._forget()
            self._number = number = self._number % _NUMBERS + 1
            self._shared[consumer, since, until] = number
            self._leases[number] = Lease(consumer, since, until)
            heappush(self._ends, (until, number))
        return number

    def over(self, now_ns: int) -> list[int]:
        """The numbers of those that end by now, which are to be dropped."""
        over = []
        while self._ends and self._ends[0][0] <= now_ns:
            over.append(heappop(self._ends)[1])
        return over

    def drop(self, number: int) -> None:
        """Forget one that is over, by which nothing is out."""
        lease = self._leases.pop(number)
        del self._shared[lease.consumer, lease.since_ns, lease.until_ns]

    def _forget(self) -> None:
        """Forget leases by which nothing is out any more, long before they end."""
        self._leases = {number: lease for number, lease in self._leases.items() if lease.left}
        self._shared = {(each.consumer, each.since_ns, each.until_ns): n for n, each in self._leases.items()}
        self._ends = sorted((lease.until_ns, number) for number, lease in self._leases.items())
        self._max = _KEPT + 2 * len(self._leases)
