"""Sets of sequences as spans: ranges with both ends included."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]
"""The first and the last sequence of a range."""


class Spans:
    """A set of sequences; iteration yields its spans in order, as few as possible."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in spans:
            self.add(first, last)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._firsts, self._lasts, strict=True)

    def __contains__(self, sequence: int) -> bool:
        return self.meets(sequence, sequence)

    def add(self, first: int, last: int) -> None:
        """Add ``first`` to ``last``; adjacent spans become one. Nothing is added if last < first."""
        if last < first:
            return
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def meets(self, first: int, last: int) -> bool:
        """Return True if any of ``first`` to ``last`` is in the set."""
        begin = bisect_left(self._lasts, first)
        return first <= last and begin < len(self._firsts) and self._firsts[begin] <= last

    def covers(self, first: int, last: int) -> bool:
        """Return True if all of ``first`` to ``last`` are in the set."""
        return not any(self.outside(first, last))

    def outside(self, first: int, last: int) -> Iterator[Span]:
        """Yield the spans of ``first`` to ``last`` that are not in the set."""
        for number in range(bisect_left(self._lasts, first), len(self._firsts)):
            if self._firsts[number] > last:
                break
            if first < self._firsts[number]:
                yield first, self._firsts[number] - 1
            first = self._lasts[number] + 1
        if first <= last:
            yield first, last

    def count(self, first: int, last: int) -> int:
        """Return how many of ``first`` to ``last`` are in the set."""
        return max(0, last - first + 1) - sum(end - begin + 1 for begin, end in self.outside(first, last))
