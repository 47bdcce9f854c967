"""Cursor moves by an operator, and the start position of a new group.

Moving a cursor, and what it then needs that RECLAIM has taken.

RECLAIM renames segments first and reads the cursors then; a program that moves a cursor writes it first and lists the
segments then. So a segment that is listed as ``.released`` comes back by itself; one under a later name, or under none,
may not.

Where a group begins that has no cursor on a route yet: at the oldest record there is.
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
from wald.hints import command_line
from wald.retention.blockers import segment_index
from wald.retention.cursors import Cursor, cursor_lock, set_cursor
from wald.retention.history import History
from wald.retention.missing import Wanted, count
from wald.segments.seek import end_sequence
from wald.segments.view import View, durable_head

_Span = tuple[int, int]


class _Needed:
    """From where to where there are records that ``cursor`` needs."""

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
    """Move the cursor of ``group`` on ``route`` to ``sequence``; on disk when this returns.

    Args:
        now: the time, as it is to stand in the file.
        rewind: whether the cursor may move backwards, or replace one that cannot be trusted.
        any_user: as of :func:`set_cursor`.

    Returns:
        the cursor; the message of one that is new or was rewound says what it needs and RECLAIM has taken.

    Raises:
        InvalidInput: an illegal name, or a negative sequence.
        NotFound: no such route.
        NotPermitted: this user may not leave a cursor there, or the cursor is another user's.
        Refused: as of :func:`set_cursor`.
    """
    try:
        head = durable_head(root)
    except Damaged:  # it is derived, and made anew at the next commit
        head = None
    follows = not rewind and os.path.lexists(root.cursor(route, group))
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
    if follows:  # RECLAIM has kept for it what it needs
        return cursor
    taken = reclaimed_above(root, cursor, log_id=log_id)
    return replace(cursor, message=taken or cursor.message)


def reclaimed_above(root: Root, cursor: Cursor, *, log_id: bytes) -> str:
    """As a sentence; "" if all that ``cursor`` needs is there.

    Args:
        cursor: as it stands on disk by now.
    """
    listing = list_segments(root)
    released, deleted = _Needed(cursor), _Needed(cursor)
    needed_of = {s.base_sequence: released if s.kind is s.kind.released else deleted for s in listing.released}
    known = {segment.base_sequence for segment in listing.segments}
    for segment in listing.released:
        with suppress(Damaged, OSError):  # of what is gone by now, or cannot be read, the ledger says what it held
            routes = segment_index(segment, log_id).routes
            for held in routes:
                if held.route == cursor.route:
                    needed_of[segment.base_sequence].add(held.first, held.last)
            known.add(segment.base_sequence)
    parts = []
    try:
        # Read last: what has gone since the listing was recorded before.
        history = History(root)
        for entry in history.deletions(cursor.sequence + 1):
            if entry["base"] not in known:
                for first, last in _spans(entry, cursor.route):
                    needed_of.get(entry["base"], deleted).add(first, last)
        for base in {entry["base"] for entry in history.all_reliefs(cursor.sequence + 1)}:
            for first, last in _dropped(root, base, cursor.route, history, log_id=log_id):
                deleted.add(first, last)
    except Damaged as error:
        parts.append(error.message)
    if released:
        taking_back = command_line(root.path, program="wald-reclaim")
        parts.append(f"{released} are released; {taking_back} takes them back")
    if deleted:
        explaining = command_line(root.path, f"where {deleted.last}")
        parts.append(f"{deleted} are deleted; {explaining} says why")
    return f"{cursor.path}: {'; '.join(parts)}" if parts else ""


def _dropped(root: Root, base: int, route: str, history: History, *, log_id: bytes) -> Iterator[tuple[int, int]]:
    """The first and the last record of ``route`` that relief has dropped of a segment, by its index if it is there."""
    held: Iterable[RouteEntry] = ()
    try:
        relieved = segment_index(Segment(base, Kind.SEALED, root.segment(base, Kind.SEALED)), log_id).shrunk
        if relieved is None:
            held = ()
        elif relieved.is_complete:
            held = relieved.routes
        else:  # the ledger has reliefs, too, that were not carried out
            held = (
                each for each in history.dropped(base) or () if relieved.dropped_between(each.first, each.first + 1)
            )
    except (Damaged, OSError):
        held = history.dropped(base) or ()
    return ((each.first, each.last) for each in held if each.route == route)


def _spans(entry: Entry, route: str) -> Iterator[_Span]:
    """The first and the last record of ``route`` in a reclaimed segment; of the segment, if its line does not say."""
    match entry.get("routes"):
        case [*routes]:
            for held in routes:
                match held:
                    case {"route": name, "first": int(first), "last": int(last)} if name == route:
                        yield first, last
        case _:
            yield entry["base"], entry["last"]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a new group begins.

    Attributes:
        sequence: the first record that it has not processed; one that is missing, if no ledger says it was reclaimed.
        message: which records of the route were reclaimed before; "" if none were.
    """

    sequence: int
    message: str = ""


def beginning(view: View, route: str, group: str) -> Beginning:
    """Where ``group`` begins on ``route``, of which it has processed nothing.

    Raises:
        Damaged: the ledger that would say what was reclaimed is damaged.
    """
    oldest = view.segments[0].base_sequence if view.segments else 1
    if oldest == 1:
        return Beginning(1)
    history = History(view.root)
    sequence, _ = next(history.unexplained(1, oldest - 1), (oldest, oldest))
    last = sequence - 1
    gone = count(history.gone(1, last), Wanted(lambda _: 1, frozenset([route]), 1, last))
    if not gone.records:
        return Beginning(sequence)
    records = f"record {gone.first} was" if gone.first == gone.last else f"records {gone.first} to {gone.last} were"
    return Beginning(
        sequence, f"group {group} is new on route {route} and begins at record {sequence}: {records} reclaimed before"
    )
