"""Where a bundle ends: after so many records, or before the record that would make it too large; exactly.

Sizes are those of the content: a line with its newline; of a keyed record value, key and headers, and one byte more.
Nothing here walks over records: a batch is cut where its newlines or its offsets say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from wald.format.records import decode_columns
from wald.reading.assembler import Batch


class Size(Protocol):
    """How much a bundle holds."""

    @property
    def limit(self) -> int: ...

    def of(self, batch: Batch) -> int:
        """What a whole batch adds."""

    def fitting(self, batch: Batch, room: int) -> int:
        """How many of its first records add no more than ``room``."""


@dataclass(frozen=True, slots=True)
class Records:
    """Exactly so many records; the last bundle may have fewer."""

    limit: int

    def of(self, batch: Batch) -> int:
        return batch.count

    def fitting(self, batch: Batch, room: int) -> int:
        return min(batch.count, room)


@dataclass(frozen=True, slots=True)
class Bytes:
    """At most so many bytes, but at least one record."""

    limit: int

    def of(self, batch: Batch) -> int:
        return content_bytes(batch)

    def fitting(self, batch: Batch, room: int) -> int:
        return records_within(batch, room)


class BundleBatches:
    """Batches parted into what each bundle holds; a portion is read to its end before the next is asked for."""

    def __init__(self, batches: Iterable[Batch], size: Size) -> None:
        self._batches = iter(batches)
        self._size = size
        self._ahead = next(self._batches, None)

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        while self._ahead is not None:
            yield self._portion()

    def _portion(self) -> Iterator[Batch]:
        room, begun = self._size.limit, False
        while (batch := self._ahead) is not None:
            count = self._size.fitting(batch, room)
            if not begun:
                count = max(count, 1)
            if count < batch.count:
                head, self._ahead = split(batch, count)
                if head is not None:
                    yield head
                return
            room -= self._size.of(batch)
            begun = True
            self._ahead = next(self._batches, None)
            yield batch


def split(batch: Batch, count: int) -> tuple[Batch | None, Batch | None]:
    """The first ``count`` records, and the others."""
    boundary = batch.first_sequence + count
    return batch.between(batch.first_sequence, boundary - 1), batch.between(boundary, batch.last_sequence)


def content_bytes(batch: Batch) -> int:
    """What all of its records count for."""
    if batch.is_columns:
        return _Offsets(batch).bytes_of(batch.count)
    return len(batch.raw())


def records_within(batch: Batch, room: int) -> int:
    """How many of its first records have together at most ``room`` bytes."""
    if batch.is_columns:
        return bisect_right(range(1, batch.count + 1), room, key=_Offsets(batch).bytes_of)
    if content_bytes(batch) <= room:
        return batch.count
    return bytes(batch.raw()[: max(0, room)]).count(b"\n")


class _Offsets:
    """The variable-size columns of a batch, by where their values end."""

    def __init__(self, batch: Batch) -> None:
        columns = decode_columns(batch.payload)
        self._begin = batch.skipped
        self._ends = [
            column.offsets.cast("i") for column in (columns.values, columns.keys, columns.headers) if column is not None
        ]

    def bytes_of(self, count: int) -> int:
        """Of the first ``count`` records asked for."""
        begin = self._begin
        return count + sum(ends[begin + count] - ends[begin] for ends in self._ends)
