"""A group on its route: what is behind its cursor, and moving the cursor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from wald.errors import Damaged
from wald.format.record import Record
from wald.log import Log
from wald.store.cursors import Cursor, CursorState
from wald.store.disk import Disk


@dataclass(frozen=True, slots=True)
class Consumer:
    """``group`` on ``route``.

    Attributes:
        on_damage: gets what cannot be read, which is passed over.
        now_ns: the time, ns since 1970.
    """

    log: Log
    route: str
    group: str
    disk: Disk
    on_damage: Callable[[Damaged], None]
    now_ns: Callable[[], int]

    @property
    def cursor(self) -> Cursor:
        return self.log.cursor(self.route, self.group)

    def enter(self) -> None:
        """Give a new group a cursor, so that what it has not processed is kept for it from now on."""
        if self.cursor.state is CursorState.ABSENT:
            self.commit(0)

    def commit(self, sequence: int) -> None:
        """Say that everything up to ``sequence`` is processed; on disk when this returns."""
        now = datetime.fromtimestamp(self.now_ns() / 1e9, UTC).isoformat(timespec="seconds")
        self.log.move_cursor(self.route, sequence, self.group, disk=self.disk, now=now)

    def unprocessed(self) -> Iterator[Record]:
        """What is there now behind the cursor."""
        return self.log.read(self.route, "cursor", group=self.group, on_damage=self.on_damage)

    def records(self, first: int, last: int) -> Iterator[Record]:
        """What is there of these, wherever the cursor is."""
        return self.log.read(self.route, first, last, group=self.group, on_damage=self.on_damage)

    def more_come(self, stop: threading.Event) -> bool:
        """Wait until there is a record behind the cursor; False if ``stop`` was set instead."""
        coming = self.log.batches(
            self.route,
            "cursor",
            group=self.group,
            limit=1,
            follow=True,
            cancel=stop,
            on_damage=self.on_damage,
        )
        return next(coming, None) is not None

    def named(self, first: int, last: int) -> str:
        """Records of the route, in words."""
        return f"{self.route} {first}" if first == last else f"{self.route} {first} to {last}"
