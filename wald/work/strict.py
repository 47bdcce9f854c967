"""Progress of a group with ``order="strict"``, which is stored in the cursor alone.

Such a group acknowledges records only in order, so its cursor needs no journal: a shell may write it, ``wald cursor
set`` may move it forward and back, and any reader may continue from it. A journal exists only while a record becomes a
dead letter. It names that record, which is the first one after the cursor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from wald.errors import Damaged, Refused
from wald.files.cursor_directory import is_companion
from wald.files.disk import Disk
from wald.format.names import WORK_SUFFIX
from wald.format.times import utc
from wald.format.work import Commit, DeadRecord, JournalLine, JournalStart
from wald.log import Log
from wald.reading.selection import select
from wald.retention.cursor_moves import move_cursor
from wald.retention.cursors import CursorState
from wald.work.journal import Journal, Replay, discard, read_whole, recover_progress
from wald.work.owner import Owner
from wald.work.ownership import done_above


def resume(log: Log, disk: Disk, route: str, group: str, floor: int) -> Replay:
    """Return the initial state of a strict group: the cursor, and unfinished dead letters.

    A journal left by workers is removed if it has no more progress than the cursor.
    """
    path = log.root.cursor_directory(route) / f"{group}{WORK_SUFFIX}"
    dead: Mapping[int, DeadRecord] = {}
    if is_companion(path, log.root.cursor(route, group)):
        found = recover_progress(log, route, group)
        if found.done:
            raise done_above(log, route, group, found.floor)
        if found.floor > floor:
            floor = found.floor
            log.set_cursor(route, floor, group)
        journal = Replay(by_key=False)
        read_whole(path, log.root, journal.apply)
        journal.end(floor)
        dead = journal.dead
        if not dead:
            discard(log.root, disk, route, group)
    replay = Replay(by_key=False)
    replay.end(floor)
    replay.dead |= dead
    return replay


class CursorJournal:
    """Replacement for the journal: each sync moves the cursor to the last done record.

    ``report`` gets a line when another process has moved the cursor.
    """

    is_new = True
    has_grown = False

    def __init__(self, log: Log, disk: Disk, start: JournalStart, owner: Owner, report: Callable[[str], None]) -> None:
        self._log, self._disk, self._start, self._owner = log, disk, start, owner
        self._report = report
        self._path = log.root.cursor(start.route, start.group)
        self._cursor = start.floor
        self._content = b""
        self._dead: dict[int, DeadRecord] = {}
        self._file: Journal | None = None
        if owner.dead:
            self._file = Journal(log.root, disk, start, lambda _: None)
            self._dead = dict(owner.dead)

    def append(self, lines: Iterable[JournalLine]) -> None:
        """Do nothing: :meth:`sync` writes the owner's state."""

    rewrite = append

    def sync(self) -> None:
        """Make dead letters durable before they are sent, and the cursor before they are forgotten."""
        dead = self._owner.dead
        if dead.keys() - self._dead.keys():
            self._write(dict(dead))
        if self._owner.last_done > self._cursor:
            self._move_cursor(self._owner.last_done)
        if self._file is not None and not dead:
            file, self._file, self._dead = self._file, None, {}  # closed once, even if the removal fails
            file.close()
            discard(self._log.root, self._disk, self._start.route, self._start.group)

    def require_place(self) -> None:
        """Follow a cursor that another process has moved."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:  # removed; the next sync creates a new one
            return
        if content == self._content:
            return
        route, group = self._start.route, self._start.group
        sequence = select(self._log.view(), route, "cursor", None, group).floor(route) - 1
        self._content = content
        if sequence != self._cursor:
            self._cursor = sequence
            self._owner.move(sequence)
            self._report(f"{route}: the cursor was moved to {sequence}; continuing after it")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, dead: dict[int, DeadRecord]) -> None:
        start = JournalStart(self._start.log_id, self._start.route, self._start.group, self._cursor, self._cursor + 1)
        if self._file is None:
            self._file = Journal(self._log.root, self._disk, start, lambda _: None)
        read = [(sequence, sequence) for sequence in sorted(dead)]
        self._file.rewrite([start, Commit(read=read), Commit(dead=list(dead.values()))])
        self._dead = dead

    def _move_cursor(self, sequence: int) -> None:
        route, group = self._start.route, self._start.group
        try:
            self._log.require_continuity()
            log_id, now = self._start.log_id, utc(time.time_ns())
            move_cursor(self._log.root, route, group, sequence, log_id=log_id, disk=self._disk, now=now)
        except Refused:  # moved concurrently
            self.require_place()
            if self._owner.last_done > self._cursor:
                raise
            return
        self._cursor = sequence
        with suppress(OSError, Damaged):
            content = self._path.read_bytes()
            cursor = self._log.cursor(route, group)
            if cursor.state is CursorState.VALID and cursor.sequence == sequence:
                self._content = content
