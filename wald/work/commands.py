"""The commands of ``wald-drain`` that run for a group, found by the locks of their files, which they hold.

    drain ──fork──▶ keeper ──▶ command          <group>.command, beside the cursor; <group>.command-3 of worker 3

A command that has outlived its drain still has the lock, and the next drain waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wald.errors import Locked
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.locks import is_locked, process_command, process_name, process_status, sharers
from wald.format.names import COMMAND_SUFFIX
from wald.format.times import utc
from wald.work.picture import Seen

KEEPER = "wald-keeper"
"""The name of the process that waits for one run of a command."""
RUNNER = "wald-runner"
"""The name of the process that starts the commands of a worker."""


class RunningCommand(NamedTuple):
    """A process that a worker runs.

    Attributes:
        worker: its number; None: of a drain without workers.
        process_group: with what it has started.
        words: its command line; "" if this user may not see it.
        started_ns: when it was started, in ns since 1970.
        left: whether an earlier drain has left it running: the process that works for the group now waits for it.
    """

    worker: int | None
    process: int
    process_group: int
    words: str
    started_ns: int
    left: bool


def worker_name(worker: int) -> str:
    """What a worker of ``wald-drain`` is called, as a consumer of its group.

    >>> worker_name(3)
    'worker-3'
    """
    return f"worker-{worker}"


def workers_of(directory: Path, group: str) -> list[int]:
    """The workers of a group that have a file in a directory, in order."""
    named = re.compile(rf"{re.escape(group + COMMAND_SUFFIX)}-([0-9]+)")
    found = (named.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


def commands_of(groups: Sequence[Seen]) -> dict[Path, list[RunningCommand]]:
    """The commands that run for work groups, by the journal of the group."""
    files: dict[Path, Path] = {}
    for each in groups:
        journal = each.file.path
        with suppress(OSError):  # the route was removed meanwhile
            files |= dict.fromkeys(command_files(journal.parent, each.file.group), journal)
    owners = [each.owner.pid for each in groups if each.owner is not None and each.owner.pid is not None]
    found: dict[Path, list[RunningCommand]] = {}
    for file, commands in running(files, owners).items():
        found.setdefault(files[file], []).extend(commands)
    return {journal: sorted(commands, key=lambda each: each.worker or 0) for journal, commands in found.items()}


def command_files(directory: Path, group: str) -> list[Path]:
    """The files of a group whose locks commands hold: of a drain without workers, and of each worker."""
    workers = (f"{COMMAND_SUFFIX}-{each}" for each in workers_of(directory, group))
    return [directory / f"{group}{suffix}" for suffix in (COMMAND_SUFFIX, *workers)]


def require_none(root: Root, route: str, group: str) -> None:
    """Take care that no command has records of a group that is about to be delivered; for who works for the group.

    Raises:
        Locked: a killed ``wald-drain`` has left one running.
    """
    for path in command_files(root.cursor_directory(route), group):
        if is_locked(path, Disk()):
            raise Locked(
                f"{path}: a command that a killed wald-drain has left running has records of route {route} "
                f"for group {group}",
                hint=f"wait until it has ended: {named(path) or f'fuser -v {path}'}",
            )


def named(path: Path) -> str:
    """Which commands run with a file, and what ends them; "" if one has just ended, or begins."""
    found = running([path]).get(path)
    if found is None:
        return f"a process that this user may not see; as root: fuser -v {path}"
    return "; ".join(
        f"process {each.process}, since {utc(each.started_ns)}, kill -- -{each.process_group} ends it: {each.words}"
        for each in found
    )


def running(files: Iterable[Path], owners: Sequence[int] = ()) -> dict[Path, list[RunningCommand]]:
    """The commands that run with each of these files, as far as this user may see their processes.

    Args:
        files: of workers, or of drains without.
        owners: the processes that work for groups now.
    """
    return {path: list(_commands(path, pids, owners)) for path, pids in sharers(files).items()}


def _commands(path: Path, sharing: list[int], owners: Sequence[int]) -> Iterable[RunningCommand]:
    """Those that a keeper has started: what they have started themselves is not named."""
    left = not set(owners).intersection(sharing)
    commands = [each for each in sharing if each not in owners and process_name(each) not in (KEEPER, RUNNER)]
    number = path.name.rpartition(f"{COMMAND_SUFFIX}-")[2]
    worker = int(number) if number.isdecimal() else None
    for each in commands:
        status = process_status(each)
        if status is not None and status.parent not in commands:
            yield RunningCommand(worker, each, status.group, process_command(each), status.started_ns, left)
