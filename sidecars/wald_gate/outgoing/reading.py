"""Reading for one response: chunks of about a quarter of a mebibyte, read by threads, one ahead of the client.

A route may be rare, so that the way to its next record is the whole log. So a thread reads for some time only, and
those that wait for one take their turn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import dataclass
from datetime import datetime

from wald.errors import WaldError
from wald.format.names import DEFAULT_GROUP
from wald.format.times import nanoseconds
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.reading.selection import Start, Stop
from wald.retention.missing import Missing
from wald_gate.outgoing.following import Watch
from wald_gate.outgoing.forms import Form
from wald_gate.outgoing.turns import STEP_SECONDS
from wald_gate.problems import HttpError
from wald_gate.state import State

_CHUNK_BYTES = 256 << 10  # of values
_CHUNK_RECORDS = 4096  # JSON may take eighty times as much as a value
_OVER = -1  # no sequence: nothing more can be wanted
_LATE_NS = 2_000_000_000  # from the append time of a record until it is durable


@dataclass(frozen=True)
class Wanted:
    """The records that a request asks for; positions have the forms of ``wald read``.

    Attributes:
        since_ns: only records appended then or later; None: any.
    """

    route: str
    start: Start
    stop: Stop | None = None
    group: str = DEFAULT_GROUP
    limit: int | None = None
    since_ns: int | None = None

    def missing(self, missing: Missing) -> None:
        """
        Raises:
            HttpError: 410, records that were asked for are not there any more.
        """
        if not missing.asked:
            return
        following = missing.last + 1
        if self.start == "cursor":
            moving = f'{{"sequence": {missing.last}}} to /v1/routes/{self.route}/cursors/{self.group}'
            hint = f"PUT {moving} passes over them; ?from=earliest reads what there is"
        else:
            hint = f"?from={following} goes on behind them; ?from=earliest reads what there is"
        code = "lost" if missing.lost else "reclaimed"
        raise HttpError(410, code, missing.message(), hint=hint, more={"next": following})


class Reading:
    """What one client reads.

    Args:
        client: whose turn it takes to read.
        watch: wakes it when the route has new records; None if it ends at the end of the log.

    Attributes:
        form: the format of the answer.
        begins_behind: the sequence behind which the wanted records begin, once some were looked for.
        last: the sequence up to which all was read.
        sent: the sequence up to which :meth:`chunks` has given all out; None before the first records or the end of the
            log were found.
    """

    def __init__(self, state: State, client: str, wanted: Wanted, form: Form, watch: Watch | None = None) -> None:
        self._state = state
        self._client = client
        self._watch = watch
        self._arrived: int | None = None  # the first record that may have arrived since reading last resumed
        self._wanted = wanted
        self.form = form
        self._error: WaldError | OSError | None = None  # that ends the way, behind what was found before it
        self._onward: Generator[Batch | int | None] | None = None  # one way through the log
        self._found: Iterator[Batch | int | None] = iter(())  # what is on it, in parts
        self._reads = threading.Lock()
        self._left = wanted.limit
        self._is_at_end = False  # of the log, as it was when it was looked at last
        self._is_over = False  # nothing more can be wanted
        self.begins_behind: int | None = None
        self.last = 0
        self.sent: int | None = None
        self._records = 0
        self._pending: asyncio.Task[bytes] | None = None  # the chunk that is being read

    @property
    def is_over(self) -> bool:
        """True if the wait is over: all wanted records have arrived, or the gate is ending."""
        return self._is_complete() or self._state.following.is_over

    async def chunk(self, seconds: float | None = None) -> bytes | None:
        """Return the next records; b"" at the end of the log; None if they were not found in time.

        After None, the search continues, and the next call waits for its result.

        Args:
            seconds: None for no time limit.

        Raises:
            WaldError: as of :meth:`wald.log.Log.batches`.
        """
        if self._pending is None:
            if self._watch is not None:
                first = self._watch.clear()
                # Several chunks may come from one view of the log; what arrived before any of them is after that view.
                self._arrived = first if self._arrived is None else min(first, self._arrived)
            self._pending = asyncio.create_task(self._chunk())
        await asyncio.wait((self._pending,), timeout=seconds)
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    async def _chunk(self) -> bytes:
        while (chunk := await self.step()) is None:
            pass
        return chunk

    async def step(self) -> bytes | None:
        """Read for a short time: as :meth:`chunk`, or None if no record was found."""
        before, counts = self._records, self._state.counts
        chunk = await self._state.readers.run(self._client, self._read)
        counts.sent_records += self._records - before
        counts.sent_bytes += len(chunk)
        return chunk or (b"" if self._is_at_end or self._left == 0 else None)

    async def more(self, seconds: float | None) -> bool:
        """Wait at the end of the log; False if nothing came for so many seconds, or if nothing more is wanted."""
        if self._watch is None or self._is_complete() or (seconds is not None and seconds <= 0):
            return False
        return await self._watch.wait(seconds)

    async def chunks(
        self, first: bytes | None, *, follow: bool, edition: int, silent_seconds: float
    ) -> AsyncGenerator[bytes]:
        """All that is wanted, beginning with ``first``; b"" each time that nothing has come for so many seconds.

        Args:
            first: the result of :meth:`chunk`; None if it is still being read.
            follow: whether to go on behind the end of the log, until the file of tokens says something else: the client
                may ask again, and is then judged by what it says now. What does not follow is whole: an end before
                its last record would pass for the end of the log.
            edition: of the rights by which the client was admitted.
        """
        counts, rights = self._state.counts, self._state.rights
        counts.streams += follow
        if first is not None:
            self.sent = self.begins_behind if first else self.last
        try:
            chunk = first
            while True:
                while chunk != b"" and (not follow or rights.edition == edition):
                    if chunk:
                        self.sent = self.last
                    yield chunk or b""
                    chunk = b"" if chunk and self._is_at_end else await self.chunk(silent_seconds)
                if not follow or rights.edition != edition or self.is_over:
                    break
                self.sent = self.last  # there is no chunk that was read and not given out
                if not await self.more(silent_seconds):
                    yield b""
                chunk = await self.chunk(silent_seconds)
            if end := self.form.end():
                yield end
        finally:
            counts.streams -= follow

    def close(self) -> None:
        """Close what is read, as soon as no thread is at it: a response that was cancelled leaves one behind."""
        if self._pending is not None and not self._pending.cancel() and not self._pending.cancelled():
            self._pending.exception()  # read, so that asyncio does not report it
        self._state.readers.submit(self._close)

    def _close(self) -> None:
        with self._reads:
            if self._onward is not None:
                self._onward.close()

    def _read(self) -> bytes:
        with self._reads:
            chunk = self._next() if self._error is None else b""
            if self._error is not None and not chunk:
                raise self._error
            return chunk

    def _next(self) -> bytes:
        if self._onward is None:
            self._onward = self._begin()
            self._found = (
                part for found in self._onward for part in (_parts(found) if isinstance(found, Batch) else (found,))
            )
        batches: list[Batch] = []
        size = records = 0
        until = time.monotonic() + STEP_SECONDS
        self._is_at_end = False
        while size < _CHUNK_BYTES and records < _CHUNK_RECORDS and self._left != records:
            try:
                found = next(self._found, _OVER)
            except (WaldError, OSError) as error:
                self._error = error
                break
            if found is None:
                if time.monotonic() > until:
                    break
                continue
            if not isinstance(found, Batch):
                self._is_at_end, self._is_over = True, found == _OVER
                self.last = max(self.last, found)
                self._begin_behind(self.last)
                break
            if self._left is not None:
                found = found.between(found.first_sequence, found.first_sequence + self._left - records - 1)
                assert found is not None
            batches.append(found)
            self._begin_behind(found.first_sequence - 1)
            self.last = max(self.last, found.last_sequence)
            size += len(found.payload)
            records += found.count
        self._records += records
        if self._left is not None:
            self._left -= records
        return self.form.write(batches) if batches else b""

    def _begin(self) -> Generator[Batch | int | None]:
        wanted = self._wanted
        return read_without_waiting(
            self._state.log.view(),
            route=wanted.route,
            start=wanted.start,
            stop=wanted.stop,
            group=wanted.group,
            since_ns=wanted.since_ns,
            on_missing=wanted.missing,
            resume_at=self._resume_at,
        )

    def _resume_at(self) -> int:
        """Return the first record to look at after the end of a view; 0 if it may be any."""
        first, self._arrived = self._arrived, None
        return first or 0

    def _begin_behind(self, sequence: int) -> None:
        if self.begins_behind is None:
            self.begins_behind = sequence

    def _is_complete(self) -> bool:
        stop = self._wanted.stop
        if self._left == 0 or self._is_over:
            return True
        if isinstance(stop, datetime):
            return time.time_ns() > nanoseconds(stop) + _LATE_NS
        return stop is not None and self.last >= stop


def _parts(batch: Batch) -> Iterator[Batch]:
    """A batch in parts of so many records."""
    for first in range(batch.first_sequence, batch.last_sequence + 1, _CHUNK_RECORDS):
        part = batch.between(first, first + _CHUNK_RECORDS - 1)
        assert part is not None
        yield part
