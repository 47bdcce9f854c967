"""Snapshot of a work group from its journal and cursor, without its lock or its owner.

The lines are replayed up to the current wall-clock time, so records of expired leases and due records are free. While
an owner runs, the snapshot may lack its last lines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from wald.checking.checker import Finding, Level
from wald.errors import Damaged, NotFound, NotProcessed
from wald.files import locks
from wald.files.cursor_directory import is_companion
from wald.files.disk import Disk
from wald.files.layout import Root, scan_cursor_directory
from wald.files.locks import process_command
from wald.files.safe_open import open_regular
from wald.format.names import HANDOVER_SUFFIX, WORK_SUFFIX, check_group, is_route
from wald.format.work import Commit, JournalLine, WorkerLease
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import Cursor, CursorState
from wald.work.journal import Failure, Reading, Replay, beyond_head, read_beside_owner
from wald.work.owner import FOREVER_SECONDS
from wald.work.window import Run, State

T = TypeVar("T")
_NO_FAILURE = Failure("", 0)
_DONE_TRIES = b"\xff"  # of done records, in a page
_FIRST_SECONDS, _LAST_SECONDS = 0.001, 0.050  # pauses of a poll
_PAUSES = 10  # a slow poll is followed by a pause of this many times its duration
_SETTLED_NS = 50_000_000  # a later write in the same tick of the file system's clock would look the same
_FileStamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class WorkFile:
    """The journal of a work group; a group with a journal is a work group."""

    root: Root
    route: str
    group: str

    @property
    def path(self) -> Path:
        return self.root.cursor_directory(self.route) / f"{self.group}{WORK_SUFFIX}"

    @property
    def lock(self) -> Path:
        """The file that the group's owner has locked."""
        return self.path.with_suffix(HANDOVER_SUFFIX)


@dataclass(frozen=True, slots=True)
class OwnerProcess:
    """The process that owns a group."""

    pid: int | None  # None: it runs in another PID namespace
    command: str  # "" if this user may not see it


class Out(NamedTuple):
    """Consecutive records that a worker has leased."""

    first: int
    last: int
    worker: str
    until_ns: int | None  # end of its lease in ns since 1970; None: it has no end
    tries: int  # deliveries of each


class Waiting(NamedTuple):
    """Delayed records."""

    first: int
    last: int
    due_ns: int  # in ns since 1970
    tries: int  # deliveries of each
    reason: str  # why they were returned, or ""


class _LeasedReplay(Replay):
    """Replay that tracks which worker has which records."""

    def apply(self, line: JournalLine) -> None:
        if isinstance(line, Commit):
            for first, last in line.done:  # first, because a worker may extend and acknowledge in the same round
                self.deliveries.finish_all(Run(first, last))
            self._hold(line.extended)
            for first, last in line.returned:
                self.deliveries.take_back(Run(first, last))
        super().apply(line)
        if isinstance(line, Commit):
            self._hold(line.leased)

    def _hold(self, leases: Iterable[WorkerLease]) -> None:
        for held in leases:
            for first, last in held.runs:
                self.deliveries.hold(Run(first, last), held.worker, until_ns=held.until_ns)


