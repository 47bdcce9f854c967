"""A root: the path of each file of a log, and which routes and cursors there are."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from wald.errors import Damaged, NotFound
from wald.format.names import (
    CONSUMERS,
    CURSOR_SUFFIX,
    Kind,
    check_route,
    cursor_name,
    is_route,
    parse_cursor_name,
    segment_name,
)

TEMPORARY = ".tmp"
RELIEF_SUFFIX = f".relief{TEMPORARY}"  # after the name of a sealed segment: its shrunk form, in preparation
CONSUMERS_FILES_MAX = 10_000  # of other users in one route, who could make every pass over the cursors take minutes


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

    def consumers(self, route: str) -> Path:
        """The directory in which other users than the log's owner leave cursors, if the route has one."""
        return self.route(route) / CONSUMERS

    def place(self, route: str, group: str, *, of_consumer: bool = False) -> Path:
        """The directory of the files that this process uses for a group: its cursor, and what wald-drain keeps.

        For the log's owner and root it is the route's directory, whatever other users leave in that of the consumers;
        for other users it is that of the consumers, unless the route has none, or the owner has a group of this name.

        Args:
            of_consumer: whether that of the consumers is meant in any case.
        """
        route_directory, consumers = self.route(route), self.consumers(route)
        if not of_consumer:
            owners = _is_owners(route_directory) or os.path.lexists(route_directory / cursor_name(group))
            if owners or not os.path.lexists(consumers):
                return route_directory
        require_no_link(consumers)
        return consumers

    def cursor(self, route: str, group: str, *, of_consumer: bool = False) -> Path:
        return self.place(route, group, of_consumer=of_consumer) / cursor_name(group)

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

    def cursors(self, route: str) -> tuple[dict[str, list[Path]], list[Path]]:
        """The cursors of each group on ``route``; and files named like a cursor of a group that none can be.

        A group has one; or two, if the log's owner and a consumer use the same name. Then the owner's is the first.

        Raises:
            NotFound: no such route.
            OSError: the directory may not be read.
        """
        directory = self.route(route)
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            raise self._no_route(route) from None
        paths = [directory / name for name in names if name.endswith(CURSOR_SUFFIX)]
        if CONSUMERS in names:
            paths += _cursors_in(directory / CONSUMERS)
        found: dict[str, list[Path]] = {}
        strange = []
        for path in sorted(paths, key=lambda path: path.name):  # of two of one name, the owner's stays the first
            if (group := parse_cursor_name(path.name)) is None:
                strange.append(path)
            else:
                found.setdefault(group, []).append(path)
        return found, strange

    def cursor_entries(self, route: str) -> Iterator[os.DirEntry[str]]:
        """Yield the files of :meth:`cursors`, in any order.

        Raises:
            OSError: a directory is missing or not readable.
        """
        directories = [self.route(route)]
        if os.path.lexists(self.consumers(route)):
            directories.append(self.consumers(route))
        for number, directory in enumerate(directories):
            with os.scandir(directory) as entries:
                for count, entry in enumerate(entries, start=1):
                    if number and count > CONSUMERS_FILES_MAX:
                        raise too_many(directory)
                    if entry.name.endswith(CURSOR_SUFFIX):
                        yield entry

    def cursor_directories(self) -> list[Path]:
        """Every directory in which cursors are."""
        routes = [self.route(name) for name in self.route_names()]
        return [*routes, *(path for route in routes if (path := route / CONSUMERS).is_dir())]

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


def _is_owners(directory: Path) -> bool:
    """Whether this process runs as the owner of a directory, or as root; not if there is none."""
    try:
        return os.geteuid() in (0, directory.stat().st_uid)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _cursors_in(consumers: Path) -> Iterator[Path]:
    """
    Raises:
        OSError: the directory cannot be read, or holds too much.
    """
    with os.scandir(consumers) as entries:
        names = [entry.name for entry in islice(entries, CONSUMERS_FILES_MAX + 1)]
    if len(names) > CONSUMERS_FILES_MAX:
        raise too_many(consumers)
    return (consumers / name for name in names if name.endswith(CURSOR_SUFFIX))


def too_many(consumers: Path) -> OSError:
    """Return the error for a directory of consumers with too many files."""
    return OSError(errno.E2BIG, f"more than {CONSUMERS_FILES_MAX} files; find out whose they are", str(consumers))


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
