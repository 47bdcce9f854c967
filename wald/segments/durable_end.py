"""Durable head, the limit of every read.

Reading the head: how far the log is durable, and so how far it may be read.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.safe_open import open_regular
from wald.format.head import HEAD_BYTES, Head, decode_head

_AT_ONCE = 100  # a line is torn for the nanoseconds in which it is rewritten, …
_PAUSES, _PAUSE_SECONDS = 250, 0.001  # … or for as long as the kernel interrupts that


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the readable bytes of a log end.

    Attributes:
        segment: base sequence of the last readable segment; every older one is readable to its end.
        position: where the readable bytes of that segment end.
        sequence: the last readable record; None where only reading shows it.
        lost: whether the head is not readable, and so records behind the bound may be durable.
    """

    segment: int
    position: int
    sequence: int | None
    lost: bool = False

    def limit(self, base_sequence: int) -> int | None:
        """Where the readable bytes of a segment end; None: at its own end."""
        return self.position if base_sequence == self.segment else None


_AHEAD_NS = 60_000_000_000  # more than time synchronisation normally corrects

EVERYTHING = Bound(1 << 63, 1 << 63, None)
"""Of segments all of which are complete."""


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
            line = os.pread(descriptor, HEAD_BYTES, 0)
            head = decode_head(line)
            if head is not None or not any(line):
                return head
            if attempt >= _AT_ONCE:
                time.sleep(_PAUSE_SECONDS)
    finally:
        os.close(descriptor)
    raise Damaged(
        f"{root.head}: offset 0: not a head line",
        case="head-damaged",
        root=root.path,
    )


def seconds_ahead(append_time_ns: int, now_ns: int) -> float:
    """Return how far append times are ahead of the clock; 0.0 if a normal clock correction explains it.

    Until the clock has caught up, every new record gets the append time of the record before it.
    """
    ahead_ns = append_time_ns - now_ns
    return ahead_ns / 1e9 if ahead_ns > _AHEAD_NS else 0.0


def readable_head(root: Root) -> Head | None:
    """As :func:`read_head`, but None for a damaged one: it is derived, and segments show as much, or nearly."""
    try:
        return read_head(root)
    except Damaged:
        return None


def lost_head(root: Root, bound: Bound) -> Damaged:
    """The error for what may be behind a bound without a head."""
    behind = "" if bound.sequence is None else f" behind record {bound.sequence}"
    return Damaged(
        f"{root.head}: there is no readable head, so it is unknown which records{behind} are durable",
        case="no-readable-head",
        root=root.path,
    )
