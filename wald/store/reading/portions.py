"""A selection of records in portions that can be read at the same time: consecutive ranges of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from wald.errors import Damaged
from wald.format.names import Kind
from wald.format.tables import FrameTable
from wald.store.files.listing import Segment
from wald.store.reading.selection import Selection
from wald.store.retention.pins import sealed_index
from wald.store.segments.view import View

PORTION_BYTES = 16 << 20  # raw: large beside the opening of a segment, small beside the memory of a process


def portions(view: View, selection: Selection) -> Iterator[tuple[int, int]]:
    """The first and the last sequence of each, in order; with nothing between them, whatever is missing or damaged."""
    first = selection.first
    for start in _starts(view, selection):
        if first < start <= selection.last:
            yield first, start - 1
            first = start
    yield first, selection.last


def _starts(view: View, selection: Selection) -> Iterator[int]:
    """Where a portion may begin: where a frame does, or a segment that is not sealed."""
    segments = view.segments
    collected = 0
    for segment in segments[view.listing.covering(selection.first) :] if segments else ():
        if segment.base_sequence > selection.last:
            return
        for start, raw_bytes, earliest_ns in _frames(segment, view):
            if earliest_ns >= selection.until_ns:
                return
            if collected >= PORTION_BYTES and start > selection.first:
                yield start
                collected = 0
            collected += raw_bytes


def _frames(segment: Segment, view: View) -> Iterator[tuple[int, int, int]]:
    """First sequence, raw bytes and earliest time of each frame; a segment without an index is a large one."""
    try:
        table = FrameTable.of(sealed_index(segment, view.log_id).frames) if segment.kind.form is Kind.SEALED else None
    except (Damaged, FileNotFoundError):
        table = None
    if table is None:
        return iter([(segment.base_sequence, PORTION_BYTES, -(1 << 63))])
    return zip(table.first_sequences, table.raw_bytes, table.earliest_ns, strict=True)
