"""Assembly of whole records from the pieces in stored batches.

Who sent a batch: the process on the socket, the FIFO, or stdin, as its header and its segment say.

The records of a batch, decoded, of which a :class:`Record` is made when it is wanted.

The garbage collector looks at each object of Python again and again, but not at bytes. So many records cost more than
the lists of bytes that they are made of.

A batch as a reader gets it: only whole records, only those that were asked for, and no copy of them.

What a record in several pieces needs is done here too: :class:`Joiner` holds the pieces until the last has come, and
hands the record out as a batch of its own. So records come in the order in which they end; within a route that is the
order of their sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from wald.errors import Damaged
from wald.format.batch import BatchHeader, Encoding, Flag, StoredBatch
from wald.format.log_state import FIFO_PEER, STDIN_PEER, UNKNOWN_PEER, Peer
from wald.format.records import Record, decode_columns, split_lines
from wald.format.sealed_index import RouteEntry
from wald.reading.scanner import DamagedRange
from wald.retention.missing import last_by_route
from wald.segments.reader import OpenSegment
from wald.segments.view import View

if TYPE_CHECKING:
    import pyarrow as pa

_WAYS = {UNKNOWN_PEER: "unknown", FIFO_PEER: "fifo", STDIN_PEER: "stdin"}


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


T = TypeVar("T")
_RECORD: Callable[[tuple[object, ...]], Record] = partial(tuple.__new__, Record)  # in half the time of Record(*fields)


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive records of one route.

    Attributes:
        first: the sequence of the first one.
        count: how many there are; the lists have one for each, and may have more.
        keys, times, headers: None if no record has any.
        terminated: whether the last line ended with a newline.
    """

    route: str
    first: int
    count: int
    append_time_ns: int
    values: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    times: Sequence[int | None] | None = None
    headers: Sequence[bytes | None] | None = None
    terminated: bool = True

    def records(self, first: int, last: int) -> Iterator[Record]:
        """Those of the records that are numbered ``first`` to ``last``."""
        here = self._place(first, last)
        numbers = range(self.first + here.start, self.first + here.stop)
        end = 0 if self.terminated else self.first + self.count - 1
        ended = (number != end for number in numbers) if end in numbers else repeat(True)
        keys, times, headers = (_part(column, here) for column in (self.keys, self.times, self.headers))
        made_of = (repeat(self.route), numbers, self.values[here], repeat(self.append_time_ns), keys, times, headers)
        return map(_RECORD, zip(*made_of, ended, strict=False))

    def values_of(self, first: int, last: int) -> Sequence[bytes]:
        """As :meth:`records`, but the values alone."""
        return self.values[self._place(first, last)]

    def _place(self, first: int, last: int) -> slice:
        return slice(max(0, first - self.first), max(0, min(last + 1 - self.first, self.count)))


def _part(column: Sequence[T] | None, here: slice) -> Sequence[T] | repeat[None]:
    return repeat(None) if column is None else column[here]


