"""Route directories: creation and retirement."""

from __future__ import annotations

from wald.files.cursor_directory import admit
from wald.files.disk import Disk
from wald.files.fifos import make_fifo
from wald.files.layout import Root, require_no_link


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
