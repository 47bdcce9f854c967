"""Kind of a file, recognised by its path: every file that docs/files.md lists, and the files of a bag."""

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
    """The value describes the file to operators."""

    ROOT = "the root of a log"
    IDENTITY = "the identity of the log: its id and the version of its format"
    LOCK = "the lock of the running daemon; contains the signature of the last one"
    HEAD = "the head: the last durable record"
    TRANSFERS = "the transfers: bytes in transfer from each pipe"
    CLOCK = "the clock steps: records after which append times restart"
    SOCKET = "the socket of the daemon"
    RAW = "a raw segment"
    SPARSE_INDEX = "the sparse index of a raw segment, a hint for readers"
    SEALED = "a sealed segment"
    RELEASED = "a segment in its grace period; wald-reclaim takes it back if a group needs it"
    DELETING = "a segment whose grace period is over; wald-reclaim deletes it"
    WHOLE = "the original of a segment whose shrinking was interrupted; it may be the only intact copy"
    TEMPORARY = "a file in preparation"
    ROUTE = "the directory of a route"
    FIFO = "the FIFO of a route"
    FOUND = "a file found at the path of a FIFO; its contents are not in the log"
    CURSOR = "a cursor: the last record of a route that a group has processed"
    HANDOVER = "the lock of wald-drain for a group, and the records that it is giving up"
    WORK = "the journal of a work group: acknowledgements above its cursor"
    PIN = "the routes that an unfinished handover of a group pins"
    ASK = "the request of a command to the owner of a work group; usually empty"
    COMMAND = "the lock of the command that wald-drain runs for a group, and its result"
    CURSORS = "the files of the groups of a route"
    RETIRED = "the mark that the route is retired"
    MOVED = "the mark of a version that could rename routes; it has no effect"
    LEDGER = "a ledger: a chain of lines about segments and bundles"
    LEDGER_PART = "a sealed part of a ledger: its older lines"
    LEDGER_LOCK = "the lock of a program that writes a ledger"
    QUARANTINE = "bytes that a start or a repair removed from the log"
    RECOVERY = "the report of one run of the daemon"
    KEYS = "the Idempotency-Keys that wald-gate has seen, rebuilt from the log"
    KEYS_LOCK = "the lock of the gate that writes the Idempotency-Keys"
    DIRECTORY = "a directory of the log"
    ARCHIVED_ROUTE = "the bags of a route"
    BAG = "a bag: the output of one run of wald-archive"
    BUNDLE = "a bundle: a tar of archived records"
    DIGEST = "the sha256 of a bundle, in the format of sha256sum"
    BAG_PART = "a file of a bag, listed in its manifest"
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
    """Kind of a path, with its route (files in ``routes``) and group (its cursor, locks and journals), or ""."""

    kind: FileKind
    route: str = ""
    group: str = ""


def kind_of(relative: str, *, in_root: bool) -> Named:
    """Parse a path: relative to the root, or the whole path outside a root."""
    found = next((kind for pattern, kind in _BY_PATH if in_root and pattern.fullmatch(relative)), None)
    found = found or next((kind for pattern, kind in _BY_END if pattern.fullmatch(relative)), FileKind.FOREIGN)
    parts = relative.split("/")
    route = parts[1] if in_root and parts[0] == "routes" and len(parts) > 1 else ""
    group = parts[-1].rpartition(".")[0] if found in _OF_A_GROUP else ""
    return Named(found, route, group)
