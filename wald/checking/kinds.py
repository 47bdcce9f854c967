"""Kind of a file, recognised by its path.

What a file of a log is, by its path in the root: every file that docs/files.md lists, and those of a bag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from wald.format.names import CURSORS, FOUND_PREFIX, WHOLE_SUFFIX

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ROUTE = rf"routes/{_NAME}"
_GROUP = rf"{_ROUTE}/{CURSORS}/{_NAME}"
_SEGMENT = r"segments/[0-9]{20}\.wal"
_BUNDLE = rf"{_NAME}-[0-9]{{20}}\.tar(?:\.zst|\.gz)?"
_BAG = rf"(?:.*/)?{_NAME}/[0-9]{{20}}-[0-9]{{20}}"


class FileKind(Enum):
    """What a file is; the value is the answer for people."""

    ROOT = "the root of a log"
    IDENTITY = "the identity of the log: its id and the version of its format"
    LOCK = "the lock that the daemon holds while it runs; the daemon that started last has signed it"
    HEAD = "the head: how far the log is durable"
    TRANSFERS = "the transfers: which bytes are on their way out of each pipe"
    CLOCK = "the clock steps: behind which records append times have begun again"
    SOCKET = "the socket of the daemon"
    RAW = "a raw segment"
    SPARSE_INDEX = "the sparse index of a raw segment, a hint for readers"
    SEALED = "a sealed segment"
    RELEASED = "a segment that wald-reclaim has released; it comes back if a group needs it in the grace period"
    DELETING = "a segment whose grace period is over; wald-reclaim deletes it"
    WHOLE = "the form of a segment from before a relief that was interrupted; it may be the only whole one"
    TEMPORARY = "a file in preparation"
    ROUTE = "the directory of a route"
    FIFO = "the FIFO of a route"
    FOUND = "a file that had taken the place of a FIFO: what is in it is not in the log"
    CURSOR = "a cursor: up to where a group has processed a route"
    HANDOVER = "the lock of wald-drain for a group, and what it is giving up"
    WORK = "the journal of a work group: what its workers have done above its cursor"
    PIN = "the routes that an unfinished handover of a group pins"
    ASK = "what a command asks the owner of a work group; empty but for that time"
    COMMAND = "the lock of the command that wald-drain runs for a group, and how that ended"
    CURSORS = "the files of the groups of a route"
    RETIRED = "the mark that the route is retired"
    MOVED = "the mark of a version that could rename routes; it has no effect"
    LEDGER = "a ledger: a chain of lines about what happened to segments and bundles"
    LEDGER_PART = "a sealed part of a ledger: its older lines"
    LEDGER_LOCK = "the lock of a program that writes a ledger"
    QUARANTINE = "bytes that a start has cut away or found bad"
    RECOVERY = "the report of one life of the daemon"
    KEYS = "what wald-gate remembers of Idempotency-Keys, made from the log"
    KEYS_LOCK = "the lock of the gate that writes what is remembered of Idempotency-Keys"
    DIRECTORY = "a directory of the log"
    ARCHIVED_ROUTE = "the bags of a route"
    BAG = "a bag: what one run of wald-archive has packed"
    BUNDLE = "a bundle: a tar of archived records"
    DIGEST = "the sha256 of a bundle, as sha256sum reads it"
    BAG_PART = "a file of a bag, which the manifest leads to"
    FOREIGN = "not a file of the log"


_OF_A_GROUP = (FileKind.CURSOR, FileKind.HANDOVER, FileKind.COMMAND, FileKind.WORK, FileKind.ASK, FileKind.PIN)
_BY_PATH = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"\.", FileKind.ROOT),
        (r"log\.json", FileKind.IDENTITY),
        (r"lock", FileKind.LOCK),
        (r"head", FileKind.HEAD),
        (r"transfers", FileKind.TRANSFERS),
        (r"clock\.jsonl", FileKind.CLOCK),
        (r"wald\.sock", FileKind.SOCKET),
        (_SEGMENT, FileKind.RAW),
        (rf"{_SEGMENT}\.idx", FileKind.SPARSE_INDEX),
        (rf"{_SEGMENT}\.zst", FileKind.SEALED),
        (rf"{_SEGMENT}(?:\.zst)?\.released", FileKind.RELEASED),
        (rf"{_SEGMENT}(?:\.zst)?\.deleting", FileKind.DELETING),
        (rf"{_SEGMENT}\.zst\{WHOLE_SUFFIX}", FileKind.WHOLE),
        (rf"(?:[a-z]+/)?[^/]+\.tmp|{_ROUTE}/(?:.*/)?[^/]+\.tmp", FileKind.TEMPORARY),
        (rf"{_ROUTE}/in", FileKind.FIFO),
        (rf"{_ROUTE}/{re.escape(FOUND_PREFIX)}[0-9]+", FileKind.FOUND),
        (rf"{_GROUP}\.cursor", FileKind.CURSOR),
        (rf"{_GROUP}\.drain", FileKind.HANDOVER),
        (rf"{_GROUP}\.command(?:-[0-9]+)?", FileKind.COMMAND),
        (rf"{_GROUP}\.work", FileKind.WORK),
        (rf"{_GROUP}\.ask", FileKind.ASK),
        (rf"{_GROUP}\.pin", FileKind.PIN),
        (rf"{_ROUTE}/{CURSORS}", FileKind.CURSORS),
        (rf"{_ROUTE}/retired", FileKind.RETIRED),
        (rf"{_ROUTE}/moved", FileKind.MOVED),
        (_ROUTE, FileKind.ROUTE),
        (r"ledger/[a-z]+\.jsonl", FileKind.LEDGER),
        (r"ledger/[a-z]+-[0-9]{20}\.jsonl\.zst", FileKind.LEDGER_PART),
        (r"ledger/[a-z.]+\.lock", FileKind.LEDGER_LOCK),
        (r"quarantine/.+", FileKind.QUARANTINE),
        (r"recovery/[0-9]{10}\.json", FileKind.RECOVERY),
        (r"gate/keys\.db(?:-wal|-shm)?", FileKind.KEYS),
        (r"gate/keys\.lock", FileKind.KEYS_LOCK),
        (rf"archive/{_NAME}", FileKind.ARCHIVED_ROUTE),
        (r"segments|routes|ledger|quarantine|recovery|archive|gate", FileKind.DIRECTORY),
    )
)
_BY_END = tuple(  # an archive may be anywhere
    (re.compile(pattern), kind)
    for pattern, kind in (
        (_BAG, FileKind.BAG),
        (rf"{_BAG}/data/{_BUNDLE}", FileKind.BUNDLE),
        (rf"{_BAG}/data/{_BUNDLE}\.sha256", FileKind.DIGEST),
        (rf"{_BAG}/[^/]+", FileKind.BAG_PART),
    )
)


@dataclass(frozen=True, slots=True)
class Named:
    """What a path names.

    Attributes:
        route: of files in ``routes``; "" of others. ``group``: of its cursor and locks.
    """

    kind: FileKind
    route: str = ""
    group: str = ""


def kind_of(relative: str, *, in_root: bool) -> Named:
    """What the file at a path is.

    Args:
        relative: the path below the root, or the whole path of a file in no root.
    """
    found = next((kind for pattern, kind in _BY_PATH if in_root and pattern.fullmatch(relative)), None)
    found = found or next((kind for pattern, kind in _BY_END if pattern.fullmatch(relative)), FileKind.FOREIGN)
    parts = relative.split("/")
    route = parts[1] if in_root and parts[0] == "routes" and len(parts) > 1 else ""
    group = parts[-1].rpartition(".")[0] if found in _OF_A_GROUP else ""
    return Named(found, route, group)
