r"""A producer: sends records over the daemon's socket and reports which sequences they got, each exactly once.

Every request carries the producer's id and a number. After a lost connection each request that was not acknowledged is
sent again, and the daemon recognises the requests that it has already. Up to 8 requests are under way at a time;
their payloads are kept here until they are acknowledged.

    with Producer("/var/spool/wald") as producer:
        producer.send("orders", ["one", "two"], keys=["a", "b"])
        producer.publish("access", b"one\ntwo\n")
        for first, last in producer.flush(): ...
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from wald.client.session import SOCKET_NAME, Durable, Session
from wald.errors import InvalidInput, NotFound, Refused
from wald.format.names import check_route

if TYPE_CHECKING:
    from wald.client.payloads import Time, Value

_IDENTITY_NAME = "log.json"

__all__ = ["Durable", "Producer"]


class Producer:
    """Sends records to the daemon of a log; the connection outlives restarts of the daemon.

    At the end of a ``with`` block it flushes and closes; if the block raises, it only closes.

    An error that the daemon answers, or its absence, ends the producer: each later call that needs the daemon raises
    Refused, and :meth:`acknowledged` and :attr:`unanswered` report what became of the records. An error that is found
    before anything is sent, such as a line without a newline, does not end it.

    The sequences of what is durable are kept until they are asked for: a program that sends for long should call
    :meth:`flush` or :meth:`acknowledged` now and then.

    Threads may share a producer: a call waits until the calls of other threads have returned. After a fork (os.fork)
    the child's copy is another producer, with a connection and an id of its own and nothing under way; the parent
    flushes what the parent has sent.

    Args:
        at: the root of the log, or the socket itself. A path at which nothing is yet is a socket, and is waited for.
        producer_id: 1 to 2**64 - 1. No other producer may use it at the same time, not even the child of a fork.
            By default a random one.
        retry_for: seconds without any progress after which the producer gives up.
        connect_for: seconds for which the first connection is tried; None: ``retry_for``.

    Raises:
        NotFound: ``at`` is a directory without a log.
        Unavailable: no daemon for that long.
        NotPermitted: this user may not connect.

    Example::

        with wald.Producer("/var/spool/wald") as producer:
            producer.send("orders", ["4 apples", "1 pear"], keys=["ann", "bob"])
            for first, last in producer.flush():
                print("durable:", first, last)
    """

    def __init__(
        self,
        at: str | os.PathLike[str],
        *,
        producer_id: int | None = None,
        retry_for: float = 30.0,
        connect_for: float | None = None,
    ) -> None:
        path = Path(at)
        self._path = socket_at(path)
        if self._path != path:
            _require_log(path)
        self._given_id = producer_id
        self._retry_for = retry_for
        self._connect_for = retry_for if connect_for is None else connect_for
        self._session: Session
        self._begin()
        self._session.connect(self._connect_for)
        _PRODUCERS.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
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
    ) -> None:
        """Send a record for each value; a value may hold any bytes, newlines too.

        Returns when the records are under way; :meth:`flush` and :meth:`acknowledged` report their sequences. The
        records are stored in the order given, and those of one call in at most a few requests.

        Args:
            route: the route that the records go to.
            values: the records; text is stored as UTF-8.
            keys: a key for each value, or None where there is none.
            times: when each happened: a datetime, nanoseconds since 1970, or None if that is not known. A datetime
                without a zone is local time. A number from 1 to 10**17 is refused: as nanoseconds it is before March
                1973, so it must be in another unit.
            headers: a mapping of text to text for each value, or None where there is none.
            not_before: when each is due, as in ``times``, or None for at once: no :class:`wald.WorkGroup` delivers it
                before. Other readers do not wait. It is kept as the header ``wald.not-before``. A number that in
                nanoseconds is before 2001-09-09 is refused, as it is in another unit.

        Raises:
            InvalidInput: an illegal route, a column of another length than ``values``, or a value that cannot be sent.
            WaldError: as :meth:`publish`.

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
        self._publish_all(route, payloads, columns=True)

    def publish(self, route: str, payload: bytes, *, columns: bool = False) -> None:
        """Send a payload that is encoded already: lines, each ending in a newline, or columns.

        Lines are cut into requests of at most 128 KiB; a longer line goes alone. Returns when they are under way;
        :meth:`flush` and :meth:`acknowledged` report what is durable.

        Args:
            route: the route that the records go to.
            payload: whole lines, or one result of :func:`wald.format.records.encode`.
            columns: whether it is the latter.

        Raises:
            InvalidInput: an illegal route, a last line without a newline, a payload the daemon finds too large.
            NotFound: there is no such route.
            Refused: a request was overtaken by another producer with the same id, or this one has ended before.
            NotPermitted: this user may not write to it.
            DiskFailure: the daemon has had too little space for ``retry_for`` seconds.
            Unavailable: no daemon for that long, or one that does not answer, or the route is over its quota.
        """
        from wald.client.payloads import frames

        check_route(route)
        if not columns and payload[-1:] != b"\n":
            raise InvalidInput(
                f"route {route}: a payload of lines must end in a newline", case="payload-without-newline"
            )
        self._publish_all(route, [payload] if columns else frames(payload), columns)

    def flush(self) -> list[Durable]:
        """Wait until all records sent are durable.

        Returns:
            what :meth:`acknowledged` returns.

        Raises:
            WaldError: as :meth:`publish`.
        """
        with self._exclusively():
            self._session.receive_all()
            return self._session.take_durable()

    def acknowledged(self) -> list[Durable]:
        """Report what has become durable since the last report, in the order in which it was sent; does not wait.

        Returns:
            the sequences of each acknowledged request. Records of other producers may lie between two requests, never
            within one.
        """
        with self._lock:
            self._session.read_answers()
            return self._session.take_durable()

    @property
    def unanswered(self) -> int:
        """How many records are sent and not answered; after a failure they may be in the log or not.

        It does not wait for the calls of other threads.
        """
        return self._session.unanswered

    def close(self) -> None:
        """Close the connection. Records that were not acknowledged may be in the log or not: :meth:`flush` first."""
        with self._lock:
            self._session.close()

    def wait_for(self, descriptor: int) -> None:
        """Return once ``descriptor`` can be read; meanwhile take acknowledgements, and send lost requests again.

        Raises:
            WaldError: as :meth:`publish`.
        """
        with self._exclusively():
            self._session.wait_for(descriptor)

    def command(self, *arguments: str) -> str:
        """Send HEAD, STAT, CUT, ROUTE or PING after everything that was published before is durable.

        A command is repeated after a lost connection.

        Returns:
            the text of the answer behind ``OK``.

        Raises:
            WaldError: as :meth:`publish`.
        """
        with self._exclusively():
            return self._session.command(*arguments)

    def begin_in_child(self) -> None:
        """Give up the parent's connection and requests; called in the child of a fork, before anything else there."""
        self._session.disconnect()  # the parent's stays open: it has a descriptor of its own
        self._begin()
        self._is_inherited = True

    def _begin(self) -> None:
        """Set the state of a producer that has sent nothing yet."""
        self._lock = threading.Lock()
        self._is_inherited = False
        self._session = Session(self._path, producer_id=self._given_id, retry_for=self._retry_for)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One call at a time; the first one in the child of a fork connects."""
        with self._lock:
            if self._is_inherited:
                if self._given_id:
                    raise Refused(
                        f"{self._path}: producer id {self._given_id:x} was given to the process before the fork",
                        case="producer-of-the-parent",
                    )
                self._is_inherited = False
                self._session.connect(self._connect_for)
            yield

    def _finish(self) -> None:
        """Wait for the answers, unless the producer has ended; :meth:`acknowledged` still reports them."""
        with self._lock:
            if not self._session.has_ended:
                self._session.receive_all()

    def _publish_all(self, route: str, payloads: Iterable[bytes | memoryview], columns: bool) -> None:
        with self._exclusively():
            for payload in payloads:
                self._session.publish(route, payload, columns)


def socket_at(path: Path) -> Path:
    """The socket in the root ``path``; ``path`` itself if it is no directory."""
    return path / SOCKET_NAME if path.is_dir() else path


def _require_log(root: Path) -> None:
    """
    Raises:
        NotFound: ``root`` has neither a log nor a socket, so it is useless to wait for a daemon.
    """
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
