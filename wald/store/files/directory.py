"""A root: the path of each file of a log, the log's identity, and an immutable listing of its segments by state.

A file's name is its state, so listing the directory shows what there is to do and to read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound, NotPermitted, UnsupportedFormat, command_line
from wald.format.names import (
    CONSUMERS,
    CURSOR_SUFFIX,
    Kind,
    check_route,
    cursor_name,
    is_route,
    parse_cursor_name,
    parse_segment_name,
    segment_name,
)
from wald.store.files.disk import Disk
from wald.store.files.regular import read_regular

FORMAT_VERSION = 1
TEMPORARY = ".tmp"
CONSUMERS_FILES_MAX = 10_000  # of other users in one route, who could make every pass over the cursors take minutes
_FOLDERS = ("segments", "routes", "ledger", "quarantine", "recovery")


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

    def segment(self, base_sequence: int, kind: Kind) -> Path:
        return self.segments / segment_name(base_sequence, kind)

    def route(self, name: str) -> Path:
        return self.routes / check_route(name)

    def fifo(self, route: str) -> Path:
        return self.route(route) / "in"

    def retired(self, route: str) -> Path:
        return self.route(route) / "retired"

    def moved(self, route: str) -> Path:
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
        adding = command_line(self.path, f"route add {route}")
        return NotFound(
            f"{self.routes}: there is no route {route!r}",
            hint=f"{command_line(self.path, 'routes')} lists them; {adding} makes it",
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
        raise OSError(errno.E2BIG, f"more than {CONSUMERS_FILES_MAX} files; find out whose they are", str(consumers))
    return (consumers / name for name in names if name.endswith(CURSOR_SUFFIX))


@dataclass(frozen=True, slots=True)
class Identity:
    """What ``log.json`` says."""

    log_id: bytes
    created: str


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment in the form in which it is to be read."""

    base_sequence: int
    kind: Kind
    path: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """The segments in a directory, oldest first.

    Attributes:
        segments: the readable ones. A raw file beside its sealed twin is already replaced and not listed.
        released: those that are reclaimed, as long as their files are there.
    """

    segments: tuple[Segment, ...]
    released: tuple[Segment, ...] = ()

    def with_released(self) -> Listing:
        """The same, with the released segments among the readable ones."""
        found = {segment.base_sequence: segment for segment in (*self.released, *self.segments)}
        return Listing(tuple(found[base] for base in sorted(found)), self.released)

    def newest_base(self) -> int:
        """The base of the newest segment; 0 if there is none."""
        return max((found[-1].base_sequence for found in (self.released, self.segments) if found), default=0)

    def successors(self) -> dict[int, int]:
        """Of each segment, by base, the base of the one behind it; the newest is not in it."""
        return dict(pairwise(sorted({segment.base_sequence for segment in (*self.released, *self.segments)})))

    def covering(self, sequence: int) -> int:
        """The position in ``segments`` of the one that ``sequence`` falls into; 0 if it is older than all."""
        return max(0, bisect_right(self.segments, sequence, key=_base) - 1)

    def including(self, segments: Iterable[Segment]) -> Listing:
        """The same, with ``segments`` among the readable ones."""
        return replace(self, segments=tuple(sorted((*self.segments, *segments), key=_base)))

    def before(self, segment: Segment) -> Segment | None:
        """The readable one in front of ``segment``."""
        number = bisect_left(self.segments, segment.base_sequence, key=_base)
        return self.segments[number - 1] if number else None

    def between(self, first: int, last: int) -> tuple[Segment, ...]:
        """The readable ones with a base from ``first`` to ``last``."""
        begin = bisect_left(self.segments, first, key=_base)
        return self.segments[begin : bisect_right(self.segments, last, key=_base)]

    def behind(self, sequence: int) -> Segment | None:
        """The first readable one that begins behind ``sequence``."""
        number = bisect_right(self.segments, sequence, key=_base)
        return self.segments[number] if number < len(self.segments) else None


def _base(segment: Segment) -> int:
    return segment.base_sequence


def list_segments(root: Root) -> Listing:
    """List the segments in the directory.

    Raises:
        Damaged: it is not there.
    """
    best: dict[int, Segment] = {}
    released: dict[int, Segment] = {}
    for directory in root.segment_directories:
        try:
            entries = list(os.scandir(directory))
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(
                f"{directory}: the directory of the segments is gone",
                hint=f"ls -l {root.path}; restore it from a backup",
            ) from None
        for entry in entries:
            name = parse_segment_name(entry.name)
            if name is None or name.kind is Kind.INDEX:
                continue
            found = released if name.kind.reclaimed else best
            if name.base_sequence not in found or name.kind is Kind.SEALED:
                found[name.base_sequence] = Segment(name.base_sequence, name.kind, Path(entry.path))
    return Listing(tuple(best[base] for base in sorted(best)), tuple(released[base] for base in sorted(released)))


def being_sealed(root: Root) -> set[int]:
    """The segments that the sealer is at work on, or that are sealed.

    The sealer makes its temporary file before it opens the raw one by name. So if a program renames a raw segment first
    and calls this then, either it sees that the segment is being sealed, or the sealer finds that the segment is gone.
    """
    suffix = Kind.SEALED.value
    names = (entry.name.partition(suffix) for entry in os.scandir(root.segments))
    return {
        int(base)
        for base, found, rest in names
        if found and base.isdecimal() and (not rest or rest.endswith(TEMPORARY))
    }


