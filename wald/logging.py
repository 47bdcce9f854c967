"""Handler for the standard library's logging that sends log records to a route."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wald.client.producer import Producer, socket_at
from wald.errors import InvalidInput, WaldError
from wald.format.names import check_route

_BATCH_RECORDS = 1000  # in one call of Producer.send
_RETRY_SECONDS = 86_400.0  # how long a daemon may be down; the capacity bounds the queue


class _Entry(NamedTuple):
    value: str
    time_ns: int
    headers: dict[str, str]


class WaldHandler(logging.Handler):
    """Handler that sends each log record to a route: formatted text and time, with level and logger as headers.

    A logging call only queues its record; a thread sends the queue to the daemon, each record once. If the queue
    is full, because the daemon is down, a logging call waits up to ``block_for`` seconds for room.

    No record is lost silently: a record that finds no room, or that the daemon refuses, is written to stderr with the
    reason, and counted in :attr:`lost`. A notice of the loss precedes the next record that reaches the route.

    Threads may share a handler. ``logging.shutdown``, which Python calls at exit, waits up to ``close_for`` seconds for
    the queue (twice if the daemon is down) and writes the rest to stderr. A process that skips exit handlers
    (``os._exit``, a child of multiprocessing) loses its queue: call ``logging.shutdown`` first. After a fork, the
    child's queue is empty.

    Args:
        at: the root of the log, or the socket. The daemon may start later.
        route: destination of the records.
        level: lowest level to send.
        capacity: maximum number of queued records.
        block_for: seconds that a logging call may wait for room.
        close_for: seconds that :meth:`flush` and :meth:`close` may wait.

    Raises:
        InvalidInput: an invalid route.

    Attributes:
        lost: number of records known to be undelivered.

    Example::

        handler = WaldHandler("/var/spool/wald", "app")
        logging.basicConfig(handlers=[handler], level=logging.INFO)
        logging.info("started")
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        route: str,
        *,
        level: int | str = logging.NOTSET,
        capacity: int = 10_000,
        block_for: float = 1.0,
        close_for: float = 5.0,
    ) -> None:
        super().__init__(level)
        self._at = at
        self._route = check_route(route)
        self._capacity = capacity
        self._block_for = block_for
        self._close_for = close_for
        self._in_flight: Sequence[_Entry]  # removed from the queue but not yet durable
        self.begin()
        _HANDLERS.add(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and emit without the handler's lock, so that threads wait for room in parallel."""
        filtered: object = self.filter(record)  # a filter may return another record since Python 3.12
        if filtered:
            self.emit(filtered if isinstance(filtered, logging.LogRecord) else record)
        return bool(filtered)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record within ``block_for`` seconds; otherwise write it to stderr."""
        try:
            headers = {"level": _as_utf8(str(record.levelname)), "logger": _as_utf8(str(record.name))}
            entry = _Entry(_as_utf8(self.format(record)), int(record.created * 1e9), headers)
        except Exception:  # noqa: BLE001 - handlers report formatting errors instead of raising
            self.handleError(record)
            return
        if reason := self._enqueue(entry):
            self._report_lost([entry], reason)

    def flush(self) -> None:
        """Wait until everything queued so far is durable or reported as lost, at most ``close_for`` seconds."""
        with self._changed:
            self._changed.wait_for(self._is_empty, self._close_for)

    def close(self) -> None:
        """Send queued records within ``close_for`` seconds, write the rest to stderr, and stop."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_empty, self._close_for)
            unsent = [*self._in_flight, *self._queue]
            self._queue.clear()
            self._in_flight = ()
        if unsent:
            self._report_lost(unsent, f"the daemon did not answer within {self._close_for} s; some may be in the log")
        super().close()

    def begin(self) -> None:
        """Start with an empty queue, also after a fork: the parent keeps its queue."""
        self.lost = 0
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._in_flight = ()
        self._thread: threading.Thread | None = None
        self._producer: Producer | None = None  # used only by the thread
        self._unreported = 0  # lost records not yet reported on the route
        self._is_closed = False

    def _is_empty(self) -> bool:
        return not self._queue and not self._in_flight

    def _enqueue(self, entry: _Entry) -> str:
        """Queue an entry; return "", or the reason if that fails."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._is_closed or len(self._queue) < self._capacity, self._block_for
            ):
                return f"the queue is full ({self._capacity} records)"
            if self._is_closed:
                return "the handler is closed"
            if self._thread is None:
                try:
                    self._thread = threading.Thread(target=self._run, name="wald.logging", daemon=True)
                    self._thread.start()
                except RuntimeError as error:  # the interpreter is shutting down
                    self._thread = None
                    return str(error)
            self._queue.append(entry)
            self._changed.notify_all()
            return ""

    def _run(self) -> None:
        while entries := self._next_batch():
            self._deliver(entries)
            with self._changed:
                self._in_flight = ()
                self._changed.notify_all()
        if self._producer is not None:
            self._producer.close()

    def _next_batch(self) -> Sequence[_Entry]:
        """Wait for entries and move some in flight; return an empty batch once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            count = min(len(self._queue), _BATCH_RECORDS)
            self._in_flight = tuple(self._queue.popleft() for _ in range(count))
            self._changed.notify_all()
            return self._in_flight

    def _deliver(self, entries: Sequence[_Entry]) -> None:
        """Send each entry once, and report exactly the entries that are refused."""
        durable, error = self._send(entries)
        undelivered = entries[durable:]
        half = len(undelivered) // 2
        if half and isinstance(error, InvalidInput):  # an entry is too large: halve the batch
            self._deliver(undelivered[:half])
            self._deliver(undelivered[half:])
        elif undelivered and self._in_flight:  # otherwise close() has reported them
            self._report_lost(undelivered, str(error))

    def _send(self, entries: Sequence[_Entry]) -> tuple[int, WaldError | OSError | None]:
        """Send a notice of earlier losses, then the entries; return how many are durable, and any error."""
        lost, error = 0, None
        try:
            self._producer = self._producer or Producer(socket_at(Path(self._at)), retry_for=_RETRY_SECONDS)
            if lost := self._unreported:
                notice = _Entry(f"{lost} log records were lost", entries[0].time_ns, _NOTICE_HEADERS)
                entries = [notice, *entries]
            self._producer.send(
                self._route,
                [entry.value for entry in entries],
                times=[entry.time_ns for entry in entries],
                headers=[entry.headers for entry in entries],
            )
            self._producer.flush()
            durable = len(entries)
        except (WaldError, OSError) as caught:
            durable, error = 0, caught
            if self._producer is not None:
                self._producer.close()
                durable = sum(last - first + 1 for first, last in self._producer.acknowledged())
                self._producer = None
        if lost and durable:
            durable -= 1
            with self._changed:
                self._unreported -= lost
        return durable, error

    def _report_lost(self, entries: Sequence[_Entry], reason: str) -> None:
        with self._changed:
            self.lost += len(entries)
            self._unreported += len(entries)
        if sys.__stderr__ is not None:  # not sys.stderr: a program may have redirected it to this handler
            lines = [f"wald.logging: not delivered to route {self._route}: {reason}", *(e.value for e in entries)]
            with suppress(OSError, ValueError):  # stderr is closed
                sys.__stderr__.write("\n".join([*lines, ""]))


def _as_utf8(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def _begin_in_child() -> None:
    for handler in list(_HANDLERS):
        handler.begin()


_NOTICE_HEADERS = {"level": "ERROR", "logger": __name__}
_HANDLERS: weakref.WeakSet[WaldHandler] = weakref.WeakSet()
os.register_at_fork(after_in_child=_begin_in_child)
