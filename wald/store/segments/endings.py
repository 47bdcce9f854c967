"""The end of a complete raw segment, which the first batch of the next segment records.

Another program may have truncated the file since. If it lost only pieces of records that end later, no sequence is
missing, and nothing else shows the loss.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from wald.errors import Damaged
from wald.format.names import Kind, parse_segment_name
from wald.format.parsing import StoredBatch
from wald.format.state import Ending, decode_previous
from wald.store.files.directory import Root
from wald.store.files.listing import Listing, Segment
from wald.store.files.regular import open_file
from wald.store.segments.head import EVERYTHING
from wald.store.segments.indexes import find_index
from wald.store.segments.raw import FIRST_BATCH, RawFile
from wald.store.segments.view import View


def recorded_end(view: View, segment: Segment) -> int:
    """Return the position at which a raw segment ended when it was cut; 0 if that is not known."""
    following = view.listing.behind(segment.base_sequence)
    ending = None if following is None else _previous(view, following)
    if ending is not None:
        with suppress(Damaged, OSError), open_file(segment.path) as file:
            index = partial(find_index, segment.path.parent, view.log_id, segment.base_sequence)
            # A repair gives a segment that it changes another salt.
            if RawFile(file.fileno(), index=index).salt == ending.salt:
                return ending.position
    return 0


def _previous(view: View, following: Segment) -> Ending | None:
    with suppress(Damaged, OSError), closing(view.open(following)) as opened:
        first = next(iter(opened.batches(FIRST_BATCH, None)), None)
        if isinstance(first, StoredBatch) and first.header.is_state:
            return decode_previous(first.payload)
    return None


def view_behind(root: Root, log_id: bytes, base: int) -> View:
    """Return a view of the segment after ``base`` only, which takes less time than one of all segments."""
    names = (parse_segment_name(entry.name) for entry in os.scandir(root.segments) if entry.name[:20] > f"{base:020d}")
    bases = (name.base_sequence for name in names if name is not None and name.kind in (Kind.RAW, Kind.SEALED))
    found = min(bases, default=None)
    segments = () if found is None else (Segment(found, Kind.RAW, root.segment(found, Kind.RAW)),)
    return View(root, log_id, EVERYTHING, Listing(segments))


def truncated(path: Path, position: int, end: int) -> Damaged:
    """Return the error for a segment whose batches end at ``position`` and ended at ``end`` when it was cut."""
    return Damaged(
        f"{path}: offset {position}: another program truncated the segment, which ended at {end} when it was cut",
        case="segment-truncated",
        root=path.parent.parent,
    )
