"""Reading for one response: chunks of about a quarter of a mebibyte, read by threads, one ahead of the client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from wald.format.names import DEFAULT_GROUP
from wald.format.times import nanoseconds
from wald.store.reading.batches import Batch
from wald.store.reading.selection import Start, Stop
from wald.store.segments.seeking import end_of
from wald_gate.outgoing.forms import Form
from wald_gate.state import State

_CHUNK_BYTES = 256 << 10  # of values
_CHUNK_RECORDS = 4096  # JSON may take eighty times as much as a value
_LATE_NS = 2_000_000_000  # from the append time of a record until it is durable


@dataclass(frozen=True)
class Wanted:
    """Which records; positions as ``wald read`` takes them."""

    route: str
    start: Start
    stop: Stop | None = None
    group: str = DEFAULT_GROUP
    limit: int | None = None


class Reading:
    """What one client reads.

    Args:
        form: how it is written.
    """

    def __init__(self, state: State, wanted: Wanted, form: Form) -> None:
        self._state = state
        self._wanted = wanted
        self._form = form
        self._pass: Iterator[Batch] | None = None  # one way to the end of the log, as it was at its beginning
        self._next = 1  # of the log, what comes behind that
        self._last = 0  # that was read
        self._records = 0

    async def chunk(self) -> bytes:
        """The next records; b"" at the end of the log.

        Raises:
            WaldError: as of :meth:`wald.log.Log.batches`.
        """
        before, counts = self._records, self._state.counts
        chunk = await self._state.in_thread(self._read)
        counts.sent_records += self._records - before
        counts.sent_bytes += len(chunk)
        return chunk

    async def more(self, seconds: float | None) -> bool:
        """Wait at the end of the log; False if nothing came for so many seconds, or if nothing more is wanted."""
        if self._is_complete():
            return False
        return await self._state.following.beyond(max(self._next - 1, self._last), seconds)

    async def chunks(self, first: bytes, *, follow: bool, silent_seconds: float) -> AsyncIterator[bytes]:
        """All that is wanted, beginning with ``first``; b"" each time that nothing has come for so many seconds.

        Args:
            follow: whether to go on behind the end of the log.
        """
        counts = self._state.counts
        counts.streams += follow
        try:
            chunk = first
            while True:
                while chunk:
                    yield chunk
                    chunk = await self.chunk()
                if not follow or self._is_complete() or self._state.following.is_over:
                    break
                if not await self.more(silent_seconds):
                    yield b""
                chunk = await self.chunk()
            yield self._form.end()
        finally:
            counts.streams -= follow

    def _read(self) -> bytes:
        if self._pass is None:
            self._pass = self._begin()
        batches: list[Batch] = []
        size = records = 0
        for batch in self._pass:
            batches.append(batch)
            self._last = max(self._last, batch.last_sequence)
            size += len(batch.payload)
            records += batch.count
            if size >= _CHUNK_BYTES or records >= _CHUNK_RECORDS:
                break
        else:
            self._pass = None
        self._records += records
        if self._wanted.limit is not None:
            self._wanted = replace(self._wanted, limit=self._wanted.limit - records)
        return self._form.write(batches) if batches else b""

    def _begin(self) -> Iterator[Batch]:
        wanted = self._wanted
        start = max(self._next, self._last + 1) if self._next > 1 else wanted.start
        self._next = end_of(self._state.log.view())  # asked first: what is read may be more
        batches = self._state.log.batches(wanted.route, start, wanted.stop, group=wanted.group, limit=wanted.limit)
        return (part for batch in batches for part in _parts(batch))

    def _is_complete(self) -> bool:
        wanted = self._wanted
        if wanted.limit == 0:
            return True
        if isinstance(wanted.stop, datetime):
            return time.time_ns() > nanoseconds(wanted.stop) + _LATE_NS
        return wanted.stop is not None and max(self._next - 1, self._last) >= wanted.stop


def _parts(batch: Batch) -> Iterator[Batch]:
    """A batch in parts of so many records."""
    for first in range(batch.first_sequence, batch.last_sequence + 1, _CHUNK_RECORDS):
        part = batch.between(first, first + _CHUNK_RECORDS - 1)
        assert part is not None
        yield part
