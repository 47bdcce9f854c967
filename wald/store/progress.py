"""What each route has received, and how far its groups have got."""

from __future__ import annotations

from dataclasses import dataclass

from wald.errors import Damaged
from wald.format.batch import payload_of
from wald.format.control import BadControl, decode
from wald.store.cursors import Cursor, cursors_of
from wald.store.directory import Root, look_again
from wald.store.head import look
from wald.store.raw import FIRST_BATCH
from wald.store.routes import has_fifo
from wald.store.segments import Whole, open_segment


@dataclass(frozen=True, slots=True)
class Progress:
    """One route.

    Attributes:
        last_sequence: of its records; 0: none yet; None: not known, because the newest segment cannot be read.
        cursors: one per group; an absent one of the default group if there is none.
    """

    route: str
    last_sequence: int | None
    fifo: bool
    retired: bool
    cursors: tuple[Cursor, ...]

    def lag(self, cursor: Cursor) -> int | None:
        """Sequences between a cursor and the route's last record; as many records of the route at most."""
        return None if self.last_sequence is None else max(0, self.last_sequence - cursor.effective)


def progress(root: Root, *, log_id: bytes, head_sequence: int) -> list[Progress]:
    """Every route of ``root``, by name."""
    last_sequences = _last_sequences(root, log_id)
    return [
        Progress(
            route,
            None if last_sequences is None else last_sequences.get(route, 0),
            has_fifo(root, route),
            root.retired(route).exists(),
            tuple(cursors_of(root, route, log_id=log_id, head_sequence=head_sequence)),
        )
        for route in root.route_names()
    ]


def _last_sequences(root: Root, log_id: bytes) -> dict[str, int] | None:
    """Of each route, from the newest segment alone: it opens with what the older ones have led to."""
    while True:
        bound, listing = look(root)
        readable = [segment for segment in listing.segments if segment.base_sequence <= bound.segment]
        if not readable:
            return {}
        found: dict[str, int] = {}
        try:
            try:
                newest = open_segment(readable[-1], log_id)
            except FileNotFoundError as gone:
                look_again(root, listing, gone)
                continue
        except Damaged:
            return None
        try:
            for batch in newest.batches(FIRST_BATCH, bound.limit(newest.base_sequence)):
                if not isinstance(batch, Whole):
                    continue
                if batch.header.is_control:
                    found |= decode(payload_of(batch.data, batch.at, batch.header)).routes
                elif batch.header.count:
                    found[batch.route] = batch.header.last_sequence
        except BadControl:
            return None
        finally:
            newest.close()
        return found