_WINDOW_BYTES = 64 << 10  # looked at for newlines at once, so that cutting a batch up takes linear time


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of one route, as they are stored; none of the methods but :meth:`records` loops over them.

    Attributes:
        route: the name of the route.
        first_sequence: number of the first record that was asked for.
        last_sequence: number of the last one.
        payload: the stored bytes that hold these records, and maybe others of the same stored batch, in the encoding
            that the header names; not copied. :meth:`raw` has these records only, in one form for both encodings.
        terminated: False if the last line ended without a newline.
        header: as stored; of a joined record the header of the batch in which it began.
        segment: base sequence of the segment that the stored batch is in.
        position: of the stored batch in the raw segment, in bytes.

    Example::

        for batch in log.batches("orders"):
            sys.stdout.buffer.write(batch.raw())
    """

    route: str
    first_sequence: int
    last_sequence: int
    payload: memoryview
    terminated: bool
    header: BatchHeader
    segment: int
    position: int

    @property
    def count(self) -> int:
        """How many records there are."""
        return self.last_sequence - self.first_sequence + 1

    @property
    def append_time_ns(self) -> int:
        """When the daemon took the records, in nanoseconds since 1970."""
        return self.header.append_time_ns

    @property
    def is_columns(self) -> bool:
        """Whether the payload holds columns (values with keys, times and headers), and not lines."""
        return self.header.encoding == Encoding.COLUMNS

    @property
    def skipped(self) -> int:
        """How many records of a payload of columns are in front of the first one that was asked for."""
        return self.first_sequence - self.header.base_sequence

    def records(self) -> Iterator[Record]:
        """Iterate over the records. An object for each takes time: :meth:`raw` and :meth:`to_arrow` are faster."""
        return self.rows().records(self.first_sequence, self.last_sequence)

    def rows(self) -> Rows:
        """The records, decoded: for who wants some of them, or some of what they hold."""
        route, first, count, time_ns = self.route, self.first_sequence, self.count, self.header.append_time_ns
        if not self.is_columns:
            return Rows(route, first, count, time_ns, split_lines(self.payload), terminated=self.terminated)
        columns = decode_columns(self.payload)
        here = slice(self.skipped, self.skipped + count)
        values = [value or b"" for value in columns.values.to_list()[here]]
        keys = columns.keys.to_list()[here] if columns.keys else None
        headers = columns.headers.to_list()[here] if columns.headers else None
        times = columns.times.cast("q").tolist()[here] if columns.times else None
        return Rows(route, first, count, time_ns, values, keys, times, headers)

    def raw(self) -> bytes | memoryview:
        """The value of each record with a newline behind it; lines are not copied."""
        if self.is_columns:
            values = decode_columns(self.payload).values.to_list()[self.skipped : self.skipped + self.count]
            return b"\n".join([value or b"" for value in values] + [b""])
        return self.payload if self.terminated else bytes(self.payload) + b"\n"

    def to_arrow(self) -> pa.RecordBatch:
        """The records as a ``pyarrow.RecordBatch``, made without a loop over them; needs ``wald[arrow]``."""
        from wald.reading.arrow import record_batch  # pyarrow and numpy take 100 ms and more to import

        return record_batch([self])

    def between(self, first: int, last: int) -> Batch | None:
        """The records numbered ``first`` to ``last``, as far as they are in this batch; None if none is."""
        first, last = max(first, self.first_sequence), min(last, self.last_sequence)
        if first > last:
            return None
        if (first, last) == (self.first_sequence, self.last_sequence):
            return self
        payload, terminated = self.payload, self.terminated
        if not self.is_columns:
            if last < self.last_sequence:
                payload, terminated = payload[: _behind_lines(payload, last - self.first_sequence + 1)], True
            payload = payload[_behind_lines(payload, first - self.first_sequence) :]
        return replace(self, first_sequence=first, last_sequence=last, payload=payload, terminated=terminated)


def _behind_lines(payload: memoryview, count: int) -> int:
    """The offset behind the ``count``-th newline; what lies behind it is hardly looked at."""
    offset = 0
    while True:
        window = bytes(payload[offset : offset + _WINDOW_BYTES])
        assert window or not count, "fewer lines than the header says"
        newlines = window.count(b"\n")
        if newlines >= count:
            return offset + len(window) - len(window.split(b"\n", count)[-1])
        count -= newlines
        offset += len(window)


def _complete(stored: StoredBatch, segment: int, count: int, start: int, end: int) -> Batch:
    """The ``count`` records that begin in a stored batch and end there; lines from ``start`` to ``end`` of its data."""
    header = stored.header
    lines = header.encoding == Encoding.LINES
    payload = memoryview(stored.data)[start:end] if lines else stored.payload
    terminated = not header.flags & Flag.UNTERMINATED
    base = header.base_sequence
    return Batch(stored.route, base, base + count - 1, payload, terminated, header, segment, stored.position)


@dataclass(slots=True)
class Begun:
    """A record whose end has not come yet."""

    route: str
    sequence: int
    pieces: list[bytes]
    header: BatchHeader
    segment: int
    position: int


class Joiner:
    """Stored batches in, batches of whole records out."""

    def __init__(self) -> None:
        self._open: dict[str, Begun] = {}

    @property
    def waits(self) -> bool:
        """Whether a record has begun and not ended."""
        return bool(self._open)

    @property
    def first_open(self) -> int | None:
        """First record that has begun and not ended; None without one."""
        return min((record.sequence for record in self._open.values()), default=None)

    def begun(self, route: str | None = None) -> list[Begun]:
        """The records that have begun and not ended, of one route or of all."""
        return [record for record in self._open.values() if route in (None, record.route)]

    def drop(self, routes: Iterable[RouteEntry] | None = None) -> list[Begun]:
        """Drop and return the records that may lack a piece.

        Args:
            routes: the missing records of each route; None: unknown, so any record may lack a piece.
        """
        lasts = None if routes is None else last_by_route(routes)
        dropped = [
            begun for begun in self._open.values() if lasts is None or begun.sequence <= lasts.get(begun.route, 0)
        ]
        for begun in dropped:
            del self._open[begun.route]
        return dropped

    def take(self, stored: StoredBatch, segment: int, first: int, last: int) -> Iterator[Batch | DamagedRange]:
        """What becomes complete with ``stored``, numbers ``first`` to ``last`` only."""
        header = stored.header
        start, end = stored.at + header.payload_offset, stored.at + header.payload_offset + header.payload_bytes
        begun = self._open.get(stored.route)
        if begun is not None and begun.sequence != header.continues_sequence:
            del self._open[stored.route]
            yield DamagedRange(f"record {begun.sequence} has lost a piece", begun.sequence, begun.sequence)
        if header.flags & Flag.CONTINUES:
            newline = stored.data.find(b"\n", start, end)
            stop = newline if newline >= 0 else end
            if newline >= 0 or not header.open_sequence:
                yield from self._finish(stored, start, stop, terminated=newline >= 0)
            else:
                self._extend(stored, start, stop)
            start = newline + 1 if newline >= 0 else end
        count, number = header.count, header.open_sequence
        if number and count:
            begin = max(stored.data.rfind(b"\n", start, end) + 1, start)
            if first <= number <= last:
                pieces = [stored.data[begin:end]]
                self._open[stored.route] = Begun(stored.route, number, pieces, header, segment, stored.position)
            count, end = count - 1, begin
        if count and (trimmed := _complete(stored, segment, count, start, end).between(first, last)) is not None:
            yield trimmed

    def _extend(self, stored: StoredBatch, start: int, stop: int) -> None:
        record = self._open.get(stored.route)
        if record is not None:
            record.pieces.append(stored.data[start:stop])

    def _finish(self, stored: StoredBatch, start: int, stop: int, *, terminated: bool) -> Iterator[Batch]:
        """Joined, if its beginning was seen and wanted."""
        record = self._open.pop(stored.route, None)
        if record is None:
            return
        pieces = [*record.pieces, stored.data[start:stop], b"\n" if terminated else b""]
        payload = memoryview(b"".join(pieces))
        number = record.sequence
        yield Batch(stored.route, number, number, payload, terminated, record.header, record.segment, record.position)