class GroupSnapshot:
    """State of a group according to its journal. Raise Damaged if lines contradict each other.

    ``floor`` is the ack floor, ``end`` the first sequence that the group has not read, and ``open`` the number of
    records between them that are not done. ``dead`` has the records that are being given up, ``failures`` the reasons
    of returned records.
    """

    def __init__(self, path: Path, lines: list[JournalLine], cursor: int, now_ns: int) -> None:
        try:
            replay = _LeasedReplay(by_key=False)
            for line in lines:
                replay.apply(line)
            replay.end(cursor)
        except (LookupError, ValueError, TypeError, OverflowError) as error:
            message = f"{path}: its lines contradict each other ({error!r})"
            raise Damaged(message, hint="keep a copy of the file for a bug report") from error
        self._deliveries = replay.deliveries
        self._window = self._deliveries.window
        self._endless_ns = now_ns + int(FOREVER_SECONDS * 10**9) // 2  # an endless lease stays beyond it for years
        self._deliveries.expire(now_ns)
        self._deliveries.wake(now_ns)
        self.dead = [each for _, each in sorted(replay.dead.items())]
        self.failures = replay.failures
        self.floor, self.end, self.open = self._window.floor, self._window.end, self._window.open

    @property
    def tries_max(self) -> int:
        return max((max(tries.replace(_DONE_TRIES, b""), default=0) for _, tries in self._window.pages()), default=0)

    def tries(self, sequence: int) -> int:
        return self._window.tries(sequence)

    def open_in(self, first: int, last: int) -> Iterator[Run]:
        return self._window.open_in(Run(max(first, self.floor + 1), min(last, self.end - 1)))

    def out(self) -> Iterator[Out]:
        leased = ((run, (lease.worker, lease.until_ns)) for run, lease in self._deliveries.out())
        for run, (worker, until_ns), tries in self._joined(leased):
            yield Out(*run, worker, None if until_ns > self._endless_ns else until_ns, tries)

    def waiting(self) -> Iterator[Waiting]:
        due, reasons = self._deliveries.due_times(), self.failures
        each = (Run(at, at) for run in self._window.runs(State.WAITING) for at in range(run.first, run.last + 1))
        waiting = ((one, (due[one.first], reasons.get(one.first, _NO_FAILURE).reason)) for one in each)
        for run, (due_ns, reason), tries in self._joined(waiting):
            yield Waiting(*run, due_ns, tries, reason)

    def _joined(self, pieces: Iterable[tuple[Run, T]]) -> Iterator[tuple[Run, T, int]]:
        """Join adjacent runs that are alike and have the same number of tries."""
        joined: tuple[Run, T, int] | None = None
        for run, about in pieces:
            first = run.first
            for tries, alike in groupby(self._window.tries_of(run)):
                last = first + sum(1 for _ in alike) - 1
                if joined is not None and (joined[0].last + 1, *joined[1:]) == (first, about, tries):
                    joined = (Run(joined[0].first, last), about, tries)
                else:
                    if joined is not None:
                        yield joined
                    joined = (Run(first, last), about, tries)
                first = last + 1
        if joined is not None:
            yield joined


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A work group with its owner, its cursor, and a snapshot of its journal up to any damage."""

    file: WorkFile
    owner: OwnerProcess | None
    cursor: Cursor
    reading: Reading
    snapshot: GroupSnapshot
    damage: str = ""


def work_files(root: Root, route: str) -> list[WorkFile]:
    root.require_route(route)
    try:
        names = sorted(entry.name for entry in scan_cursor_directory(root.cursor_directory(route), WORK_SUFFIX))
    except FileNotFoundError:
        return []
    groups = (name.removesuffix(WORK_SUFFIX) for name in names)
    return [WorkFile(root, route, group) for group in groups if is_route(group)]


def work_file(root: Root, route: str, group: str) -> WorkFile:
    """Return the journal of a group. Raise NotFound if there is no such route, or the group is not a work group."""
    root.require_route(route)
    file = WorkFile(root, route, check_group(group))
    if os.path.lexists(file.path):
        return file
    if group in root.groups(route):
        raise NotFound(
            f"group {group} of route {route} is not a work group: it has only a cursor",
            hint=command_line(root.path, f"cursor show {route} --group {group}"),
        )
    raise NotFound(f"route {route} has no work group {group}", hint=command_line(root.path, f"group list {route}"))


def owner_of(file: WorkFile) -> OwnerProcess | None:
    if found := locks.holders(file.lock):
        return OwnerProcess(found[0], process_command(found[0]))
    return OwnerProcess(None, "") if locks.is_locked(file.lock, Disk()) else None


def read_status(log: Log, file: WorkFile, now_ns: int) -> GroupStatus:
    owner = owner_of(file)
    reading, lines, damage = read_of_group(file, log.identity.log_id)
    cursor = log.cursor(file.route, file.group, any_user=True)
    try:
        snapshot = GroupSnapshot(file.path, lines, cursor.effective, now_ns)
    except Damaged as error:
        damage, snapshot = error.message, GroupSnapshot(file.path, [], cursor.effective, now_ns)
    return GroupStatus(file, owner, cursor, reading, snapshot, damage)


def read_of_group(file: WorkFile, log_id: bytes) -> tuple[Reading, list[JournalLine], str]:
    """Read a group's journal while its owner may be writing it."""
    reading, lines = read_beside_owner(file.path)
    if reading.damage:
        return reading, lines, f"offset {reading.end}: {reading.damage}"
    cursor, start = file.root.cursor(file.route, file.group), reading.start
    if os.path.lexists(cursor) and os.path.lexists(file.path) and not is_companion(file.path, cursor):
        return reading, [], "offset 0: belongs to another user than the cursor of the group"
    if start is not None and start.owner != (log_id, file.route, file.group):
        whose = f"group {start.group} on route {start.route} of log {start.log_id.hex()}"
        return reading, [], f"offset 0: the journal of {whose}"
    if beyond := beyond_head(file.root, reading):
        return reading, [], f"offset 0: {beyond}"
    return reading, lines, ""


def check_journals(root: Root, log_id: bytes) -> Iterator[tuple[WorkFile, Finding]]:
    """Check the journal of every work group, even while its owner writes to it; change nothing."""
    for route in root.route_names():
        files: list[WorkFile] = []
        with suppress(NotFound, OSError):  # removed in the meantime; the check of cursors reports an unreadable one
            files = work_files(root, route)
        for file in files:
            yield from ((file, finding) for finding in _findings(file, log_id))


