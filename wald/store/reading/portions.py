"""A selection of records in portions that can be read at the same time: consecutive ranges of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from wald.errors import Damaged
from wald.format.names import Kind
from wald.format.tables import FrameTable
from wald.store.files.clock import read_steps
from wald.store.files.listing import Segment
from wald.store.reading.selection import Selection
from wald.store.retention.pins import sealed_index
from wald.store.segments.view import View

PORTION_BYTES = 8 << 20  # raw: large beside the opening of a segment, small beside the memory of a process


def portions(view: View, selection: Selection) -> Iterator[tuple[int, int]]:
    """The first and the last sequence of each, in order; with nothing between them, whatever is missing or damaged."""
    first, dealt = selection.first, False
    for start, is_end in _starts(view, selection):
        if first < start:
            yield first, start - 1
            first, dealt = start, True
        if is_end:
            if not dealt:
                yield first, first
            return
    yield first, selection.last


def _starts(view: View, selection: Selection) -> Iterator[tuple[int, bool]]:
    """Where a portion may begin: where a frame does, or a segment that is not sealed. At the last one selected ends."""
    segments = view.segments
    collected = 0
    stepped = max((step.base for step in read_steps(view.root)), default=0)  # append times restart there
    for segment in segments[view.listing.covering(selection.first) :] if segments else ():
        if segment.base_sequence > selection.last:
            return
        for start, raw_bytes, earliest_ns, latest_ns in _frames(segment, view):
            if start > selection.last:
                return
            if selection.until_ns <= earliest_ns <= latest_ns and start >= stepped:
                yield start, True
                return
            if collected >= PORTION_BYTES and start > selection.first:
                yield start, False
                collected = 0
            collected += raw_bytes


def _frames(segment: Segment, view: View) -> Iterator[tuple[int, int, int, int]]:
    """First sequence, raw bytes, earliest and latest time of each frame; a segment without an index is a large one."""
    try:
        table = FrameTable.of(sealed_index(segment, view.log_id).frames) if segment.kind.form is Kind.SEALED else None
    except (Damaged, FileNotFoundError):
        table = None
    if table is None:
        return iter([(segment.base_sequence, PORTION_BYTES, 0, -1)])
    return zip(table.first_sequences, table.raw_bytes, table.earliest_ns, table.latest_ns, strict=True)
