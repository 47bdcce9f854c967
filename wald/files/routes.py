"""Route directories: creation and retirement.

The former commands ``wald route rename`` and ``merge`` left marks in ``routes/<name>/moved``. They no longer have an
effect. A start and ``wald verify`` report each mark, and the retirement of the route removes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wald.errors import Damaged, InvalidInput
from wald.files.cursor_directory import admit
from wald.files.disk import Disk
from wald.files.fifos import make_fifo
from wald.files.layout import Root, require_no_link
from wald.files.safe_open import read_regular
from wald.format.names import DEFAULT_GROUP, check_route
from wald.hints import hint_for


def add_route(
    root: Root, disk: Disk, name: str, *, fifo: bool = False, mode: int | None = None, consumers: str | None = None
) -> None:
    """Create a route, or reactivate a retired one. Idempotent.

    Args:
        fifo: programs write to the route through ``routes/<name>/in``, as :func:`make_fifo` makes it with ``mode``.
        consumers: OS group whose members may leave cursors, as in :func:`admit`; None: unchanged.

    Raises:
        InvalidInput: invalid name.
        Damaged: a symbolic link has this name.
        NotPermitted: this user is not in the group ``consumers``.
    """
    route = root.route(name)
    require_no_link(route)
    disk.make_directory(route)
    disk.sync_directory(root.routes)  # even for an existing route: a killed process may have made it without a sync
    if root.retired(name).exists():
        _remove_mark(root, disk, name)
        disk.unlink(root.retired(name))
    if fifo:
        make_fifo(root, name, mode)
    require_no_link(root.cursor_directory(name))
    disk.make_directory(root.cursor_directory(name))
    if consumers is not None:
        admit(root, disk, name, consumers)
    disk.sync_directory(route)


def retire_route(root: Root, disk: Disk, name: str, *, now: str) -> None:
    """Mark a route as retired: its cursors no longer prevent deletions. Its records and cursors stay.

    A daemon that retires a route (ROUTE RETIRE) also refuses its records on the socket and closes the FIFO, ending an
    unfinished record and leaving the rest unread. It continues to read a stdin that feeds the route.

    Raises:
        NotFound: there is no such route.
    """
    root.require_route(name)
    if not root.retired(name).exists():
        disk.replace(root.retired(name), f"{now}\n".encode())
    _remove_mark(root, disk, name)


def _remove_mark(root: Root, disk: Disk, name: str) -> None:
    """Remove a leftover mark, without a sync."""
    if root.moved(name).is_file():
        disk.unlink(root.moved(name))


class Mark(NamedTuple):
    """Leftover mark of a renamed route; ``hint`` names the commands that remove it."""

    path: Path
    message: str
    hint: str


def moved_marks(root: Root) -> Iterator[Mark]:
    """Yield the marks of routes that are not retired."""
    for route in root.route_names():
        path = root.moved(route)
        if not path.is_file() or root.retired(route).exists():
            continue
        to = _destination(path, route)
        message = f"records sent to {route} are stored in {route} again, and not in {to or 'another route'}"
        if to is None:
            yield Mark(path, message, hint_for("moved-mark-unreadable", root=root.path, route=route))
            continue
        groups = root.groups(route)
        group = "" if DEFAULT_GROUP in groups or not groups else groups[0]
        yield Mark(path, message, hint_for("moved-mark", root=root.path, route=route, group=group, to=to))


def _destination(path: Path, route: str) -> str | None:
    """Return the other route that a mark names, or None."""
    try:
        to = check_route(json.loads(read_regular(path))["to"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidInput, Damaged):
        return None
    return to if to != route else None
