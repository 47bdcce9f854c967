"""Ownership of a work group: one process at a time, by the lock of ``routes/R/cursors/G.drain``.

A command of ``wald-drain`` holds the lock of a file too, and the next drain waits for one that outlived its drain:

    drain ──fork──▶ keeper ──▶ command          <group>.command, or <group>.command-3 of worker 3
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wald.errors import Locked, Refused
from wald.files import locks
from wald.files.cursor_directory import GroupFile, is_own_file, not_permitted
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.locks import holders, is_locked, process_command, process_name, process_status, sharers
from wald.format.names import COMMAND_SUFFIX, HANDOVER_SUFFIX, cursor_name, is_group_file
from wald.format.times import utc
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.retention.handovers import PinWriter
from wald.work.journal import discard, recover_progress
from wald.work.snapshot import GroupStatus, WorkFile, owner_of

KEEPER = "wald-keeper"
"""Name of the process that waits for one run of a command."""
RUNNER = "wald-runner"
"""Name of the process that starts the commands of a worker."""
_RETRY_SECONDS = 0.1  # another process may hold the lock for an instant, to test it


class Ownership(GroupFile):
    """The right to work on ``route`` for ``group``, held until it is closed. The owner may use the file's contents."""

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        super().__init__(root, route, group, HANDOVER_SUFFIX, disk)
        try:
            until = time.monotonic() + _RETRY_SECONDS
            while not self.lock():
                if time.monotonic() >= until:
                    raise self._refusal(route, group)
                time.sleep(_RETRY_SECONDS / 10)
            if not os.fstat(self.descriptor).st_nlink:
                raise Locked(f"{self.path}: the group has just been removed", hint="run the same command again")
            disk.sync_directory(self.path.parent)
        except (Locked, OSError):
            self.close()
            raise

    def _refusal(self, route: str, group: str) -> Locked:
        found = holders(self.path)
        if os.getpid() in found:
            return Locked(
                f"{self.path}: this process already works on route {route} for group {group}",
                hint="use the open WorkGroup, which threads may share, or close it first",
            )
        if found:
            command = process_command(found[0]) or process_name(found[0])
            return Locked(
                f"{self.path}: another process works on route {route} for group {group}: process {found[0]}, {command}",
                hint="wait until it has ended, or add workers to it; "
                "a wald-gate releases the group 30 s after the last request if no worker has a record",
            )
        return Locked(
            f"{self.path}: another process works on route {route} for group {group}",
            hint=f"wait until it has ended, or find it: fuser {self.path}",
        )


class RunningCommand(NamedTuple):
    """A process that a worker of ``wald-drain`` runs."""

    worker: int | None  # None: the drain has no workers
    process: int
    process_group: int  # including the processes that it started
    words: str  # its command line; "" if this user may not see it
    started_ns: int  # in ns since 1970
    left: bool  # an earlier drain started it, and the current owner waits for it


def worker_name(worker: int) -> str:
    """Return the name of a worker of ``wald-drain``.

    >>> worker_name(3)
    'worker-3'
    """
    return f"worker-{worker}"


