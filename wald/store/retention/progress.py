"""What each route has received, and how far its groups have got."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from wald.errors import Damaged
from wald.format.parsing import StoredBatch
from wald.format.state import BadControl, decode_state
from wald.store.files.fifos import has_fifo
from wald.store.retention.cursors import Cursor, cursors_of
from wald.store.retention.lag import lags
from wald.store.segments.raw import FIRST_BATCH, DamagedBytes
from wald.store.segments.seeking import end_of
from wald.store.segments.view import View


@dataclass(frozen=True, slots=True)
class Progress:
    """One route.

    Attributes:
        last_sequence: of its records; 0: none yet; None: not known, for the newest segment is damaged behind it.
        cursors: one per group; an absent one of the default group if there is none.
        lags: of each of them, records, in the same order.
    """

    route: str
    last_sequence: int | None
    fifo: bool
    retired: bool
    cursors: tuple[Cursor, ...]
    lags: tuple[int, ...]


def progress(view: View) -> list[Progress]:
    """Every route, by name.

    Raises:
        Damaged: the end of the log is not known.
    """
    root, head_sequence = view.root, end_of(view) - 1
    last = last_sequences(view)
    cursors = {
        route: tuple(cursors_of(root, route, log_id=view.log_id, head_sequence=head_sequence))
        for route in root.route_names()
    }
    found = lags(view, chain.from_iterable(cursors.values()))
    return [
        Progress(
            route,
            last.get(route, 0),
            has_fifo(root, route),
            root.retired(route).exists(),
            of_route,
            tuple(found[route, cursor.group].records for cursor in of_route),
        )
        for route, of_route in cursors.items()
    ]


def last_sequences(view: View) -> dict[str, int | None]:
    """Of each route, from the newest segment alone, which opens with what the older ones led to; None: not known.

    Which routes have lost records where that is damaged is not known; records behind the damage make theirs known.
    """
    names = view.root.route_names()
    unknown: dict[str, int | None] = dict.fromkeys(names)
    bound = view.bound
    if bound.lost:
        return unknown
    readable = [s for s in view.segments if s.base_sequence <= bound.segment and view.limit(s) != 0]
    found: dict[str, int | None] = dict.fromkeys(names, 0)
    if not readable:
        return found
    try:
        newest = view.open(readable[-1])
    except Damaged:
        return unknown
    try:
        for batch in newest.batches(FIRST_BATCH, bound.limit(newest.base_sequence)):
            if isinstance(batch, DamagedBytes):
                found |= unknown
            elif not isinstance(batch, StoredBatch):
                continue
            elif batch.header.is_control:
                found |= decode_state(batch.payload).routes
            elif batch.header.count:
                found[batch.route] = batch.header.last_sequence
        if newest.tail is not None and newest.tail.garbage_bytes:
            found |= unknown
    except BadControl:
        return unknown
    finally:
        newest.close()
    return found