def _findings(file: WorkFile, log_id: bytes) -> Iterator[Finding]:
    path = file.path
    try:
        reading, lines, damage = read_of_group(file, log_id)
        GroupSnapshot(path, lines, cursor=0, now_ns=0)
    except FileNotFoundError:  # removed in the meantime
        return
    except Damaged as error:
        yield Finding.of(Level.ERROR, path, error.message)
        return
    except OSError as error:
        yield Finding(Level.ERROR, path, 0, f"cannot be read ({error.strerror})")
        return
    if damage:
        yield Finding.of(Level.ERROR, path, f"{damage}; the group does not start with this journal")
        return
    yield Finding(Level.OK, path, 0, f"{reading.lines} lines")
    if reading.torn:
        yield Finding(Level.INFO, path, reading.end, "an unfinished line; the owner of the group removes it")


class Progress:
    """Progress of ``group`` on ``route``, from its files, which are reread only after a change."""

    def __init__(self, log: Log, route: str, group: str, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        log.root.require_route(route)
        self.log, self.route, self.group = log, route, check_group(group)
        self._cursor_path = log.root.cursor(route, group)
        self._file = WorkFile(log.root, route, group)
        self._cursor_stamp: _FileStamp = None
        self._journal_stamp: _FileStamp = None
        self._floor = 0
        self._snapshot: GroupSnapshot | None = None
        self._unsynced: set[Path] = set()
        self._synced_inodes: dict[Path, int] = {}

    def read(self) -> None:
        if (stamp := _stamp(self._cursor_path)) != self._cursor_stamp or stamp is None:
            cursor = self.log.cursor(self.route, self.group, any_user=True)
            if cursor.state is CursorState.ABSENT:
                listing = command_line(self.log.root.path, f"cursor list {self.route}")
                raise NotFound(
                    f"group {self.group} has no cursor on route {self.route}, so it has not started",
                    hint=f"{listing} shows those that have",
                )
            self._floor, self._cursor_stamp = cursor.effective, _settled(stamp)
            self._unsynced.add(self._cursor_path)
        if (stamp := _stamp(self._file.path)) != self._journal_stamp:
            self._snapshot = None
            with suppress(FileNotFoundError, Damaged):
                _, lines, _ = read_of_group(self._file, self.log.identity.log_id)  # the valid ones, if it is damaged
                self._snapshot = GroupSnapshot(self._file.path, lines, self._floor, time.time_ns())
            self._journal_stamp = _settled(stamp)
            self._unsynced.add(self._file.path)

    def unprocessed(self, runs: Iterable[Run]) -> list[Run]:
        """Return the unprocessed parts of these runs of the route.

        Progress is synced before it counts, because its writer may not have synced it yet, and a power failure would
        undo it.
        """
        before = list(runs)
        left = [Run(max(run.first, self._floor + 1), run.last) for run in before if run.last > self._floor]
        if (snapshot := self._snapshot) is not None:
            unread = snapshot.end
            left = [
                part
                for run in left
                for part in (*snapshot.open_in(*run), Run(max(run.first, unread), run.last))
                if part.size > 0
            ]
        if left != before:
            self._sync()
        return left

    def _sync(self) -> None:
        """Sync the files that were read. A file that has replaced one since then has at least the same progress."""
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
    """Records of ``route`` that ``group`` has not yet processed.

    One thread may update this while another one reads ``count``.
    """

    def __init__(self, route: str, group: str) -> None:
        self._left: list[Run] = []
        self.route, self.group = route, check_group(group)

    def add(self, first: int, last: int) -> None:
        if self._left and self._left[-1].last + 1 == first:
            first = self._left.pop().first
        self._left.append(Run(first, last))

    @property
    def count(self) -> int:
        return sum(run.size for run in self._left)

    def update(self, progress: Progress) -> None:
        self._left = progress.unprocessed(self._left)


def pause(before: float, reading: float) -> float:
    """Return the next pause in seconds, after a pause of ``before`` (0: none) and a poll that took ``reading``."""
    return max(min(max(2 * before, _FIRST_SECONDS), _LAST_SECONDS), _PAUSES * reading)


def not_processed(log: Log, unprocessed: Unprocessed, sent: int, seconds: float) -> NotProcessed:
    """Return the error for records not processed in time; ``sent`` is the total number of records."""
    route, group = unprocessed.route, unprocessed.group
    return NotProcessed(
        f"group {group} has not processed {unprocessed.count} of {sent} records on route {route} "
        f"for {round(seconds, 2):g} s; all of them are durable",
        hint=f"{command_line(log.root.path, f'cursor show {route} --group {group}')}; do not send them again",
    )


def _stamp(path: Path) -> _FileStamp:
    """Return values that differ after any change of the file; None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _settled(stamp: _FileStamp) -> _FileStamp:
    """Return the stamp if any later write would change it, else None."""
    return None if stamp is None or time.time_ns() - stamp[2] < _SETTLED_NS else stamp
