"""Cursor moves by an operator, and the start position of a new group.

RECLAIM renames a segment, then reads the cursors; a move writes the cursor, then lists the segments. So RECLAIM
restores any ``.released`` segment that a moved cursor needs. A ``.deleting`` segment may be gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from wald.errors import Damaged, InvalidInput, Refused
from wald.files.cursor_directory import make_cursor_directory, not_permitted
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.listing import Segment, list_segments
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import WORK_SUFFIX, Kind
from wald.format.sealed_index import RouteEntry
from wald.format.spans import Span, Spans
from wald.hints import hint_for
from wald.retention.blockers import segment_index
from wald.retention.cursors import Cursor, CursorState, cursor_is_directory, read_cursor, read_cursor_file
from wald.retention.history import History, route_entries
from wald.retention.missing import Missing, count_missing, span_text
from wald.segments.seek import end_sequence
from wald.segments.view import View, durable_head

_LOCK_SECONDS = 5.0  # other moves on the route take two syncs each
_POLL_SECONDS = 0.002
_MODE = 0o644  # the log's owner reads cursors of other users; the directories above keep others out


@contextmanager
def cursor_lock(directory: Path, disk: Disk) -> Iterator[None]:
    """Serialise cursor moves on a route. Continue unlocked if locks are unsupported, not permitted or too slow.

    Without the lock, the lower of two concurrent moves may win.
    """
    descriptor = -1
    try:
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            until = time.monotonic() + _LOCK_SECONDS
            while not disk.lock(descriptor) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


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
    """Create or move a cursor durably, as :meth:`wald.log.Log.set_cursor` describes."""
    try:
        head = durable_head(root)
    except Damaged:  # the next commit rewrites the head
        head = None
    path = root.cursor(route, group)
    moves_forward = not rewind and os.path.lexists(path)
    any_user = any_user and os.geteuid() == 0
    lines = CursorLines(sequence, log_id, head.epoch if head else 0, group, now)
    with cursor_lock(path.parent, disk):
        last = end_sequence(root, log_id) - 1
        while True:
            current = read_cursor(root, route, group, log_id=log_id, head_sequence=last, any_user=any_user)
            _require_allowed(root, current, sequence, last, rewind=rewind)
            is_new = current.state is CursorState.ABSENT
            # Disk gives other files to the log's owner.
            owner = current.user_id if any_user and current.user_id > 0 else -1
            make_cursor_directory(root, disk, route)
            try:
                disk.replace(path, encode_cursor(lines), mode=_MODE, owner=owner, exclusive=is_new)
                break
            except FileExistsError:  # just created, perhaps by a user that ``any_user`` does not cover
                any_user = False
            except PermissionError as error:
                raise not_permitted(root, route, path, error) from error
            except IsADirectoryError:
                raise cursor_is_directory(path) from None
        cursor = read_cursor_file(path, route, group, log_id, last)
    if moves_forward:  # its old position pinned everything that it needs
        return cursor
    return replace(cursor, message=reclaimed_above(root, cursor, log_id=log_id) or cursor.message)


def _require_allowed(root: Root, current: Cursor, sequence: int, head_sequence: int, *, rewind: bool) -> None:
    path = current.path
    if sequence < 0:
        raise InvalidInput(f"{path}: {sequence} is not a sequence", case="cursor-below-zero")
    if sequence > head_sequence:
        raise Refused(
            f"{path}: {sequence} is beyond the last durable record, {head_sequence}, so it cannot have been processed",
            case="cursor-beyond-head",
            root=root.path,
        )
    moves_back = sequence < current.sequence
    is_invalid = current.state in (CursorState.UNREADABLE, CursorState.FOREIGN, CursorState.BEYOND)
    if not rewind and (is_invalid or moves_back):
        raise Refused(
            f"{current.message}; it is replaced only on request"
            if is_invalid
            else f"{path}: {sequence} would move the cursor backwards from {current.sequence}",
            case="rewind-needed",
            root=root.path,
            route=current.route,
            sequence=sequence,
            group=current.group,
        )
    if moves_back and current.of_work_group:
        journal = path.with_suffix(WORK_SUFFIX)
        raise Refused(
            f"{journal}: lists the records that the workers of group {current.group} have done; while it exists, "
            f"they are not redelivered",
            case="journal-in-the-way",
            root=root.path,
            route=current.route,
            sequence=sequence,
            group=current.group,
            path=journal,
        )


def reclaimed_above(root: Root, cursor: Cursor, *, log_id: bytes) -> str:
    """Return a sentence about reclaimed records that a stored cursor needs, or ""."""
    listing = list_segments(root)
    released, deleted = Spans(), Spans()
    spans_by_base = {s.base_sequence: released if s.kind is s.kind.released else deleted for s in listing.released}
    known_bases = {segment.base_sequence for segment in listing.segments}

    def add(spans: Spans, entries: Iterable[RouteEntry]) -> None:
        for entry in entries:
            if entry.route == cursor.route:
                spans.add(max(entry.first, cursor.sequence + 1), entry.last)

    for segment in listing.released:
        with suppress(Damaged, OSError):  # the ledger has the contents of deleted and unreadable segments
            index, _ = segment_index(segment, log_id)
            add(spans_by_base[segment.base_sequence], index.routes)
            known_bases.add(segment.base_sequence)
    parts = []
    try:
        # Read the ledger last: it then has every deletion since the listing.
        history = History(root)
        for line in history.deletions(cursor.sequence + 1):
            if (base := line["base"]) not in known_bases:
                routes = route_entries(line.get("routes"))
                any_route = (RouteEntry(cursor.route, 0, base, line["last"]),)
                add(spans_by_base.get(base, deleted), any_route if routes is None else routes)
        for base in {line["base"] for line in history.all_shrinks(cursor.sequence + 1)}:
            add(deleted, _dropped_entries(root, base, history, log_id=log_id))
    except Damaged as error:
        parts.append(error.message)
    if ranges := list(released):
        hint = hint_for("records-released", root=root.path)
        parts.append(f"{_records_are(cursor.route, ranges)} released; {hint}")
    if ranges := list(deleted):
        hint = hint_for("records-deleted", root=root.path, record=ranges[-1][1])
        parts.append(f"{_records_are(cursor.route, ranges)} deleted; {hint}")
    return f"{cursor.path}: {'; '.join(parts)}" if parts else ""


def _records_are(route: str, ranges: list[Span]) -> str:
    first, last = ranges[0][0], ranges[-1][1]
    return f"{span_text(first, last)} of {route} {'is' if first == last else 'are'}"


def _dropped_entries(root: Root, base: int, history: History, *, log_id: bytes) -> Iterable[RouteEntry]:
    try:
        index, _ = segment_index(Segment(base, Kind.SEALED, root.segment(base, Kind.SEALED)), log_id)
    except (Damaged, OSError):
        return history.dropped_entries(base) or ()
    if (shrunk := index.shrunk) is None:
        return ()
    if shrunk.is_complete:
        return shrunk.routes
    # The ledger also lists unfinished shrinks, which dropped nothing.
    ranges = Spans(shrunk.ranges)
    return [each for each in history.dropped_entries(base) or () if each.first in ranges]


def start_position(view: View, route: str, group: str) -> tuple[int, str]:
    """Return the start position of a new group, and a message about reclaimed records, or "".

    It never skips a loss that no ledger explains.
    """
    oldest = view.segments[0].base_sequence if view.segments else 1
    if oldest == 1:
        return 0, ""
    history = History(view.root)
    sequence, _ = next(history.unexplained_spans(1, oldest - 1), (oldest, oldest))
    last = sequence - 1
    missing = count_missing(view.root.path, history.reclaimed_segments(1, last), frozenset([route]), 1, last)
    if missing is None:
        return last, ""
    records = f"{span_text(missing.first, missing.last)} {'was' if missing.first == missing.last else 'were'}"
    return last, f"group {group} is new on route {route} and starts at record {sequence}: {records} already reclaimed"


class EarlierReclaim:
    """Distinguishes records that were reclaimed before a group existed from those that it has missed.

    A new group begins at the oldest record of its route, and other routes may pin segments before a reclaimed one. The
    ledger has the cursors at each deletion, so a group is not among those of deletions before it.

    Args:
        is_new: the group has no cursor, so all deletions until now were before it.
    """

    def __init__(self, root: Root, route: str, group: str, *, is_new: bool = False) -> None:
        self._root, self._route, self._group = root, route, group
        deletions = History(root).deletions() if is_new else ()
        self._deleted = Spans((line["base"], line["last"]) for line in deletions)

    def require(self, missing: Missing) -> None:
        """Raise the error of missing records unless they were reclaimed before the group existed."""
        if missing.lost or not self._includes(missing.first, missing.last):
            raise missing.error()

    def skip(self, missing: Missing) -> None:
        """Skip them, and records that an operator gave up or did not restore; raise for others."""
        if not missing.lost:
            self.require(missing)

    def _includes(self, first: int, last: int) -> bool:
        if self._deleted.covers(first, last):
            return True
        cursors = list(History(self._root).cursors_at_removal(self._route, first, last))
        return bool(cursors) and all(isinstance(each, dict) and self._group not in each for each in cursors)
