"""Producer that sends records over the daemon's socket; each is stored exactly once.

Every request carries the producer's id and a number: after a lost connection, the producer resends requests and the
daemon deduplicates them. Up to 8 requests are in flight, with their payloads in memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wald.client.session import SOCKET_NAME, Durable, Request, Session
from wald.errors import InvalidInput, NotFound, Refused
from wald.format.names import check_route
from wald.format.protocol import FRAME_MAX_BYTES

if TYPE_CHECKING:
    from wald.client.payloads import Time, Value

_IDENTITY_NAME = "log.json"
_SOCKET_SUFFIXES = (".sock", ".socket")

__all__ = ["Durable", "Producer", "Receipt"]


class Receipt:
    """Sequences of the records of one :meth:`Producer.send`, once they are durable."""

    def __init__(self, producer: Producer, session: Session, requests: Sequence[Request]) -> None:
        self._producer = producer
        self._session = session
        self._requests = requests

    def done(self) -> bool:
        """Return True if the acknowledgement of all records was received. Looks for new ones, without waiting."""
        return self._producer.has_received(self._session, self._requests)

    def result(self) -> list[int]:
        """Wait until the records are durable, and return the sequence of each.

        :meth:`Producer.flush` and :meth:`Producer.acknowledged` do not report these records afterwards.

        Raises:
            WaldError: see :meth:`Producer.publish`.
        """
        durable = self._producer.receive(self._session, self._requests)
        return [sequence for first, last in durable for sequence in range(first, last + 1)]


class Producer:
    """Client that sends records to the daemon of a log, and survives restarts of the daemon.

    The end of a ``with`` block flushes and closes the producer; after an exception, the producer is only closed.

    A permanent error, or a daemon that stays unreachable, ends the producer: later calls that need the daemon raise
    Refused, and :meth:`acknowledged` and :attr:`unanswered` report the state of the records. An error that is detected
    before sending does not end the producer.

    Sequences of durable records accumulate until :meth:`flush`, :meth:`acknowledged` or the
    :class:`~wald.client.producer.Receipt` of :meth:`send` returns them.

    Threads may share a producer; their calls run one at a time. After a fork the child's copy is a new producer without
    requests in flight.

    Args:
        at: the root of the log, or the socket. A path ending in ``.sock`` or ``.socket`` need not exist yet.
        producer_id: 1 to 2**64 - 1, by default random. Only one producer may use an id at a time, also after a fork.
        retry_for: seconds without progress after which the producer gives up.
        connect_for: seconds to wait for the first connection; by default ``retry_for``.

    Raises:
        NotFound: there is no log at ``at``.
        Unavailable: no daemon was reachable within ``connect_for`` seconds.
        NotPermitted: this user may not connect.

    Example::

        with wald.Producer("/var/spool/wald") as producer:
            producer.send("orders", ["4 apples", "1 pear"], keys=["ann", "bob"])
            for first, last in producer.flush():
                print("durable:", first, last)
            receipt = producer.send("orders", ["2 figs"])
            print("durable:", receipt.result())
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        *,
        producer_id: int | None = None,
        retry_for: float = 30.0,
        connect_for: float | None = None,
    ) -> None:
        self._path = find_socket(Path(at))
        self._configured_id = producer_id
        self._retry_for = retry_for
        self._connect_for = retry_for if connect_for is None else connect_for
        self._session: Session
        self._begin()
        self._session.connect(self._connect_for)
        _PRODUCERS.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with self._lock:  # the answers remain for acknowledged()
                    if not self._session.end_reason:
                        self._session.receive_all()
        finally:
            self.close()

    def send(
        self,
        route: str,
        values: Sequence[Value],
        *,
        keys: Sequence[Value | None] | None = None,
        times: Sequence[Time | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        not_before: Sequence[Time | None] | None = None,
    ) -> Receipt:
        """Send one record for each value. Values may contain any bytes, including newlines.

        Returns before the records are durable; the receipt, :meth:`flush` and :meth:`acknowledged` report their
        sequences. Order is preserved.

        Args:
            values: the records; text is stored as UTF-8.
            keys: a key or None for each value.
            times: event time of each value: a datetime (local time if it has no zone), nanoseconds since 1970, or None.
                Numbers from 1 to 10**17 (before March 1973) are refused, as their unit is probably wrong.
            headers: a mapping of text to text, or None, for each value.
            not_before: due time of each value, as in ``times``. No :class:`wald.WorkGroup` delivers the record earlier;
                other readers do not wait. Stored as the header ``wald.not-before``. Numbers below 10**18 (before
                2001-09-09) are refused.

        Raises:
            InvalidInput: an invalid route, a column whose length differs from ``values``, or a value of the wrong type.
            WaldError: see :meth:`publish`.

        Example::

            producer.send(
                "orders",
                ["4 apples", b"1 pear"],
                keys=["ann", None],
                times=[datetime.now(UTC), time.time_ns()],
                headers=[{"from": "web"}, None],
                not_before=[time.time_ns() + 300 * 10**9, None],
            )
        """
        from wald.client.payloads import encode_values

        check_route(route)
        payloads = encode_values(values, keys=keys, times=times, headers=headers, not_before=not_before)
        return self._publish_all(route, payloads, columns=True)

    def publish(self, route: str, payload: bytes, *, columns: bool = False) -> Receipt:
        """Send an encoded payload: lines that each end in a newline, or columns.

        Lines are split into requests of at most 128 KiB; a longer line is sent alone.

        Args:
            payload: whole lines, or with ``columns`` one result of :func:`wald.format.records.encode_columns`.

        Raises:
            InvalidInput: an invalid route, a last line without a newline, or a payload that is too large.
            NotFound: there is no such route.
            Refused: another producer used the same id, or this producer has ended.
            NotPermitted: this user may not write to the route.
            DiskFailure: the daemon lacked space for ``retry_for`` seconds.
            Unavailable: no daemon answered in that time, or the route is over its quota.
        """
        return self._publish_all(route, payloads_of(route, payload, columns=columns), columns)

    def flush(self) -> list[Durable]:
        """Wait until all sent records are durable; return their sequences as :meth:`acknowledged` does.

        Raises:
            WaldError: see :meth:`publish`.
        """
        with self._exclusively():
            self._session.receive_all()
            return self._session.pop_durable()

    def acknowledged(self) -> list[Durable]:
        """Return the sequences acknowledged since the last report, without waiting.

        Returns:
            first and last sequence of each request, in the order sent. Records of other producers are never in between.
        """
        with self._lock:
            self._session.read_answers()
            return self._session.pop_durable()

    def receive(self, session: Session, requests: Sequence[Request]) -> list[Durable]:
        """Wait for the requests of a receipt."""
        with self._exclusively():
            return session.receive(requests)

    def has_received(self, session: Session, requests: Sequence[Request]) -> bool:
        """Return True if the requests of a receipt are durable."""
        if not all(request.is_done for request in requests):
            with self._lock:
                session.read_answers()
        return all(request.is_done for request in requests)

    @property
    def unanswered(self) -> int:
        """Number of records in flight. After a failure, each may or may not be in the log."""
        return self._session.unanswered

    @property
    def has_ended(self) -> bool:
        """True after a permanent error or :meth:`close`."""
        return bool(self._session.end_reason)

    def close(self) -> None:
        """Close the connection. Call :meth:`flush` first: unacknowledged records may or may not be in the log."""
        with self._lock:
            self._session.close()

    def wait_for(self, descriptor: int) -> None:
        """Process acknowledgements and resend lost requests until ``descriptor`` is readable."""
        with self._exclusively():
            self._session.wait_for(descriptor)

    def command(self, *arguments: str) -> str:
        """Send HEAD, STAT, CUT, ROUTE or PING once all earlier records are durable; return the text after ``OK``."""
        with self._exclusively():
            return self._session.command(*arguments)

    def begin_in_child(self) -> None:
        """Drop the parent's connection and requests."""
        self._session.disconnect()  # the parent's descriptor stays open
        self._session.end_reason = f"{self._path}: the parent process sent these records"
        self._begin()
        self._is_inherited = True

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._is_inherited = False
        self._session = Session(self._path, producer_id=self._configured_id, retry_for=self._retry_for)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Run one call at a time; after a fork, connect first."""
        with self._lock:
            if self._is_inherited:
                if self._configured_id:
                    raise Refused(
                        f"{self._path}: producer id {self._configured_id:x} belongs to the parent process",
                        case="producer-of-the-parent",
                    )
                self._is_inherited = False
                self._session.connect(self._connect_for)
            yield

    def _publish_all(self, route: str, payloads: Iterable[bytes | memoryview], columns: bool) -> Receipt:
        requests: list[Request] = []
        with self._exclusively():
            for payload in payloads:
                self._session.publish(route, payload, columns, requests)
            return Receipt(self, self._session, requests)


def frames(payload: bytes) -> Iterator[bytes | memoryview]:
    """Split lines into parts of up to :data:`FRAME_MAX_BYTES`, or of one longer line."""
    if len(payload) <= FRAME_MAX_BYTES:
        yield payload
        return
    view, start = memoryview(payload), 0
    while start < len(payload):
        end = payload.rfind(b"\n", start, start + FRAME_MAX_BYTES) + 1 or payload.find(b"\n", start) + 1
        yield view[start:end]
        start = end


def socket_at(path: Path) -> Path:
    return path / SOCKET_NAME if path.is_dir() else path


def find_socket(path: Path) -> Path:
    """Return the socket of a root or a socket path. Raise NotFound without a log."""
    at = socket_at(path)
    if at != path or not (path.exists() or path.suffix in _SOCKET_SUFFIXES):
        _require_log(path)
    return at


def payloads_of(route: str, payload: bytes, *, columns: bool) -> Iterable[bytes | memoryview]:
    """Check the arguments of :meth:`Producer.publish`, and split lines."""
    check_route(route)
    if columns:
        return [payload]
    if payload[-1:] != b"\n":
        raise InvalidInput(f"route {route}: a payload of lines must end in a newline", case="payload-without-newline")
    return frames(payload)


def _require_log(root: Path) -> None:
    """Raise NotFound for a directory without a log or socket, instead of waiting for a daemon."""
    try:
        if not (root / SOCKET_NAME).exists():
            (root / _IDENTITY_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{root}: there is no log here", case="no-log", root=root) from None
    except OSError:
        return  # the attempt to connect reports it


def _begin_in_child() -> None:
    for producer in list(_PRODUCERS):
        producer.begin_in_child()


_PRODUCERS: weakref.WeakSet[Producer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_begin_in_child)
