"""Path of every file in a root, and the names that wald creates there.

A root: the path of each file of a log, and which routes and cursors there are.

Which names the directories of a log may hold; what has another name, no program of wald has made.
"""

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
    FOUND_PREFIX,
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

TEMPORARY = ".tmp"
RELIEF_SUFFIX = f".relief{TEMPORARY}"  # after the name of a sealed segment: its shrunk form, in preparation
GROUP_FILES_MAX = 10_000  # in one route: other users could make every pass over the cursors take minutes


@dataclass(frozen=True)
class Root:
    """The paths of one log."""

    path: Path

    @property
    def identity(self) -> Path:
        return self.path / "log.json"

    @property
    def unfinished_identity(self) -> Path:
        """The identity of a log that is being restored, as long as not all of it is there."""
        return self.path / "log.json.restoring"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def head(self) -> Path:
        return self.path / "head"

    @property
    def transfers(self) -> Path:
        return self.path / "transfers"

    @property
    def clock_steps(self) -> Path:
        return self.path / "clock.jsonl"

    @property
    def socket(self) -> Path:
        return self.path / "wald.sock"

    @property
    def archive(self) -> Path:
        """Where wald-archive packs, unless it is asked to pack elsewhere."""
        return self.path / "archive"

    @property
    def segments(self) -> Path:
        return self.path / "segments"

    @property
    def segment_directories(self) -> tuple[Path, ...]:
        """Where readers look for segments: in the log's own directory; of a log in parts, in several."""
        return (self.segments,)

    @cached_property
    def routes(self) -> Path:  # asked for several times for each of perhaps thousands of routes
        return self.path / "routes"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def recovery(self) -> Path:
        return self.path / "recovery"

    def report(self, epoch: int) -> Path:
        """Return the path of the report of one start of the daemon."""
        return self.recovery / f"{epoch:010d}.json"

    @property
    def gate(self) -> Path:
        """What wald-gate remembers."""
        return self.path / "gate"

    def segment(self, base_sequence: int, kind: Kind) -> Path:
        return self.segments / segment_name(base_sequence, kind)

    def route(self, name: str) -> Path:
        return self.routes / check_route(name)

    def fifo(self, route: str) -> Path:
        return self.route(route) / "in"

    def retired(self, route: str) -> Path:
        return self.route(route) / "retired"

    def moved(self, route: str) -> Path:
        """Return the path of the mark that versions with ``wald route rename`` left."""
        return self.route(route) / "moved"

    def cursor_directory(self, route: str) -> Path:
        """The directory of the files of all consumer groups of a route: cursors, journals, pins and locks."""
        return self.route(route) / CURSORS

    def cursor(self, route: str, group: str) -> Path:
        return self.cursor_directory(route) / cursor_name(group)

    def route_names(self) -> list[str]:
        """Every route, retired ones included, by name; directories whose names are illegal are left out."""
        if not self.routes.is_dir():
            return []
        return sorted(
            entry.name
            for entry in os.scandir(self.routes)
            if is_route(entry.name) and entry.is_dir(follow_symlinks=False)
        )

    def has_route(self, route: str) -> bool:
        """Whether the route is there; a symbolic link is no route.

        Raises:
            InvalidInput: an illegal name.
        """
        path = self.route(route)
        return path.is_dir() and not path.is_symlink()

    def groups(self, route: str) -> list[str]:
        """The groups that have a cursor on ``route``.

        Raises:
            NotFound: no such route.
            OSError: the directory may not be read.
        """
        return sorted(self.cursors(route)[0])

    def cursors(self, route: str) -> tuple[dict[str, Path], list[Path]]:
        """The cursor of each group on ``route``; and files named like a cursor of a group that cannot exist.

        Raises:
            NotFound: no such route.
            OSError: the directory may not be read, or has too many files.
        """
        groups: dict[str, Path] = {}
        strange = []
        try:
            entries = sorted(entry.name for entry in self.cursor_entries(route))
        except (FileNotFoundError, NotADirectoryError):
            self.require_route(route)
            entries = []
        for path in map(self.cursor_directory(route).__truediv__, entries):
            if (group := parse_cursor_name(path.name)) is None:
                strange.append(path)
            else:
                groups[group] = path
        return groups, strange

    def cursor_entries(self, route: str) -> Iterator[os.DirEntry[str]]:
        """Yield the files of :meth:`cursors`, in any order.

        Raises:
            OSError: the directory is missing or not readable, or has too many files.
        """
        for entry in entries_of_groups(self.cursor_directory(route)):
            if entry.name.endswith(CURSOR_SUFFIX):
                yield entry

    def route_directories(self) -> list[Path]:
        """Every route's directory, and its directory of cursors if that exists."""
        routes = [self.route(name) for name in self.route_names()]
        return [*routes, *(path for route in routes if (path := route / CURSORS).is_dir())]

    def require_route(self, route: str) -> None:
        """
        Raises:
            InvalidInput: an illegal name.
            NotFound: no such route.
        """
        if not self.has_route(route):
            raise self._no_route(route)

    def _no_route(self, route: str) -> NotFound:
        return NotFound(
            f"{self.routes}: there is no route {route!r}", case="no-such-route", root=self.path, route=route
        )


