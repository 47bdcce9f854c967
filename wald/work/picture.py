"""What a work group looks like from outside: by its journal and its cursor, without its lock and without its owner.

The lines are carried out as the owner does it, but by the clock on the wall, which they name. So a lease that is over
has come back, and what waits for a time that has come is free. While an owner runs, the picture may be some lines old.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from wald.errors import Damaged, NotFound
from wald.files import locks
from wald.files.cursor_directory import is_companion, not_permitted
from wald.files.disk import Disk
from wald.files.layout import Root, scan_cursor_directory
from wald.files.locks import process_command
from wald.format.names import HANDOVER_SUFFIX, WORK_SUFFIX, check_group, cursor_name, is_group_file, is_route
from wald.format.work import Commit, JournalLine, WorkerLease
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import Cursor
from wald.work.journal import Reading, beyond_head, read_beside_owner
from wald.work.replay import Replayed
from wald.work.terms import FOREVER_SECONDS
from wald.work.window import Run, State

T = TypeVar("T")
_DONE_TRIES = b"\xff"  # in a page, of a record that is done


@dataclass(frozen=True, slots=True)
class WorkFile:
    """The journal of a work group, which makes a group a work group."""

    root: Root
    route: str
    group: str

    @property
    def path(self) -> Path:
        return self.root.cursor_directory(self.route) / f"{self.group}{WORK_SUFFIX}"

    @property
    def lock(self) -> Path:
        """The file that the owner of the group has locked."""
        return self.path.with_suffix(HANDOVER_SUFFIX)


@dataclass(frozen=True, slots=True)
class OwnerProcess:
    """The process that works for a group.

    Attributes:
        pid: None if it is not known: it runs in another PID namespace.
        command: its command line; "" if this user may not see it.
    """

    pid: int | None
    command: str


class Out(NamedTuple):
    """Records that a consumer has.

    Attributes:
        until_ns: when its lease ends, in ns since 1970; None: it has no end.
        tries: how often each of them was delivered.
    """

    first: int
    last: int
    consumer: str
    until_ns: int | None
    tries: int


class Waiting(NamedTuple):
    """Records that are not due yet.

    Attributes:
        due_ns: when they are, in ns since 1970.
        tries: how often each of them was delivered.
        reason: why they came back the last time, as their worker said; "" if it did not, or they never were with one.
    """

    first: int
    last: int
    due_ns: int
    tries: int
    reason: str


class _Leased(Replayed):
    """The lines carried out with who has what, which a new owner does not ask."""

    def carry_out(self, line: JournalLine) -> None:
        if isinstance(line, Commit):
            for first, last in line.done:  # first: a worker that needed longer may have been done in the same turn
                self.deliveries.finish_all(Run(first, last))
            self._hold(line.extended)
            for first, last in line.returned:
                self.deliveries.take_back(Run(first, last))
        super().carry_out(line)
        if isinstance(line, Commit):
            self._hold(line.leased)

    def _hold(self, leases: Iterable[WorkerLease]) -> None:
        for held in leases:
            for first, last in held.runs:
                self.deliveries.hold(Run(first, last), held.worker, until_ns=held.until_ns)


class Picture:
    """What a journal says.

    Args:
        floor: of the group's cursor.
        now_ns: what time it is, in ns since 1970.

    Attributes:
        dead: records that are being given up.
        failures: why records came back the last time, as their workers said.

    Raises:
        Damaged: the lines do not fit each other.
    """

    def __init__(self, path: Path, lines: list[JournalLine], floor: int, now_ns: int) -> None:
        try:
            replayed = _Leased(by_key=False)
            for line in lines:
                replayed.carry_out(line)
            replayed.end(floor)
        except (LookupError, ValueError, TypeError, OverflowError) as error:
            message = f"{path}: its lines do not follow from each other ({error!r})"
            raise Damaged(message, hint="keep a copy of the file for a bug report") from error
        self._deliveries = replayed.deliveries
        self._window = self._deliveries.window
        self._endless_ns = now_ns + int(FOREVER_SECONDS * 10**9) // 2  # so much is left for years
        self._deliveries.expire(now_ns)
        self._deliveries.wake(now_ns)
        self.dead = [each for _, each in sorted(replayed.dead.items())]
        self.failures = replayed.failures

    @property
    def floor(self) -> int:
        """The ack floor: everything up to it is done."""
        return self._window.floor

    @property
    def end(self) -> int:
        """The first sequence that the group has not taken in."""
        return self._window.end

    @property
    def open(self) -> int:
        """How many records were taken in and are not done."""
        return self._window.open

    @property
    def tries_max(self) -> int:
        """How often the record was delivered that was delivered most, of those that are not done."""
        return max((max(tries.replace(_DONE_TRIES, b""), default=0) for _, tries in self._window.pages()), default=0)

    def out(self) -> Iterator[Out]:
        """What consumers have, in order."""
        leased = ((run, (lease.consumer, lease.until_ns)) for run, lease in self._deliveries.out())
        for run, (consumer, until_ns), tries in self._joined(leased):
            yield Out(*run, consumer, None if until_ns > self._endless_ns else until_ns, tries)

    def waiting(self) -> Iterator[Waiting]:
        """What is not due yet, in order."""
        due = self._deliveries.due_times()
        each = (Run(at, at) for run in self._window.runs(State.WAITING) for at in range(run.first, run.last + 1))
        for run, (due_ns, reason), tries in self._joined((one, (due[one.first], self._why(one.first))) for one in each):
            yield Waiting(*run, due_ns, tries, reason)

    def _why(self, sequence: int) -> str:
        failure = self.failures.get(sequence)
        return failure.reason if failure else ""

    def _joined(self, pieces: Iterable[tuple[Run, T]]) -> Iterator[tuple[Run, T, int]]:
        """Runs of records that are alike, also in how often they were delivered, as long as they can be."""
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

    def open_in(self, first: int, last: int) -> Iterator[Run]:
        """What of a range was taken in and is not done, in order."""
        return self._window.open_in(Run(max(first, self.floor + 1), min(last, self.end - 1)))

    def tries(self, sequence: int) -> int:
        """How often an open record was delivered."""
        return self._window.tries(sequence)


@dataclass(frozen=True, slots=True)
class Seen:
    """A work group as it was found.

    Attributes:
        owner: None: no process works for it.
        damage: what is wrong with its journal; "" if nothing is.
        picture: up to the damage, if there is any.
    """

    file: WorkFile
    owner: OwnerProcess | None
    cursor: Cursor
    reading: Reading
    picture: Picture
    damage: str = ""


def work_files(root: Root, route: str) -> list[WorkFile]:
    """The work groups of a route, by name.

    Raises:
        NotFound: there is no such route.
        OSError: its directory may not be read.
    """
    root.require_route(route)
    try:
        names = sorted(entry.name for entry in scan_cursor_directory(root.cursor_directory(route), WORK_SUFFIX))
    except FileNotFoundError:
        return []
    groups = (name.removesuffix(WORK_SUFFIX) for name in names)
    return [WorkFile(root, route, group) for group in groups if is_route(group)]


def work_file(root: Root, route: str, group: str) -> WorkFile:
    """The journal of a group.

    Raises:
        InvalidInput: an illegal name.
        NotFound: there is no such route, or the group is no work group on it.
    """
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


def look(log: Log, file: WorkFile, now_ns: int) -> Seen:
    """Look at a work group.

    Args:
        now_ns: what time it is, in ns since 1970.

    Raises:
        FileNotFoundError: it was removed meanwhile.
        OSError: its journal cannot be read.
    """
    owner = owner_of(file)
    reading, lines, damage = read_of_group(file, log.identity.log_id)
    cursor = log.cursor(file.route, file.group, any_user=True)
    try:
        picture = Picture(file.path, lines, cursor.effective, now_ns)
    except Damaged as error:
        damage, picture = error.message, Picture(file.path, [], cursor.effective, now_ns)
    return Seen(file, owner, cursor, reading, picture, damage)


def read_of_group(file: WorkFile, log_id: bytes) -> tuple[Reading, list[JournalLine], str]:
    """Read the journal of a group, also one that its owner writes to meanwhile.

    Returns:
        how far it could be read, its lines up to there, and what is wrong with it; "" if nothing is. Of a journal that
        is not that of the group, or is newer than the log, no lines.

    Raises:
        FileNotFoundError: it was removed meanwhile.
        Damaged: it is no regular file.
        OSError: it cannot be read.
    """
    reading, lines = read_beside_owner(file.path)
    if reading.damage:
        return reading, lines, f"offset {reading.end}: {reading.damage}"
    if foreign := _foreign(log_id, file, reading):
        return reading, [], foreign
    if beyond := beyond_head(file.root, reading):
        return reading, [], f"offset 0: {beyond}"
    return reading, lines, ""


def owner_of(file: WorkFile) -> OwnerProcess | None:
    """The process that works for a group; None if none does."""
    if found := locks.holders(file.lock):
        return OwnerProcess(found[0], process_command(found[0]))
    return OwnerProcess(None, "") if locks.is_locked(file.lock, Disk()) else None


def remove_files(file: WorkFile, disk: Disk) -> list[Path]:
    """Remove a group from its route, with all its files: what it has not done is not kept for it any more.

    Who does it holds the lock of the group, or knows that no process has it.

    Returns:
        what was removed; gone from the disk when this returns.

    Raises:
        NotPermitted: this user may not.
    """
    removed = []
    cursor = cursor_name(file.group)
    names = [name for name in os.listdir(file.path.parent) if is_group_file(name, file.group)]
    for name in sorted(
        names, key=lambda name: (name != cursor, name)
    ):  # first the cursor: then a new owner begins anew
        path = file.path.with_name(name)
        try:
            disk.unlink(path)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise not_permitted(file.root, file.route, path, error) from error
        removed.append(path)
    disk.sync_directory(file.path.parent)
    return removed


def _foreign(log_id: bytes, file: WorkFile, reading: Reading) -> str:
    """Says whose journal it is, if it is not that of the group; else ""."""
    cursor = file.root.cursor(file.route, file.group)
    if os.path.lexists(cursor) and os.path.lexists(file.path) and not is_companion(file.path, cursor):
        return "offset 0: belongs to another user than the cursor of the group"
    start = reading.start
    if start is None:
        return ""
    expected = (log_id, file.route, file.group)
    if (start.log_id, start.route, start.group) == expected:
        return ""
    return f"offset 0: the journal of group {start.group} on route {start.route} of log {start.log_id.hex()}"
