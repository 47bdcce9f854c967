"""Records of a route for a work group: read ahead in order by a thread, or reread by sequence.

A cache keeps the batches that were used last. Records are usually read again in order, so some batches after the
requested one are read, too. No file stays open for this, because it might keep the space of a deleted segment in use.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from wald.errors import Damaged, WaldError
from wald.hints import command_line
from wald.log import Log
from wald.reading.assembler import Batch, Rows
from wald.retention.history import History
from wald.retention.missing import Missing
from wald.work.window import Run

_AHEAD_BYTES = 4 << 20
_CACHE_BYTES = 8 << 20
_AGAIN_BYTES = 1 << 20  # read at once
_AGAIN_DISTANCE = 8 << 20  # of the log, because a route may have few records in it
_RECORD_BYTES = 64  # memory per record in addition to its value


class Lost(Exception):
    """Records that were read before and no longer exist: a repair gave them up, or the log is an older copy."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run


class CachedBatch(NamedTuple):
    """Cached batch; its records are None if they are lost."""

    run: Run
    rows: Rows | None
    size: int

    @classmethod
    def of(cls, batch: Batch) -> CachedBatch:
        run = Run(batch.first_sequence, batch.last_sequence)
        return cls(run, batch.rows(), len(batch.payload) + _RECORD_BYTES * batch.count)


