"""What a cursor that was just set needs and RECLAIM has taken: who sets one is to know what will never come.

RECLAIM renames first and reads the cursors then, and who sets a cursor does it the other way round. So what stands here
under the name ``.released`` comes back by itself; what stands under a later name, or under none, may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from wald.errors import Damaged, command_line
from wald.store.files.directory import Listing, Root, list_segments
from wald.store.retention.cursors import Cursor
from wald.store.retention.history import Entry, History
from wald.store.retention.pins import segment_index

_Span = tuple[int, int]


def taken_above(root: Root, cursor: Cursor, *, log_id: bytes) -> str:
    """In words; "" if all that ``cursor`` needs is there.

    Args:
        cursor: as it stands on disk by now.
    """
    listing = _settled(root)
    released: list[_Span] = []
    deleted: list[_Span] = []
    places = {s.base_sequence: released if s.kind is s.kind.released else deleted for s in listing.released}
    known = {segment.base_sequence for segment in listing.segments}
    for segment in listing.released:
        with suppress(Damaged, OSError):  # of what is gone by now, or cannot be read, the ledger tells
            routes = segment_index(segment, log_id).routes
            places[segment.base_sequence] += [(told.first, told.last) for told in routes if told.route == cursor.route]
            known.add(segment.base_sequence)
    parts = []
    try:
        for entry in History(root).deletions():  # read last: what has gone since the listing was told before
            if entry["base"] not in known:
                places.get(entry["base"], deleted).extend(_spans(entry, cursor.route))
    except Damaged as error:
        parts.append(error.message)
    if needed := [span for span in released if span[1] > cursor.sequence]:
        taking_back = command_line(root.path, program="wald-reclaim")
        parts.append(f"{_words(needed, cursor)} are released; {taking_back} takes them back")
    if needed := [span for span in deleted if span[1] > cursor.sequence]:
        telling = command_line(root.path, f"where {max(needed)[1]}")
        parts.append(f"{_words(needed, cursor)} are deleted; {telling} says why")
    return f"{cursor.path}: {'; '.join(parts)}" if parts else ""


def _settled(root: Root) -> Listing:
    """A listing that a second look confirms: one that is made while names change may leave one out.

    What is cut and sealed meanwhile makes no difference, for that may go on faster than one can look.
    """
    listing = list_segments(root)
    while True:
        again = list_segments(root)
        bases = {segment.base_sequence for segment in listing.segments}
        newest = max(bases, default=0)
        if again.released == listing.released and bases == {
            segment.base_sequence for segment in again.segments if segment.base_sequence <= newest
        }:
            return again
        listing = again


def _spans(entry: Entry, route: str) -> Iterator[_Span]:
    """The first and the last record of ``route`` in a reclaimed segment; of the segment, if its line does not tell."""
    match entry.get("routes"):
        case [*routes]:
            for told in routes:
                match told:
                    case {"route": name, "first": int(first), "last": int(last)} if name == route:
                        yield first, last
        case _:
            yield entry["base"], entry["last"]


def _words(spans: list[_Span], cursor: Cursor) -> str:
    first, last = max(min(spans)[0], cursor.sequence + 1), max(last for _, last in spans)
    return f"record {first} of {cursor.route}" if first == last else f"records {first} to {last} of {cursor.route}"
