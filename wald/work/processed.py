"""Whether a group has processed records: by its cursor, and of a work group by its journal, as any process writes them.

A program looks again and again, so only what has changed since its last look is read. What it shows to be processed is
synced before it counts: the process that wrote it may still have to, and until then a power cut would take it back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from wald.errors import Damaged, NotFound, NotProcessed
from wald.files.disk import Disk
from wald.files.safe_open import open_regular
from wald.format.names import check_group
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.work.picture import Picture, WorkFile, read_of_group
from wald.work.window import Run

_FIRST_SECONDS, _LAST_SECONDS = 0.001, 0.050  # between two looks
_PAUSES = 10  # a look that takes long is followed by a pause of so many times that
_SETTLED_NS = 50_000_000  # what was written after a look, in the same tick of the clock of files, would look the same
_Seen = tuple[int, int, int] | None


class Progress:
    """How far ``group`` has processed ``route``.

    Raises:
        InvalidInput: an illegal name.
        NotFound: there is no such route.
    """

    def __init__(self, log: Log, route: str, group: str, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        log.root.require_route(route)
        self.log, self.route, self.group = log, route, check_group(group)
        self._cursor_path = log.root.cursor(route, group)
        self._file = WorkFile(log.root, route, group)
        self._cursor_seen: _Seen = None
        self._journal_seen: _Seen = None
        self._floor = 0
        self._picture: Picture | None = None
        self._unsynced: set[Path] = set()
        self._synced_inodes: dict[Path, int] = {}

    def look(self) -> None:
        """Take in what the group has processed by now.

        Raises:
            NotFound: there is no such group.
            OSError: its files may not be read.
        """
        if (seen := _seen(self._cursor_path)) != self._cursor_seen or seen is None:
            cursor = self.log.cursor(self.route, self.group, any_user=True)
            if cursor.state is CursorState.ABSENT:
                listing = command_line(self.log.root.path, f"cursor list {self.route}")
                raise NotFound(
                    f"group {self.group} has no cursor on route {self.route}, so it has not begun",
                    hint=f"{listing} shows those that have",
                )
            self._floor, self._cursor_seen = cursor.effective, _settled(seen)
            self._unsynced.add(self._cursor_path)
        if (seen := _seen(self._file.path)) != self._journal_seen:
            self._picture = self._read_journal()
            self._journal_seen = _settled(seen)
            self._unsynced.add(self._file.path)

    def left(self, runs: Iterable[Run]) -> list[Run]:
        """What of some records it had not processed at the last look; that it has processed the others, is on disk.

        Args:
            runs: of records of the route.

        Raises:
            OSError: that cannot be synced.
        """
        before = list(runs)
        left = [Run(max(run.first, self._floor + 1), run.last) for run in before if run.last > self._floor]
        if (picture := self._picture) is not None:
            left = [open_run for run in left for open_run in _open_in(picture, run)]
        if left != before:
            self._sync()
        return left

    def _read_journal(self) -> Picture | None:
        try:
            _, lines, _ = read_of_group(self._file, self.log.identity.log_id)  # also what stands before a damage
            return Picture(self._file.path, lines, self._floor, time.time_ns())
        except (FileNotFoundError, Damaged):
            return None

    def _sync(self) -> None:
        """Return when what was read is on disk. A file that has replaced it meanwhile says at least as much."""
        inodes = dict(self._synced_inodes)
        for path in self._unsynced:
            with suppress(FileNotFoundError, Damaged):
                descriptor = open_regular(path)
                try:
                    inodes[path] = os.fstat(descriptor).st_ino
                    self._disk.sync(descriptor)
                finally:
                    self._disk.close(descriptor)
        if inodes != self._synced_inodes:
            self._disk.sync_directory(self._cursor_path.parent)
        self._synced_inodes = inodes
        self._unsynced.clear()


class Unprocessed:
    """Records of ``route`` that ``group`` has not processed yet.

    A thread may look at it while another one takes something in.
    """

    def __init__(self, route: str, group: str) -> None:
        self._left: list[Run] = []
        self.route, self.group = route, check_group(group)

    def add(self, first: int, last: int) -> None:
        """Add stored records."""
        if self._left and self._left[-1].last + 1 == first:
            first = self._left.pop().first
        self._left.append(Run(first, last))

    @property
    def count(self) -> int:
        """Number of these records."""
        return sum(run.size for run in self._left)

    def take_in(self, progress: Progress) -> None:
        """Remove the records that the group has processed.

        Raises:
            OSError: as of :meth:`Progress.left`.
        """
        self._left = progress.left(self._left)


def pause(before: float, look: float) -> float:
    """How long to wait until the next look, in seconds.

    Args:
        before: how long it was before this look; 0: it was the first.
        look: how long this look has taken.
    """
    return max(min(max(2 * before, _FIRST_SECONDS), _LAST_SECONDS), _PAUSES * look)


def not_processed(log: Log, unprocessed: Unprocessed, sent: int, seconds: float) -> NotProcessed:
    """The error for records that were not processed for so many seconds.

    Args:
        sent: how many records were to be processed.
    """
    route, group = unprocessed.route, unprocessed.group
    return NotProcessed(
        f"group {group} has not processed {unprocessed.count} of {sent} records on route {route} "
        f"for {round(seconds, 2):g} s; all of them are durable",
        hint=f"{command_line(log.root.path, f'cursor show {route} --group {group}')}; do not send them again",
    )


def _open_in(picture: Picture, run: Run) -> Iterator[Run]:
    """What of a run is not done: it is open, or was not taken in."""
    yield from picture.open_in(*run)
    if run.last >= picture.end:
        yield Run(max(run.first, picture.end), run.last)


def _seen(path: Path) -> _Seen:
    """What changes with a file; None: it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _settled(seen: _Seen) -> _Seen:
    """The same, if it would have changed with what is written from now on; else None, so that it is read again."""
    return None if seen is None or time.time_ns() - seen[2] < _SETTLED_NS else seen
