"""Cursor moves by an operator, and the start position of a new group.

RECLAIM renames a segment, then reads the cursors; a move writes the cursor, then lists the segments. So RECLAIM
restores any ``.released`` segment that a moved cursor needs. A deleted one, or one with a later name, may be gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.listing import Segment, list_segments
from wald.format.ledger_lines import Entry
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry
from wald.format.spans import Span
from wald.hints import command_line
from wald.retention.blockers import segment_index
from wald.retention.cursors import Cursor, cursor_lock, set_cursor
from wald.retention.history import History
from wald.retention.missing import RequestedRecords, count_missing
from wald.segments.seek import end_sequence
from wald.segments.view import View, durable_head


def move_cursor(
    root: Root,
    route: str,
    group: str,
    sequence: int,
    *,
    log_id: bytes,
    disk: Disk,
    now: str,
    rewind: bool = False,
    any_user: bool = False,
) -> Cursor:
    """Move a cursor durably; errors as in :func:`set_cursor`."""
    try:
        head = durable_head(root)
    except Damaged:  # the next commit rewrites it
        head = None
    moves_forward = not rewind and os.path.lexists(root.cursor(route, group))
    with cursor_lock(root.cursor_directory(route), disk):
        cursor = set_cursor(
            root,
            route,
            group,
            sequence,
            disk=disk,
            head_sequence=end_sequence(root, log_id) - 1,
            epoch=head.epoch if head else 0,
            now=now,
            rewind=rewind,
            any_user=any_user,
        )
    if moves_forward:  # it has pinned all that it needs
        return cursor
    return replace(cursor, message=reclaimed_above(root, cursor, log_id=log_id) or cursor.message)


class _Range:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.first = self.last = 0

    def add(self, first: int, last: int) -> None:
        if last > self._cursor.sequence:
            first = max(first, self._cursor.sequence + 1)
            self.first, self.last = min(self.first or first, first), max(self.last, last)

    def __bool__(self) -> bool:
        return self.last > 0

    def __str__(self) -> str:
        span = f"record {self.first}" if self.first == self.last else f"records {self.first} to {self.last}"
        return f"{span} of {self._cursor.route}"


def reclaimed_above(root: Root, cursor: Cursor, *, log_id: bytes) -> str:
    """Return a sentence about reclaimed records that the stored ``cursor`` needs, or ""."""
    listing = list_segments(root)
    released, deleted = _Range(cursor), _Range(cursor)
    range_of = {s.base_sequence: released if s.kind is s.kind.released else deleted for s in listing.released}
    known = {segment.base_sequence for segment in listing.segments}
    for segment in listing.released:
        with suppress(Damaged, OSError):  # the ledger has the contents of deleted and unreadable segments
            for entry in segment_index(segment, log_id)[0].routes:
                if entry.route == cursor.route:
                    range_of[segment.base_sequence].add(entry.first, entry.last)
            known.add(segment.base_sequence)
    parts = []
    try:
        # Read the ledger last: it has every deletion since the listing.
        history = History(root)
        for line in history.deletions(cursor.sequence + 1):
            if line["base"] not in known:
                for span in _spans(line, cursor.route):
                    range_of.get(line["base"], deleted).add(*span)
        for base in {line["base"] for line in history.all_shrinks(cursor.sequence + 1)}:
            for entry in _dropped(root, base, history, log_id=log_id):
                if entry.route == cursor.route:
                    deleted.add(entry.first, entry.last)
    except Damaged as error:
        parts.append(error.message)
    if released:
        reclaim = command_line(root.path, program="wald-reclaim")
        parts.append(f"{released} are released; {reclaim} restores them")
    if deleted:
        explain = command_line(root.path, f"where {deleted.last}")
        parts.append(f"{deleted} are deleted; {explain} says why")
    return f"{cursor.path}: {'; '.join(parts)}" if parts else ""


def _dropped(root: Root, base: int, history: History, *, log_id: bytes) -> Iterable[RouteEntry]:
    """Prefer the index to the ledger."""
    try:
        dropped = segment_index(Segment(base, Kind.SEALED, root.segment(base, Kind.SEALED)), log_id)[0].shrunk
    except (Damaged, OSError):
        return history.dropped(base) or ()
    if dropped is None or dropped.is_complete:
        return () if dropped is None else dropped.routes
    # the ledger also has unfinished shrinks
    return [each for each in history.dropped(base) or () if dropped.dropped_between(each.first, each.first + 1)]


def _spans(line: Entry, route: str) -> Iterator[Span]:
    """Yield the range of a route; the whole segment if its line lists no routes."""
    match line.get("routes"):
        case [*routes]:
            for entry in routes:
                match entry:
                    case {"route": name, "first": int(first), "last": int(last)} if name == route:
                        yield first, last
        case _:
            yield line["base"], line["last"]


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Start position of a new group."""

    sequence: int  # missing if no ledger says that it was reclaimed
    message: str = ""


def start_position(view: View, route: str, group: str) -> StartPosition:
    """Return where a group without a cursor on ``route`` starts: at the oldest record."""
    oldest = view.segments[0].base_sequence if view.segments else 1
    if oldest == 1:
        return StartPosition(1)
    history = History(view.root)
    sequence, _ = next(history.unexplained(1, oldest - 1), (oldest, oldest))
    last = sequence - 1
    request = RequestedRecords(lambda _: 1, frozenset([route]), 1, last)
    missing = count_missing(history.reclaimed_segments(1, last), request)
    if not missing.records:
        return StartPosition(sequence)
    is_one = missing.first == missing.last
    records = f"record {missing.first} was" if is_one else f"records {missing.first} to {missing.last} were"
    return StartPosition(
        sequence, f"group {group} is new on route {route} and starts at record {sequence}: {records} already reclaimed"
    )
