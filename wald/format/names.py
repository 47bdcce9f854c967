"""Names of routes, consumer groups and producers, and the positions that operators type.

File and route names: a name says what a file is, where it starts and which state it is in.

Building and parsing live side by side. Segment names carry the base sequence in 20 digits, so sorting names is
sorting sequences.

The positions that people type: a sequence or a time, and the error for what is neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from wald.errors import InvalidInput

DIGITS = 20  # the largest u64 has 20 digits
ROUTE_MAX_LENGTH = 127  # leaves room for suffixes within the 255 bytes of a file name
_ROUTE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_SEGMENT = re.compile(r"([0-9]{20})\.wal(|\.idx|\.zst|(?:\.zst)?\.released|(?:\.zst)?\.deleting)")
SEQUENCE_MAX = (1 << 64) - 1

DEFAULT_GROUP = "processed"  # so that the default cursor file is processed.cursor
CURSOR_SUFFIX = ".cursor"
HANDOVER_SUFFIX = ".drain"  # what wald-drain hands over
COMMAND_SUFFIX = ".command"  # how its command ended; with a number behind it, that of a worker
WORK_SUFFIX = ".work"  # what its workers have done above the cursor
ASK_SUFFIX = ".ask"  # what a command asks the owner of its workers
PIN_SUFFIX = ".pin"  # lists the routes that an unfinished handover pins
_OF_GROUP = re.compile(r"(.*)\.(?:cursor|drain|command(?:-[0-9]+)?|work|ask|pin)", re.DOTALL)
CURSORS = "cursors"  # the directory of a route with the files of its consumer groups
WHOLE_SUFFIX = ".whole"  # behind the name of a sealed segment: a second name of what is being relieved
FOUND_PREFIX = "in.found-"  # and a number: what stood where the FIFO of a route belongs

VERIFY_LEDGER = "verify.jsonl"
SKIPS_LEDGER = "skips.jsonl"  # records that `wald cursor skip` has passed over for a group
LEDGERS = ("segments.jsonl", "reclaim.jsonl", "archive.jsonl", VERIFY_LEDGER, SKIPS_LEDGER)
PART_SUFFIX = ".zst"
_LEDGER_PART = re.compile(r"([a-z]+)-([0-9]{20})(\.jsonl)\.zst")


class Kind(Enum):
    """What a file in ``segments/`` is; the value is the suffix after the 20 digits."""

    RAW = ".wal"
    INDEX = ".wal.idx"
    SEALED = ".wal.zst"
    RELEASED = ".wal.zst.released"
    """Reclaimed. It is kept for the grace period and taken back if a consumer needs it before that ends."""
    DELETING = ".wal.zst.deleting"
    """Its grace period is over, and it is being deleted."""
    RAW_RELEASED = ".wal.released"
    RAW_DELETING = ".wal.deleting"
    """The same of a segment that was reclaimed before it was sealed."""

    @property
    def form(self) -> Kind:
        """What the bytes of a segment are: RAW or SEALED."""
        return Kind.RAW if self in (Kind.RAW, Kind.RAW_RELEASED, Kind.RAW_DELETING) else Kind.SEALED

    @property
    def released(self) -> Kind:
        """The kind of the same bytes once they are reclaimed."""
        return Kind(self.form.value + ".released")

    @property
    def deleting(self) -> Kind:
        """The kind of the same bytes once their grace period is over."""
        return Kind(self.form.value + ".deleting")

    @property
    def reclaimed(self) -> bool:
        return self in (self.released, self.deleting)


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """A parsed name in ``segments/``."""

    base_sequence: int
    kind: Kind

    def __str__(self) -> str:
        return segment_name(self.base_sequence, self.kind)


def segment_name(base_sequence: int, kind: Kind) -> str:
    """The file name of the segment that begins with ``base_sequence``.

    >>> segment_name(1, Kind.RAW)
    '00000000000000000001.wal'
    """
    return f"{base_sequence:0{DIGITS}d}{kind.value}"


def parse_segment_name(name: str) -> SegmentName | None:
    """The inverse of :func:`segment_name`; None for anything that is not ours."""
    match = _SEGMENT.fullmatch(name)
    if match is None or int(match[1]) > SEQUENCE_MAX:
        return None
    return SegmentName(int(match[1]), Kind(".wal" + match[2]))


def ledger_part_name(ledger: str, line: int) -> str:
    """The file name of the sealed part of ``ledger`` whose first line is number ``line``.

    >>> ledger_part_name("reclaim.jsonl", 1)
    'reclaim-00000000000000000001.jsonl.zst'
    """
    return f"{ledger.removesuffix('.jsonl')}-{line:0{DIGITS}d}.jsonl.zst"


def parse_ledger_part_name(name: str) -> tuple[str, int] | None:
    """The inverse of :func:`ledger_part_name`; None for anything that is not ours."""
    match = _LEDGER_PART.fullmatch(name)
    return (match[1] + match[3], int(match[2])) if match else None


def check_route(name: str) -> str:
    """Return ``name`` if it may name a route.

    Raises:
        InvalidInput: it may not; the message says why.
    """
    return _check(name, "route")


def is_route(name: str) -> bool:
    """Whether ``name`` may name a route."""
    return _ROUTE.fullmatch(name) is not None


def check_group(name: str) -> str:
    """Return ``name`` if it may name a consumer group.

    Raises:
        InvalidInput: it may not.
    """
    return _check(name, "group")


def _check(name: str, what: str) -> str:
    if _ROUTE.fullmatch(name) is None:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise InvalidInput(
            f"illegal {what} name {shown!r}",
            case="illegal-name",
            more=ROUTE_MAX_LENGTH - 1,
        )
    return name


def worker_suffix(worker: int) -> str:
    """The suffix of the file that says how the command of a worker ended.

    >>> worker_suffix(3)
    '.command-3'
    """
    return f"{COMMAND_SUFFIX}-{worker}"


def is_group_file(name: str, group: str | None = None) -> bool:
    """Whether a file may be one that ``group``, or any, leaves beside its cursor, or that cursor."""
    match = _OF_GROUP.fullmatch(name)
    return match is not None and group in (None, match[1])


def cursor_name(group: str) -> str:
    """The file name of a group's cursor."""
    return group + CURSOR_SUFFIX


def parse_cursor_name(name: str) -> str | None:
    """The group whose cursor ``name`` is; None if it is none."""
    group = name.removesuffix(CURSOR_SUFFIX)
    return group if group != name and _ROUTE.fullmatch(group) else None
