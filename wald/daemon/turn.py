"""One turn: the drafts of the sources, the memory they lie in, and their places in the log after the commit.

Records of one route and one peer without a producer id become one batch; a batch with a producer id stays one, because
it may have to be recognised again. A :class:`Ticket` is a claim on the sequences that the records will have once they
are durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from wald.daemon.spooling import Spooling
from wald.format.batch import Buffer, Encoding, Flag
from wald.format.protocol import Code, ProtocolError, Publish
from wald.format.state import Producers, Written
from wald.store.writing.drafts import Draft, Route, Sender

ARENA_BYTES = 4 << 20  # several pipe chunks; at a millisecond a turn more would not be faster


class Arena:
    """The memory of one turn: every byte that arrives lies in it until it is durable, so the daemon's size is fixed.

    It is handed out from the front, and emptied when a turn begins.
    """

    def __init__(self, length: int = ARENA_BYTES) -> None:
        self.buffer = bytearray(length)
        self.view = memoryview(self.buffer)
        self.used = 0

    @property
    def free(self) -> int:
        """Bytes that can still be handed out in this turn."""
        return len(self.buffer) - self.used

    def reset(self) -> None:
        """Begin a turn: what was handed out is no longer needed."""
        self.used = 0


class Ticket(NamedTuple):
    """A claim on ``records`` records of ``draft``, the first of which is number ``offset``."""

    draft: Draft
    offset: int
    records: int

    def sequences(self) -> tuple[int, int]:
        """Return the first and the last sequence, after the commit."""
        first = self.draft.base_sequence + self.offset
        return first, first + self.records - 1


@dataclass(slots=True)
class Turn:
    """The drafts of one round of the loop.

    Attributes:
        committed: how many of ``drafts`` are durable.
    """

    producers: Producers
    drafts: list[Draft] = field(default_factory=list)
    committed: int = 0
    payload_bytes: int = 0
    _merging: dict[tuple[str, Sender], Draft] = field(default_factory=dict)
    _published: dict[int, dict[int, Ticket]] = field(default_factory=dict)

    @property
    def open_routes(self) -> frozenset[str]:
        """The routes on which a record is left open."""
        return frozenset(draft.route.name for draft in self.drafts if draft.flags & Flag.CONTINUED)

    def add(self, draft: Draft) -> None:
        """Add a source's own batch."""
        self.drafts.append(draft)
        self.payload_bytes += draft.payload_bytes

    def publish_lines(self, route: Route, payload: Buffer, count: int, peer: Sender) -> Ticket:
        """Take lines without a producer; they join the peer's batch of this turn on the route."""
        draft = self._merging.get((route.name, peer))
        length = len(payload)
        if draft is None:
            draft = self._merging[route.name, peer] = Draft(route, [payload], length, count, peer=peer)
            self.add(draft)
            return Ticket(draft, 0, count)
        ticket = Ticket(draft, draft.count, count)
        draft.payload.append(payload)
        draft.payload_bytes += length
        draft.count += count
        self.payload_bytes += length
        return ticket

    def publish(
        self,
        request: Publish,
        producer_id: int,
        route: Route,
        payload: Buffer | None,
        count: int,
        peer: Sender,
        spooling: Spooling | None = None,
    ) -> Ticket | Written:
        """Take a batch that stays one; what is in the log already is answered instead of taken.

        Args:
            producer_id: as it will be in the log; 0: none.
            payload: None if ``spooling`` has it.

        Raises:
            ProtocolError: under this number the producer sent something else, its batches are not consecutive, it
                asks for one too old to be remembered, or it may be forgotten with batches that it has not seen.
        """
        number = request.producer_sequence
        draft = Draft(
            route,
            [] if payload is None else [payload],
            request.payload_bytes,
            count,
            encoding=Encoding.COLUMNS if request.columns else Encoding.LINES,
            producer_id=producer_id,
            producer_sequence=number,
            peer=peer,
        )
        if spooling is not None:
            draft.spool, draft.body_checksum = spooling.descriptor, spooling.body_checksum
        ticket = Ticket(draft, 0, count)
        if not producer_id:
            self.add(draft)
            return ticket
        if known := self._known(draft):
            return known
        self._check_order(producer_id, number, request.seen)
        self.add(draft)
        self._published.setdefault(producer_id, {})[number] = ticket
        return ticket

    def _known(self, draft: Draft) -> Ticket | Written | None:
        """Return the result of the batch that this one repeats; None if it is new."""
        producer_id, number = draft.producer_id, draft.producer_sequence
        here = self._published.get(producer_id, {}).get(number)
        known = here or self.producers.find(producer_id, number)
        if known is None:
            return None
        before = known.fingerprint if isinstance(known, Written) else known.draft.fingerprint
        if before != draft.fingerprint:
            raise ProtocolError(Code.CONFLICT, f"batch {number} of this producer is already another one")
        return known

    def _check_order(self, producer_id: int, number: int, seen: int | None) -> None:
        here = self._published.get(producer_id)
        expected = max(here) + 1 if here else self.producers.expected(producer_id)
        if expected is None and seen is not None and seen < (upto := self.producers.forgotten_upto()):
            raise ProtocolError(Code.FORGOTTEN, f"this producer may be forgotten; its batches may go up to {upto}")
        if expected is None or number == expected:
            return
        if number < expected:
            raise ProtocolError(Code.FORGOTTEN, f"batch {number} of this producer is too old to be remembered")
        raise ProtocolError(Code.GAP, f"batch {expected} of this producer is missing before {number}")
