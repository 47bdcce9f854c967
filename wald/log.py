"""Public API of a log: appending and reading records, batches, Arrow tables, cursors, and record lookup.

Methods import what they need, so that short commands start fast.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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

    from wald.client.payloads import Time, Value
    from wald.client.producer import Producer
    from wald.format.records import Record
    from wald.reading.assembler import Batch, Sender
    from wald.reading.lookup import Whereabouts
    from wald.reading.selection import Start, Stop
    from wald.retention.cursors import Cursor
    from wald.retention.missing import OnMissing
    from wald.segments.view import View


class Log:
    """Log in a directory.

    Reading needs no daemon, keeps no file open, and is possible while a daemon writes. The first :meth:`append`
    connects to the daemon; :meth:`close`, or the end of a ``with`` block, closes the connection. Threads may share a
    log; their appends run one at a time.

    Args:
        root: the directory of the log.

    Raises:
        NotFound: no log exists at ``root``.
        NotPermitted: this user may not read the log.
        UnsupportedFormat: a newer wald wrote the log.
        Damaged: the log's identity cannot be read.

    Example::

        with wald.open("/var/spool/wald") as log:
            sequence = log.append("orders", "4 apples", key="ann")
            for record in log.records("orders", start=sequence):
                print(record.sequence, record.key, record.value)
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Root(Path(root))
        self.identity = read_identity(self.root)
        self._view: View | None = None
        self._continuity = Continuity(self.root, self.identity.log_id)
        self._producer: Producer | None = None
        self._appending = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection that :meth:`append` opened. The log remains usable."""
        with self._appending:
            if self._producer is not None:
                self._producer.close()
                self._producer = None

    def append(
        self,
        route: str,
        value: Value,
        *,
        key: Value | None = None,
        time: Time | None = None,
        headers: Mapping[str, str] | None = None,
        not_before: Time | None = None,
    ) -> int:
        """Append one record, and return its sequence once it is durable.

        Each call waits for a sync of the disk; :class:`wald.Producer` appends many records with one sync. The daemon's
        socket must be at its default place, in the root.

        Args:
            route: the route.
            value: the record; text is stored as UTF-8.
            key: the record's key.
            time, headers, not_before: as in :meth:`wald.Producer.send`.

        Raises:
            Unavailable: no daemon answered within 30 seconds. The record may or may not be in the log.
            WaldError: see :meth:`wald.Producer.publish`.

        Example::

            sequence = log.append("orders", "4 apples", key="ann", headers={"from": "web"})
        """
        from wald.client.producer import Producer

        columns: dict[str, Any] = {"keys": key, "times": time, "headers": headers, "not_before": not_before}
        columns = {name: [entry] for name, entry in columns.items() if entry is not None}
        with self._appending:
            if self._producer is None or self._producer.has_ended:
                self._producer = Producer(self.root.path)
            [sequence] = self._producer.send(route, [value], **columns).result()
        return sequence

    def head(self) -> Head | None:
        """Return the durable head, or None if nothing has been written yet.

        Raises:
            Damaged: the head file is unreadable or lost.
            Replaced: see :meth:`require_continuity`.
        """
        try:
            head = read_head(self.root)
            if head is None:  # nothing is durable yet, or the file is lost
                from wald.segments.view import durable_head

                head = durable_head(self.root)
        except Damaged:
            self.require_continuity()
            raise
        self._continuity.check(head)
        return head

    def require_continuity(self, head: Head | None = None) -> None:
        """Check that the log at the path is the one that was opened, and still has the records that were read.

        Methods that read or move a cursor include this check. Call it before using positions from memory after a pause.

        Args:
            head: the current head; None to read it.

        Raises:
            Replaced: another log, an older copy of this log, or no log is at the path. Open the log again, and read
                positions from cursors.
        """
        self._continuity.check(head or readable_head(self.root))

    def view(self) -> View:
        """Return a snapshot: the segments of the log and its durable head."""
        from wald.segments.view import read_view

        if self._view is None:
            view = read_view(self.root, self.identity.log_id, continuity=self._continuity)
        else:
            view = self._view.renewed()
        self._view = view
        return view

    def routes(self) -> list[str]:
        """Return the names of all routes."""
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
        """Iterate over records; for arguments and errors see :meth:`batches`.

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
        """Iterate over batches of durable, whole records. Each record comes once, in log order.

        Args:
            route: the route; None for all routes, where a record stored in pieces comes at its last piece.
            start: "earliest", "end", "cursor" (after the records that ``group`` has processed), a sequence, or a
                datetime: the first record appended at that time or later.
            stop: the last sequence, or a datetime: only records appended before that time.
            group: consumer group for ``start="cursor"``.
            limit: maximum number of records.
            follow: at the end, wait for more records until ``cancel`` is set or the time ``stop`` is 2 s in the past.
            cancel: event that ends the wait; a thread or a signal handler may set it.
            on_damage: called with the error for each unreadable range, which is then skipped, instead of raising it.
            on_missing: policy for requested records that were reclaimed: "error", "skip", or a function that is called
                with each :class:`Missing` and may raise. By default, missing records are an error if ``start`` is a
                sequence, a time, or a cursor before them.
            on_wait: called at least every 50 ms while waiting for more records.

        Yields:
            consecutive records of one route.

        Raises:
            InvalidInput: an invalid start or stop.
            NotFound: no such route, a sequence never assigned, or requested records that were reclaimed.
            Damaged: part of the log is unreadable, or the cursor cannot be trusted.
            Replaced: see :meth:`require_continuity`.

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
        """Return records as a stream of Arrow batches for DuckDB, Polars and others; needs ``wald[arrow]``.

        Small batches are joined. For the arguments see :meth:`batches`. The columns are sequence, route, append_time,
        event_time, key, value and headers.

        Raises:
            WaldError: see :meth:`batches`; raised here or while the stream is read.

        Example::

            table = log.to_arrow_reader("orders").read_all()
        """
        import pyarrow as pa

        from wald.reading.arrow import record_batches, schema

        batches = self.batches(route, start, stop, group=group, limit=limit, on_damage=on_damage, on_missing=on_missing)
        return pa.RecordBatchReader.from_batches(schema, record_batches(batches))

    def where(self, sequence: int) -> Whereabouts:
        """Return the place of a record, or what happened to it: reclaimed, archived, lost or not yet written.

        Raises:
            InvalidInput: ``sequence`` is below 1.
            Damaged: no segment has the record, and the ledger that should report it is damaged.
        """
        from wald.reading.lookup import locate_record

        return locate_record(self.view(), sequence)

    def sender(self, batch: Batch) -> Sender:
        """Return the source of a batch of :meth:`batches`; for the socket, also the user and the process.

        Example::

            for batch in log.batches("orders"):
                print(batch.first_sequence, log.sender(batch))
        """
        from wald.reading.assembler import Senders

        with closing(Senders(self.view)) as senders:
            return senders.of(batch.segment, batch.header)

    def cursor(self, route: str, group: str = DEFAULT_GROUP, *, any_user: bool = False) -> Cursor:
        """Return the position up to which ``group`` has processed ``route``.

        Args:
            route: the route.
            group: the consumer group.
            any_user: return another user's cursor even to the log's owner or root, only for display: that user could
                make a program that starts at the cursor skip records.

        Returns:
            the cursor, whose state tells whether it exists and can be trusted.

        Raises:
            InvalidInput: an invalid name.
            NotFound: no such route.
            Refused: another user owns the cursor, and this program runs as the log's owner or as root.
            Replaced: see :meth:`require_continuity`.
        """
        from wald.retention.cursors import read_cursor

        self.require_continuity()
        log_id, head = self.identity.log_id, readable_head(self.root)
        if head is None:
            from wald.segments.seek import end_sequence

            last = end_sequence(self.root, log_id) - 1
        else:
            last = head.sequence
        return read_cursor(self.root, route, group, log_id=log_id, head_sequence=last, any_user=any_user)

    def set_cursor(
        self,
        route: str,
        sequence: int,
        group: str = DEFAULT_GROUP,
        *,
        rewind: bool = False,
        any_user: bool = False,
    ) -> Cursor:
        """Record durably that ``group`` has processed ``route`` up to ``sequence``.

        Each call syncs the disk twice. :class:`wald.Consumer` moves a cursor once for many records.

        Args:
            route: the route.
            sequence: the last processed record; 0 for none.
            group: the consumer group.
            rewind: allow a move backwards, and the replacement of a cursor that cannot be trusted.
            any_user: let root move another user's cursor, which keeps its owner.

        Returns:
            the cursor. If it is new or was rewound, its ``message`` names needed records that were reclaimed.

        Raises:
            InvalidInput: an invalid name, or a negative sequence.
            NotFound: no such route.
            Refused: a move backwards without ``rewind``, or beyond the head; see also :meth:`cursor`.
            NotPermitted: this user may not create a cursor there, or another user owns it.
            Replaced: see :meth:`require_continuity`.
            OSError: the cursor cannot be written.
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
