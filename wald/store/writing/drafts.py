"""Drafts are batches that wait to be written. A commit gives each of them its place in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wald.format.batch import OUTSIDE_BYTES, Buffer, Encoding, Fields, Flag, checksum_body, padded, route_prefix
from wald.format.peers import NOT_KNOWN, Peer, encode_peer
from wald.format.state import fingerprint


@dataclass(frozen=True, slots=True)
class Route:
    """A route: its name, and the bytes that each body of its batches begins with."""

    name: str
    prefix: bytes
    name_bytes: int

    @classmethod
    def named(cls, name: str) -> Route:
        return cls(name, route_prefix(name.encode("ascii")), len(name))


_NO_ROUTE = Route.named("")

Sender = Peer | int
"""A process on the socket, or the number of a peer that is not introduced."""


@dataclass(slots=True)
class Draft:
    """One batch before it has a place in the log.

    Attributes:
        payload: the buffers; empty where ``spool`` holds the payload.
        count: records that begin in it.
        continues: sequence of the record that the payload starts in the middle of; 0 if it does not.
        body_checksum: computed when it is first needed; with ``spool`` it must be given.
        spool: descriptor of the file that holds a payload too large for memory.
        source: the pipe or connection that sent it.
        peer: who sent it.
    """

    route: Route
    payload: list[Buffer]
    payload_bytes: int
    count: int
    encoding: int = Encoding.LINES
    flags: int = 0
    continues: int = 0
    producer_id: int = 0
    producer_sequence: int = 0
    body_checksum: int | None = None
    spool: int | None = None
    source: object = None
    peer: Sender = NOT_KNOWN

    def checksum(self) -> int:
        """The checksum of the body, computed once."""
        if self.body_checksum is None:
            self.body_checksum = checksum_body(self.route.prefix, self.payload, self.payload_bytes)
        return self.body_checksum

    @property
    def fingerprint(self) -> int:
        """Distinguishes two batches of a producer; see :func:`wald.format.state.fingerprint`."""
        return fingerprint(
            body_checksum=self.checksum(),
            payload_bytes=self.payload_bytes,
            encoding=self.encoding,
            route_bytes=self.route.name_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """The length of the batch in the segment."""
        return OUTSIDE_BYTES + len(self.route.prefix) + padded(self.payload_bytes)


class Placed(NamedTuple):
    """A draft with its place: ``position`` in the segment, and the sequence of the first record that begins in it."""

    draft: Draft
    position: int
    base_sequence: int

    @property
    def last_sequence(self) -> int:
        return self.base_sequence + self.draft.count - 1

    def header(self, append_time_ns: int, epoch: int, flags: int, peer: int) -> Fields:
        """The header that is written, with ``flags`` besides those of the draft, and the number of its peer."""
        draft, _, base_sequence = self
        checksum = draft.body_checksum
        if checksum is None:  # this is faster than draft.checksum(), and nothing asks again
            checksum = checksum_body(draft.route.prefix, draft.payload, draft.payload_bytes)
        return (
            checksum,
            draft.payload_bytes,
            base_sequence,
            append_time_ns,
            draft.producer_id,
            draft.continues or draft.producer_sequence,
            draft.count,
            epoch,
            draft.encoding,
            int(draft.flags) | flags,  # flags are slow to combine
            draft.route.name_bytes,
            peer,
        )


class Placement(NamedTuple):
    """What one commit will write.

    Attributes:
        introductions: the control batches that go in front of the others: the peers that are new to the segment.
        peers: the numbers of these.
    """

    segment: int
    position: int
    end: int
    append_time_ns: int
    introductions: tuple[Placed, ...]
    batches: tuple[Placed, ...]
    peers: dict[Sender, int]


def introduction(peer: Peer) -> Draft:
    """The control batch that gives ``peer`` its number."""
    payload = encode_peer(peer)
    return Draft(_NO_ROUTE, [payload], len(payload), 0, Encoding.CONTROL, Flag.CONTROL, peer=peer)
