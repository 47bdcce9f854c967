"""The records of a route for a work group: in order, by a thread that reads ahead; and again, by their numbers."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence

from wald.errors import WaldError
from wald.format.record import Record
from wald.log import Log
from wald.store.reading.batches import Batch

_AHEAD_BYTES = 4 << 20
_KEPT_BYTES = 16 << 20


class Source:
    """Reads ``route`` from ``start`` on.

    Args:
        arrived: notified when there is more, or when reading has failed. The caller of a method holds it.
    """

    def __init__(self, log: Log, route: str, start: int, arrived: threading.Condition) -> None:
        self._log = log
        self._route = route
        self._arrived = arrived
        self._ahead: deque[Batch] = deque()
        self._ahead_bytes = 0
        self._failed: Exception | None = None
        self._kept = _Kept(_KEPT_BYTES)
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(start,), name=f"wald-work-{route}", daemon=True)
        self._thread.start()

    def next(self) -> Batch | None:
        """The batch that is next in the order of the log; None if there is none yet.

        Raises:
            WaldError, OSError: reading has failed, after all batches before that place were given out.
        """
        if not self._ahead:
            if self._failed is not None:
                raise self._failed
            return None
        return self._ahead[0]

    def take(self) -> None:
        """Go on behind the batch that is next."""
        batch = self._ahead.popleft()
        self._ahead_bytes -= len(batch.payload)
        self._kept.add(batch)
        self._arrived.notify_all()

    def records(self, first: int, last: int) -> Sequence[Record]:
        """Records that were taken before, from ``first`` on, at most up to ``last``.

        Raises:
            NotFound, Damaged: they cannot be read any more.
        """
        records = self._kept.records(first, last)
        if not records:
            for batch in self._log.batches(self._route, first, last):
                self._kept.add(batch)
                return self._kept.records(first, last)
        return records

    def close(self) -> None:
        """End the thread."""
        self._cancel.set()
        with self._arrived:
            self._arrived.notify_all()
        self._thread.join()

    def _read(self, start: int) -> None:
        try:
            for batch in self._log.batches(self._route, start, follow=True, cancel=self._cancel):
                with self._arrived:
                    self._ahead.append(batch)
                    self._ahead_bytes += len(batch.payload)
                    self._arrived.notify_all()
                    while self._ahead_bytes > _AHEAD_BYTES and not self._cancel.is_set():
                        self._arrived.wait()
                if self._cancel.is_set():
                    return
        except (WaldError, OSError) as error:
            with self._arrived:
                self._failed = error
                self._arrived.notify_all()


class _Kept:
    """The batches that were used last, decoded, by their first sequence."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: OrderedDict[int, tuple[int, list[Record]]] = OrderedDict()
        self._firsts: list[int] = []

    def add(self, batch: Batch) -> None:
        if batch.first_sequence in self._batches:
            self._remove(batch.first_sequence)
        records = list(batch.records())
        size = len(batch.payload) + 256 * len(records)
        self._batches[batch.first_sequence] = size, records
        insort(self._firsts, batch.first_sequence)
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._batches) > 1:
            self._remove(next(iter(self._batches)))

    def records(self, first: int, last: int) -> Sequence[Record]:
        place = bisect_right(self._firsts, first) - 1
        if place < 0:
            return ()
        base = self._firsts[place]
        self._batches.move_to_end(base)
        return self._batches[base][1][first - base : last - base + 1]

    def _remove(self, first: int) -> None:
        size, _ = self._batches.pop(first)
        self._bytes -= size
        self._firsts.remove(first)
