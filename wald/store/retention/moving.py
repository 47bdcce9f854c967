"""Moving a route: from now on its records are stored in another route, where its groups get cursors first.

Each step may be the last one before a crash, and the same command completes the rest: the other route, a cursor on it
for each group, and then the mark, from which on records go there. So no record is there before its groups are.
"""

from __future__ import annotations

import os

from wald.errors import Refused, command_line
from wald.store.files.consumers import admit
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.moved import Moved, moved
from wald.store.files.routes import add_route
from wald.store.retention.cursors import set_cursor


def require_movable(root: Root, old: str, new: str) -> None:
    """
    Raises:
        InvalidInput: an illegal name.
        NotFound: there is no route ``old``.
        Refused: one of them is retired or moved elsewhere, or a consumer's group has no cursor on ``new``.
    """
    root.require_route(old)
    root.route(new)
    if old == new:
        raise Refused(f"{old} and {new} are one route", hint=command_line(root.path, "routes"))
    for route in (old, new):
        if root.retired(route).exists():
            raise Refused(f"{route} is retired", hint=f"{command_line(root.path, f'route add {route}')} takes it back")
    for route, mark in ((old, moved(root, old)), (new, moved(root, new))):
        if mark is not None and (route, mark.to) != (old, new):
            raise Refused(f"{route} was moved to {mark.to}", hint=f"use {mark.to}")
    for path in root.cursors(old)[1]:
        raise Refused(f"{path}: no group can have this name", hint="rename the file, or remove it")
    _require_consumers(root, old, new)


def move_route(root: Root, disk: Disk, old: str, new: str, *, after: int, epoch: int, now: str) -> Moved:
    """Store what is sent to ``old`` in ``new`` from now on; doing it twice changes nothing.

    A group of ``old`` that has no cursor on ``new`` gets one: behind ``after``; if ``new`` has records and no group
    at all, before them, because nothing has read them.

    Args:
        after: the last durable record.
        epoch, now: the daemon's life and the time.

    Raises:
        as :func:`require_movable`.
    """
    require_movable(root, old, new)
    mark = moved(root, old)
    if mark is not None:
        return mark
    is_new = not root.has_route(new)
    add_route(root, disk, new)
    if is_new:
        _admit_the_same(root, disk, old, new)
    known = root.groups(new)
    begin = after if is_new or known else 0
    for group, paths in root.cursors(old)[0].items():
        if group not in known and any(path.parent == root.route(old) for path in paths):
            set_cursor(root, new, group, begin, disk=disk, head_sequence=after, epoch=epoch, now=now)
    mark = Moved(new, after, now)
    disk.replace(root.moved(old), mark.encoded())
    return mark


def _admit_the_same(root: Root, disk: Disk, old: str, new: str) -> None:
    """Let those users leave cursors in ``new`` that may in ``old``."""
    try:
        status = root.consumers(old).stat()
    except FileNotFoundError:
        return
    if status.st_mode & 0o020:
        admit(root, disk, new, str(status.st_gid))


def _require_consumers(root: Root, old: str, new: str) -> None:
    """A cursor of another user only that user can make."""
    for group, paths in root.cursors(old)[0].items():
        for path in paths:
            if path.parent == root.consumers(old) and not os.path.lexists(root.consumers(new) / path.name):
                adding = command_line(root.path, f"route add {new} --consumers GROUP")
                setting = command_line(root.path, f"cursor set {new} 0 --group {group}")
                raise Refused(
                    f"{path}: the group of another user, which has no cursor on {new}",
                    hint=f"{adding}; then, as that user, {setting}",
                )
