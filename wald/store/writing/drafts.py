"""A draft is a batch on its way to disk. The writer gives it its place in the log."""

from __future__ import annotations

from dataclasses import dataclass

from wald.format.batch import OUTSIDE_BYTES, BatchHeader, Buffer, Encoding, Flag, checksum_body, padded, route_prefix
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
    """One batch on its way to disk.

    Attributes:
        payload: the buffers; empty where ``spool`` holds the payload.
        count: records that begin in it.
        continues: sequence of the record that the payload starts in the middle of; 0 if it does not.
        body_checksum: computed when it is first needed; with ``spool`` it must be given.
        spool: descriptor of the file that holds a payload too large for memory.
        source: the pipe or connection that sent it.
        peer: who sent it.
        introduces: True for the control batch that gives ``peer`` its number in the segment.
        position: in the segment; this and the next two are set by :meth:`wald.store.writing.writer.Writer.place`.
        base_sequence: sequence of the first record that begins in it.
        peer_number: number of ``peer`` in the segment.
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
    introduces: bool = False
    position: int = 0
    base_sequence: int = 0
    peer_number: int = NOT_KNOWN

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

    @property
    def last_sequence(self) -> int:
        return self.base_sequence + self.count - 1

    def header(self, append_time_ns: int, epoch: int, flags: int) -> BatchHeader:
        """Return the header to write; ``flags`` are added to those of the draft."""
        checksum = self.body_checksum
        if checksum is None:  # this is faster than self.checksum(), and nothing asks again
            checksum = checksum_body(self.route.prefix, self.payload, self.payload_bytes)
        return BatchHeader._make(
            (
                checksum,
                self.payload_bytes,
                self.base_sequence,
                append_time_ns,
                self.producer_id,
                self.continues or self.producer_sequence,
                self.count,
                epoch,
                self.encoding,
                int(self.flags) | flags,  # flags are slow to combine
                self.route.name_bytes,
                self.peer_number,
            )
        )


def introduction(peer: Peer) -> Draft:
    """Return the control batch that gives ``peer`` its number."""
    payload = encode_peer(peer)
    return Draft(_NO_ROUTE, [payload], len(payload), 0, Encoding.CONTROL, Flag.CONTROL, peer=peer, introduces=True)
