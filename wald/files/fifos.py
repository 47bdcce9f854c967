"""Creation, checks and replacement of FIFOs.

The FIFOs of routes: making them, checking them, and putting them back where something else has their name.

``rm in; echo x > in`` makes a file that no process reads. So does a log rotation that creates the file it has moved.
Such a file is kept for its bytes, as ``in.found-1``, beside the FIFO that takes its place.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from wald.errors import InvalidInput
from wald.files import modes
from wald.files.layout import Root
from wald.format.names import FOUND_PREFIX
from wald.hints import command_line

FIFO_MODE = 0o620  # only the daemon's group may write to it
OWNERS_FIFO_MODE = 0o600  # what a route with writers may have: a FIFO cannot check its writers


def has_fifo(root: Root, route: str) -> bool:
    """Whether the route has a FIFO, or a symbolic link to one, as systemd's units make it."""
    try:
        return stat.S_ISFIFO(os.stat(root.fifo(route)).st_mode)
    except NotADirectoryError:  # what should be the route is none
        raise
    except OSError:  # nothing there, or a link that leads nowhere or to what may not be read
        return False


def is_displaced(root: Root, route: str) -> bool:
    """Whether something else stands where the route's FIFO belongs."""
    return os.path.lexists(root.fifo(route)) and not has_fifo(root, route)


def make_fifo(root: Root, route: str, mode: int | None) -> Path | None:
    """See to it that the route has a FIFO.

    Args:
        mode: its permission bits; None: those it has, or FIFO_MODE for a new one.

    Returns:
        where what stood in its place is kept; None if nothing did.

    Raises:
        InvalidInput: it is a link to a FIFO elsewhere, which has another mode.
        OSError: it cannot be made.
    """
    path = root.fifo(route)
    found = None
    if not has_fifo(root, route):
        if is_displaced(root, route):
            number = 1 + max(
                (int(each.name.removeprefix(FOUND_PREFIX)) for each in found_files(root, route)), default=0
            )
            found = path.with_name(f"{FOUND_PREFIX}{number}")
            os.rename(path, found)
        modes.make_fifo(path, FIFO_MODE if mode is None else mode)
    elif mode is not None and stat.S_IMODE(path.stat().st_mode) != mode:
        if path.is_symlink():
            raise InvalidInput(
                f"{path}: a symbolic link, and the mode of its target is not {mode:04o}",
                case="fifo-is-link",
                mode=mode,
                target=path.resolve(),
            )
        path.chmod(mode)
    return found


def found_files(root: Root, route: str) -> list[Path]:
    """What has stood where the route's FIFO belongs, and was kept."""
    names = (entry.name for entry in os.scandir(root.route(route)) if entry.name.startswith(FOUND_PREFIX))
    return [root.route(route) / name for name in sorted(names) if name.removeprefix(FOUND_PREFIX).isdecimal()]


def found_words(root: Root, path: Path, route: str) -> str:
    """What a kept file is, and what to do with it."""
    name = shlex.quote(str(path))
    return (
        f"{path}: {path.lstat().st_size} bytes were written where the FIFO of route {route} belongs, not to the log; "
        f"{command_line(root.path, f'append {route} {name}')} && rm {name}"
    )


def troubles(root: Root) -> Iterator[tuple[Path, str]]:
    """Whatever keeps lines that were written to a FIFO from the log: a path, and what is wrong there."""
    seen: dict[tuple[int, int], Path] = {}
    for route in root.route_names():
        for found in found_files(root, route):
            yield found, found_words(root, found, route)
        path = root.fifo(route)
        if root.retired(route).exists():
            continue
        if is_displaced(root, route):
            yield (
                path,
                f"{path}: not a FIFO; what is written to it is not read: "
                + command_line(root.path, f"route add {route} --fifo"),
            )
        if not has_fifo(root, route):
            continue
        status = os.stat(path)
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first != path:
            yield path, same_fifo_words(root, path, first)


def same_fifo_words(root: Root, path: Path, other: Path) -> str:
    """Two routes have one FIFO."""
    adding = command_line(root.path, f"route add {path.parent.name} --fifo")
    return f"{path}: the same FIFO as {other}; rm {path}, and {adding} makes one of its own"
