"""Locations named by paths: a log, segments that were shipped elsewhere, or an archive of bundles.

    a directory with log.json                 a log: read up to its head
    a directory with *.wal.zst, or segments/  shipped segments: read to their ends; the segments name their log
    a directory of bags, or a URL of one      an archive made by wald-archive
    any of these with * ? [                   everything that matches; other matches are ignored. An existing directory
                                              is never a pattern

Several directories may contain parts of one log, because older segments were shipped: they are read as one log.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.listing import Segment, list_segments
from wald.format.batch import StoredBatch
from wald.format.names import Kind, is_route, parse_segment_name
from wald.format.segment import BadHeader
from wald.segments.durable_end import UNBOUNDED
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile
from wald.segments.reader import SealedSegment
from wald.segments.sealed_file import SealedFile
from wald.segments.view import View, open_segment, read_view

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?=/)(//(?P<host>[^/]*))?")


@dataclass(frozen=True, slots=True)
class Continued(Root):
    """A log continued from older segments in ``more``."""

    more: tuple[Path, ...] = ()

    @property
    def segment_directories(self) -> tuple[Path, ...]:
        return (self.segments, *self.more)


@dataclass(frozen=True, slots=True)
class Shipped(Continued):
    """Shipped segments without the rest of their log, in a separate directory and in ``more``."""

    @property
    def segments(self) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class LogLocation:
    """A log whose segments can be read; ``log`` is its id in hexadecimal."""

    root: Root
    log_id: bytes

    @property
    def log(self) -> str:
        return self.log_id.hex()

    def view(self) -> View:
        """Return a view of the current log; shipped segments may be read to their ends."""
        return read_view(self.root, self.log_id, bound=UNBOUNDED if isinstance(self.root, Shipped) else None)


@dataclass(frozen=True, slots=True)
class ArchiveLocation:
    """Directory of bags: its absolute path, or its URL."""

    address: str


Location = LogLocation | ArchiveLocation


def find_locations(paths: Sequence[str], *, patterns: bool = True) -> list[Location]:
    """Return the locations named by ``paths``, in order and without duplicates; parts of one log are one location."""
    found = dict.fromkeys(location for path in paths for location in _expand(path, patterns=patterns))
    if not found:
        raise NotFound("which log? no path was given", hint='.load("/var/spool/wald")')
    logs: dict[bytes, list[LogLocation]] = {}
    for location in found:
        if isinstance(location, LogLocation):
            logs.setdefault(location.log_id, []).append(location)
    first_parts: dict[Location, Location] = {parts[0]: _joined(parts) for parts in logs.values()}
    archives: dict[Location, Location] = {each: each for each in found if isinstance(each, ArchiveLocation)}
    joined = first_parts | archives
    return [joined[location] for location in found if location in joined]


def is_pattern(path: str) -> bool:
    """Return True if ``path`` has wildcards, unless a directory of exactly this name exists."""
    return glob.has_magic(path) and not os.path.isdir(path)


def _expand(path: str, *, patterns: bool) -> Iterator[Location]:
    if is_remote(path):
        require_bags(path)
        yield ArchiveLocation(path)
        return
    path = local_path(path, hint="")
    if not patterns or not is_pattern(path):
        yield _location(Path(os.path.abspath(path)))
        return
    found = []
    for name in sorted(glob.glob(os.path.abspath(path))):
        with suppress(NotFound):  # a pattern may match other files, too
            found.append(_location(Path(name)))
    if not found:
        raise NotFound(f"{path}: no match is a log or contains segments or bags", hint=f"ls -d {path}")
    yield from found


def _location(path: Path) -> Location:
    root = Root(path)
    if root.identity.exists():
        return LogLocation(root, read_identity(root).log_id)
    for directory in (path, root.segments):
        with suppress(FileNotFoundError, NotADirectoryError):
            names = filter(None, map(parse_segment_name, os.listdir(directory)))
            if any(name.kind in (Kind.RAW, Kind.SEALED) for name in names):
                return LogLocation(Shipped(directory), _log_id_of_segments(directory))
    if path.is_dir() and _has_bags(str(path)):
        return ArchiveLocation(str(path))
    raise NotFound(
        f"{path}: neither a log, nor segments of one, nor an archive",
        hint=f"ls {path}; on a cluster it must have the same path on every machine",
    )


def _has_bags(address: str) -> bool:
    from wald_archive.objects import open_destination, parse_bag_name

    destination = open_destination(address, Disk())
    return any(
        parse_bag_name(route, name)
        for route in destination.listing("").folders
        if is_route(route)
        for name in destination.listing(route).folders
    )


def require_bags(address: str) -> None:
    """Check that ``address``, a path or a URL, is an archive; an empty directory in a store is not."""
    if _has_bags(address):
        return
    from wald_archive.objects import open_destination

    segments = any(map(parse_segment_name, open_destination(address, Disk()).listing("").files))
    raise NotFound(
        f"{address}: no bags of wald-archive found{', but segments, which are read from a directory' * segments}",
        hint="copy the segments to a directory, and name that" if segments else "wald-archive creates them",
    )


def _log_id_of_segments(directory: Path) -> bytes:
    """Return the log id in the oldest readable segment; a reader checks the others against it."""
    for segment in list_segments(Shipped(directory)).segments:
        try:
            if segment.kind is Kind.SEALED:
                with SealedFile(segment.path) as sealed:
                    return sealed.index.log_id
            with segment.path.open("rb") as file:
                return RawFile(file.fileno()).header().log_id
        except (Damaged, BadHeader):
            continue
    raise Damaged(f"{directory}: no segment here names its log", hint=f"wald inspect --content {directory}/*.wal.zst")


def _joined(parts: Sequence[LogLocation]) -> LogLocation:
    if len(parts) == 1:
        return parts[0]
    whole = [part for part in parts if not isinstance(part.root, Shipped)]
    if len(whole) > 1:
        raise InvalidInput(
            f"{whole[1].root.path}: the same log as {whole[0].root.path}, so its records would be read twice",
            hint="name one of the two",
        )
    main = (whole or parts)[0]
    more = tuple(part.root.segments for part in parts if part is not main)
    root = Continued(main.root.path, more) if whole else Shipped(main.root.path, more)
    _refuse_overlaps(list_segments(root).segments, main.log_id)
    return LogLocation(root, main.log_id)


def _refuse_overlaps(segments: Sequence[Segment], log_id: bytes) -> None:
    """Refuse overlaps, which exist if two copies of a log were continued. Readers find overlaps within a directory."""
    for segment, following in pairwise(segments):
        if segment.path.parent != following.path.parent and _end(segment, log_id) > following.base_sequence:
            raise InvalidInput(
                f"{segment.path} and {following.path} both have records of log {log_id.hex()}, from "
                f"{following.base_sequence} on, so they would be read twice",
                hint="name one of the two directories",
            )


def _end(segment: Segment, log_id: bytes) -> int:
    """Return the sequence after the last one of a segment; 0 if it cannot be opened, which its reader reports."""
    try:
        with closing(open_segment(segment, log_id)) as opened:
            if isinstance(opened, SealedSegment):
                return opened.index.next_sequence
            # Damage has no end that is known.
            found = (item for item in opened.batches(FIRST_BATCH, None) if not isinstance(item, DamagedBytes))
            ends = (item.header.end_sequence if isinstance(item, StoredBatch) else item.next_sequence for item in found)
            return max(ends, default=0)
    except (FileNotFoundError, Damaged):
        return 0


def is_remote(address: str) -> bool:
    """Return True if ``address`` is a URL of something other than a directory.

    >>> is_remote("s3://lake/logs"), is_remote("file:///spool"), is_remote("/spool"), is_remote("a:b")
    (True, False, False, False)
    """
    match = _SCHEME.match(address)
    return match is not None and not _is_file(match)


def local_path(address: str, *, hint: str) -> str:
    """Return the path that ``address`` names: the address itself, or the part after ``file://``.

    >>> local_path("file:///spool", hint=""), local_path("file:/spool", hint=""), local_path("spool", hint="")
    ('/spool', '/spool', 'spool')
    """
    match = _SCHEME.match(address)
    if match is None:
        return address
    if not _is_file(match):
        raise InvalidInput(f"{address}: a URL, but a directory is needed", hint=hint)
    return address[match.end() :]


def _is_file(match: re.Match[str]) -> bool:
    return match["scheme"].lower() == "file" and match["host"] in (None, "", "localhost")