def read_identity(root: Root) -> Identity:
    """The identity of the log in ``root``.

    Every program begins with it, so none goes on where a directory of the log is elsewhere.

    Raises:
        NotFound: there is no log.
        NotPermitted: this user may not read it.
        UnsupportedFormat: it was written by a newer wald.
        Damaged: ``log.json`` is not readable, or a directory of the log is a symbolic link.
    """
    require_folders(root)
    try:
        text = read_regular(root.identity)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{root.path}: there is no log here", hint=_where_else(root.path)) from None
    except PermissionError as error:
        raise NotPermitted.of(error) from error
    except OSError as error:
        raise Damaged(f"{root.identity}: {error.strerror}", hint=f"ls -l {root.path}") from error
    try:
        fields = json.loads(text)
        version = int(fields["format"])
        if version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{root.identity}: format {version} is newer than the {FORMAT_VERSION} this program knows",
                hint="install a newer wald: docs/install.md",
            )
        return Identity(uuid.UUID(fields["log"]).bytes, str(fields["created"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(
            f"{root.identity}: not the identity of a log ({error})",
            hint=_how_to_identify(root.path),
        ) from error


def require_folders(root: Root) -> None:
    """
    Raises:
        Damaged: a directory of the log is a symbolic link.
    """
    for folder in _FOLDERS:
        require_no_link(root.path / folder)


def _how_to_identify(path: Path) -> str:
    return f"{command_line(path, 'repair')} makes it again from the segments; daemon and wald-reclaim must be stopped"


def _where_else(path: Path) -> str:
    """What to do about a path at which there is no log."""
    if _has_lost_its_identity(Root(path)):
        return f"log.json is missing: {_how_to_identify(path)}"
    if not path.exists() or _may_become_a_log(path):
        return f"{command_line(path, 'run')} makes one"
    return f"--root takes the directory of a log, which has a log.json; to find one: find {path} -name log.json"


def _has_lost_its_identity(root: Root) -> bool:
    """Whether segments are there, and no restore was about to make a log of them."""
    if root.unfinished_identity.exists() or not root.segments.is_dir():
        return False
    return any(parse_segment_name(name) for name in os.listdir(root.segments))


def check_root(path: Path) -> None:
    """Check that ``path`` is a log, or can be made one.

    Raises:
        InvalidInput: the path is not a directory, or holds files that are not a log's.
        Damaged: there are segments, and nothing says which log they belong to.
        WaldError: as :func:`read_identity`, of a log that is there.
    """
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{path}: not a directory", hint="name a directory, existing or not, with --root")
    root = Root(path)
    if root.identity.exists():
        read_identity(root)
    elif _has_lost_its_identity(root):
        raise Damaged(f"{root.identity}: missing, though {root.segments} holds segments", hint=_how_to_identify(path))
    elif path.is_dir() and not _may_become_a_log(path):
        raise InvalidInput(f"{path}: not empty, and not a log", hint="name an empty or a new directory with --root")


def create_root(path: Path, disk: Disk, *, now: str) -> Root:
    """Make ``path`` a root if it is not one yet; what exists is left as it is.

    Raises:
        InvalidInput: the path is not a directory, or holds files that are not a log's.
        Damaged: there are segments, and nothing says which log they belong to.
    """
    check_root(path)
    root = Root(path)
    make_directories(root, disk)
    if not root.identity.exists():
        disk.sync_names_above(path)
        # Last, and in one step: a root without it is one whose making was interrupted, and is made again.
        with contextlib.suppress(FileExistsError):  # two daemons started at once: the log has one identity
            disk.replace(root.identity, encode_identity(uuid.uuid4(), now=now), exclusive=True)
    read_identity(root)
    return root


def make_directories(root: Root, disk: Disk) -> None:
    """Make the directory of a log, and those in it; what exists is left as it is."""
    disk.make_directory(root.path)
    for folder in _FOLDERS:
        require_no_link(root.path / folder)
        disk.make_directory(root.path / folder)


def encode_identity(log_id: uuid.UUID, *, now: str) -> bytes:
    """The content of ``log.json``."""
    return json.dumps({"log": str(log_id), "format": FORMAT_VERSION, "created": now}).encode() + b"\n"


def require_no_link(directory: Path) -> None:
    """
    Raises:
        Damaged: there is a symbolic link.
    """
    if directory.is_symlink():
        raise Damaged(
            f"{directory}: a symbolic link; nothing is written through one",
            hint=f"rm {directory}, and move what it leads to there, or mount it there: "
            f"mount --bind {directory.resolve()} {directory}",
        )


def require_root(path: Path) -> None:
    """
    Raises:
        NotFound: there is no log at ``path``, nor what is left of one.
    """
    root = Root(path)
    if not (root.identity.exists() or root.segments.exists()):
        raise NotFound(
            f'{path}: there is no log here, and on_missing_root = "refuse" says to make none',
            hint=f"findmnt -T {path} shows whether its file system is mounted; {command_line(path, 'init')} makes one",
        )


def _may_become_a_log(path: Path) -> bool:
    return path.is_dir() and not any(map(_foreign, os.listdir(path)))


def _foreign(name: str) -> bool:
    """Not ours, and not what a fresh file system, an interrupted making or systemd's socket leaves behind."""
    return name not in (*_FOLDERS, "lost+found", "wald.sock") and not name.endswith(TEMPORARY)
