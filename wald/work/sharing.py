"""What each of the workers that wait gets of the records that come next, in the order in which they have asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from wald.format.records import Record
from wald.reading.assembler import Rows
from wald.work.deliveries import Refusal
from wald.work.terms import Delivery
from wald.work.window import Run

_DELIVERY: Callable[[tuple[Record, int]], Delivery] = partial(tuple.__new__, Delivery)  # in half the time of Delivery()


Share = tuple[Iterable[Record], bytes]
"""Records that a consumer has got, to be gone through once, and how often each was delivered, this time included."""


class Leased(list[Delivery]):
    """What a consumer has got.

    Attributes:
        refused: of what it has said to be done, the records for which that did not count.
    """

    __slots__ = ("refused",)

    def __init__(self, shares: Iterable[Share], refused: Sequence[Refusal]) -> None:
        for records, tries in shares:
            self += map(_DELIVERY, zip(records, tries, strict=True))
        self.refused = refused


class Wanted:
    """What one consumer waits for, and what it has got.

    Attributes:
        records_max: how many records it still takes; bytes_max: of their values, but for the first record it gets.
        lease_ns: for how long it has them.
        got: what it has by now, and runs: which records those are.
        error: why it got nothing.
    """

    __slots__ = ("bytes_max", "consumer", "error", "got", "lease_ns", "records_max", "runs")

    def __init__(self, consumer: str, records_max: int, bytes_max: int, lease_ns: int) -> None:
        self.consumer = consumer
        self.records_max = records_max
        self.bytes_max = bytes_max
        self.lease_ns = lease_ns
        self.got: list[Share] = []
        self.runs: list[tuple[int, int]] = []
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether it gets no more."""
        return not (self.records_max and self.bytes_max)

    def reserve(self, values: Sequence[bytes], start: int) -> int:
        """Count what it gets of the records with these values from ``start`` on; how many records that is."""
        lengths = list(map(len, values[start : start + self.records_max]))
        count, size = len(lengths), sum(lengths)
        if size >= self.bytes_max:
            count = max(sum(size <= self.bytes_max for size in accumulate(lengths)), 0 if self.got else 1)
            size = self.bytes_max
        self.records_max -= count
        self.bytes_max -= size
        return count

    def take(self, run: tuple[int, int], records: Iterable[Record], tries: bytes) -> None:
        """Take records that were delivered to it."""
        self.got.append((records, tries))
        self.runs.append(run)


def share(values: Sequence[bytes], wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, int]]:
    """Who gets how many of the records with these values, which follow each other, until there are no more of them."""
    at = 0
    for each in wanted:
        if at == len(values):
            return
        if count := each.reserve(values, at):
            at += count
            yield each, count


def hand_out(rows: Rows, run: Run, tries: bytes, shares: Sequence[tuple[Wanted, int]]) -> None:
    """Give each its share of a run of records, which were delivered so often.

    One that gets all of them makes them itself, later; for several it takes less time to make all at once.
    """
    records = rows.records(*run)
    if len(shares) == 1:
        shares[0][0].take(run, records, tries)
        return
    every, at = list(records), 0
    for each, count in shares:
        first = run.first + at
        each.take((first, first + count - 1), every[at : at + count], tries[at : at + count])
        at += count
