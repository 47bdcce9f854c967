"""The identity of a log whose ``log.json`` is lost, damaged or that of another log, from the files that name their log.

These are the segments, their sparse indexes, and the cursors of the log's owner. The head and the ledgers name no log,
and the cursors of other users are not trusted. Nothing is guessed: if two files name different logs, nothing is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zstandard

from wald.errors import Damaged, NotFound, WaldError
from wald.format.cursor import BadCursor, decode_cursor
from wald.format.names import CURSOR_SUFFIX, WHOLE, Kind, parse_segment_name
from wald.format.segment import HEADER, INDEX_MAGIC, SEGMENT_MAGIC, BadHeader, SegmentHeader, decode_header
from wald.format.times import utc
from wald.store.files.directory import Root
from wald.store.files.identity import Identity, read_identity, require_folders
from wald.store.files.listing import Segment
from wald.store.files.regular import open_file, read_regular
from wald.store.segments.compression import SealedFile
from wald.store.segments.head import readable_head
from wald.store.segments.raw import RawFile, ScannedBatch


@dataclass(frozen=True, slots=True)
class LostIdentity:
    """What has to be written into ``log.json``, and why."""

    identity: Identity
    reason: str


@dataclass(frozen=True, slots=True)
class _Witness:
    """A file that names its log; ``created_ns`` is when it was made, None if it does not say."""

    path: Path
    log_id: bytes
    created_ns: int | None = None


def lost_identity(root: Root) -> LostIdentity | None:
    """The identity that ``log.json`` must get; None if it is there, and any file is of that log, or none says.

    Raises:
        NotFound: there is no log.
        UnsupportedFormat: it was written by a newer wald.
        Damaged: no file says which log it is, or files name different ones.
    """
    require_folders(root)
    own, wrong = None, "it is missing"
    failure: WaldError | None = None
    try:
        own = read_identity(root)
    except NotFound as error:
        if root.unfinished_identity.exists():
            raise
        failure = error
    except Damaged as error:
        wrong, failure = error.message.removeprefix(f"{root.identity}: "), error
    found = list(_witnesses(root))
    named = {each.log_id for each in found}
    if own is not None and (own.log_id in named or not any(each.path.parent == root.segments for each in found)):
        return None
    if not found:
        assert failure is not None, "the identity was not read"
        raise failure
    if len(named) > 1 or (own is not None and not _is_of(root, found)):
        raise _disagree(root, own, found)
    if own is not None:
        wrong = f"it is of log {own.log_id.hex()}"
    (log_id,) = named
    files = f"{len(found)} file{'s say' if len(found) > 1 else ' says'}"
    return LostIdentity(Identity(log_id, _created(root, found)), f"{wrong}; {files} that this is log {log_id.hex()}")


def _disagree(root: Root, own: Identity | None, found: list[_Witness]) -> Damaged:
    said = [f"{root.identity.name} says {own.log_id.hex()}"] if own is not None else []
    for log_id in dict.fromkeys(each.log_id for each in found):
        first, *others = (os.path.relpath(each.path, root.path) for each in found if each.log_id == log_id)
        more = f" and {len(others)} more say" if others else " says"
        said.append(f"{first}{more} {log_id.hex()}")
    return Damaged(
        f"{root.path}: the identity of the log is uncertain: {'; '.join(said)}",
        case="identity-uncertain",
        root=root.path,
    )


def _witnesses(root: Root) -> Iterator[_Witness]:
    """Every file that can be read and names its log; segments by name, then cursors."""
    if root.segments.is_dir():
        for name in sorted(os.listdir(root.segments)):
            parsed = parse_segment_name(name.removesuffix(WHOLE))
            path = root.segments / name
            if parsed is not None:
                with suppress(Damaged, OSError, zstandard.ZstdError, BadHeader):
                    yield _of_segment(path, parsed.kind)
    for route in root.route_names():
        directory = root.cursor_directory(route)
        for path in sorted(directory.glob(f"*{CURSOR_SUFFIX}")):
            with suppress(Damaged, OSError, BadCursor):
                status = path.lstat()
                if status.st_uid not in (0, directory.stat().st_uid) or status.st_nlink > 1:
                    continue  # another user may have written it
                log_id = decode_cursor(read_regular(path)).log_id
                if log_id is not None:
                    yield _Witness(path, log_id)


def _of_segment(path: Path, kind: Kind) -> _Witness:
    """
    Raises:
        Damaged, OSError, zstandard.ZstdError, BadHeader: it does not say.
    """
    if kind is Kind.INDEX or kind.form is Kind.RAW:
        with open_file(path) as file:
            header = decode_header(file.read(HEADER.size), INDEX_MAGIC if kind is Kind.INDEX else SEGMENT_MAGIC)
        return _Witness(path, header.log_id, header.created_at_ns)
    try:
        header = _sealed_header(path)
    except (zstandard.ZstdError, BadHeader):
        with SealedFile(path) as sealed:
            return _Witness(path, sealed.index.log_id)
    return _Witness(path, header.log_id, header.created_at_ns)


def _sealed_header(path: Path) -> SegmentHeader:
    """The segment header, with which the first frame of a sealed segment begins."""
    with open_file(path) as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        return decode_header(stream.read(HEADER.size))


def _is_of(root: Root, found: list[_Witness]) -> bool:
    """Whether the head is that of the log whose segments are there: it stands at the end of a batch of one of them."""
    head = readable_head(root)
    if head is None:
        return False
    for kind in (Kind.RAW, Kind.SEALED):
        path = root.segment(head.segment, kind)
        if any(each.path == path for each in found):
            return _ends_at(Segment(head.segment, kind, path), head.position, head.sequence + 1)
    return False


def _ends_at(segment: Segment, position: int, sequence: int) -> bool:
    """Whether a batch ends at a position in a segment, and the next record is ``sequence``."""
    with suppress(Damaged, OSError):
        if segment.kind is Kind.SEALED:
            with SealedFile(segment.path) as sealed:
                return (sealed.index.raw_bytes, sealed.index.next_sequence) == (position, sequence)
        with open_file(segment.path) as file:
            for met in RawFile(file.fileno(), limit=position).scan():
                if isinstance(met, ScannedBatch) and met.end == position:
                    return met.header.end_sequence == sequence
    return False


def _created(root: Root, found: list[_Witness]) -> str:
    """When the oldest thing was made that is left of the log: a segment, or the report of a start; "": not known."""
    times = [each.created_ns for each in found if each.created_ns is not None]
    for path in root.recovery.glob("*.json"):
        with suppress(Damaged, OSError, ValueError, TypeError, KeyError, RecursionError):
            times.append(int(json.loads(read_regular(path))["at_ns"]))
    return utc(min(times), 3) if times else ""
