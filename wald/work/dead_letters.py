"""Dead letters: records with headers for their origin and the reason, and the maintenance thread that writes them.

    wald.origin.log  wald.origin.route  wald.origin.sequence  wald.origin.append_time_ns     origin
    wald.group  wald.reason  wald.tries                                                      failure

Value, key, event time and other headers are kept, so each record can be redriven unchanged. Headers that are not a
JSON object of strings are kept in hexadecimal as ``wald.origin.headers``.

Dead letters are sent in windows of as many requests as the daemon remembers for one producer, each window under a
producer id made from its contents. So the daemon recognises a window that is sent again after a crash. Because it
forgets its oldest producers, a retry first looks in the log, where each batch has the id of its producer. A window
that differs in any way, for example because a record was damaged in the meantime, has another id and is sent as a
whole.

A record may be too large for a dead letter, because pipes allow longer records than requests to the daemon. Such a
record ends the run: everything before it is sent, and only the operator can skip it.

The thread also moves the cursor, and follows a cursor moved by others. This waits for disks and the daemon, so it is
not part of the commit loop. It writes a dead letter exactly once:

    the journal has it, synced ─▶ the dead letter is durable ─▶ the journal has the record as done

The producer id is derived from the journal line, so the daemon recognizes one that is sent again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, astuple, dataclass
from itertools import groupby, islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from wald.client.payloads import encode_headers, record_payloads
from wald.client.producer import Durable, Producer, socket_at
from wald.client.session import Session
from wald.errors import Gone, InvalidInput, Replaced, WaldError
from wald.files.cursor_directory import UNKNOWN_USER
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.log_state import PRODUCER_WINDOW, stored_producer_id
from wald.format.names import is_route
from wald.format.records import Record
from wald.format.work import DeadRecord
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.retention.handovers import PinWriter
from wald.retention.missing import Missing
from wald.work.commit_loop import CommitLoop, Request
from wald.work.owner import DeadLetter, Owner

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RETRY_SECONDS = 10.0  # how long to wait for a daemon that restarts
_FIXED_BYTES = 128  # of a payload besides its records: count, last offsets, padding
_RECORD_BYTES = 24  # of a record besides its bytes: a time, three offsets, its bits
LOG, ROUTE, SEQUENCE, _TIME = (f"wald.origin.{name}" for name in ("log", "route", "sequence", "append_time_ns"))
GROUP, REASON, TRIES = "wald.group", "wald.reason", "wald.tries"
_ODD = "wald.origin.headers"
_OURS = frozenset({LOG, ROUTE, SEQUENCE, _TIME, GROUP, REASON, TRIES})


class Undeliverable(Exception):
    """The daemon refused a dead letter. ``sent`` earlier records are on disk as dead letters."""

    def __init__(self, message: str, *, sent: int) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of records: log, route, and the group that could not process them."""

    log_id: bytes
    route: str
    group: str

    def headers(self, reason: str, tries: int) -> dict[str, str]:
        values = (self.log_id.hex(), self.route, self.group, reason, str(tries))
        return dict(zip((LOG, ROUTE, GROUP, REASON, TRIES), values, strict=True))

    def seed(self, handover: DataclassInstance) -> bytes:
        identity = (self.log_id.hex(), self.route, self.group, *astuple(handover))
        return hashlib.sha256(repr(identity).encode()).digest()


def dead_letter(record: Record, headers: Mapping[str, str], route: str) -> Record:
    """Return the dead letter, on ``route``, of a record that was given up; it keeps the record's sequence."""
    own = {SEQUENCE: str(record.sequence), _TIME: str(record.append_time_ns)}
    return record._replace(route=route, headers=encode_headers(headers_of(record) | dict(headers) | own))


def original(letter: Record, log_id: bytes, root: Path) -> Record:
    """Return the original of a dead letter; it keeps the dead letter's sequence.

    Raise InvalidInput if it is not a dead letter of the log with this id in ``root``.
    """
    headers = headers_of(letter)
    route = headers.get(ROUTE, "")
    if headers.get(LOG) != log_id.hex() or not is_route(route):
        passing = command_line(root, f"cursor set {letter.route} {letter.sequence}")
        raise InvalidInput(
            f"{letter.route} {letter.sequence}: is not a dead letter of this log",
            hint=f"{passing} skips it; then run the same command again",
        )
    own = {name: value for name, value in headers.items() if name not in _OURS}
    try:
        encoded = bytes.fromhex(own[_ODD]) if _ODD in own else encode_headers(own) if own else None
    except ValueError:  # the producer's own header of this name
        encoded = encode_headers(own)
    return letter._replace(route=route, headers=encoded)


def payloads(letters: Iterable[Record]) -> Iterator[tuple[str, bytes]]:
    """Encode letters, in order, as pairs of a route and a ``columns`` payload.

    A letter longer than a payload gets a separate one, which the daemon accepts or refuses.
    """
    for route, run in groupby(letters, lambda letter: letter.route):
        fields = [(letter.value, letter.key, letter.event_time_ns, letter.headers) for letter in run]
        yield from ((route, payload) for payload in record_payloads(fields))


