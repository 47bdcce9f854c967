"""Who sent a batch: the process on the socket, the FIFO, or stdin, as its header and its segment say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from wald.errors import Damaged
from wald.format.batch import BatchHeader
from wald.format.peers import FIFO, NOT_KNOWN, STDIN, Peer
from wald.store.segments.opened import OpenSegment
from wald.store.segments.view import View

_WAYS = {NOT_KNOWN: "unknown", FIFO: "fifo", STDIN: "stdin"}


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a batch.

    Attributes:
        via: ``socket``, ``fifo``, ``stdin``, or ``unknown``: a program without the daemon
            wrote the batch.
        peer: the process; None but for ``socket``, and where what introduces it is damaged.
        producer_id: as it is in the log; 0: none.
    """

    via: str
    peer: Peer | None = None
    producer_id: int = 0

    def to_json(self) -> dict[str, Any]:
        """An object for JSON, with the keys that are known."""
        peer = {} if self.peer is None else self.peer._asdict()
        return {"via": self.via} | peer | ({"producer_id": f"{self.producer_id:x}"} if self.producer_id else {})

    def __str__(self) -> str:
        producer = f", producer {self.producer_id:x}" if self.producer_id else ""
        if self.peer is None:
            return f"{self.via}{producer}"
        name = f" ({self.peer.process})" if self.peer.process else ""
        return f"{self.via}, user {self.peer.user}, process {self.peer.pid}{name}{producer}"


class Senders:
    """Looks up the senders of batches. It holds the segment of the last one open; use it in a ``with`` statement.

    Args:
        view: the log as it is now.
    """

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._base = -1
        self._segment: OpenSegment | None = None
        self._known: dict[int, Sender] = {}  # of the segment: the number of the peer → the sender

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enter(-1)

    def of(self, segment: int, header: BatchHeader) -> Sender:
        """The sender of the batch with ``header`` in the segment with the base sequence ``segment``."""
        if segment != self._base:
            self._enter(segment)
        sender = self._known.get(header.peer)
        if sender is None:
            sender = self._known[header.peer] = Sender("socket", self._peer(header.peer))
        return sender if not header.producer_id else Sender(sender.via, sender.peer, header.producer_id)

    def _enter(self, segment: int) -> None:
        if self._segment is not None:
            self._segment.close()
        self._base, self._segment = segment, None
        self._known = {number: Sender(via) for number, via in _WAYS.items()}

    def _peer(self, number: int) -> Peer | None:
        try:
            if self._segment is None:
                self._segment = _open(self._view(), self._base)
            return None if self._segment is None else self._segment.peer(number)
        except Damaged:  # or reclaimed since
            return None


def _open(view: View, base: int) -> OpenSegment | None:
    listing = view.including_released().listing
    found = listing.between(base, base)
    return view.open(found[0]) if found else None
