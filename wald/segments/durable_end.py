"""Durable head, the limit of every read."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.safe_open import FileIdentity, open_regular
from wald.format.head import HEAD_BYTES, Head, decode_head

_FAST_READS = 100  # the daemon rewrites the line within nanoseconds
_SLOW_READS, _PAUSE_SECONDS = 250, 0.001  # if the kernel interrupts the daemon in between
_AHEAD_NS = 60_000_000_000  # more than time synchronisation normally corrects


class Bound(NamedTuple):
    """End of the readable bytes of a log."""

    segment: int
    position: int
    sequence: int | None  # last readable record; None if only reading can tell
    head_lost: bool = False  # the head is unreadable; later records may be durable

    def limit(self, base_sequence: int) -> int | None:
        """Return where reading a segment must stop; None for the end of the file."""
        return self.position if base_sequence == self.segment else None


UNBOUNDED = Bound(1 << 63, 1 << 63, None)  # if all segments are complete


def read_head(root: Root) -> Head | None:
    """Return the durable head, or None if no head exists. Raise Damaged if the head is unreadable."""
    try:
        descriptor = open_regular(root.head)
    except FileNotFoundError:
        return None
    try:
        for attempt in range(_FAST_READS + _SLOW_READS):
            line = os.pread(descriptor, HEAD_BYTES, 0)
            head = decode_head(line)
            if head is not None or not any(line):
                return head
            if attempt >= _FAST_READS:
                time.sleep(_PAUSE_SECONDS)
    finally:
        os.close(descriptor)
    raise Damaged(f"{root.head}: offset 0: not a valid head", case="head-damaged", root=root.path)


def readable_head(root: Root) -> Head | None:
    """Return the durable head; None if missing or damaged, because the segments show nearly as much."""
    try:
        return read_head(root)
    except Damaged:
        return None


class OpenHead:
    """Head file that stays open, so that a read takes a third of the time of :func:`readable_head`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._descriptor = -1
        self._identity: FileIdentity | None = None
        self._line = b""
        self._head: Head | None = None  # decoded from that

    def read(self) -> Head | None:
        """Return the same as :func:`readable_head`."""
        if self._identity is None or not self._identity.is_current():
            self.close()
            with suppress(OSError, Damaged):
                self._descriptor = open_regular(self._root.head)
                self._identity = FileIdentity(self._root.head, self._descriptor)
        line = b"" if self._identity is None else os.pread(self._descriptor, HEAD_BYTES, 0)
        if line != self._line:
            self._line, self._head = line, decode_head(line)
        return self._head or readable_head(self._root)

    def close(self) -> None:
        if self._identity is not None:
            self._identity = None
            os.close(self._descriptor)


def seconds_ahead(append_time_ns: int, now_ns: int) -> float:
    """Return the seconds between the clock and a later append time; 0.0 within a normal correction."""
    ahead_ns = append_time_ns - now_ns
    return ahead_ns / 1e9 if ahead_ns > _AHEAD_NS else 0.0


def lost_head(root: Root, bound: Bound) -> Damaged:
    after = "" if bound.sequence is None else f" after record {bound.sequence}"
    return Damaged(
        f"{root.head}: there is no readable head, so it is unknown which records{after} are durable",
        case="no-readable-head",
        root=root.path,
    )