def fits(letter: Record, bytes_max: int) -> bool:
    size = len(letter.value) + len(letter.key or b"") + len(letter.headers or b"")
    return size + _RECORD_BYTES + _FIXED_BYTES <= bytes_max


def prepare(daemon: Path, root: Root, route: str, *, retry_for: float = RETRY_SECONDS) -> None:
    """Create the dead-letter route if it is missing; wait up to ``retry_for`` seconds for a daemon."""
    with Producer(daemon, retry_for=retry_for) as producer:
        if not root.route(route).is_dir():
            producer.command("ROUTE", "ADD", route)


def send(
    daemon: Path,
    letters: Iterator[tuple[str, bytes]],
    *,
    seed: bytes,
    retry_for: float = RETRY_SECONDS,
    sent_before: SentBefore | None = None,
) -> list[Durable]:
    """Send payloads to routes. They are on disk when this returns; repeated calls with the same seed store them once.

    For a retry, ``sent_before`` finds in the log the payloads that the daemon may have forgotten.
    """
    durable: list[Durable] = []
    while window := list(islice(letters, PRODUCER_WINDOW)):
        sender = producer_id(seed, window)
        known = sent_before.batches(sender, {route for route, _ in window}) if sent_before else {}
        durable += (known[number] for number in sorted(known))
        at = max(known, default=0)  # they were sent in order
        if at >= len(window):
            continue
        session = Session(socket_at(daemon), producer_id=sender, retry_for=retry_for, number=at)
        session.connect(retry_for)
        try:
            for route, payload in window[at:]:
                session.publish(route, payload, True, [])
            session.receive_all()
        except InvalidInput as error:
            session.receive_all()
            durable += session.pop_durable()
            raise Undeliverable(error.message, sent=sum(last - first + 1 for first, last in durable)) from error
        finally:
            session.close()
        durable += session.pop_durable()
    return durable


@dataclass(frozen=True, slots=True)
class SentBefore:
    """Search of the log for the batches of an interrupted handover, which come after the sequence ``after``."""

    log: Log
    after: int

    def batches(self, sender: int, routes: Collection[str]) -> dict[int, Durable]:
        # The user ids that the daemon may have seen as the sender: they differ between user namespaces.
        users = os.geteuid(), 0, self.log.root.path.stat().st_uid, UNKNOWN_USER
        ids = {stored_producer_id(user, sender) for user in users}
        found = {}
        for route in sorted(set(routes).intersection(self.log.routes())):
            for batch in self.log.batches(route, self.after + 1, on_missing="skip"):
                if batch.header.producer_id in ids:
                    found[batch.header.producer_sequence] = Durable(batch.first_sequence, batch.last_sequence)
        return found


def headers_of(record: Record) -> dict[str, str]:
    """Return the headers of a record; unless they are a JSON object of strings, one header in hexadecimal."""
    if record.headers is None:
        return {}
    try:
        headers = json.loads(record.headers.decode())
        if isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values()):
            encode_headers(headers)  # raises for half of a surrogate pair, which cannot be sent
            return headers
    except (ValueError, RecursionError):
        pass
    return {_ODD: record.headers.hex()}


def producer_id(seed: bytes, window: Sequence[tuple[str, bytes]]) -> int:
    digest = hashlib.sha256(seed)
    for route, payload in window:
        digest.update(f"{route} {len(payload)} ".encode())
        digest.update(payload)
    return int.from_bytes(digest.digest()[:8]) or 1


_EVERY_SECONDS = 1.0
_RETRY_SECONDS = 1.0  # short, because the thread retries and must stop quickly
_log = logging.getLogger("wald.work")