def workers_of(directory: Path, group: str) -> list[int]:
    named = re.compile(rf"{re.escape(group + COMMAND_SUFFIX)}-([0-9]+)")
    found = (named.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


def command_files(directory: Path, group: str) -> list[Path]:
    """Return the files that commands of a group lock: of a drain without workers, and of each worker."""
    workers = (f"{COMMAND_SUFFIX}-{each}" for each in workers_of(directory, group))
    return [directory / f"{group}{suffix}" for suffix in (COMMAND_SUFFIX, *workers)]


def commands_of(groups: Sequence[GroupStatus]) -> dict[Path, list[RunningCommand]]:
    files: dict[Path, Path] = {}
    for each in groups:
        journal = each.file.path
        with suppress(OSError):  # the route was removed in the meantime
            files |= dict.fromkeys(command_files(journal.parent, each.file.group), journal)
    owners = [each.owner.pid for each in groups if each.owner is not None and each.owner.pid is not None]
    found: dict[Path, list[RunningCommand]] = {}
    for file, commands in running(files, owners).items():
        found.setdefault(files[file], []).extend(commands)
    return {journal: sorted(commands, key=lambda each: each.worker or 0) for journal, commands in found.items()}


def running(files: Iterable[Path], owners: Sequence[int] = ()) -> dict[Path, list[RunningCommand]]:
    """Return the commands that hold each of these files, as far as this user may see; ``owners`` own groups now."""
    found: dict[Path, list[RunningCommand]] = {}
    for path, sharing in sharers(files).items():
        left = not set(owners).intersection(sharing)
        commands = [each for each in sharing if each not in owners and process_name(each) not in (KEEPER, RUNNER)]
        number = path.name.rpartition(f"{COMMAND_SUFFIX}-")[2]
        worker = int(number) if number.isdecimal() else None
        found[path] = [
            RunningCommand(worker, each, status.group, process_command(each), status.started_ns, left)
            for each in commands
            if (status := process_status(each)) is not None and status.parent not in commands  # started by a keeper
        ]
    return found


def describe_commands(path: Path) -> str:
    """Describe the commands that hold a file, and how to end them; "" if one has just ended, or is starting."""
    found = running([path]).get(path)
    if found is None:
        return f"a process that this user may not see; as root: fuser -v {path}"
    return "; ".join(
        f"process {each.process}, since {utc(each.started_ns)}, kill -- -{each.process_group} ends it: {each.words}"
        for each in found
    )


def require_no_command(root: Root, route: str, group: str) -> None:
    """Raise Locked if a command that a killed ``wald-drain`` left running has records of a group."""
    for path in command_files(root.cursor_directory(route), group):
        if is_locked(path, Disk()):
            raise Locked(
                f"{path}: a command that a killed wald-drain left running still has records of route {route} "
                f"for group {group}",
                hint=f"wait until it has ended: {describe_commands(path) or f'fuser -v {path}'}",
            )


def remove_group(file: WorkFile) -> list[Path]:
    root, route, group = file.root, file.route, file.group
    if is_own_file(file.path):
        with Ownership(root, route, group, Disk()):
            require_no_command(root, route, group)  # without its file, the next start would not wait for it
            return _remove(file)
    if owner_of(file) is not None:
        raise Locked(f"{file.lock}: another process works on route {route} for group {group}")
    return _remove(file)


def succeed_workers(log: Log, route: str, group: str) -> None:
    """Move the cursor of a work group to its ack floor for a reader without workers.

    A group without workers is left alone, and no lock is taken.
    """
    if not log.cursor(route, group).of_work_group:
        return
    disk = Disk()
    with Ownership(log.root, route, group, disk):
        require_no_command(log.root, route, group)
        cursor = log.cursor(route, group)
        if cursor.state is CursorState.ABSENT:
            discard(log.root, disk, route, group)  # of a removed group with this name
        elif cursor.state is CursorState.VALID:
            progress = recover_progress(log, route, group)
            if progress.done or progress.dead:
                raise done_above(log, route, group, progress.floor)
            if progress.floor > cursor.sequence:
                log.set_cursor(route, progress.floor, group)
            # The pin remains if the workers were killed after the last dead letter was recorded.
            PinWriter(log.root, disk, route, group, log.identity.log_id, "work").unpin()


def done_above(log: Log, route: str, group: str, floor: int, command: str = "COMMAND") -> Refused:
    """Return the refusal of a reader without workers; ``command`` is what processes the remaining records."""
    words = f"feed {route} --group {group} --workers 1 --exit-at-end -- {command}"
    return Refused(
        f"route {route}: workers of group {group} have processed records above the cursor, "
        f"{floor}, which would be processed again",
        hint=f"{command_line(log.root.path, words, program='wald-drain')} processes the rest",
    )


def _remove(file: WorkFile) -> list[Path]:
    disk = Disk()
    directory = file.path.parent
    left = locks.abandoned_files(directory, disk, prefix=f"{file.group}.")
    removed = []
    cursor = cursor_name(file.group)
    names = [name for name in os.listdir(directory) if is_group_file(name, file.group)]
    for name in sorted(names, key=lambda name: (name != cursor, name)):  # without the cursor a new owner starts again
        path = directory / name
        try:
            disk.unlink(path)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise not_permitted(file.root, file.route, path, error) from error
        removed.append(path)
    disk.sync_directory(directory)
    locks.remove_leftovers(left, disk)
    return removed