class BatchCache:
    """Least recently used cache of batches, bounded by ``bytes_max`` unless a single batch is larger."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: OrderedDict[int, CachedBatch] = OrderedDict()
        self._firsts: list[int] = []

    def add(self, batch: CachedBatch) -> None:
        first = batch.run.first
        if first in self._batches:
            self._evict(first)
        self._batches[first] = batch
        insort(self._firsts, first)
        self._bytes += batch.size
        while self._bytes > self._bytes_max and len(self._batches) > 1:
            self._evict(next(iter(self._batches)))

    def rows(self, sequence: int) -> Rows | None:
        if not (place := bisect_right(self._firsts, sequence)):
            return None
        first = self._firsts[place - 1]
        batch = self._batches[first]
        if sequence > batch.run.last:
            return None
        self._batches.move_to_end(first)
        return batch.rows

    def _evict(self, first: int) -> None:
        self._bytes -= self._batches.pop(first).size
        self._firsts.remove(first)


@dataclass(eq=False)
class Source:
    """Reader of ``route`` from ``start`` that skips some missing records."""

    _log: Log
    _route: str
    _start: int
    _arrived: Callable[[], None]  # called when there are records, or reading has failed, after :meth:`next` gave None
    _lost: Callable[[Missing], None]  # called with the records passed over
    _skip: Callable[[Missing], None]  # raises the error of missing records that it does not pass over

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._is_awaited = self._end_is_awaited = False
        self.is_at_end = False  # True once the reader has reached the end of the log
        self._begin_empty(self._start)

    def restart(self, start: int) -> None:
        """Restart from ``start``, as if nothing had been read."""
        self.close()
        self._begin_empty(start)

    def _begin_empty(self, start: int) -> None:
        self._ahead: deque[CachedBatch] = deque()
        self._ahead_bytes = 0
        self._is_waiting = False  # for records after all those read
        self._failed: Exception | None = None
        self._cache = BatchCache(_CACHE_BYTES)
        self._cancel = threading.Event()
        self._begin(start)

    def has_no_more(self) -> bool:
        """Return True if all available records were read; otherwise ``arrived`` is called once they are."""
        with self._changed:
            self._end_is_awaited = not self._is_waiting
            return self._is_waiting and not self._ahead

    @property
    def next_bytes(self) -> int:
        """Size of the batch whose run :meth:`next` has returned."""
        return self._ahead[0].size

    def next(self, floor: int) -> Run | None:
        """Return the run of the next batch in the log; None if there is none yet.

        For a run of lost records, :meth:`pop` returns None. A reader's error is raised once all earlier batches are
        used; reading then restarts above ``floor``.
        """
        with self._changed:
            if self._ahead:
                return self._ahead[0].run
            if self._failed is None:
                self._is_awaited = True
                return None
            error, self._failed = self._failed, None
        self._thread.join()
        self._begin(max(self._start, floor + 1))
        raise error

    def pop(self) -> Rows | None:
        """Return the records of the next batch, or None if they are lost."""
        with self._changed:
            batch = self._ahead.popleft()
            was_full = self._ahead_bytes > _AHEAD_BYTES
            self._ahead_bytes -= batch.size
            if was_full:
                self._changed.notify_all()
        if batch.rows is not None:
            self._cache.add(batch)
        return batch.rows

    def rows(self, first: int) -> Rows:
        """Return the batch of a record read before. Raise Lost if the record is lost."""
        if (rows := self._cache.rows(first)) is not None:
            return rows
        batch, lost = self._read_again(first)
        for missing in lost:
            self._skip(missing)
        is_missing = batch is None or batch.first_sequence > first
        if not lost and is_missing and (entry := History(self._log.root).skip_of(first)) is not None:
            last, why = int(entry["last"]), f"a start of the daemon skipped them, as {entry.get('why')}"
            place = self._log.root.path, first, last, last + 1 - first, False, self._route, frozenset([self._route])
            lost.append(Missing(*place, asked=False, lost=why))  # the log is older than the journal
        for missing in lost:
            self._lost(missing)
        if lost:
            raise Lost(Run(first, lost[-1].last))
        if batch is None or is_missing:  # the log is older than the journal, or shorter
            raise Damaged(
                f"{self._log.root.segments}: record {first} of route {self._route} was read before, but is missing now",
                hint=f"{command_line(self._log.root.path, 'verify')} checks the log",
            )
        cached = CachedBatch.of(batch)
        self._cache.add(cached)
        assert cached.rows is not None
        return cached.rows

    def _read_again(self, first: int) -> tuple[Batch | None, list[Missing]]:
        """Return the whole batch that has ``first`` or comes after it, and the records missing before that."""
        lost: list[Missing] = []
        batches = self._log.batches(self._route, first, on_missing=lost.append)
        batch = next(batches, None)
        missing, size, following = list(lost), 0, batch
        with suppress(WaldError, OSError):  # a later call, which needs these records, raises the error
            while size < _AGAIN_BYTES and batch and following and _distance(batch, following) < _AGAIN_DISTANCE:
                if following := next(batches, None):
                    self._cache.add(cached := CachedBatch.of(following))
                    size += cached.size
        return batch, missing

    def close(self) -> None:
        self._cancel.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def _begin(self, start: int) -> None:
        self._start = start
        self._thread = threading.Thread(target=self._read, args=(start,), name=f"wald-work-{self._route}", daemon=True)
        self._thread.start()

    def _read(self, start: int) -> None:
        try:
            following = self._log.batches(
                self._route,
                start,
                follow=True,
                cancel=self._cancel,
                on_missing=self._pass_over,
                on_wait=self._reach_end,
            )
            for batch in following:
                self._add(CachedBatch.of(batch))
                with self._changed:
                    while self._ahead_bytes > _AHEAD_BYTES and not self._cancel.is_set():
                        self._changed.wait()
                if self._cancel.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - the next lease raises it
            self._failed = error if isinstance(error, WaldError | OSError) else OSError(f"{self._route}: {error!r}")
            self._notify()

    def _pass_over(self, missing: Missing) -> None:
        self._skip(missing)
        self._lost(missing)
        self._add(CachedBatch(Run(missing.first, missing.last), None, 0))

    def _add(self, batch: CachedBatch) -> None:
        with self._changed:
            self._is_waiting = False
            self._start = batch.run.last + 1
            self._ahead.append(batch)
            self._ahead_bytes += batch.size
        self._notify()

    def _reach_end(self) -> None:
        with self._changed:
            must_notify = self._end_is_awaited or not self.is_at_end
            self._is_waiting = self.is_at_end = True
            self._end_is_awaited = False
        if must_notify:
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            is_awaited, self._is_awaited = self._is_awaited, False
        if is_awaited:
            self._arrived()


def _distance(batch: Batch, following: Batch) -> float:
    """Return the bytes of the log between two batches; infinite if they are in different segments."""
    return following.position - batch.position if batch.segment == following.segment else inf