@dataclass(eq=False)
class Maintenance:
    """Maintenance of ``group`` on ``route``; ``letter_errors`` says why dead letters could not be written."""

    _log: Log
    _route: str
    _group: str
    _cursor: int  # its position
    _owner: Owner
    _loop: CommitLoop
    _: KW_ONLY
    daemon: Path  # where dead letters are sent
    report: Callable[[str], None] | None  # called with a line for each dead letter and each failure; None to log them
    wake: threading.Event  # set when there is something to do at once
    lost: SimpleQueue[Missing]  # records that a repair gave up and the group has passed over
    moves_cursor: bool = True  # False if the commit loop moves the cursor

    def __post_init__(self) -> None:
        identity = self._log.identity.log_id
        self._pin_writer = PinWriter(self._log.root, Disk(), self._route, self._group, identity, "work")
        self._pinned: Mapping[str, int] | None = None  # None: the previous owner may have left a pin
        self._is_closed = False
        self._reported: dict[str | int, str] = {}  # failures that still last, by step and by dead letter
        self.letter_errors: dict[int, Exception] = {}
        self._lost_reported = ""
        self._thread = threading.Thread(target=self._run, name=f"wald-work-maintenance-{self._route}", daemon=True)
        self.wake.set()  # the journal may be ahead of the cursor
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self.wake.set()
        self._thread.join()
        self._report_lost()

    def move_cursor(self) -> None:
        floor = self._owner.floor
        if self.moves_cursor and floor > self._cursor:
            self._log.set_cursor(self._route, floor, self._group)
            self._cursor = floor

    def _run(self) -> None:
        while True:
            self.wake.wait(_EVERY_SECONDS)
            self.wake.clear()
            if self._is_closed:
                return None
            self._report_lost()
            for step in (self._follow_cursor, self.move_cursor, self._write_dead_letters, self.move_cursor):
                try:
                    step()
                except (WaldError, OSError, ValueError, RuntimeError) as error:
                    why = f"{self._route}: group {self._group}: {error}"
                    if isinstance(error, Replaced) and not isinstance(error, Gone):  # a log that is gone may return
                        return self._report(why, logging.ERROR)
                    self._report_failure(step.__name__, why, error)
                else:
                    self._reported.pop(step.__name__, None)

    def _follow_cursor(self) -> None:
        """If an operator has moved the cursor, mark everything before it done."""
        if not self.moves_cursor:
            return
        cursor = self._log.cursor(self._route, self._group)
        if cursor.state is CursorState.VALID and cursor.sequence > max(self._cursor, self._owner.floor):
            self._loop.call(Request(lambda: self._owner.finish_through(cursor.sequence), durable=True))
            self._cursor = cursor.sequence
            self._report(f"{self._route}: the cursor was moved to {cursor.sequence}; continuing after it")

    def _report(self, line: str, level: int = logging.INFO) -> None:
        if self.report is None:
            _log.log(level, "%s", line)
            return
        with suppress(Exception):  # of the callback
            self.report(line)

    def _report_lost(self) -> None:
        while not self.lost.empty():
            line = f"{self._route}: {self.lost.get().message()}; continuing after them"
            if line != self._lost_reported:
                self._report(line, logging.WARNING)
            self._lost_reported = line

    def _report_failure(self, step: str | int, why: str, error: Exception) -> None:
        """Report a failure once while it persists, instead of every second."""
        if self._reported.get(step) != why and not self._is_closed:
            hint = getattr(error, "hint", "")
            retrying = "; retrying every second" * self.moves_cursor  # the next lease of a strict group may end it
            self._report(f"{why}{retrying}" + f"\n  hint: {hint}" * bool(hint), logging.WARNING)
        self._reported[step] = why

    def _write_dead_letters(self) -> None:
        while not self._is_closed and (letter := self._next_dead_letter()) and self._write_dead_letter(*letter):
            pass
        if self._pinned != {} and not self._loop.call(Request(self._owner.dead_letter_positions)):
            self._pin_writer.unpin()
            self._pinned = {}

    def _next_dead_letter(self) -> DeadLetter | None:
        if not self._owner.has_dead_letters:
            for sequence in list(self.letter_errors):  # skipped by an operator
                self._end_failure(sequence)
            return None
        head = self._log.head()
        durable = 0 if head is None else head.sequence
        return self._loop.call(Request(lambda: self._owner.next_dead_letter(durable), durable=True))

    def _write_dead_letter(self, record: Record, dead: DeadRecord, may_be_sent: bool) -> bool:
        """Write a dead letter and mark its record done; return False if that failed."""
        named = f"{self._route} {dead.sequence}"
        try:
            self._pin()
            letter = self._send_dead_letter(record, dead, may_be_sent)
        except (WaldError, Undeliverable, OSError) as error:
            self._loop.call(Request(lambda: self._owner.retry_dead_letter(dead.sequence)))
            self._report_failure(dead.sequence, f"{named}: cannot become a dead letter: {error}", error)
            self.letter_errors[dead.sequence] = error
            return False
        self._end_failure(dead.sequence)
        self._report(f"{named}: given up: {dead.reason}; sent to {dead.route} as {letter}")
        self._loop.call(Request(lambda: self._owner.finish_dead_letter(dead.sequence), durable=True))
        return True

    def _end_failure(self, sequence: int) -> None:
        self._reported.pop(sequence, None)
        self.letter_errors.pop(sequence, None)

    def _pin(self) -> None:
        """Pin the dead-letter routes, so that a retry after an interruption finds the letters in the log."""
        pinned = self._pinned or {}
        positions = self._loop.call(Request(self._owner.dead_letter_positions))
        if any(pinned.get(route, at + 1) > at for route, at in positions.items()):
            self._pin_writer.pin(positions)
            self._pinned = positions

    def _send_dead_letter(self, record: Record, dead: DeadRecord, may_be_sent: bool) -> int:
        log = self._log
        origin = Origin(log.identity.log_id, record.route, self._group)
        headers = origin.headers(dead.reason, dead.tries)
        if may_be_sent and dead.route in log.routes():
            wanted = {**headers, SEQUENCE: str(dead.sequence)}
            for sent in log.records(dead.route, dead.after + 1, on_missing="skip"):
                if wanted.items() <= headers_of(sent).items():
                    return sent.sequence
        prepare(self.daemon, log.root, dead.route, retry_for=_RETRY_SECONDS)
        letters = payloads([dead_letter(record, headers, dead.route)])
        (durable,) = send(self.daemon, letters, seed=origin.seed(dead), retry_for=_RETRY_SECONDS)
        return durable.first
