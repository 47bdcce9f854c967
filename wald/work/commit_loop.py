"""Commit loop of a work group: each round applies the requests of all callers, with one write and one sync.

    submitted ─▶ acknowledged, returned, … ─▶ leased ─▶ written ─▶ answered ─▶ synced ─▶ durable requests answered

Requests that arrive during a round are applied together in the next one. One thread runs the rounds and expires
leases. A single caller runs its round itself, because two thread switches cost a tenth of a lease of 100 records.

After a failed write or sync the state of the disk is unknown, so all later requests fail. They also fail once another
log, an older copy of the log or another journal is at the path, because the next owner would read that one. A log that
is gone may return, for example with a mount: requests fail until then, and each round checks again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from wald.errors import Gone, WaldError
from wald.work.deliveries import Named, Refusal
from wald.work.journal import Journal
from wald.work.owner import LeaseOrder, Owner, Share

if TYPE_CHECKING:
    from wald.work.strict import CursorJournal

T = TypeVar("T")
MakeAnswer = Callable[[Sequence[Share], Sequence[Refusal]], T]
_NS = 1_000_000_000
_START_NS = 5 * _NS
_SLEEP_MAX_SECONDS = 60.0
_IDLE_YIELDS = 2  # more of them cost other processes their time when the processors are busy


class Receiver(Protocol):
    """Receiver of answers for callers that do not block a thread; the commit loop calls its methods."""

    def deliver(self, requests: Sequence[Request[Any]]) -> None:
        """Accept answered requests."""

    def prepare_early(self, requests: Sequence[Request[Any]]) -> None:
        """Accept requests that will be answered after the next sync, to prepare their answers in the meantime."""


class Request(Generic[T]):
    """A request to the commit loop.

    Args:
        apply: called by the commit loop; its result is the answer.
        durable: answer only after a sync.

    Attributes:
        named: records that the request acknowledges; each round first does this for all requests at once.
        receiver: gets the answer if no thread waits for it.
    """

    __slots__ = ("_answered", "_apply", "durable", "error", "is_answered", "named", "receiver", "result")
    result: T

    def __init__(self, apply: Callable[[], T] | None = None, *, durable: bool = False) -> None:
        self._apply = apply
        self._answered = threading.Lock()
        self._answered.acquire()
        self.durable = durable
        self.error: BaseException | None = None
        self.is_answered = False
        self.named: Named = "", ()
        self.receiver: Receiver | None = None

    def apply(self) -> None:
        if self._apply is not None:
            try:
                self.result = self._apply()
            except (WaldError, OSError) as error:
                self.error = error

    def wake(self) -> None:
        self._answered.release()

    def wait(self) -> None:
        self._answered.acquire()

    def prepare(self) -> None:
        """Make the answer, once. The caller does this, so that the commit loop does not wait."""

    def answer(self) -> T:
        self.prepare()
        if self.error is not None:
            raise self.error
        return self.result


class AckRequest(Request[list[Refusal]]):
    """An acknowledgement; its answer is the refused records."""

    __slots__ = ()

    def __init__(self, named: Named) -> None:
        super().__init__(durable=True)
        self.result = []
        self.named = named


class LeaseRequest(Request[T]):
    """A lease request, which waits for records until ``until_ns`` of the monotonic clock.

    Args:
        named: records to acknowledge first; they are durable once the request is answered.
        make: makes the answer from the delivered records and the refused acknowledgements.
    """

    __slots__ = ("_make", "order", "refused", "until_ns")

    def __init__(self, order: LeaseOrder, named: Named, make: MakeAnswer[T], *, until_ns: int) -> None:
        super().__init__(durable=bool(named[1]))
        self._make: MakeAnswer[T] | None = make
        self.order = order
        self.named = named
        self.refused: Sequence[Refusal] = ()
        self.until_ns = until_ns

    def has_ended(self) -> bool:
        """Return True if the order has received records or an error."""
        if not self.order.shares:
            self.error = self.order.error
        elif not self.durable:  # durable, so that the number of tries never decreases
            self.durable = any(max(tries) > 1 for _, tries in self.order.shares)
        return bool(self.order.shares) or self.error is not None

    def prepare(self) -> None:
        if self._make is not None and self.error is None:
            make, self._make = self._make, None
            try:
                self.result = make(self.order.shares, self.refused)
            except Exception as error:  # noqa: BLE001 - raised in the caller
                self.error = error


class CommitLoop:
    """Thread that applies requests to ``owner`` and makes them durable in ``journal``.

    Args:
        queue: the requests, and None to wake the thread because there may be something to lease. A ``SimpleQueue``
            stays usable if Ctrl-C interrupts a call, unlike a lock.
        require: called in each round; raises an error if the journal no longer belongs to the log at the path.
    """

    def __init__(
        self,
        owner: Owner,
        journal: Journal | CursorJournal,
        queue: SimpleQueue[Request[Any] | None],
        *,
        require: Callable[[], None],
        name: str,
    ) -> None:
        self._owner = owner
        self._journal = journal
        self._queue = queue
        self._require = require
        self._waiting: deque[LeaseRequest[Any]] = deque()  # in order of arrival
        self._running = threading.Lock()  # held during a round
        self._round_thread: int | None = None
        self._callers = 0  # threads that wait for the last round
        self._wakes_ns = float("inf")  # when the thread wakes, by the monotonic clock
        self._failed: Exception | None = None
        self._is_closing = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"wald-work-commit-{name}", daemon=True)
        self._thread.start()

    def call(self, request: Request[T]) -> T:
        """Submit a request, wait for its answer, and return it."""
        try:
            if not self._run_alone(request):
                self.submit([request])
            request.wait()
            return request.answer()
        except BaseException as error:
            if isinstance(request, LeaseRequest) and error is not request.error:
                self.withdraw(request)
            raise

    def finish(self, request: Request[Any]) -> None:
        """Submit a request and wait until it is answered, unless this thread runs a round. The answer is not used.

        In that case, the garbage collector has ended a loop over a worker's jobs during the round.
        """
        if threading.get_ident() in (self._round_thread, self._thread.ident):
            self.submit([request])
        else:
            self.call(request)

    def submit(self, requests: Iterable[Request[Any]]) -> None:
        """Submit requests whose answers go to their receivers."""
        for request in requests:
            self._queue.put(request)
        if self._has_ended:
            self._reject_all()

    def withdraw(self, lease: LeaseRequest[Any]) -> None:
        """End a lease whose caller no longer waits; return the records it received to the group."""

        def withdraw() -> None:
            if lease in self._waiting:
                self._waiting.remove(lease)
            elif runs := lease.order.runs:
                sequences = [sequence for first, last in runs for sequence in range(first, last + 1)]
                self._owner.give_back(lease.order.worker, sequences, 0, "", 0)

        self.submit([Request(withdraw)])

    @property
    def has_failed(self) -> bool:
        """True if all further requests fail."""
        return self._failed is not None

    def close(self) -> None:
        """End the thread. Waiting leases are answered without records."""
        self._is_closing = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        timeout: float | None = None
        try:
            while not self._is_closing:
                first = None
                with suppress(Empty):
                    first = self._queue.get(timeout=timeout)
                self._gather()
                with self._running:
                    self._run_round([first] if first else [])
                    self._wakes_ns = self._next_ns()
                    timeout = self._timeout(self._wakes_ns)
            with self._running:
                self._run_round([])
        finally:
            with self._running:
                self._has_ended = True
            self._reject_all()

    def _gather(self) -> None:
        """Let the callers of the last round submit their next requests, so that one sync serves all of them.

        A caller that was woken may not have run yet, so this gives up only after two yields without a new request.
        """
        size, idle = self._queue.qsize(), 0
        while size < self._callers and idle < _IDLE_YIELDS:
            time.sleep(0)
            before, size = size, self._queue.qsize()
            idle = 0 if size > before else idle + 1

    def _run_alone(self, request: Request[Any]) -> bool:
        """Run a round in the caller's thread, or return False if the commit loop has to run it.

        The main thread runs none, because Ctrl-C may interrupt it anywhere.
        """
        if self._callers > 1 or threading.current_thread() is threading.main_thread():
            return False
        if not self._running.acquire(blocking=False):
            return False
        try:
            self._round_thread = threading.get_ident()
            if self._has_ended:
                return False
            self._run_round([], last=request)
            if self._is_closing or self._next_ns() < self._wakes_ns:
                self._queue.put(None)  # during a close, this round may have consumed the pending wake-up
        finally:
            self._round_thread = None
            self._running.release()
        return True

    def _pop_requests(self, requests: list[Request[Any]]) -> None:
        """Move the requests from the queue to ``requests``."""
        with suppress(Empty):
            while True:
                if (request := self._queue.get_nowait()) is not None:
                    requests.append(request)

    def _next_ns(self) -> float:
        """Return when a waiting lease must be checked again, by the monotonic clock."""
        if not self._waiting:
            return float("inf")
        return min(self._owner.next_change_ns(), *map(self._deadline_ns, self._waiting))

    def _timeout(self, next_ns: float) -> float | None:
        if next_ns == float("inf"):
            return None
        return min(max(0.0, (next_ns - self._owner.clock.monotonic_ns()) / _NS), _SLEEP_MAX_SECONDS)

    def _deadline_ns(self, request: LeaseRequest[Any]) -> int:
        """Return the deadline of a lease; after a start, it is extended until existing records have been read."""
        return request.until_ns if self._owner.has_read else request.until_ns + _START_NS

    def _run_round(self, requests: list[Request[Any]], last: Request[Any] | None = None) -> None:
        """Answer ``requests``, the queued ones, and ``last``."""
        waiting = list(self._waiting)  # including those that receive records now, which fail if the write fails
        try:
            self._pop_requests(requests)
            if last is not None:
                requests.append(last)
            self._callers = sum(request.receiver is None for request in requests)
            if self._failed is not None:
                raise _copy(self._failed)
            if self._is_closing:
                self._journal.sync()  # for the acknowledgements of waiting leases
                raise _closed()
            with suppress(OSError):  # a failure to open files does not prove another log
                self._require()
                self._journal.require_place()
            self._commit(requests)
        except BaseException as error:  # raised in each caller
            # A library may raise a timeout in the thread of a caller at any point, even in the middle of a write.
            failure = error if isinstance(error, Exception) else _copy(error)
            if not self._is_closing and self._failed is None and not isinstance(error, Gone):
                self._failed = failure
            _fail(requests, failure)
            _fail(waiting, None if self._is_closing else failure)
            self._waiting.clear()
            if failure is not error:
                raise

    def _commit(self, requests: Sequence[Request[Any]]) -> None:
        self._owner.tick()
        self._acknowledge([request for request in requests if request.named[1]])
        done: list[Request[Any]] = []
        for request in requests:
            if isinstance(request, LeaseRequest):
                self._waiting.append(request)
            else:
                request.apply()
                done.append(request)
        done += self._lease()
        self._journal.append(self._owner.pop_lines())
        if self._journal.has_grown:
            self._journal.rewrite(self._owner.all_lines())
        durable = [request for request in done if request.durable]
        _answer(request for request in done if not request.durable)
        if durable or any(request.durable for request in self._waiting):
            for receiver, some in _by_receiver(durable).items():
                if receiver is not None:
                    receiver.prepare_early(some)
            self._journal.sync()
            _answer(durable)

    def _acknowledge(self, requests: Sequence[Request[Any]]) -> None:
        refusals = self._owner.acknowledge([request.named for request in requests])
        for request, refused in zip(requests, refusals, strict=True):
            if isinstance(request, LeaseRequest):
                request.refused = refused
            else:
                request.result = refused

    def _lease(self) -> list[Request[Any]]:
        """Deliver records to the waiting leases; return the answered ones."""
        self._owner.lease([request.order for request in self._waiting])
        now_ns = self._owner.clock.monotonic_ns()
        ended: list[Request[Any]] = []
        waiting = list(self._waiting)
        self._waiting.clear()
        for request in waiting:
            has_ended = request.has_ended() or self._deadline_ns(request) <= now_ns
            (ended if has_ended else self._waiting).append(request)
        return ended

    def _reject_all(self) -> None:
        """Fail the requests that arrive after the thread has ended."""
        requests: list[Request[Any]] = []
        self._pop_requests(requests)
        _fail(requests, self._failed or _closed())


def _answer(requests: Iterable[Request[Any]]) -> None:
    for receiver, some in _by_receiver(requests).items():
        for request in some:
            request.is_answered = True
        if receiver is not None:
            receiver.deliver(some)
        else:
            for request in some:
                request.wake()


def _by_receiver(requests: Iterable[Request[Any]]) -> dict[Receiver | None, list[Request[Any]]]:
    found: dict[Receiver | None, list[Request[Any]]] = {}
    for request in requests:
        found.setdefault(request.receiver, []).append(request)
    return found


def _fail(requests: Iterable[Request[Any]], error: Exception | None) -> None:
    """Answer requests with an error; without an error, answer waiting leases with the records they have."""
    unanswered = [request for request in requests if not request.is_answered]
    for request in unanswered:
        request.error = request.error or (error and _copy(error))
    _answer(unanswered)


def _closed() -> ValueError:
    return ValueError("the work group is closed")


def _copy(error: BaseException) -> Exception:
    """Copy an error for another thread; a shared error would accumulate the frames of all threads that raise it."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    if isinstance(error, WaldError):
        return type(error)(error.message, hint=error.hint)
    return (
        ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"the work group failed: {error!r}")
    )
