"""Consumer that reads a route for a group, and moves the group's cursor once for many records."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Self, cast

from wald.errors import WaldError
from wald.format.names import DEFAULT_GROUP, check_group
from wald.format.records import Record
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.retention.cursor_moves import EarlierReclaim, start_position
from wald.retention.cursors import CursorState
from wald.retention.missing import Missing, OnMissing
from wald.work.ownership import succeed_workers

_LOGGER = logging.getLogger("wald.consumer")


class Consumer:
    """Iterator over a consumer group's unprocessed records of a route; it moves the group's cursor.

    A record counts as processed when the program requests the next one. Moving the cursor takes two syncs of the disk,
    so it moves after ``commit_records`` records, ``commit_bytes`` bytes or ``commit_seconds`` seconds, whichever comes
    first, at the end of the log, and at the end of a ``with`` block.

    Each record is processed **at least once**: after a crash, the records processed since the cursor last moved are
    delivered again. A loop that ends with ``break``, ``return`` or an exception leaves its last record unprocessed,
    unless :meth:`commit` is called first. A new loop over the same consumer starts after the last processed record.

    The first loop of a new group creates its cursor before the oldest record; RECLAIM then keeps what the group has not
    processed. Records that were reclaimed earlier are skipped without an error, even if ``on_missing`` is "error", with
    a warning to the logger ``wald.consumer`` if earlier segments still exist.

    In the group of a :class:`wald.WorkGroup`, a loop starts at the group's ack floor. It is refused if workers have
    acknowledged records above the floor, because these would be delivered again, and while a process owns the group.

    Only one program at a time may consume a route for a group: two would both get every record, and the slower one
    would fail to move the cursor. Only one thread at a time may use a consumer.

    Args:
        at: the root of the log.
        route: the route to consume.
        group: the consumer group.
        follow: at the end, wait for more records until ``cancel`` is set.
        cancel: event that ends the iteration after the current record, or the wait for more records;
            ``wald.loop.stop_on_signals()`` returns one that SIGTERM, SIGINT and SIGHUP set.
        commit_records: move the cursor after this number of records.
        commit_bytes: move the cursor after this number of bytes.
        commit_seconds: move the cursor after this time, even while waiting for more records.
        on_missing: as in :meth:`wald.Log.batches`.

    Raises:
        NotFound: there is no such log or route.
        InvalidInput: the name of the group is invalid.
        NotPermitted: this user may not read the log.

    Example::

        with wald.Consumer("/var/spool/wald", "orders", group="billing", follow=True) as consumer:
            for record in consumer:
                print(record.sequence, record.key, record.value)
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        route: str,
        group: str = DEFAULT_GROUP,
        *,
        follow: bool = False,
        cancel: threading.Event | None = None,
        commit_records: int = 10_000,
        commit_bytes: int = 16 << 20,
        commit_seconds: float = 1.0,
        on_missing: OnMissing = None,
    ) -> None:
        self.log = Log(at)
        self.log.root.require_route(route)
        self.route = route
        self.group = check_group(group)
        self._follow = follow
        self._cancel = cancel or threading.Event()
        self._on_missing = on_missing
        self._progress = _Progress(self.log, route, group, commit_records, commit_bytes, commit_seconds)
        self._last = 0  # sequence of the last delivered record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._progress.commit()
        except (WaldError, OSError):
            if error is None:  # otherwise, the block's own error is the one to report
                raise

    def __iter__(self) -> Generator[Record]:
        """Iterate over records. Each is processed when the next one is requested.

        Raises:
            WaldError: see :meth:`batches`.
        """
        return cast("Generator[Record]", self._records(waits=True))

    def batches(self) -> Generator[Batch]:
        """Iterate over batches of records. Each is processed when the next one is requested.

        Yields:
            consecutive records of the route.

        Raises:
            NotFound: records that the group has not processed were reclaimed.
            Damaged: records are unreadable, or the cursor cannot be trusted. The cursor stays before them.
            Refused: another program has moved the cursor further, or workers of the group have processed records
                above it.
            Locked: a process owns the group, with workers.
            NotPermitted: this user may not create a cursor there, or another user owns it.
            OSError: the cursor cannot be written, for example because the disk is full.
        """
        return cast("Generator[Batch]", self._batches(waits=True))

    def poll_records(self) -> Generator[Record | None]:
        """Iterate like :meth:`__iter__`, but yield None instead of waiting for more records."""
        return self._records(waits=False)

    def poll_batches(self) -> Generator[Batch | None]:
        """Iterate like :meth:`batches`, but yield None instead of waiting for more records."""
        return self._batches(waits=False)

    def commit(self, sequence: int | None = None) -> None:
        """Declare records processed, and move the cursor after them, durably.

        Args:
            sequence: the last processed record; by default the last one that was delivered.

        Raises:
            Refused: another program has moved the cursor further.
            NotPermitted: this user may not create a cursor there, or another user owns it.
            OSError: the cursor cannot be written, for example because the disk is full.

        Example::

            for record in consumer:
                if handle(record) == "enough":
                    consumer.commit()
                    break
        """
        self._progress.sequence = self._last if sequence is None else sequence
        self._progress.commit()

    def _records(self, *, waits: bool) -> Generator[Record | None]:
        for batch in self._unprocessed(waits=waits):
            if batch is None:
                yield None
                continue
            for record in batch.records():
                self._last = record.sequence
                yield record
                self._progress.add(record.sequence, 1, len(record.value))
                if self._cancel.is_set():
                    self._progress.commit()
                    return

    def _batches(self, *, waits: bool) -> Generator[Batch | None]:
        for batch in self._unprocessed(waits=waits):
            if batch is None:
                yield None
                continue
            self._last = batch.last_sequence
            yield batch
            self._progress.add(batch.last_sequence, batch.count, len(batch.payload))
            if self._cancel.is_set():
                self._progress.commit()
                return

    def _unprocessed(self, *, waits: bool) -> Iterator[Batch | None]:
        succeed_workers(self.log, self.route, self.group)
        is_new = self.log.cursor(self.route, self.group).state is CursorState.ABSENT
        if self._on_missing in (None, "error"):
            self._earlier_reclaim = EarlierReclaim(self.log.root, self.route, self.group, is_new=is_new)
            self._on_missing = self._pass_over
        if is_new:
            after, _ = start_position(self.log.view(), self.route, self.group)
            self.log.set_cursor(self.route, after, self.group)  # so that reclaim keeps the unprocessed records
        self._progress.commit()  # of a previous loop
        yield from self._read() if waits else self._poll()
        self._progress.commit()

    def _pass_over(self, missing: Missing) -> None:
        self._earlier_reclaim.require(missing)
        _LOGGER.warning("%s; they were reclaimed before group %s existed", missing.message(), self.group)

    def _read(self) -> Iterator[Batch]:
        return self.log.batches(
            self.route,
            "cursor",
            group=self.group,
            follow=self._follow,
            cancel=self._cancel,
            on_missing=self._on_missing,
            on_wait=self._progress.commit_if_due,
        )

    def _poll(self) -> Iterator[Batch | None]:
        for step in read_without_waiting(
            self.log.view(),
            route=self.route,
            start="cursor",
            stop=None,
            group=self.group,
            on_missing=self._on_missing,
        ):
            if isinstance(step, int):  # the end of the log
                if not self._follow:
                    return
                self._progress.commit_if_due()
                yield None
            elif step is not None:
                yield step


class _Progress:
    """Sequence up to which a group has processed a route, and the time at which to move its cursor."""

    def __init__(self, log: Log, route: str, group: str, records: int, size: int, seconds: float) -> None:
        self.sequence = 0
        self._log, self._route, self._group = log, route, group
        self._limits = records, size, seconds
        self._records = self._bytes = 0  # processed since the cursor was moved
        self._due = math.inf
        self._committed = 0

    def add(self, sequence: int, records: int, size: int) -> None:
        """Record that everything up to ``sequence`` is processed; move the cursor if a limit is reached."""
        self.sequence = sequence
        self._records += records
        self._bytes += size
        records_limit, bytes_limit, seconds = self._limits
        if self._records >= records_limit or self._bytes >= bytes_limit:
            self.commit()
        elif self._due == math.inf:
            self._due = time.monotonic() + seconds
        else:
            self.commit_if_due()

    def commit_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self.commit()

    def commit(self) -> None:
        if self.sequence > self._committed:
            self._log.set_cursor(self._route, self.sequence, self._group)
            self._committed = self.sequence
        self._records = self._bytes = 0
        self._due = math.inf
