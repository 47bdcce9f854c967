"""File names, and the rules for names of routes and consumer groups. docs/files.md lists the files.

A segment's name begins with its base sequence in 20 digits, so that names sort like sequences.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from wald.errors import InvalidInput

DIGITS = 20  # of the largest u64
ROUTE_MAX_LENGTH = 127  # file names have at most 255 bytes, suffixes included
_ROUTE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_SEGMENT = re.compile(r"([0-9]{20})\.wal(|\.idx|\.zst|(?:\.zst)?\.released|(?:\.zst)?\.deleting)")
SEQUENCE_MAX = (1 << 64) - 1

DEFAULT_GROUP = "processed"
CURSOR_SUFFIX = ".cursor"
HANDOVER_SUFFIX = ".drain"
COMMAND_SUFFIX = ".command"  # result of a handover's command; followed by "-N" for worker N
WORK_SUFFIX = ".work"
ASK_SUFFIX = ".ask"
PIN_SUFFIX = ".pin"
_GROUP_FILE = r"(?s)(.*)\.(?:cursor|drain|command(?:-[0-9]+)?|work|ask|pin)"  # compiled at first use, like _LEDGER_PART
CURSORS = "cursors"  # directory in a route for the files of its groups
WHOLE_SUFFIX = ".whole"  # second link to a sealed segment that is being shrunk
DISPLACED_PREFIX = "in.found-"  # and a number: a file that was at the path of the route's FIFO

VERIFY_LEDGER = "verify.jsonl"
SKIPS_LEDGER = "skips.jsonl"
LEDGERS = ("segments.jsonl", "reclaim.jsonl", "archive.jsonl", VERIFY_LEDGER, SKIPS_LEDGER)
PART_SUFFIX = ".zst"
_LEDGER_PART = r"([a-z]+)-([0-9]{20})(\.jsonl)\.zst"


class Kind(Enum):
    """Kind of a file in ``segments/``; the value is its suffix."""

    RAW = ".wal"
    INDEX = ".wal.idx"
    SEALED = ".wal.zst"
    RELEASED = ".wal.zst.released"
    """Reclaimed; restored if a consumer needs it within the grace period."""
    DELETING = ".wal.zst.deleting"
    """Being deleted after its grace period."""
    RAW_RELEASED = ".wal.released"  # reclaimed before it was sealed
    RAW_DELETING = ".wal.deleting"

    @property
    def form(self) -> Kind:
        """Format of the file: RAW or SEALED."""
        return Kind.RAW if self in (Kind.RAW, Kind.RAW_RELEASED, Kind.RAW_DELETING) else Kind.SEALED

    @property
    def released(self) -> Kind:
        return Kind(self.form.value + ".released")

    @property
    def deleting(self) -> Kind:
        return Kind(self.form.value + ".deleting")

    @property
    def is_reclaimed(self) -> bool:
        return self in (self.released, self.deleting)


class SegmentName(NamedTuple):
    """Parsed name of a segment."""

    base_sequence: int
    kind: Kind


def segment_name(base_sequence: int, kind: Kind) -> str:
    """Return a segment's file name.

    >>> segment_name(1, Kind.RAW)
    '00000000000000000001.wal'
    """
    return f"{base_sequence:0{DIGITS}d}{kind.value}"


def parse_segment_name(name: str) -> SegmentName | None:
    """Invert :func:`segment_name`; None for any other name."""
    match = _SEGMENT.fullmatch(name)
    if match is None or int(match[1]) > SEQUENCE_MAX:
        return None
    return SegmentName(int(match[1]), Kind(".wal" + match[2]))


def ledger_part_name(ledger: str, line: int) -> str:
    """Return the file name of a sealed part that begins with line number ``line``.

    >>> ledger_part_name("reclaim.jsonl", 1)
    'reclaim-00000000000000000001.jsonl.zst'
    """
    return f"{ledger.removesuffix('.jsonl')}-{line:0{DIGITS}d}.jsonl.zst"


def parse_ledger_part_name(name: str) -> tuple[str, int] | None:
    """Invert :func:`ledger_part_name`; None for any other name."""
    match = re.fullmatch(_LEDGER_PART, name)
    return (match[1] + match[3], int(match[2])) if match else None


def check_route(name: str) -> str:
    return _check(name, "route")


def is_route(name: str) -> bool:
    return _ROUTE.fullmatch(name) is not None


def check_group(name: str) -> str:
    return _check(name, "group")


def _check(name: str, kind: str) -> str:
    if _ROUTE.fullmatch(name) is None:
        short_name = name if len(name) <= 40 else name[:37] + "..."
        raise InvalidInput(f"illegal {kind} name {short_name!r}", case="illegal-name", more=ROUTE_MAX_LENGTH - 1)
    return name


def is_group_file(name: str, group: str | None = None) -> bool:
    """Return True if ``name`` is a file of ``group``, such as its cursor. None means any group."""
    match = re.fullmatch(_GROUP_FILE, name)
    return match is not None and group in (None, match[1])


def cursor_name(group: str) -> str:
    return group + CURSOR_SUFFIX


def parse_cursor_name(name: str) -> str | None:
    """Invert :func:`cursor_name`; None for any other name."""
    group = name.removesuffix(CURSOR_SUFFIX)
    return group if group != name and _ROUTE.fullmatch(group) else None
