"""Assembly of whole records from the pieces in stored batches.

Batches come in the order in which their records end: within a route, in sequence order. :class:`Rows` creates
:class:`Record` objects on demand, because the garbage collector traverses objects, not bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from wald.errors import Damaged
from wald.format.batch import BatchHeader, Encoding, Flag, StoredBatch
from wald.format.log_state import FIFO_PEER, STDIN_PEER, UNKNOWN_PEER, Peer
from wald.format.records import Record, decode_columns
from wald.format.sealed_index import RouteEntry, merge_routes
from wald.reading.scanner import DamagedRange
from wald.segments.reader import OpenSegment
from wald.segments.view import View

if TYPE_CHECKING:
    import pyarrow as pa

_CONTINUES, _UNTERMINATED = int(Flag.CONTINUES), int(Flag.UNTERMINATED)  # enums are slow
_VIA = {UNKNOWN_PEER: "unknown", FIFO_PEER: "fifo", STDIN_PEER: "stdin"}


@dataclass(frozen=True, slots=True)
class Sender:
    """Sender of a batch.

    Attributes:
        via: ``socket``, ``fifo``, ``stdin``, or ``unknown`` if a program wrote the batch without the daemon.
        peer: the sending process; None if unknown, or ``via`` is not ``socket``.
        producer_id: 0 if the sender gave none.
    """

    via: str
    peer: Peer | None = None
    producer_id: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the known fields."""
        peer = {} if self.peer is None else self.peer._asdict()
        return {"via": self.via} | peer | ({"producer_id": f"{self.producer_id:x}"} if self.producer_id else {})

    def __str__(self) -> str:
        producer = f", producer {self.producer_id:x}" if self.producer_id else ""
        if self.peer is None:
            return f"{self.via}{producer}"
        name = f" ({self.peer.process})" if self.peer.process else ""
        return f"{self.via}, user {self.peer.user}, process {self.peer.pid}{name}{producer}"


