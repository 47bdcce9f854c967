"""A handler for the standard library's logging, which sends log records to a route."""

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

_AT_ONCE = 1000  # log records in one call of Producer.send
_RETRY_SECONDS = 86_400.0  # a daemon may be away that long; what waits meanwhile is bounded by the capacity


class _Entry(NamedTuple):
    value: str
    time_ns: int
    headers: dict[str, str]


class WaldHandler(logging.Handler):
    """Sends each log record to a route: the formatted text, its time, and its level and logger as headers.

    A logging call only puts its record into a queue, which a thread sends to the daemon, each record once. While the
    daemon is away the queue fills. When it is full, a logging call waits at most ``block_for`` seconds for room.

    No record is lost silently. One that finds no room, or that the daemon refuses, is written to stderr with the
    reason and counted in :attr:`lost`, and a record in the route says how many were lost, once the route can be
    written to.

    Threads may share a handler, as they share every handler. ``logging.shutdown``, which Python calls at exit, waits
    at most ``close_for`` seconds for what is queued (twice, if the daemon is away) and writes the rest to stderr. A
    process that ends without its exit handlers (``os._exit``, a child process of multiprocessing, SIGKILL) loses what
    is queued: call ``logging.shutdown`` first. After a fork the child has a queue of its own; what the parent had
    queued is sent by the parent.

    Args:
        at: the root of the log, or the socket itself. The daemon need not run yet.
        route: the route that the records go to.
        level: as for every handler.
        capacity: how many records may be queued.
        block_for: seconds that a logging call may wait for room in the queue; 0: none.
        close_for: seconds that :meth:`flush` and :meth:`close` may wait.

    Raises:
        InvalidInput: an illegal route.

    Attributes:
        lost: how many records were not delivered, as far as is known.

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
        self.lost = 0
        self._at = at
        self._route = check_route(route)
        self._capacity = capacity
        self._block_for = block_for
        self._close_for = close_for
        self._in_hand: Sequence[_Entry]  # taken out of the queue, and not durable yet
        self._begin()
        _HANDLERS.add(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Filter and emit, as every handler does, but let threads wait for room side by side, not one after another."""
        filtered: object = self.filter(record)  # from Python 3.12 on it may be another record
        if filtered:
            self.emit(filtered if isinstance(filtered, logging.LogRecord) else record)
        return bool(filtered)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record, within ``block_for`` seconds; write it to stderr if that is not possible."""
        try:
            headers = {"level": _as_utf8(str(record.levelname)), "logger": _as_utf8(str(record.name))}
            entry = _Entry(_as_utf8(self.format(record)), int(record.created * 1e9), headers)
        except Exception:  # noqa: BLE001 - as every handler does: an error of formatting is reported, not raised
            self.handleError(record)
            return
        if reason := self._enqueue(entry):
            self._report_lost([entry], reason)

    def flush(self) -> None:
        """Wait until everything queued so far is durable or reported as lost, at most ``close_for`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting(), self._close_for)

    def close(self) -> None:
        """Send what is queued, within ``close_for`` seconds, write the rest to stderr, and stop."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting(), self._close_for)
            left = [*self._in_hand, *self._queue]
            self._queue.clear()
            self._in_hand = ()
        if left:
            self._report_lost(left, f"the daemon has not answered for {self._close_for} s; some may be in the log")
        super().close()

    def begin_in_child(self) -> None:
        """Leave to the parent what the parent has queued; called in the child of a fork."""
        self.lost = 0
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._in_hand = ()
        self._thread: threading.Thread | None = None
        self._producer: Producer | None = None  # the thread's
        self._unreported = 0  # lost records of which the route has not been notified
        self._is_closed = False

    def _waiting(self) -> bool:
        return bool(self._queue or self._in_hand)

    def _enqueue(self, entry: _Entry) -> str:
        """Queue an entry; returns why that is not possible, or ""."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, self._block_for):
                return f"the queue is full ({self._capacity} records)"
            if self._is_closed:
                return "the handler is closed"
            if self._thread is None:
                try:
                    self._thread = threading.Thread(target=self._run, name="wald.logging", daemon=True)
                    self._thread.start()
                except RuntimeError as error:  # the interpreter is about to end
                    self._thread = None
                    return str(error)
            self._queue.append(entry)
            self._changed.notify_all()
            return ""

    def _has_room(self) -> bool:
        return self._is_closed or len(self._queue) < self._capacity

    def _run(self) -> None:
        while entries := self._take():
            self._deliver(entries)
            with self._changed:
                self._in_hand = ()
                self._changed.notify_all()
        if self._producer is not None:
            self._producer.close()

    def _take(self) -> Sequence[_Entry]:
        """Wait for entries and take some out of the queue; none when the handler is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            count = min(len(self._queue), _AT_ONCE)
            self._in_hand = tuple(self._queue.popleft() for _ in range(count))
            self._changed.notify_all()
            return self._in_hand

    def _deliver(self, entries: Sequence[_Entry]) -> None:
        """Send entries, each once; report those that are refused, and no others with them."""
        durable, error = self._send(entries)
        left = entries[durable:]
        half = len(left) // 2
        if half and isinstance(error, InvalidInput):  # of one of them, too large for a request
            self._deliver(left[:half])
            self._deliver(left[half:])
        elif left and self._in_hand:  # else close() has reported them
            self._report_lost(left, str(error))

    def _send(self, entries: Sequence[_Entry]) -> tuple[int, WaldError | OSError | None]:
        """Send entries, and in front of them how many were lost before.

        Returns:
            how many of them are durable, and the error that the next one met; None if all are durable.
        """
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
            durable, error = self._end_producer(), caught
        if lost and durable:
            durable -= 1
            with self._changed:
                self._unreported -= lost
        return durable, error

    def _end_producer(self) -> int:
        """Close the producer; returns how many of the records sent last are durable."""
        producer, self._producer = self._producer, None
        if producer is None:
            return 0
        producer.close()
        return sum(last - first + 1 for first, last in producer.acknowledged())

    def _report_lost(self, entries: Sequence[_Entry], reason: str) -> None:
        with self._changed:
            self.lost += len(entries)
            self._unreported += len(entries)
        if sys.__stderr__ is not None:  # not sys.stderr, which a program may have made log to this handler
            lines = [f"wald.logging: not delivered to route {self._route}: {reason}", *(e.value for e in entries)]
            with suppress(OSError, ValueError):  # stderr is closed
                sys.__stderr__.write("\n".join([*lines, ""]))


def _as_utf8(text: str) -> str:
    """The text, with escapes for what UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def _begin_in_child() -> None:
    for handler in list(_HANDLERS):
        handler.begin_in_child()


_NOTICE_HEADERS = {"level": "ERROR", "logger": __name__}
_HANDLERS: weakref.WeakSet[WaldHandler] = weakref.WeakSet()
os.register_at_fork(after_in_child=_begin_in_child)
