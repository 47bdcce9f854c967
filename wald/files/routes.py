"""Route directories and their FIFOs: creation, retirement, checks.

``rm in; echo x > in`` or log rotation creates a file that no process reads. :func:`make_fifo` renames that file to
``in.found-1`` and creates a FIFO in its place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from wald.errors import InvalidInput
from wald.files import modes
from wald.files.cursor_directory import permit_cursor_owners
from wald.files.disk import Disk
from wald.files.layout import Root, require_no_link
from wald.format.names import DISPLACED_PREFIX
from wald.hints import hint_for

FIFO_MODE = 0o620  # the daemon's group may write
OWNERS_FIFO_MODE = 0o600  # for a route with writers: a FIFO cannot authenticate them


def add_route(
    root: Root, disk: Disk, name: str, *, fifo: bool = False, mode: int | None = None, consumers: str | None = None
) -> None:
    """Create a route, or reactivate a retired one. Idempotent.

    ``consumers`` is the OS group for :func:`permit_cursor_owners`; None changes nothing.
    """
    route = root.route(name)
    require_no_link(route)
    disk.make_directory(route)
    disk.sync_directory(root.routes)  # always: a killed process may have left the route unsynced
    if root.retired(name).exists():
        disk.unlink(root.retired(name))
    if fifo:
        make_fifo(root, name, mode)
    require_no_link(root.cursor_directory(name))
    disk.make_directory(root.cursor_directory(name))
    if consumers is not None:
        permit_cursor_owners(root, disk, name, consumers)
    disk.sync_directory(route)


def retire_route(root: Root, disk: Disk, name: str, *, now: str) -> None:
    """Mark a route as retired. Its records and cursors stay, but no longer prevent deletions.

    The daemon continues to read a stdin that feeds the route.
    """
    root.require_route(name)
    if not root.retired(name).exists():
        disk.replace(root.retired(name), f"{now}\n".encode())


def has_fifo(root: Root, route: str) -> bool:
    """Return True if the route has a FIFO or, as in systemd's units, a symbolic link to a FIFO."""
    try:
        return stat.S_ISFIFO(os.stat(root.fifo(route)).st_mode)
    except NotADirectoryError:
        raise
    except OSError:
        return False


def make_fifo(root: Root, route: str, mode: int | None) -> Path | None:
    """Create the FIFO or set its mode (None: unchanged). Rename a file in its place and return the new path."""
    path = root.fifo(route)
    displaced = None
    if not has_fifo(root, route):
        if os.path.lexists(path):
            numbers = (int(each.name.removeprefix(DISPLACED_PREFIX)) for each in displaced_files(root, route))
            displaced = path.with_name(f"{DISPLACED_PREFIX}{1 + max(numbers, default=0)}")
            os.rename(path, displaced)
        modes.make_fifo(path, FIFO_MODE if mode is None else mode)
    elif mode is not None and stat.S_IMODE(path.stat().st_mode) != mode:
        if path.is_symlink():
            raise InvalidInput(
                f"{path}: is a symbolic link, and the mode of its target is not {mode:04o}",
                case="fifo-is-link",
                mode=mode,
                target=path.resolve(),
            )
        path.chmod(mode)
    return displaced


def displaced_files(root: Root, route: str) -> list[Path]:
    names = (entry.name for entry in os.scandir(root.route(route)) if entry.name.startswith(DISPLACED_PREFIX))
    return [root.route(route) / name for name in sorted(names) if name.removeprefix(DISPLACED_PREFIX).isdecimal()]


def fifo_problems(root: Root) -> Iterator[tuple[Path, str]]:
    """Yield path and message for each reason why lines written to a FIFO do not reach the log."""
    first_paths: dict[tuple[int, int], Path] = {}
    for route in root.route_names():
        for displaced in displaced_files(root, route):
            yield displaced, describe_displaced(root, displaced, route)
        path = root.fifo(route)
        if root.retired(route).exists():
            continue
        if not has_fifo(root, route):
            if os.path.lexists(path):
                hint = hint_for("not-a-fifo", root=root.path, route=route)
                yield path, f"{path}: not a FIFO, so data written to it is not read; {hint}"
            continue
        status = os.stat(path)
        first = first_paths.setdefault((status.st_dev, status.st_ino), path)
        if first != path:
            hint = hint_for("fifo-of-two-routes", root=root.path, route=route, path=path)
            yield path, f"{path}: the same FIFO as {first}; {hint}"


def describe_displaced(root: Root, path: Path, route: str) -> str:
    return (
        f"{path}: {path.lstat().st_size} bytes were written to this file instead of the FIFO of route {route}; "
        f"{hint_for('fifo-displaced', root=root.path, route=route, path=path)}"
    )
