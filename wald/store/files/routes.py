"""Routes as directories: made, retired, and listed with what an operator asked of them."""

from __future__ import annotations

from wald.store.files.cursor_directory import admit
from wald.store.files.directory import Root, require_no_link
from wald.store.files.disk import Disk
from wald.store.files.fifos import make_fifo


def add_route(
    root: Root, disk: Disk, name: str, *, fifo: bool = False, mode: int | None = None, consumers: str | None = None
) -> None:
    """Create a route, or reactivate a retired one. Idempotent.

    Args:
        fifo: whether programs write to it through ``routes/<name>/in``; what stands in its place is kept beside it.
        mode: permissions of that FIFO; None: those it has, or FIFO_MODE for a new one.
        consumers: the group whose members may leave cursors, as :func:`admit` takes it; None: do not change it.

    Raises:
        InvalidInput: an illegal name.
        Damaged: a symbolic link has this name.
        NotPermitted: this user is not in the group ``consumers``.
    """
    route = root.route(name)
    require_no_link(route)
    disk.make_directory(route)
    disk.sync_directory(root.routes)  # even if it is there: the process that made it may have been killed before this
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
    """Let a route no longer gate RECLAIM; its records and cursors stay.

    A daemon that is asked to do it (ROUTE RETIRE) also takes nothing more over the socket and closes the FIFO, ending
    an unfinished record; what the FIFO still holds is not read. A stdin that feeds the route is read on.

    Raises:
        NotFound: no such route.
    """
    root.require_route(name)
    if not root.retired(name).exists():
        disk.replace(root.retired(name), f"{now}\n".encode())
    _remove_mark(root, disk, name)


def _remove_mark(root: Root, disk: Disk, name: str) -> None:
    """Remove the mark that :mod:`wald.store.files.moved` reports, without a sync."""
    if root.moved(name).is_file():
        disk.unlink(root.moved(name))