class Senders:
    """Lookup of batch senders. The last segment stays open until :meth:`close`."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._base = -1
        self._segment: OpenSegment | None = None
        self._senders: dict[int, Sender] = {}  # by peer number

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def of(self, segment: int, header: BatchHeader) -> Sender:
        if segment != self._base:
            self.close()
            self._base, self._senders = segment, {number: Sender(via) for number, via in _VIA.items()}
        sender = self._senders.get(header.peer)
        if sender is None:
            sender = self._senders[header.peer] = Sender("socket", self._peer(header.peer))
        return sender if not header.producer_id else Sender(sender.via, sender.peer, header.producer_id)

    def _peer(self, number: int) -> Peer | None:
        try:
            if self._segment is None:
                view = self._view()
                segments = view.including_released().listing.between(self._base, self._base)
                if not segments:
                    return None
                self._segment = view.open(segments[0])
            return self._segment.peer(number)
        except Damaged:  # or reclaimed since
            return None


_RECORD: Callable[[tuple[object, ...]], Record] = partial(tuple.__new__, Record)  # twice as fast as Record(*fields)


@dataclass(frozen=True, slots=True)
class Rows:
    """Decoded records of one route. Columns may be longer than ``count``, and are None if they have no values."""

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
        rows = self._slice(first, last)
        numbers = range(self.first + rows.start, self.first + rows.stop)
        unterminated = 0 if self.terminated else self.first + self.count - 1
        terminated = (number != unterminated for number in numbers) if unterminated in numbers else repeat(True)
        optional = (self.keys, self.times, self.headers)
        keys, times, headers = (repeat(None) if column is None else column[rows] for column in optional)
        required = (repeat(self.route), numbers, self.values[rows], repeat(self.append_time_ns))
        return map(_RECORD, zip(*required, keys, times, headers, terminated, strict=False))

    def values_of(self, first: int, last: int) -> Sequence[bytes]:
        return self.values[self._slice(first, last)]

    def _slice(self, first: int, last: int) -> slice:
        return slice(max(0, first - self.first), max(0, min(last + 1 - self.first, self.count)))


_WINDOW_BYTES = 64 << 10  # searched at a time, because slicing takes linear time


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of one route in stored form; only :meth:`records` loops over them.

    Attributes:
        route: name of the route.
        first_sequence, last_sequence: the range of the selected records.
        payload: the stored bytes, not copied, in the encoding that the header names. A payload of columns may contain
            other records; :meth:`raw` returns only the selected records, in one form for both encodings.
        terminated: False if the last line ended without a newline.
        header: the stored header; for a record in several pieces, the header of its first batch.
        segment: base sequence of the segment with the batch.
        position: offset of the batch in the raw segment, in bytes.

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
        """Number of selected records."""
        return self.last_sequence - self.first_sequence + 1

    @property
    def append_time_ns(self) -> int:
        """Time at which the daemon accepted the records, in nanoseconds since 1970."""
        return self.header.append_time_ns

    @property
    def is_columns(self) -> bool:
        """True if the payload is columns (values with keys, times and headers) instead of lines."""
        return self.header.encoding == Encoding.COLUMNS

    @property
    def skipped(self) -> int:
        """Number of records in a payload of columns before the first selected one."""
        return self.first_sequence - self.header.base_sequence

    def records(self) -> Iterator[Record]:
        """Iterate over the records; :meth:`raw` and :meth:`to_arrow` are faster, without an object per record."""
        return self.rows().records(self.first_sequence, self.last_sequence)

    def rows(self) -> Rows:
        """Decode the records without creating an object for each."""
        route, first, count, time_ns = self.route, self.first_sequence, self.count, self.header.append_time_ns
        if not self.is_columns:
            return Rows(route, first, count, time_ns, bytes(self.payload).split(b"\n"), terminated=self.terminated)
        columns = decode_columns(self.payload)
        selected = slice(self.skipped, self.skipped + count)
        values = [value or b"" for value in columns.values.to_list()[selected]]
        keys = columns.keys.to_list()[selected] if columns.keys else None
        headers = columns.headers.to_list()[selected] if columns.headers else None
        times = columns.times.cast("q").tolist()[selected] if columns.times else None
        return Rows(route, first, count, time_ns, values, keys, times, headers)

    def raw(self) -> bytes | memoryview:
        """Return each value followed by a newline; lines are not copied."""
        if self.is_columns:
            values = decode_columns(self.payload).values.to_list()[self.skipped : self.skipped + self.count]
            return b"\n".join([value or b"" for value in values] + [b""])
        return self.payload if self.terminated else bytes(self.payload) + b"\n"

    def to_arrow(self) -> pa.RecordBatch:
        """Return a ``pyarrow.RecordBatch``, created without a loop over the records; needs ``wald[arrow]``."""
        from wald.reading.arrow import record_batch  # takes 100 ms

        return record_batch([self])

    def between(self, first: int, last: int) -> Batch | None:
        """Return the part of the batch with sequences ``first`` to ``last``; None if empty."""
        first, last = max(first, self.first_sequence), min(last, self.last_sequence)
        if first > last:
            return None
        if (first, last) == (self.first_sequence, self.last_sequence):
            return self
        payload, terminated = self.payload, self.terminated
        if not self.is_columns:
            if last < self.last_sequence:
                payload, terminated = payload[: _offset_after_lines(payload, last - self.first_sequence + 1)], True
            payload = payload[_offset_after_lines(payload, first - self.first_sequence) :]
        return replace(self, first_sequence=first, last_sequence=last, payload=payload, terminated=terminated)


def _offset_after_lines(payload: memoryview, count: int) -> int:
    offset = 0
    while True:
        window = bytes(payload[offset : offset + _WINDOW_BYTES])
        assert window or not count, "the payload has fewer lines than its header claims"
        newlines = window.count(b"\n")
        if newlines >= count:
            return offset + len(window) - len(window.split(b"\n", count)[-1])
        count -= newlines
        offset += len(window)


@dataclass(slots=True)
class OpenRecord:
    """Record whose last piece is still unread."""

    route: str
    sequence: int
    pieces: list[bytes]
    header: BatchHeader
    segment: int
    position: int

    def complete(self, *, terminated: bool) -> Batch:
        number, payload = self.sequence, memoryview(b"".join(self.pieces))
        return Batch(self.route, number, number, payload, terminated, self.header, self.segment, self.position)


class Assembler:
    """Assembler of whole records, with at most one open record per route."""

    def __init__(self) -> None:
        self.open_records: dict[str, OpenRecord] = {}

    def drop(self, routes: Iterable[RouteEntry] | None = None) -> list[OpenRecord]:
        """Drop and return open records that may lack a piece among the missing ``routes``; None drops all."""
        limits = None if routes is None else {each.route: each.last for each in merge_routes((), routes)}
        records = self.open_records.values()
        dropped = [each for each in records if limits is None or each.sequence <= limits.get(each.route, 0)]
        for record in dropped:
            del self.open_records[record.route]
        return dropped

    def add(self, stored: StoredBatch, segment: int, first: int, last: int) -> list[Batch | DamagedRange]:
        """Add a stored batch; return the records within ``first`` to ``last`` that it completes."""
        completed: list[Batch | DamagedRange] = []
        header, route = stored.header, stored.route
        start = stored.offset + header.payload_offset
        end = start + header.payload_bytes
        record = self.open_records.get(route)
        if record is not None and record.sequence != header.continues_sequence:
            del self.open_records[route]
            message = f"a piece of record {record.sequence} is missing"
            completed.append(DamagedRange(message, record.sequence, record.sequence))
            record = None
        if header.flags & _CONTINUES:
            newline = stored.data.find(b"\n", start, end)
            begin, start = start, newline + 1 if newline >= 0 else end
            if record is not None:  # otherwise its beginning was not read or not selected
                record.pieces.append(stored.data[begin:start])
                if newline >= 0 or not header.open_sequence:
                    completed.append(record.complete(terminated=newline >= 0))
                    del self.open_records[route]
        count, open_sequence, base = header.count, header.open_sequence, header.base_sequence
        if open_sequence and count:
            begin = max(stored.data.rfind(b"\n", start, end) + 1, start)
            if first <= open_sequence <= last:
                pieces = [stored.data[begin:end]]
                self.open_records[route] = OpenRecord(route, open_sequence, pieces, header, segment, stored.position)
            count, end = count - 1, begin
        if count:
            payload, terminated = memoryview(stored.data)[start:end], not header.flags & _UNTERMINATED
            batch = Batch(route, base, base + count - 1, payload, terminated, header, segment, stored.position)
            if (selected := batch.between(first, last)) is not None:
                completed.append(selected)
        return completed
