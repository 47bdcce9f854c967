"""Records that a work group has taken in before, by their numbers: the batches that were used last.

Who gets records again from the beginning of a batch soon wants those of the next one. So a thread reads that meanwhile,
and no turn waits for it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Self

from wald.reading.assembler import Batch, Rows
from wald.work.window import Run

_RECORD_BYTES = 64  # besides its value


class Decoded:
    """The records of a batch; None if those of the run are lost.

    Attributes:
        size: in bytes, about.
        is_again: whether it was read again, and the one behind it is not asked for yet.
    """

    __slots__ = ("is_again", "rows", "run", "size")

    def __init__(self, run: Run, rows: Rows | None, size: int, *, is_again: bool = False) -> None:
        self.run = run
        self.rows = rows
        self.size = size
        self.is_again = is_again

    @classmethod
    def of(cls, batch: Batch, *, is_again: bool = False) -> Self:
        run = Run(batch.first_sequence, batch.last_sequence)
        return cls(run, batch.rows(), len(batch.payload) + _RECORD_BYTES * batch.count, is_again=is_again)


class Kept:
    """Batches by their first sequence.

    Args:
        bytes_max: how much to keep; but one batch.
        batches_from: reads from a sequence on.
    """

    def __init__(self, bytes_max: int, batches_from: Callable[[int], Iterator[Batch]]) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: OrderedDict[int, Decoded] = OrderedDict()
        self._firsts: list[int] = []
        self._changing = threading.Lock()
        self._batches_from = batches_from
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, batch: Decoded) -> None:
        """Keep a batch, and no longer those that were used least lately."""
        first = batch.run.first
        with self._changing:
            if first in self._batches:
                self._remove(first)
            self._batches[first] = batch
            insort(self._firsts, first)
            self._bytes += batch.size
            while self._bytes > self._bytes_max and len(self._batches) > 1:
                self._remove(next(iter(self._batches)))

    def rows(self, first: int, taken_end: int) -> Rows | None:
        """The batch with the record ``first``; None if that is not kept.

        Args:
            taken_end: the first sequence that was not taken in before.
        """
        with self._changing:
            place = bisect_right(self._firsts, first) - 1
            if place < 0:
                return None
            base = self._firsts[place]
            self._batches.move_to_end(base)
            batch = self._batches[base]
        if first > batch.run.last:
            return None
        if batch.is_again:
            batch.is_again = False
            if batch.run.last + 1 < taken_end:
                self._ask(batch.run.last + 1)
        return batch.rows

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()

    def _ask(self, first: int) -> None:
        """Have the batch read that has ``first``, or begins behind it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="wald-work-again", daemon=True)
            self._thread.start()
        self._asked.put(first)

    def _read(self) -> None:
        while (first := self._asked.get()) is not None:
            with suppress(Exception):  # who wants these records gets the error, as they are read once more
                for batch in self._batches_from(first):
                    self.add(Decoded.of(batch, is_again=True))
                    break

    def _remove(self, first: int) -> None:
        self._bytes -= self._batches.pop(first).size
        self._firsts.remove(first)
