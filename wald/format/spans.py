"""Sets of sequences as spans (ranges that include both ends), and their run lengths in JSON.

In a ledger line, a route's run lengths alternate between other routes' sequences and its own (docs/format.md, "A
ledger").
"""

from __future__ import annotations

import base64
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import zstandard

Span = tuple[int, int]  # first and last sequence


class Spans:
    """A set of sequences. Iteration yields its maximal spans in order."""

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
        """Add a span, and merge adjacent spans. Ignore an empty span."""
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


_LIST_MAX = 64
_LEVEL = 9
_NUMBER_BYTES = 8
assert sys.byteorder == "little"  # arrays use memory order


class BadRunLengths(ValueError):
    """The run lengths do not decode."""


def run_lengths(spans: Iterable[Span], first: int) -> list[int]:
    """Return the alternating lengths of gaps and sorted ``spans``, starting at ``first``."""
    lengths, at = [], first
    for begin, last in spans:
        lengths += [begin - at, last + 1 - begin]
        at = last + 1
    return lengths


def spans_of(lengths: Iterable[int], first: int) -> Iterator[Span]:
    """Invert :func:`run_lengths`."""
    numbers, at = iter(lengths), first
    for gap, count in zip(numbers, numbers, strict=True):
        yield at + gap, at + gap + count - 1
        at += gap + count


def pack(lengths: Sequence[int]) -> list[int] | str:
    """Return run lengths for JSON, compressed if there are many."""
    if len(lengths) <= _LIST_MAX:
        return list(lengths)
    return base64.b64encode(zstandard.ZstdCompressor(level=_LEVEL).compress(array("Q", lengths).tobytes())).decode()


def unpack(stored: object, records: int) -> array[int]:
    """Invert :func:`pack`. The number of ``records`` covered limits the decompressed size."""
    lengths: array[int] = array("Q")
    try:
        if isinstance(stored, str):
            limit = 2 * _NUMBER_BYTES * max(1, records)
            frame = base64.b64decode(stored, validate=True)
            if zstandard.frame_content_size(frame) > limit:
                raise BadRunLengths("more numbers than records")
            lengths.frombytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit))
        elif isinstance(stored, list):
            lengths.extend(stored)
        else:
            raise BadRunLengths("not a list of numbers")
    except (ValueError, TypeError, OverflowError, zstandard.ZstdError) as error:
        raise BadRunLengths(str(error)) from error
    if len(lengths) % 2:
        raise BadRunLengths("an odd number of numbers")
    return lengths
