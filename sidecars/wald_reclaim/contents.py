"""What complete segments hold, by their indexes and the ledgers, and what the groups must have read of them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.listing import Listing, Segment
from wald.format.sealed_index import BadSealed, RouteTable, SealedIndex
from wald.hints import hint_for
from wald.retention.blockers import required_positions, segment_index, with_lost_routes
from wald.retention.history import History


class Unreadable(Exception):
    """It is not known what a segment holds: it stays, and the pass goes on with the others."""


class Contents:
    """The complete segments of ``root``.

    Attributes:
        history: the ledgers.
    """

    def __init__(self, root: Root, log_id: bytes) -> None:
        self._log_id = log_id
        self.history = History(root)
        self._successors: dict[int, int] = {}
        """The base of each segment's successor."""

    def take_in(self, listing: Listing) -> Listing:
        """Take in which segments there are; returns ``listing``."""
        self._successors = listing.successors()
        return listing

    def index(self, segment: Segment) -> SealedIndex:
        """What a segment holds.

        Raises:
            Unreadable: by all methods but those that say otherwise.
            FileNotFoundError: likewise: it is deleted.
        """
        return self.index_and_damage(segment)[0]

    def index_and_damage(self, segment: Segment) -> tuple[SealedIndex, str]:
        """The same, and what is wrong with its own index; "" if nothing is."""
        try:
            index, damage = segment_index(segment, self._log_id)
            if damage is not None:
                following = self._successors.get(segment.base_sequence)
                index = with_lost_routes(index, segment, following, self.history, damage)
        except Damaged as error:
            raise Unreadable(f"{error.message}; {error.hint}") from error
        if damage is None:
            return index, ""
        source = "its frames show what it holds" if index.sha256 else "segments.jsonl says what it held"
        return index, f"{damage.message}; {source}"

    def needs(self, segment: Segment, index: SealedIndex) -> RouteTable:
        """The records that the cursors must have reached before it may go."""
        try:
            return required_positions(
                index, self._successors.get(index.base_sequence, index.next_sequence), self.history
            )
        except BadSealed as error:
            hint = hint_for("lost-routes-unknown", root=segment.path.parents[1])
            raise Unreadable(f"{segment.path}: it is damaged: {error}; {hint}") from error

    def routes(self, segment: Segment) -> RouteTable:
        """What it holds of each route; nothing if it cannot be read, or is deleted."""
        with suppress(Unreadable, FileNotFoundError):
            return self.index(segment).routes
        return RouteTable.from_entries([])

    def last(self, segment: Segment) -> int:
        """Its last sequence; its base if it cannot be read."""
        try:
            return self.index(segment).next_sequence - 1
        except Unreadable:
            return segment.base_sequence

    def all_archived(self, index: SealedIndex, retired: Collection[str]) -> bool:
        """Whether every record of a route that is not retired is in a bundle.

        Raises:
            Damaged: the ledger of the archive cannot be read.
        """
        return all(
            self.history.all_archived(entry.route, entry.first, entry.last)
            for entry in index.routes
            if entry.route not in retired
        )