def entries_of_groups(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a directory of cursors.

    Raises:
        OSError: it is missing, a symbolic link, or not readable; or it has too many files.
    """
    if directory.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > GROUP_FILES_MAX:
                raise OSError(
                    errno.E2BIG, f"more than {GROUP_FILES_MAX} files; find out whose they are", str(directory)
                )
            yield entry


def require_no_link(directory: Path) -> None:
    """
    Raises:
        Damaged: there is a symbolic link.
    """
    if directory.is_symlink():
        raise Damaged(
            f"{directory}: a symbolic link; wald does not write through links",
            case="symbolic-link",
            path=directory,
            target=directory.resolve(),
        )


_ANY = Root(Path())
_OF_ROOT = {
    "lost+found",
    *(path.name for path in (_ANY.identity, _ANY.unfinished_identity, _ANY.lock, _ANY.head)),
    *(path.name for path in (_ANY.transfers, _ANY.clock_steps, _ANY.socket, _ANY.archive)),
    *(path.name for path in (_ANY.segments, _ANY.routes, _ANY.ledger, _ANY.quarantine, _ANY.recovery, _ANY.gate)),
}
_OF_LEDGER = {*LEDGERS, *(str(Path(name).with_suffix(".lock")) for name in LEDGERS)}
_OF_ROUTE = {at("any").name for at in (_ANY.fifo, _ANY.retired, _ANY.moved, _ANY.cursor_directory)}


def known_names(root: Root) -> Iterator[tuple[Path, Callable[[str], bool]]]:
    """Each directory whose names are known, without following a link, and whether a name is one of them.

    A directory may be missing.
    """
    yield root.path, lambda name: name in _OF_ROOT or _is_anywhere(name)
    yield root.segments, lambda name: parse_segment_name(name) is not None or _is_anywhere(name)
    yield root.ledger, lambda name: name in _OF_LEDGER or _is_part(name) or _is_anywhere(name)
    yield root.routes, lambda name: is_route(name) or _is_anywhere(name)
    for route in _routes(root):
        yield root.route(route), _is_of_route
        yield root.cursor_directory(route), _is_of_group


def _routes(root: Root) -> list[str]:
    try:
        return [] if root.routes.is_symlink() else root.route_names()
    except OSError:  # may not be listed
        return []


def _is_anywhere(name: str) -> bool:
    """A temporary file; and a cursor, because a group that loses it loses what it has not read."""
    return name.endswith((TEMPORARY, CURSOR_SUFFIX))


def _is_part(name: str) -> bool:
    part = parse_ledger_part_name(name)
    return part is not None and part[0] in LEDGERS


def _is_of_route(name: str) -> bool:
    is_found = name.startswith(FOUND_PREFIX) and name.removeprefix(FOUND_PREFIX).isdecimal()
    return name in _OF_ROUTE or is_found or _is_anywhere(name)


def _is_of_group(name: str) -> bool:
    return is_group_file(name) or _is_anywhere(name)
