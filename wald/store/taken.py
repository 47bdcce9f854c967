"""What a cursor that was just set needs and RECLAIM has taken: who sets one is to know what will never come.

RECLAIM renames first and reads the cursors then, and who sets a cursor does it the other way round. So what stands here
under the name ``.doomed`` comes back by itself; what stands under a later name, or under none, may not.
"""

from __future__ import annotations

from collections.abc import Iterator

from wald.errors import Damaged, command_line
from wald.store.cursors import Cursor
from wald.store.directory import Listing, Root, list_segments
from wald.store.history import Entry, History
from wald.store.pins import segment_index

_Span = tuple[int, int]


def taken_above(root: Root, cursor: Cursor, *, log_id: bytes) -> str:
    """In words; "" if all that ``cursor`` needs is there.

    Args:
        cursor: as it stands on disk by now.
    """
    listing = _settled(root)
    parts = []
    if doomed := list(_held(listing, False, cursor, log_id)):
        parts.append(
            f"{_words(doomed, cursor)} are doomed; {command_line(root.path, program='wald-reclaim')} takes them back"
        )
    there = {segment.base_sequence for segment in (*listing.segments, *listing.doomed)}
    try:
        deletions = [entry for entry in History(root).deletions() if entry["base"] not in there]
    except Damaged as error:
        deletions = []
        parts.append(error.message)
    deleted = [span for entry in deletions for span in _spans(entry, cursor.route) if span[1] > cursor.sequence]
    deleted += _held(listing, True, cursor, log_id)
    if deleted:
        parts.append(
            f"{_words(deleted, cursor)} are deleted; {command_line(root.path, f'where {max(deleted)[1]}')} says why"
        )
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
        if again.doomed == listing.doomed and bases == {
            segment.base_sequence for segment in again.segments if segment.base_sequence <= newest
        }:
            return again
        listing = again


def _held(listing: Listing, deleting: bool, cursor: Cursor, log_id: bytes) -> Iterator[_Span]:
    """What the reclaimed segments, ``deleting`` or not yet, hold of the cursor's route above it."""
    for segment in listing.doomed:
        if (segment.kind is segment.kind.deleting) == deleting:
            try:
                routes = segment_index(segment, log_id).routes
            except (Damaged, FileNotFoundError):
                continue  # what cannot be read comes back; of what is gone by now the ledger tells
            yield from ((r.first, r.last) for r in routes if r.route == cursor.route and r.last > cursor.sequence)


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
