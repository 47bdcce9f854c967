"""Reading the head: how far the log is durable, and so how far anybody may read it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import islice

from wald.errors import Damaged, command_line
from wald.format.head import LINE_BYTES, Head, decode_head
from wald.format.names import Kind
from wald.store.files.directory import Listing, Root, Segment, list_segments
from wald.store.files.regular import open_file, open_regular
from wald.store.segments.raw import RawFile, Scanned

_AT_ONCE = 100  # a line is torn for the nanoseconds in which it is rewritten, …
_PAUSES, _PAUSE_SECONDS = 250, 0.001  # … or for as long as the kernel runs somebody else in the middle of that
_EVERYWHERE = 1 << 63


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the readable bytes of a log end.

    Attributes:
        segment: base sequence of the last readable segment; every older one is readable to its end.
        position: where the readable bytes of that segment end.
        sequence: the last readable record; None where only reading can tell.
        lost: whether there is no readable head and so records may be durable behind the bound, which nobody can tell.
    """

    segment: int
    position: int
    sequence: int | None
    lost: bool = False

    def limit(self, base_sequence: int) -> int | None:
        """Where the readable bytes of a segment end; None: at its own end."""
        return self.position if base_sequence == self.segment else None


def read_head(root: Root) -> Head | None:
    """The durable head; None if there is no head file, or none has been written into it yet.

    Raises:
        Damaged: the file is there and is not a head.
    """
    try:
        descriptor = open_regular(root.head)
    except FileNotFoundError:
        return None
    try:
        for attempt in range(_AT_ONCE + _PAUSES):
            line = os.pread(descriptor, LINE_BYTES, 0)
            head = decode_head(line)
            if head is not None or not any(line):
                return head
            if attempt >= _AT_ONCE:
                time.sleep(_PAUSE_SECONDS)
    finally:
        os.close(descriptor)
    raise Damaged(
        f"{root.head}: offset 0: not a head line",
        hint=f"rm {root.head}: the next start of the daemon makes it anew from the segments",
    )


def head_of(root: Root) -> Head | None:
    """The durable head; None before anything was durable.

    Raises:
        Damaged: the file is there and is not a head, or it is lost: there are records and nothing says how far.
    """
    found = read_head(root)
    if found is not None:
        return found
    bound, listing = look(root)
    if not listing.segments or not (bound.lost or bound.sequence != 0):
        return None
    found = read_head(root)  # which a daemon may have made meanwhile
    if found is None:
        raise lost_head(root, bound)
    return found


def lost_head(root: Root, bound: Bound) -> Damaged:
    """The error for what may be behind a bound without a head."""
    behind = "" if bound.sequence is None else f" behind record {bound.sequence}"
    return Damaged(
        f"{root.head}: there is no readable head, so what is durable{behind} cannot be told",
        hint=f"send a record to the running daemon, or start it: {command_line(root.path, 'run')}",
    )


def readable_head(root: Root) -> Head | None:
    """As :func:`read_head`, but a damaged one is none: it is derived, and segments tell as much, or nearly."""
    try:
        return read_head(root)
    except Damaged:
        return None


def look(root: Root) -> tuple[Bound, Listing]:
    """How far the log may be read, and its segments, which reach at least that far.

    Without a readable head, which is derived and may be lost, that is everything but the newest raw segment.
    """
    head = readable_head(root)
    listing = list_segments(root)  # after the head: a segment that the head is in has its name already
    if head is not None:
        return Bound(head.segment, head.position, head.sequence), listing
    newest = listing.segments[-1] if listing.segments else None
    if newest is not None and newest.kind is Kind.RAW:
        return Bound(newest.base_sequence, 0, newest.base_sequence - 1, lost=_holds_a_batch(newest)), listing
    return Bound(_EVERYWHERE, _EVERYWHERE, None), listing


def _holds_a_batch(segment: Segment) -> bool:
    """Whether a raw segment has more in it than its control batch; one that is gone meanwhile counts as empty."""
    try:
        with open_file(segment.path) as file:
            scan = RawFile(file.fileno()).scan()
            return any(isinstance(found, Scanned) and not found.header.is_control for found in islice(scan, 2))
    except (FileNotFoundError, Damaged):
        return False
