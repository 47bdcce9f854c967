"""How much of its disk a daemon may use: numbers in, numbers out, and the few that change while it runs.

Whatever waits to be sealed can be sealed only where its sealed form fits beside it, so the room for one is never given
away. Input is taken while

    free bytes + what the next segment has already  ≥  reserve + one sealed form + the next segment

The reserve (``free_space_min``) is left to others, by the sealer too. So that this can come true again on any disk once
everything in it was read and reclaimed, segments are smaller than was asked for, and at last the reserve is, where the
disk cannot hold the reserve, the active segment, the next one, and one more in both of its forms.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wald.errors import command_line
from wald.store.files.disk import free_bytes

_SEGMENT_MIN_BYTES = 64 << 10
_SEGMENT_USUAL_BYTES = 1 << 20  # a reserve that would make segments smaller than this is too large for the disk
_UNLIMITED = 1 << 62
_OWN_SHARE = 32  # of the disk, one part for ledgers, indexes, cursors and what else is small
_PLENTY = 8  # so many sealed forms beside what is needed are more than is used up while one is made
_RESERVE_SHARE = 4  # of the disk, one part is the reserve where the one that is asked for does not fit


class Cause(StrEnum):
    """Why input waits for room."""

    SEGMENTS = "segments"
    """The log itself fills the disk."""
    OTHERS = "others"
    """Without a single complete segment there would be too little room."""
    REFUSED = "refused"
    """The last write met a full disk, or a quota, whatever the numbers say."""

    def hint(self, root: Path) -> str:
        """What a person may type."""
        if self is Cause.SEGMENTS:
            reclaiming = command_line(root, program="wald-reclaim")
            return f"{command_line(root, 'explain')} says who has not read what; {reclaiming} deletes the rest"
        return f"df -h {root} and du -xhd1 around it say what fills the disk; quota -v, what may be used of it"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is in force on a disk, in bytes.

    Attributes:
        segment_bytes: of a segment, allocated ahead.
        reserve_bytes: left to others.
        payload_bytes: of the largest record or request that the disk can take; for a larger one there is never room.
    """

    segment_bytes: int
    reserve_bytes: int
    payload_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What has to stay free for others and for sealing."""
        return self.reserve_bytes + sealed_bytes_max(self.segment_bytes)

    @property
    def needed_bytes(self) -> int:
        """With less than this free, or held already, nothing is taken: there would be no next segment."""
        return self.kept_bytes + self.segment_bytes


def sealed_bytes_max(raw_bytes: int) -> int:
    """The worst case of the sealed form: nothing can be compressed, and the index comes on top."""
    return raw_bytes + raw_bytes // 64 + (64 << 10)


def sizes_for(total_bytes: int, *, segment_max_bytes: int, free_space_min: int) -> Sizes:
    """The sizes in force on a disk of ``total_bytes``, none of them above what is asked for.

    Args:
        total_bytes: what the daemon could use if the disk were empty; 0: the file system does not tell.
    """
    if not total_bytes:
        return Sizes(segment_max_bytes, free_space_min, _UNLIMITED)
    usable = total_bytes - total_bytes // _OWN_SHARE
    reserve = free_space_min
    if _largest_segment(usable - reserve) < min(segment_max_bytes, _SEGMENT_USUAL_BYTES):
        reserve = min(free_space_min, total_bytes // _RESERVE_SHARE)
    segment = min(segment_max_bytes, max(_SEGMENT_MIN_BYTES, _largest_segment(usable - reserve)))
    # A large payload gathers in a file and is copied from there, beside an active segment that is full.
    payload = (usable - reserve - sealed_bytes_max(segment) - 2 * segment) // 2
    return Sizes(segment, reserve, max(_SEGMENT_MIN_BYTES // 2, payload))


def _largest_segment(usable_bytes: int) -> int:
    """The largest segment of which four fit, one of them sealed; whole MiB, or below that the smallest ones."""
    largest = max(0, usable_bytes - (64 << 10)) * 64 // 257
    return largest - largest % (_SEGMENT_USUAL_BYTES if largest >= _SEGMENT_USUAL_BYTES else _SEGMENT_MIN_BYTES)


class Room:
    """The disk of one daemon.

    Args:
        path: the directory of the segments.

    Attributes:
        sizes: in force.
        spare_bytes: allocated for the next segment already; set after they were taken, and before they are used, since
            what is counted too early is given away, and then there is no room to seal. The sealed form that is just
            being made is not counted: input waits for it.
    """

    def __init__(self, path: Path, sizes: Sizes) -> None:
        self._path = path
        self.sizes = sizes
        self.spare_bytes = 0

    def resize(self, sizes: Sizes) -> None:
        """Go on with other sizes."""
        self.sizes = sizes

    def left_bytes(self, free_bytes: int) -> int:
        """How much may be taken before input has to wait; below 0: so much is missing."""
        return free_bytes + self.spare_bytes - self.sizes.needed_bytes

    def lets_allocate(self, segment_bytes: int) -> bool:
        """Whether a segment may be allocated ahead."""
        return free_bytes(self._path) >= self.sizes.kept_bytes + segment_bytes

    def lets_seal(self, raw_bytes: int) -> bool:
        """Whether a segment may be sealed: what that may take is not others'."""
        return free_bytes(self._path) >= self.sizes.reserve_bytes + sealed_bytes_max(raw_bytes)

    def is_plenty(self, raw_bytes: int) -> bool:
        """Whether a segment can be sealed without holding the room for it first."""
        return free_bytes(self._path) >= self.sizes.needed_bytes + _PLENTY * sealed_bytes_max(raw_bytes)

    def cause(self, free: int) -> Cause:
        """Why there is too little room, where ``free`` bytes are left once what waits were written."""
        segments = 0
        with os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # sealed or reclaimed meanwhile
                    segments += entry.stat(follow_symlinks=False).st_blocks * 512
        # An active segment is always there.
        enough = free + segments >= self.sizes.needed_bytes + self.sizes.segment_bytes
        return Cause.SEGMENTS if enough else Cause.OTHERS
