"""Kinds of files, recognised by path: every file that docs/files.md lists, and the files of a bag."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from wald.format.names import CURSORS, DISPLACED_PREFIX, WHOLE_SUFFIX

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ROUTE = rf"routes/{_NAME}"
_GROUP = rf"{_ROUTE}/{CURSORS}/(?P<group>{_NAME})"
_SEGMENT = r"segments/[0-9]{20}\.wal"
_ANY_FORM = rf"{_SEGMENT}(?:\.zst)?"
_BAG = rf"(?:.*/)?{_NAME}/[0-9]{{20}}-[0-9]{{20}}"
_BUNDLE = rf"{_BAG}/data/{_NAME}-[0-9]{{20}}\.tar(?:\.zst|\.gz)?"


class FileKind(Enum):
    """Kind of a file, with its meaning for operators and the pattern of its path. The first match wins."""

    ROOT = "the root of a log", r"\."
    IDENTITY = "the identity of the log: its id and the version of its format", r"log\.json"
    LOCK = "the lock of the running daemon; contains the signature of the last one", r"lock"
    HEAD = "the head: the last durable record", r"head"
    TRANSFERS = "the transfers: bytes in transfer from each pipe", r"transfers"
    CLOCK = "the clock steps: records after which append times restart", r"clock\.jsonl"
    SOCKET = "the socket of the daemon", r"wald\.sock"
    RAW = "a raw segment", _SEGMENT
    SPARSE_INDEX = "the sparse index of a raw segment, a hint for readers", rf"{_SEGMENT}\.idx"
    SEALED = "a sealed segment", rf"{_SEGMENT}\.zst"
    RELEASED = "a segment in its grace period; wald-reclaim restores it if a group needs it", rf"{_ANY_FORM}\.released"
    DELETING = "a segment whose grace period is over; wald-reclaim deletes it", rf"{_ANY_FORM}\.deleting"
    WHOLE = (
        "the original of a segment whose shrinking was interrupted; it may be the only intact copy",
        rf"{_SEGMENT}\.zst\{WHOLE_SUFFIX}",
    )
    TEMPORARY = "a file in preparation", rf"(?:[a-z]+/)?[^/]+\.tmp|{_ROUTE}/(?:.*/)?[^/]+\.tmp"
    ROUTE = "the directory of a route", _ROUTE
    FIFO = "the FIFO of a route", rf"{_ROUTE}/in"
    FOUND = (
        "a file found at the path of a FIFO; its contents are not in the log",
        rf"{_ROUTE}/{re.escape(DISPLACED_PREFIX)}[0-9]+",
    )
    CURSOR = "a cursor: the last record of a route that a group has processed", rf"{_GROUP}\.cursor"
    HANDOVER = "the lock of wald-drain for a group, and the records that it is giving up", rf"{_GROUP}\.drain"
    WORK = "the journal of a work group: acknowledgements above its cursor", rf"{_GROUP}\.work"
    PIN = "the routes that an unfinished handover of a group pins", rf"{_GROUP}\.pin"
    ASK = "socket of a work group's owner, for commands", rf"{_GROUP}\.ask"
    COMMAND = (
        "the lock of the command that wald-drain runs for a group, and its result",
        rf"{_GROUP}\.command(?:-[0-9]+)?",
    )
    CURSORS = "the files of the groups of a route", rf"{_ROUTE}/{CURSORS}"
    RETIRED = "the mark that the route is retired", rf"{_ROUTE}/retired"
    LEDGER = "a ledger: a chain of lines about segments and bundles", r"ledger/[a-z]+\.jsonl"
    LEDGER_PART = "a sealed part of a ledger: its older lines", r"ledger/[a-z]+-[0-9]{20}\.jsonl\.zst"
    LEDGER_LOCK = "the lock of a program that writes a ledger", r"ledger/[a-z.]+\.lock"
    QUARANTINE = "bytes that a start or a repair removed from the log", r"quarantine/.+"
    RECOVERY = "the report of one run of the daemon", r"recovery/[0-9]{10}\.json"
    KEYS = "the Idempotency-Keys that wald-gate has seen, rebuilt from the log", r"gate/keys\.log"
    KEYS_LOCK = "the lock of the gate that writes the Idempotency-Keys", r"gate/keys\.lock"
    DIRECTORY = "a directory of the log", r"segments|routes|ledger|quarantine|recovery|archive|gate"
    ARCHIVED_ROUTE = "the bags of a route", rf"archive/{_NAME}"
    BAG = "a bag: the output of one run of wald-archive", _BAG
    BUNDLE = "a bundle: a tar of archived records", _BUNDLE
    DIGEST = "the sha256 of a bundle, in the format of sha256sum", rf"{_BUNDLE}\.sha256"
    BAG_PART = "a file of a bag, listed in its manifest", rf"{_BAG}/[^/]+"
    FOREIGN = "not a file of the log", r"(?s).*"

    def __init__(self, meaning: str, pattern: str) -> None:
        self.meaning = meaning
        self.pattern = pattern


_ANYWHERE = (FileKind.BAG, FileKind.BUNDLE, FileKind.DIGEST, FileKind.BAG_PART, FileKind.FOREIGN)  # also outside a root


class RecognizedFile(NamedTuple):
    """Kind of a file, with its route and group ("" if none)."""

    kind: FileKind
    route: str
    group: str


def kind_of(relative: str, *, in_root: bool) -> RecognizedFile:
    """Recognise a file by its path relative to the root, or by its whole path outside a root."""
    kinds = FileKind if in_root else _ANYWHERE
    kind, match = next((kind, match) for kind in kinds if (match := re.fullmatch(kind.pattern, relative)))
    parts = relative.split("/")
    route = parts[1] if in_root and parts[0] == "routes" and len(parts) > 1 else ""
    return RecognizedFile(kind, route, match.groupdict().get("group", ""))
