"""A log as a Python program reads it: records or batches from any place, cursors, and where any record is.

Each method imports what it needs, because a short command such as ``wald head`` calls one of them and ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import Damaged
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.format.head import Head
from wald.format.names import DEFAULT_GROUP
from wald.format.times import utc
from wald.segments.continuity import Continuity
from wald.segments.durable_end import read_head, readable_head

if TYPE_CHECKING:
    import pyarrow as pa

    from wald.format.records import Record
    from wald.reading.assembler import Batch, Sender
    from wald.reading.lookup import Whereabouts
    from wald.reading.selection import Start, Stop
    from wald.retention.cursors import Cursor
    from wald.retention.missing import OnMissing
    from wald.segments.view import View


class Log:
    """The log in a directory, to be read.

    It needs no daemon, holds no file open, and may be used while a daemon writes. Threads may share it.

    Args:
        root: the root of the log.

    Raises:
        NotFound: there is no log.
        NotPermitted: this user may not read it.
        UnsupportedFormat: it was written by a newer wald.
        Damaged: its identity cannot be read.

    Example::

        log = wald.open("/var/spool/wald")
        for record in log.records("orders", start=1000, stop=1999):
            print(record.sequence, record.key, record.value)
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Root(Path(root))
        self.identity = read_identity(self.root)
        self._view: View | None = None
        self._continuity = Continuity(self.root, self.identity.log_id)

    def head(self) -> Head | None:
        """How far the log is durable.

        Returns:
            the head; None before anything was durable.

        Raises:
            Damaged: the head file is not readable, or lost.
            Replaced: as of :meth:`require_continuity`.
        """
        try:
            head = read_head(self.root)
            if head is None:  # nothing is durable yet, or the file is lost
                from wald.segments.view import head_of

                head = head_of(self.root)
        except Damaged:
            self.require_continuity()
            raise
        self._continuity.check(head)
        return head

    def require_continuity(self) -> None:
        """Check that the log at the path is the one that was opened, and still has the records that were read.

        Methods that read or move a cursor include this check. A program that holds positions for a long time, and acts
        on them without reading, should call it first.

        Raises:
            Replaced: another log is at the path, or an older copy of this one was restored there. This object is no
                longer usable: open the log again, and read positions from cursors. Or no log is at the path now.
        """
        self._continuity.require()

    def view(self) -> View:
        """The segments of the log and how far they may be read, as they are now; what reading takes.

        Raises:
            Damaged: the directory of the segments is gone.
            Replaced: as of :meth:`require_continuity`.
        """
        from wald.segments.view import read_view

        if self._view is None:
            view = read_view(self.root, self.identity.log_id, continuity=self._continuity)
        else:
            view = self._view.renewed()
        self._view = view
        return view

    def routes(self) -> list[str]:
        """The names of all routes."""
        return self.root.route_names()

    def records(
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
        """Iterate over records; arguments and errors are those of :meth:`batches`.

        Example::

            for record in log.records("orders", start=datetime(2026, 11, 21, tzinfo=UTC), follow=True):
                print(record.sequence, record.value)
        """
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
        """Iterate over batches of whole records: durable ones only, each record once, in the order of the log.

        Args:
            route: None: every route; a record in several pieces then comes when it is complete.
            start: "earliest", "end", "cursor" (after what ``group`` has processed), a sequence, or a datetime: the
                first record appended then or later, which may be none yet.
            stop: the last sequence wanted, or a datetime: records appended before it are wanted. Sequences include the
                end, as all ranges of sequences in wald do; a time is a moment between records.
            group: the group whose cursor "cursor" means.
            limit: at most so many records.
            follow: whether to wait for more at the end, until ``cancel`` is set, or the time of ``stop`` is 2 s ago.
            cancel: ends the wait for more records; a thread or a signal handler may set it.
            on_damage: called with each error about what cannot be read; reading then goes on behind it. Without it the
                error is raised.
            on_missing: what to do about wanted records that were reclaimed: "error", "skip", or a function that is
                called with each :class:`Missing` and may raise. Without it they are an error if they were asked for:
                ``start`` is a sequence, a time, or a cursor in front of them.
            on_wait: called again and again while waiting for more records, at intervals of up to 50 ms.

        Yields:
            consecutive records of one route.

        Raises:
            InvalidInput: a start or stop that can never be right.
            NotFound: no such route, a record never issued, or wanted records that were reclaimed.
            Damaged: something that should be there cannot be read, or the cursor cannot be trusted.
            Replaced: as of :meth:`require_continuity`.

        Example::

            for batch in log.batches("orders", start="cursor", group="billing"):
                print(batch.first_sequence, batch.last_sequence, len(batch.raw()))
        """
        from wald.reading.reader import read_batches

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
        """The records as a stream of Arrow batches, as DuckDB and others take it; needs ``wald[arrow]``.

        Small batches are joined. The arguments are those of :meth:`batches`.

        Returns:
            a ``pyarrow.RecordBatchReader`` with the columns sequence, route, append_time, event_time, key, value and
            headers.

        Raises:
            WaldError: as :meth:`batches`, here or while the stream is read.

        Example::

            table = log.to_arrow_reader("orders").read_all()
        """
        import pyarrow as pa

        from wald.reading.arrow import record_batches, schema

        batches = self.batches(route, start, stop, group=group, limit=limit, on_damage=on_damage, on_missing=on_missing)
        return pa.RecordBatchReader.from_batches(schema, record_batches(batches))

    def where(self, sequence: int) -> Whereabouts:
        """Report what has become of a record; there is an answer for every number from 1 on.

        Args:
            sequence: the number of the record.

        Returns:
            whether it is there, reclaimed, lost or still to come, and where.

        Raises:
            InvalidInput: below 1.
            Damaged: it is in no segment, and the ledger that should report it is damaged.
        """
        from wald.reading.lookup import where

        return where(self.view(), sequence)

    def sender(self, batch: Batch) -> Sender:
        """Who sent a batch.

        Args:
            batch: as :meth:`batches` yields it.

        Returns:
            the way it came, and of what came over the socket the user and the process.

        Example::

            for batch in log.batches("orders"):
                print(batch.first_sequence, log.sender(batch))
        """
        from wald.reading.assembler import Senders

        with Senders(self.view) as senders:
            return senders.of(batch.segment, batch.header)

    def cursor(self, route: str, group: str = DEFAULT_GROUP, *, any_user: bool = False) -> Cursor:
        """How far ``group`` has processed ``route``.

        Args:
            route: the route.
            group: the group.
            any_user: return the cursor that another user has left even if this program runs as the log's owner or as
                root, to show it. Do not start to process there: that user can make the program skip records.

        Returns:
            the cursor; its state says whether there is one that can be trusted.

        Raises:
            InvalidInput: an illegal name.
            NotFound: no such route.
            Refused: another user has left the cursor, and this program runs as the log's owner or as root.
            Replaced: as of :meth:`require_continuity`.
        """
        from wald.retention.cursors import read_cursor

        self.require_continuity()
        return read_cursor(
            self.root,
            route,
            group,
            log_id=self.identity.log_id,
            head_sequence=self._last_sequence(),
            any_user=any_user,
        )

    def _last_sequence(self) -> int:
        head = readable_head(self.root)
        if head is not None:
            return head.sequence
        from wald.segments.seek import end_sequence

        return end_sequence(self.root, self.identity.log_id) - 1

    def set_cursor(
        self,
        route: str,
        sequence: int,
        group: str = DEFAULT_GROUP,
        *,
        rewind: bool = False,
        any_user: bool = False,
    ) -> Cursor:
        """Declare that ``group`` has processed ``route`` up to ``sequence``; on disk when this returns.

        This costs two syncs of the disk. :class:`wald.Consumer` does it for groups of records.

        Args:
            route: the route.
            sequence: the last processed record; 0: none.
            group: the group whose cursor it is.
            rewind: whether the cursor may move backwards, or replace one that cannot be trusted.
            any_user: let root move the cursor of another user, who keeps it.

        Returns:
            the cursor. The ``message`` of one that is new or was rewound says what it needs and RECLAIM has taken.

        Raises:
            InvalidInput: an illegal name, or a negative sequence.
            NotFound: no such route.
            Refused: backwards without ``rewind``, or beyond the head; or as of :meth:`cursor`.
            NotPermitted: this user may not leave a cursor there, or it is another user's.
            Replaced: as of :meth:`require_continuity`.
            OSError: the cursor cannot be written, as the disk is full.
        """
        from wald.files.disk import Disk
        from wald.retention.cursor_moves import move_cursor

        self.require_continuity()
        return move_cursor(
            self.root,
            route,
            group,
            sequence,
            log_id=self.identity.log_id,
            disk=Disk(),
            now=utc(time.time_ns()),
            rewind=rewind,
            any_user=any_user,
        )
