"""Finding the next batch behind damage in a raw segment, by nothing that a payload can imitate.

A payload may hold whole batches with valid checksums, because every program that can read the segment can learn its
salt. So a batch is not believed because its checksums hold. Batches are found from an anchor: a position given by the
sparse index, by the head, or by the end of the data. From there the trailers lead backwards to the damage. If trailers
are damaged, too, the bytes between are searched for headers, and only a chain of headers is believed that ends exactly
where the trailers have led to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

from wald.format.batch import ALIGNMENT, HEADER, MAGIC, TRAILER, begin_of, decode_header, padded, seed
from wald.format.index import INTERVAL_BYTES, SparseIndex

_BACKWARDS_BYTES = 64 << 10  # read at once on the way back


class Resync:
    """
    Args:
        read: gives the bytes of the segment: (offset, length) → bytes, fewer only at its end.
        salt: of the segment.
        ends: places where batches end if anything does: the head, the end of the data.
        index: the sparse index, as far as there is one; it is believed where it agrees with the segment.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], salt: int, *, ends: Iterable[int], index: SparseIndex | None
    ) -> None:
        self._read = read
        self._salt = salt
        self._window, self._window_offset = b"", 0
        self._anchors = sorted({*self._agreeing(index or SparseIndex()), *filter(self._begin, ends)})

    def behind(self, position: int) -> int | None:
        """The first place behind ``position``, where there is damage, at which a batch ended; None if none is known."""
        number = bisect_right(self._anchors, position)
        if number == len(self._anchors):
            return None
        end = marked = self._anchors[number]
        while begin := self._begin(end):
            if begin <= position:
                return end
            end = begin
            if marked - end >= INTERVAL_BYTES:  # the next damage on this way need not be reached from as far
                insort(self._anchors, end)
                marked = end
        return self._chain(position, end)

    def _begin(self, end: int) -> int | None:
        """Where the batch begins that ends at ``end``; None if its trailer is damaged."""
        offset = end - TRAILER.size
        inside = offset - self._window_offset
        if not 0 <= inside <= len(self._window) - TRAILER.size:
            self._window_offset = max(0, end - _BACKWARDS_BYTES)
            self._window = self._read(self._window_offset, end - self._window_offset)
            inside = offset - self._window_offset
        return begin_of(self._window[max(0, inside) : inside + TRAILER.size], end, self._salt)

    def _agreeing(self, index: SparseIndex) -> Iterator[int]:
        """The positions in the index at which such a batch begins as it says."""
        entries = zip(index.sequences, index.positions, index.times_ns, strict=True)
        for sequence, position, time_ns in entries:
            header = decode_header(self._read(position, HEADER.size), 0, seed(self._salt, position))
            if header is not None and (header.base_sequence, header.append_time_ns) == (sequence, time_ns):
                yield position

    def _chain(self, position: int, end: int) -> int:
        """The first header behind ``position`` from which headers lead to ``end`` exactly; ``end`` if none does."""
        leads_nowhere: set[int] = set()
        for candidate in self._headers(position + ALIGNMENT, end):
            at, met = candidate, set[int]()
            while at < end and at not in leads_nowhere:
                met.add(at)
                header = decode_header(self._read(at, HEADER.size), 0, seed(self._salt, at))
                if header is None:
                    break
                at += header.total_bytes
            if at == end:
                return candidate
            leads_nowhere |= met
        return end

    def _headers(self, start: int, end: int) -> Iterator[int]:
        """Every position of a valid header of a batch that lies between ``start`` and ``end``."""
        offset = padded(start)
        while offset + HEADER.size <= end:
            window = self._read(offset, min(1 << 20, end - offset))
            at = window.find(MAGIC)
            while at >= 0:
                position = offset + at
                header = decode_header(window, at, seed(self._salt, position)) if not at % ALIGNMENT else None
                if header is not None and position + header.total_bytes <= end:
                    yield position
                at = window.find(MAGIC, at + 1)
            # The next window begins with the first place at which this one does not hold a whole header.
            offset += max(ALIGNMENT, len(window) - HEADER.size + ALIGNMENT & -ALIGNMENT)
