"""A log as a Python program reads it: records or batches from any place, cursors, and where any record is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import Damaged
from wald.format.head import Head
from wald.format.names import DEFAULT_GROUP
from wald.format.record import Record
from wald.format.times import utc
from wald.store.files.directory import Root, read_identity
from wald.store.files.disk import Disk
from wald.store.reading.batches import Batch
from wald.store.reading.lookup import Whereabouts, where
from wald.store.reading.reader import Start, Stop, read_batches
from wald.store.retention.cursors import Cursor, read_cursor, set_cursor
from wald.store.retention.missing import OnMissing
from wald.store.retention.taken import taken_above
from wald.store.segments.seeking import end_sequence
from wald.store.segments.view import View, head_of, read_view

if TYPE_CHECKING:
    import pyarrow as pa


class Log:
    """The log in a directory. Holds nothing open; may be used while a daemon writes, and from any thread.

    Raises:
        NotFound: there is no log.
        NotPermitted: this user may not read it.
        UnsupportedFormat: it was written by a newer wald.
        Damaged: its identity cannot be read.
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Root(Path(root))
        self.identity = read_identity(self.root)
        self._view: View | None = None

    def head(self) -> Head | None:
        """Up to where the log is durable; None before anything was.

        Raises:
            Damaged: the head file is not readable, or lost.
        """
        return head_of(self.root)

    def view(self) -> View:
        """How far the log may be read by now, and its segments.

        Raises:
            Damaged: the directory of the segments is gone.
        """
        before = self._view
        self._view = view = read_view(self.root, self.identity.log_id) if before is None else before.renewed()
        return view

    def routes(self) -> list[str]:
        """Every route, by name."""
        return self.root.route_names()

    def read(
        self,
        route: str | None = None,
        start: Start = "earliest",
        stop: Stop | None = None,
        *,
        group: str = DEFAULT_GROUP,
        limit: int | None = None,
        follow: bool = False,
        cancel: threading.Event | None = None,
        on_damage: Callable[[Damaged], None] | None = None,
        on_missing: OnMissing = None,
        on_wait: Callable[[], None] | None = None,
    ) -> Iterator[Record]:
        """Records, one by one; arguments and errors are those of :meth:`batches`."""
        batches = self.batches(
            route,
            start,
            stop,
            group=group,
            limit=limit,
            follow=follow,
            cancel=cancel,
            on_damage=on_damage,
            on_missing=on_missing,
            on_wait=on_wait,
        )
        return (record for batch in batches for record in batch.records())

    def batches(
        self,
        route: str | None = None,
        start: Start = "earliest",
        stop: Stop | None = None,
        *,
        group: str = DEFAULT_GROUP,
        limit: int | None = None,
        follow: bool = False,
        cancel: threading.Event | None = None,
        on_damage: Callable[[Damaged], None] | None = None,
        on_missing: OnMissing = None,
        on_wait: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        """Batches of whole records, durable ones only, each record once and in the order of the log.

        Args:
            route: None: every route; a record in several pieces then comes when it is complete.
            start: "earliest", "end", "cursor" (after what ``group`` has processed), a sequence, or a datetime: the
                first record appended then or later, which may be none yet.
            stop: the last sequence wanted, or a datetime: records appended before it are wanted. Sequences include the
                end, as all ranges of sequences in wald do; a time is a moment between records.
            group: the group whose cursor "cursor" means.
            limit: at most so many records.
            follow: whether to wait for more at the end, until ``cancel`` is set.
            cancel: ends the wait for more records; a thread or a signal handler may set it.
            on_damage: called with each error about what cannot be read; reading then goes on behind it. Without it the
                error is raised.
            on_missing: what to do about wanted records that were reclaimed: "error", "skip", or a function that is
                called with each :class:`Missing` and may raise. Without it they are an error if they were asked for:
                ``start`` is a sequence, a time, or a cursor in front of them.
            on_wait: called while waiting for more records, at most every 50 ms.

        Raises:
            InvalidInput: a start or stop that can never be right.
            NotFound: no such route, a record never issued, or wanted records that were reclaimed.
            Damaged: something that should be there cannot be read, or the cursor cannot be trusted.
        """
        return read_batches(
            self.view(),
            route=route,
            start=start,
            stop=stop,
            group=group,
            limit=limit,
            follow=follow,
            cancel=cancel,
            on_damage=on_damage,
            on_missing=on_missing,
            on_wait=on_wait,
        )

    def to_arrow_reader(
        self,
        route: str | None = None,
        start: Start = "earliest",
        stop: Stop | None = None,
        *,
        group: str = DEFAULT_GROUP,
        limit: int | None = None,
        on_damage: Callable[[Damaged], None] | None = None,
        on_missing: OnMissing = None,
    ) -> pa.RecordBatchReader:
        """The records as a stream of Arrow batches, as DuckDB and others take it; small batches are put together."""
        import pyarrow as pa

        from wald.store.reading.arrow import record_batches, schema

        batches = self.batches(route, start, stop, group=group, limit=limit, on_damage=on_damage, on_missing=on_missing)
        return pa.RecordBatchReader.from_batches(schema, record_batches(batches))

    def where(self, sequence: int) -> Whereabouts:
        """What has become of a record; there is an answer for every number from 1 on.

        Raises:
            InvalidInput: below 1.
            Damaged: it is in no segment, and the ledger that should tell of it is damaged.
        """
        return where(self.view(), sequence)

    def cursor(self, route: str, group: str = DEFAULT_GROUP) -> Cursor:
        """How far ``group`` has processed ``route``.

        Raises:
            NotFound: no such route.
        """
        head_sequence = end_sequence(self.root, self.identity.log_id) - 1
        return read_cursor(self.root, route, group, log_id=self.identity.log_id, head_sequence=head_sequence)

    def set_cursor(self, route: str, sequence: int, group: str = DEFAULT_GROUP, *, rewind: bool = False) -> Cursor:
        """Say that ``group`` has processed ``route`` up to ``sequence``; on disk when this returns.

        The ``message`` of a cursor that is new or was moved with ``rewind`` says what it needs and RECLAIM has taken.

        Raises:
            NotFound: no such route.
            Refused: backwards without ``rewind``, or beyond the head.
        """
        now = utc(time.time_ns())
        return self.move_cursor(route, sequence, group, disk=Disk(), now=now, rewind=rewind)

    def move_cursor(
        self, route: str, sequence: int, group: str, *, disk: Disk, now: str, rewind: bool = False
    ) -> Cursor:
        """As :meth:`set_cursor`, for programs that bring their own disk and clock."""
        try:
            head = self.head()
        except Damaged:  # derived, and made anew at the next commit
            head = None
        follows = not rewind and self.root.cursor(route, group).exists()
        cursor = set_cursor(
            self.root,
            route,
            group,
            sequence,
            disk=disk,
            head_sequence=end_sequence(self.root, self.identity.log_id) - 1,
            epoch=head.epoch if head else 0,
            now=now,
            rewind=rewind,
        )
        if follows:  # what it needs, it has held back all the time
            return cursor
        return replace(cursor, message=taken_above(self.root, cursor, log_id=self.identity.log_id))
