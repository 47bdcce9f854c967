"""Limits on the disk space that a daemon uses.

Sealing needs room for the sealed form next to the raw one, and input must not use it. Input is accepted while

    free bytes + bytes allocated for the next segment  ≥  reserve + one sealed form + the next segment

The reserve (``free_space_min``) is for other programs. A disk must hold the reserve, the active segment, the next one,
and a third in both forms. On a smaller disk, the segments shrink first, then the reserve.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wald.files.disk import free_bytes
from wald.files.layout import Root
from wald.hints import hint_for

_SEGMENT_MIN_BYTES = 64 << 10
_SEGMENT_USUAL_BYTES = 1 << 20  # a reserve that leaves only smaller segments is too large
_UNLIMITED = 1 << 62
_OWN_SHARE = 32  # 1/32 of the disk, for ledgers, cursors and other small files
_PLENTY = 8  # sealed forms
_RESERVE_SHARE = 4  # 1/4 of the disk, if the configured reserve does not fit


class Cause(StrEnum):
    """Reason why input waits for disk space."""

    SEGMENTS = "segments"  # the log itself fills the disk
    OTHERS = "others"  # other files: even without complete segments, space would be missing
    REFUSED = "refused"  # the last write hit a full disk or quota

    def hint(self, root: Path) -> str:
        if self is Cause.SEGMENTS:
            return hint_for("log-fills-disk", root=root)
        segments = Root(root).segments
        return hint_for("other-files-fill-disk", disk=segments if segments.is_mount() else root)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that fit a disk."""

    segment_bytes: int
    reserve_bytes: int
    payload_bytes: int  # of one record or request

    @property
    def headroom_bytes(self) -> int:
        """Free space left for other programs and for sealing."""
        return self.reserve_bytes + sealed_bytes_max(self.segment_bytes)

    @property
    def needed_bytes(self) -> int:
        """Free and preallocated space that input requires."""
        return self.headroom_bytes + self.segment_bytes


def sealed_bytes_max(raw_bytes: int) -> int:
    """Return the largest size of a sealed form with its index."""
    return raw_bytes + raw_bytes // 64 + (64 << 10)


def sizes_for(total_bytes: int, *, segment_max_bytes: int, free_space_min: int) -> Sizes:
    """Reduce the configured sizes to fit a disk of ``total_bytes`` (0: unknown)."""
    if not total_bytes:
        return Sizes(segment_max_bytes, free_space_min, _UNLIMITED)
    usable = total_bytes - total_bytes // _OWN_SHARE
    reserve = free_space_min
    if _largest_segment(usable - reserve) < min(segment_max_bytes, _SEGMENT_USUAL_BYTES):
        reserve = min(free_space_min, total_bytes // _RESERVE_SHARE)
    segment = min(segment_max_bytes, max(_SEGMENT_MIN_BYTES, _largest_segment(usable - reserve)))
    # A large payload exists twice, in its spool file and in the log, and the active segment may be full.
    payload = (usable - reserve - sealed_bytes_max(segment) - 2 * segment) // 2
    return Sizes(segment, reserve, max(_SEGMENT_MIN_BYTES // 2, payload))


def _largest_segment(usable_bytes: int) -> int:
    """Return the largest size, in steps of 1 MiB or 64 KiB, at which three raw segments and a sealed one fit."""
    largest = max(0, usable_bytes - (64 << 10)) * 64 // 257
    return largest - largest % (_SEGMENT_USUAL_BYTES if largest >= _SEGMENT_USUAL_BYTES else _SEGMENT_MIN_BYTES)


class DiskBudget:
    """Free-space checks on the segments' disk."""

    def __init__(self, path: Path, sizes: Sizes) -> None:
        self._path = path
        self.sizes = sizes
        # Allocated for the next segment. Set after allocation and reset before use: otherwise input would use the room
        # for sealing.
        self.spare_bytes = 0

    def remaining_bytes(self, free_bytes: int) -> int:
        return free_bytes + self.spare_bytes - self.sizes.needed_bytes

    def can_allocate(self, segment_bytes: int) -> bool:
        return free_bytes(self._path) >= self.sizes.headroom_bytes + segment_bytes

    def can_seal(self, raw_bytes: int) -> bool:
        return free_bytes(self._path) >= self.sizes.reserve_bytes + sealed_bytes_max(raw_bytes)

    def has_plenty(self, raw_bytes: int) -> bool:
        """Return True if input cannot fill the room for a sealed form during its compression."""
        return free_bytes(self._path) >= self.sizes.needed_bytes + _PLENTY * sealed_bytes_max(raw_bytes)

    def cause(self, free: int) -> Cause:
        """Return why space is missing. ``free`` is the space after writing the waiting input."""
        segment_bytes = 0
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # sealed or reclaimed in the meantime
                    segment_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        # The active segment always exists.
        segments_suffice = free + segment_bytes >= self.sizes.needed_bytes + self.sizes.segment_bytes
        return Cause.SEGMENTS if segments_suffice else Cause.OTHERS
