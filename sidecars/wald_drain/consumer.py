"""A consumer group on its route: the records after its cursor, and moving the cursor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wald.files.disk import Disk
from wald.format.records import Record
from wald.format.times import utc
from wald.log import Log
from wald.retention.cursor_moves import move_cursor, start_position
from wald.retention.cursors import Cursor, CursorState, new_group_warning


@dataclass(frozen=True, slots=True)
class Consumer:
    """``group`` on ``route``.

    Attributes:
        now_ns: the clock, in ns since 1970.
    """

    log: Log
    route: str
    group: str
    disk: Disk
    now_ns: Callable[[], int]

    @property
    def cursor(self) -> Cursor:
        return self.log.cursor(self.route, self.group)

    def enter(self, report: Callable[[str], None]) -> None:
        """Give a new group a cursor, so that the records that it has not processed are kept from now on.

        Records that were reclaimed before the group existed, from the first record on, are reported and passed over.
        """
        if self.cursor.state is CursorState.ABSENT:
            news = new_group_warning(self.log.root, self.route, self.group)
            after, reclaimed = start_position(self.log.view(), self.route, self.group)
            self.commit(after)
            for message in filter(None, (news, reclaimed)):
                report(message)

    def commit(self, sequence: int) -> None:
        """Move the cursor: everything up to ``sequence`` is processed. The cursor is on disk when this returns.

        Raises:
            Replaced: another log, or an older copy of it, is at the path.
        """
        self.log.require_continuity()
        log_id, now = self.log.identity.log_id, utc(self.now_ns())
        move_cursor(self.log.root, self.route, self.group, sequence, log_id=log_id, disk=self.disk, now=now)

    def unprocessed(self) -> Iterator[Record]:
        """The records that are now after the cursor.

        Raises:
            Damaged: a record cannot be read; the cursor must stay before it, so that it is not reclaimed.
        """
        return self.log.records(self.route, "cursor", group=self.group)

    def records(self, first: int, last: int) -> Iterator[Record]:
        """The records of the route in this range, wherever the cursor is."""
        return self.log.records(self.route, first, last)

    def more_come(self, stop: threading.Event) -> bool:
        """Wait until there is a record after the cursor; False if ``stop`` was set instead."""
        following = self.log.batches(self.route, "cursor", group=self.group, limit=1, follow=True, cancel=stop)
        return next(following, None) is not None

    def named(self, first: int, last: int) -> str:
        """A range of records, as text."""
        return f"{self.route} {first}" if first == last else f"{self.route} {first} to {last}"
