"""Removing a work group, while no process works for it."""

from __future__ import annotations

from pathlib import Path

from wald.errors import Locked
from wald.files import locks
from wald.files.cursor_directory import is_own_file
from wald.files.disk import Disk
from wald.work.commands import require_none
from wald.work.ownership import Ownership
from wald.work.picture import WorkFile, owner_of, remove_files


def remove_group(file: WorkFile) -> list[Path]:
    """Remove a work group from its route: its cursor, its journal, and its other files.

    Returns:
        as of :func:`remove_files`.

    Raises:
        Locked: a process owns the group, or a command runs that a killed ``wald-drain`` has left.
        NotPermitted: this user may not.
    """
    root, route, group = file.root, file.route, file.group
    if is_own_file(file.path):
        with Ownership(root, route, group, Disk()):
            require_none(root, route, group)  # without its file, the next start would not wait for it
            return _remove(file)
    if owner_of(file) is not None:
        raise Locked(f"{file.lock}: another process works on route {route} for group {group}")
    return _remove(file)


def _remove(file: WorkFile) -> list[Path]:
    left = locks.abandoned_files(file.path.parent, Disk(), prefix=f"{file.group}.")
    removed = remove_files(file, Disk())
    locks.remove_leftovers(left, Disk())
    return removed
