"""Routes as directories: made, retired, and listed with what an operator asked of them."""

from __future__ import annotations

import os
import stat

from wald.errors import InvalidInput
from wald.store.directory import Root
from wald.store.disk import Disk

FIFO_MODE = 0o620  # the daemon's group may write, nobody else
OWNERS_FIFO_MODE = 0o600  # what a route with writers may have: a FIFO does not ask who writes


def add_route(root: Root, disk: Disk, name: str, *, fifo: bool = False, mode: int | None = None) -> None:
    """Make a route, or take a retired one back; doing it twice changes nothing.

    Args:
        fifo: whether programs write to it through ``routes/<name>/in``.
        mode: permissions of that FIFO; None: those it has, or FIFO_MODE for a new one.

    Raises:
        InvalidInput: an illegal name, or something else stands where the FIFO belongs.
    """
    route = root.route(name)
    if not route.is_dir():
        disk.make_directory(route)
        disk.sync_directory(root.routes)
    if root.retired(name).exists():
        disk.unlink(root.retired(name))
    if fifo:
        _make_fifo(root, name, mode)
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


def has_fifo(root: Root, name: str) -> bool:
    """Whether the route has a FIFO."""
    try:
        return stat.S_ISFIFO(os.stat(root.fifo(name)).st_mode)
    except FileNotFoundError:
        return False


def _make_fifo(root: Root, name: str, mode: int | None) -> None:
    path = root.fifo(name)
    if path.exists():
        if not path.is_fifo():
            raise InvalidInput(f"{path}: not a FIFO", hint=f"mv {path} elsewhere, then wald route add {name} --fifo")
    else:
        os.mkfifo(path, OWNERS_FIFO_MODE)  # until it has its mode nobody else may open it
        mode = FIFO_MODE if mode is None else mode
    if mode is not None:
        path.chmod(mode)  # mkfifo's own mode is narrowed by the umask
