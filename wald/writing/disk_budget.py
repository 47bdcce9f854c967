"""Space that a daemon may use on its disk.

How much of its disk a daemon may use.

A segment can be sealed only if its sealed form fits beside it, so the room for one sealed form is never used for input.
Input is taken while

    free bytes + what the next segment has already  ≥  reserve + one sealed form + the next segment

The reserve (``free_space_min``) is left to other programs, by the sealer too. A disk must hold the reserve, the active
segment, the next one, and one more in both forms. If it cannot, segments are smaller than configured, and if that is
not enough, so is the reserve. So there is always enough room once everything was read and reclaimed.
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
_SEGMENT_USUAL_BYTES = 1 << 20  # a reserve that makes segments smaller than this is too large for the disk
_UNLIMITED = 1 << 62
_OWN_SHARE = 32  # of the disk, one part is for ledgers, indexes, cursors and other small files
_PLENTY = 8  # sealed forms: more than is written while one is made
_RESERVE_SHARE = 4  # of the disk, one part is the reserve if the configured one does not fit


class Cause(StrEnum):
    """Why input waits for room."""

    SEGMENTS = "segments"
    """The log itself fills the disk."""
    OTHERS = "others"
    """Other files fill the disk: without any complete segment there would be too little room as well."""
    REFUSED = "refused"
    """The last write failed because of a full disk or a quota, whatever the numbers say."""

    def hint(self, root: Path) -> str:
        """Commands that a person can type."""
        if self is Cause.SEGMENTS:
            return hint_for("log-fills-disk", root=root)
        segments = Root(root).segments
        return hint_for("other-files-fill-disk", disk=segments if segments.is_mount() else root)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that apply to a disk, in bytes.

    Attributes:
        segment_bytes: of a segment, allocated ahead.
        reserve_bytes: left to other programs.
        payload_bytes: of the largest record or request that the disk can hold.
    """

    segment_bytes: int
    reserve_bytes: int
    payload_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What must stay free for other programs and for sealing."""
        return self.reserve_bytes + sealed_bytes_max(self.segment_bytes)

    @property
    def needed_bytes(self) -> int:
        """Input is taken only while so much is free or held: otherwise there would be no next segment."""
        return self.kept_bytes + self.segment_bytes


def sealed_bytes_max(raw_bytes: int) -> int:
    """The largest sealed form: nothing in it can be compressed, and it has an index."""
    return raw_bytes + raw_bytes // 64 + (64 << 10)


def sizes_for(total_bytes: int, *, segment_max_bytes: int, free_space_min: int) -> Sizes:
    """The sizes that apply to a disk of ``total_bytes``, none of them above the configured one.

    Args:
        total_bytes: what the daemon could use if the disk were empty; 0: not known.
    """
    if not total_bytes:
        return Sizes(segment_max_bytes, free_space_min, _UNLIMITED)
    usable = total_bytes - total_bytes // _OWN_SHARE
    reserve = free_space_min
    if _largest_segment(usable - reserve) < min(segment_max_bytes, _SEGMENT_USUAL_BYTES):
        reserve = min(free_space_min, total_bytes // _RESERVE_SHARE)
    segment = min(segment_max_bytes, max(_SEGMENT_MIN_BYTES, _largest_segment(usable - reserve)))
    # A large payload is collected in a file and copied from there while the active segment may be full.
    payload = (usable - reserve - sealed_bytes_max(segment) - 2 * segment) // 2
    return Sizes(segment, reserve, max(_SEGMENT_MIN_BYTES // 2, payload))


def _largest_segment(usable_bytes: int) -> int:
    """The largest segment of which four fit, one of them sealed: a multiple of 1 MiB, or of 64 KiB if it is smaller."""
    largest = max(0, usable_bytes - (64 << 10)) * 64 // 257
    return largest - largest % (_SEGMENT_USUAL_BYTES if largest >= _SEGMENT_USUAL_BYTES else _SEGMENT_MIN_BYTES)


class DiskBudget:
    """The disk of one daemon.

    Args:
        path: the directory of the segments.

    Attributes:
        sizes: that apply now.
        spare_bytes: allocated for the next segment. It is set after they were allocated and before they are used:
            room that is counted too early is used for input, and then there is none to seal. The sealed form that is
            being written is not counted; input waits for it.
    """

    def __init__(self, path: Path, sizes: Sizes) -> None:
        self._path = path
        self.sizes = sizes
        self.spare_bytes = 0

    def resize(self, sizes: Sizes) -> None:
        """Apply other sizes."""
        self.sizes = sizes

    def left_bytes(self, free_bytes: int) -> int:
        """How much input may be taken; below 0: how much room is missing."""
        return free_bytes + self.spare_bytes - self.sizes.needed_bytes

    def lets_allocate(self, segment_bytes: int) -> bool:
        """Whether a segment may be allocated ahead."""
        return free_bytes(self._path) >= self.sizes.kept_bytes + segment_bytes

    def lets_seal(self, raw_bytes: int) -> bool:
        """Whether a segment may be sealed. The reserve is not used for that."""
        return free_bytes(self._path) >= self.sizes.reserve_bytes + sealed_bytes_max(raw_bytes)

    def is_plenty(self, raw_bytes: int) -> bool:
        """Whether a segment can be sealed without allocating the room for it first."""
        return free_bytes(self._path) >= self.sizes.needed_bytes + _PLENTY * sealed_bytes_max(raw_bytes)

    def cause(self, free: int) -> Cause:
        """Why there is too little room, if ``free`` bytes were left after writing the input that waits."""
        segments = 0
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # sealed or reclaimed in the meantime
                    segments += entry.stat(follow_symlinks=False).st_blocks * 512
        # There is always an active segment.
        enough = free + segments >= self.sizes.needed_bytes + self.sizes.segment_bytes
        return Cause.SEGMENTS if enough else Cause.OTHERS
