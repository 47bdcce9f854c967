"""Sets of sequences as spans (ranges that include both ends), and their run lengths in JSON.

In a ledger line, a route's run lengths alternately count other routes' sequences and its own (docs/format.md, "A
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
        return self.overlaps(sequence, sequence)

    def add(self, first: int, last: int) -> None:
        """Add a span and merge adjacent spans. Ignore an empty span."""
        if last < first:
            return
        start = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if start < end:
            first, last = min(first, self._firsts[start]), max(last, self._lasts[end - 1])
        self._firsts[start:end] = [first]
        self._lasts[start:end] = [last]

    def overlaps(self, first: int, last: int) -> bool:
        start = bisect_left(self._lasts, first)
        return first <= last and start < len(self._firsts) and self._firsts[start] <= last

    def covers(self, first: int, last: int) -> bool:
        return not any(self.gaps(first, last))

    def gaps(self, first: int, last: int) -> Iterator[Span]:
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
        """Return the number of members from ``first`` to ``last``."""
        return max(0, last - first + 1) - sum(end - start + 1 for start, end in self.gaps(first, last))


_LIST_MAX = 64
_LEVEL = 9
_NUMBER_BYTES = 8
assert sys.byteorder == "little"  # arrays use memory order


class BadRunLengths(ValueError):
    """The run lengths cannot be decoded."""


def run_lengths(spans: Iterable[Span], first: int) -> list[int]:
    """Return the alternating lengths of gaps and sorted ``spans``, starting at ``first``."""
    lengths, sequence = [], first
    for start, last in spans:
        lengths += [start - sequence, last + 1 - start]
        sequence = last + 1
    return lengths


def spans_of(lengths: Iterable[int], first: int) -> Iterator[Span]:
    """Invert :func:`run_lengths`."""
    numbers, sequence = iter(lengths), first
    for gap, count in zip(numbers, numbers, strict=True):
        yield sequence + gap, sequence + gap + count - 1
        sequence += gap + count


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
                raise BadRunLengths("there are more numbers than records")
            lengths.frombytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit))
        elif isinstance(stored, list):
            lengths.extend(stored)
        else:
            raise BadRunLengths("the run lengths are not a list")
    except (ValueError, TypeError, OverflowError, zstandard.ZstdError) as error:
        raise BadRunLengths(str(error)) from error
    if len(lengths) % 2:
        raise BadRunLengths("the number of run lengths is odd")
    return lengths
