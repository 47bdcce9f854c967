"""A set of sequences as runs, as few as there can be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Spans:
    """The runs (first, last) of a set of sequences, by number."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def add(self, first: int, last: int) -> None:
        """Add ``first`` to ``last``; runs that meet become one."""
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def meets(self, first: int, last: int) -> bool:
        """Whether any of ``first`` to ``last`` is in it."""
        begin = bisect_left(self._lasts, first)
        return begin < len(self._firsts) and self._firsts[begin] <= last

    def covers(self, first: int, last: int) -> bool:
        """Whether all of ``first`` to ``last`` are in it."""
        return not any(self.outside(first, last))

    def outside(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs of ``first`` to ``last`` that are not in it."""
        for number in range(bisect_left(self._lasts, first), len(self._firsts)):
            if self._firsts[number] > last:
                break
            if first < self._firsts[number]:
                yield first, self._firsts[number] - 1
            first = self._lasts[number] + 1
        if first <= last:
            yield first, last
