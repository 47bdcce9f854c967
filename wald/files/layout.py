"""Paths of the files of a log, and the names that wald creates there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from wald.errors import Damaged, NotFound
from wald.format.names import (
    CURSOR_SUFFIX,
    CURSORS,
    DISPLACED_PREFIX,
    LEDGERS,
    Kind,
    check_route,
    cursor_name,
    is_group_file,
    is_route,
    parse_cursor_name,
    parse_ledger_part_name,
    parse_segment_name,
    segment_name,
)
from wald.hints import hint_for

TEMPORARY = ".tmp"
SHRUNK_SUFFIX = f".shrunk{TEMPORARY}"  # follows a sealed segment's name: its unfinished shrunk form
GROUP_FILES_MAX = 10_000  # in one route; more could take minutes


class _FixedPath:
    """Path with a fixed name in a root."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, _: type[Root], attribute: str) -> None:
        self.attribute = attribute

    def __get__(self, root: Root, _: type[Root]) -> Path:
        path = root.__dict__[self.attribute] = root.path / self.name  # found there from now on
        return path


@dataclass(frozen=True)
class Root:
    """Paths of one log."""

    path: Path

    unfinished_identity = _FixedPath("log.json.restoring")  # until a restored log is complete
    lock = _FixedPath("lock")
    head = _FixedPath("head")
    transfers = _FixedPath("transfers")
    clock_steps = _FixedPath("clock.jsonl")
    socket = _FixedPath("wald.sock")
    archive = _FixedPath("archive")
    quarantine = _FixedPath("quarantine")
    recovery = _FixedPath("recovery")
    gate = _FixedPath("gate")

    @property
    def identity(self) -> Path:
        return self.path / "log.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def segments(self) -> Path:
        return self.path / "segments"

    @property
    def segment_directories(self) -> tuple[Path, ...]:
        """Directories of segments; several if the log has parts."""
        return (self.segments,)

    @cached_property
    def routes(self) -> Path:  # cached for thousands of routes
        return self.path / "routes"

    def report(self, epoch: int) -> Path:
        return self.recovery / f"{epoch:010d}.json"

    def segment(self, base_sequence: int, kind: Kind) -> Path:
        return self.segments / segment_name(base_sequence, kind)

    def route(self, name: str) -> Path:
        return self.routes / check_route(name)

    def fifo(self, route: str) -> Path:
        return self.route(route) / "in"

    def retired(self, route: str) -> Path:
        return self.route(route) / "retired"

    def cursor_directory(self, route: str) -> Path:
        return self.route(route) / CURSORS

    def cursor(self, route: str, group: str) -> Path:
        return self.cursor_directory(route) / cursor_name(group)

    def route_names(self) -> list[str]:
        """Return all routes, including retired routes."""
        if not self.routes.is_dir():
            return []
        return sorted(
            entry.name
            for entry in os.scandir(self.routes)
            if is_route(entry.name) and entry.is_dir(follow_symlinks=False)
        )

    def has_route(self, route: str) -> bool:
        """Return True if the route has a directory, not a symbolic link."""
        path = self.route(route)
        return path.is_dir() and not path.is_symlink()

    def require_route(self, route: str) -> None:
        if not self.has_route(route):
            raise NotFound(
                f"{self.routes}: there is no route {route!r}", case="no-such-route", root=self.path, route=route
            )

    def groups(self, route: str) -> list[str]:
        return sorted(self.cursors(route)[0])

    def cursors(self, route: str) -> tuple[dict[str, Path], list[Path]]:
        """Return each group's cursor, and the cursors with invalid names. Raise NotFound without the route."""
        groups: dict[str, Path] = {}
        invalid = []
        try:
            names = sorted(entry.name for entry in scan_cursor_directory(self.cursor_directory(route), CURSOR_SUFFIX))
        except (FileNotFoundError, NotADirectoryError):
            self.require_route(route)
            names = []
        for path in map(self.cursor_directory(route).__truediv__, names):
            if (group := parse_cursor_name(path.name)) is None:
                invalid.append(path)
            else:
                groups[group] = path
        return groups, invalid

    def route_directories(self) -> list[Path]:
        routes = [self.route(name) for name in self.route_names()]
        return [*routes, *(path for route in routes if (path := route / CURSORS).is_dir())]


def scan_cursor_directory(directory: Path, suffix: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files with a suffix. Raise OSError for a symbolic link or too many files."""
    if directory.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > GROUP_FILES_MAX:
                hint = hint_for("too-many-cursor-files", directory=directory)
                raise OSError(errno.E2BIG, f"more than {GROUP_FILES_MAX} files; {hint}", str(directory))
            if entry.name.endswith(suffix):
                yield entry


def require_no_link(directory: Path) -> None:
    if directory.is_symlink():
        raise Damaged(
            f"{directory}: is a symbolic link; wald does not write through links",
            case="symbolic-link",
            path=directory,
            target=directory.resolve(),
        )


_IN_ROOT = {"lost+found", "log.json", "segments", "routes", "ledger"}
_IN_ROOT |= {entry.name for entry in vars(Root).values() if isinstance(entry, _FixedPath)}
_IN_LEDGER = {*LEDGERS, *(str(Path(name).with_suffix(".lock")) for name in LEDGERS)}
_IN_ROUTE = {"in", "retired", CURSORS}


def known_names(root: Root) -> Iterator[tuple[Path, Callable[[str], bool]]]:
    """Yield each directory, even if missing, and a test for the names that wald creates there."""
    yield root.path, lambda name: name in _IN_ROOT or _is_allowed_anywhere(name)
    yield root.segments, lambda name: parse_segment_name(name) is not None or _is_allowed_anywhere(name)
    yield root.ledger, lambda name: name in _IN_LEDGER or _is_ledger_part(name) or _is_allowed_anywhere(name)
    yield root.routes, lambda name: is_route(name) or _is_allowed_anywhere(name)
    try:
        routes = [] if root.routes.is_symlink() else root.route_names()
    except OSError:  # unreadable
        routes = []
    for route in routes:
        yield root.route(route), _is_in_route
        yield root.cursor_directory(route), lambda name: is_group_file(name) or _is_allowed_anywhere(name)


def _is_allowed_anywhere(name: str) -> bool:
    """Return True for temporary files, and for cursors, whose loss would cost groups records."""
    return name.endswith((TEMPORARY, CURSOR_SUFFIX))


def _is_ledger_part(name: str) -> bool:
    part = parse_ledger_part_name(name)
    return part is not None and part[0] in LEDGERS


def _is_in_route(name: str) -> bool:
    is_displaced = name.startswith(DISPLACED_PREFIX) and name.removeprefix(DISPLACED_PREFIX).isdecimal()
    return name in _IN_ROUTE or is_displaced or _is_allowed_anywhere(name)
