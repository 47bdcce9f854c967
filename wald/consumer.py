"""A consumer: the records of a route for a group, each processed at least once, its cursor moved in groups."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Self

from wald.errors import WaldError
from wald.format.names import DEFAULT_GROUP, check_group
from wald.format.records import Record
from wald.log import Log
from wald.reading.assembler import Batch
from wald.retention.cursor_moves import start_position
from wald.retention.cursors import CursorState
from wald.retention.missing import OnMissing
from wald.work.succession import succeed_workers


class Consumer:
    """Iterates over the records of a route that a group has not processed, and moves the group's cursor.

    A record counts as processed when the program asks for the next one, and never before. The cursor is moved in
    groups, because moving it costs two syncs of the disk: after ``commit_records`` records, ``commit_bytes`` bytes or
    ``commit_seconds`` seconds, whichever comes first, when the iteration reaches the end, and at the end of a ``with``
    block.

    So each record is processed **at least once**. After a crash, the records processed since the cursor last moved
    come again. Leaving a loop by ``break``, ``return`` or an exception leaves its last record unprocessed: it comes
    again, unless :meth:`commit` is called first. A new loop over the same consumer begins behind the last processed
    record.

    A group that has no cursor on the route yet gets one when the first loop begins. It begins at the oldest record
    there is, and from then on RECLAIM keeps for it what it has not processed. Records that were reclaimed before are
    passed over without an error, whatever ``on_missing`` is.

    In the group of a :class:`wald.WorkGroup` a loop begins at its ack floor, and only if no worker has acknowledged a
    record above that, which would come again. While a process owns the group, no loop begins; and none is to own it
    while one runs.

    One program at a time may consume a route for a group; two would both get every record, and the slower one fails to
    move the cursor. One thread at a time may use a consumer.

    Args:
        at: the root of the log.
        route: the route to consume.
        group: the group whose cursor is moved.
        follow: whether to wait for more records at the end, until ``cancel`` is set.
        cancel: when it is set, the iteration ends behind the record in hand, and so does the wait for more records.
            ``wald.loop.stop_on_signals()`` gives an event that SIGTERM, SIGINT and SIGHUP set.
        commit_records: move the cursor after this many records.
        commit_bytes: move the cursor after records of this many bytes.
        commit_seconds: move the cursor when this much time has passed, also while waiting for more records.
        on_missing: as in :meth:`wald.Log.batches`.

    Raises:
        NotFound: there is no such log or route.
        InvalidInput: the name of the group is illegal.
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
        self._last = 0  # sequence of the last record handed out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._progress.commit()
        except (WaldError, OSError):
            if error is None:  # else the error of the block is the one to report
                raise

    def __iter__(self) -> Generator[Record]:
        """Iterate over records; each is processed once the next one is asked for.

        Raises:
            WaldError: as :meth:`batches`.
        """
        for batch in self._unprocessed():
            for record in batch.records():
                self._last = record.sequence
                yield record
                self._progress.add(record.sequence, 1, len(record.value))
                if self._cancel.is_set():
                    self._progress.commit()
                    return

    def batches(self) -> Generator[Batch]:
        """Iterate over batches of records; each batch is processed once the next one is asked for.

        Yields:
            consecutive records, as :meth:`wald.Log.batches` does.

        Raises:
            NotFound: records that the group has not processed were reclaimed.
            Damaged: records cannot be read, or the cursor cannot be trusted. The cursor stays in front of them.
            Refused: the cursor cannot be moved, because another program has moved it further; or workers of the group
                have processed records above it.
            Locked: a process owns the group, with workers.
            NotPermitted: this user may not leave a cursor there, or it is another user's.
            OSError: the cursor cannot be written, as the disk is full.
        """
        for batch in self._unprocessed():
            self._last = batch.last_sequence
            yield batch
            self._progress.add(batch.last_sequence, batch.count, len(batch.payload))
            if self._cancel.is_set():
                self._progress.commit()
                return

    def commit(self, sequence: int | None = None) -> None:
        """Declare records processed, and move the cursor behind them; on disk when this returns.

        Args:
            sequence: the last of them; None: the last record that was handed out.

        Raises:
            Refused: the cursor cannot be moved, because another program has moved it further.
            NotPermitted: this user may not leave a cursor there, or it is another user's.
            OSError: the cursor cannot be written, as the disk is full.

        Example::

            for record in consumer:
                if handle(record) == "enough":
                    consumer.commit()
                    break
        """
        self._progress.sequence = self._last if sequence is None else sequence
        self._progress.commit()

    def _unprocessed(self) -> Iterator[Batch]:
        self._enter()
        self._progress.commit()  # of a loop before this one
        yield from self.log.batches(
            self.route,
            "cursor",
            group=self.group,
            follow=self._follow,
            cancel=self._cancel,
            on_missing=self._on_missing,
            on_wait=self._progress.commit_if_due,
        )
        self._progress.commit()

    def _enter(self) -> None:
        """Give a new group a cursor in front of the oldest record, so that what it has not processed is kept."""
        succeed_workers(self.log, self.route, self.group)
        if self.log.cursor(self.route, self.group).state is CursorState.ABSENT:
            after, _ = start_position(self.log.view(), self.route, self.group)
            self.log.set_cursor(self.route, after, self.group)


class _Progress:
    """How far a group has processed a route, and when its cursor is to be moved there.

    Attributes:
        sequence: the last processed record; 0 before any was.
    """

    def __init__(self, log: Log, route: str, group: str, records: int, size: int, seconds: float) -> None:
        self.sequence = 0
        self._log, self._route, self._group = log, route, group
        self._limits = records, size, seconds
        self._records = self._bytes = 0  # processed since the cursor was moved
        self._due = math.inf
        self._committed = 0

    def add(self, sequence: int, records: int, size: int) -> None:
        """Note that everything up to ``sequence`` is processed; move the cursor if it is time to."""
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
        """Move the cursor, if it is behind."""
        if self.sequence > self._committed:
            self._log.set_cursor(self._route, self.sequence, self._group)
            self._committed = self.sequence
        self._records = self._bytes = 0
        self._due = math.inf
