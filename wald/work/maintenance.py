"""Maintenance thread of a work group: it moves the cursor, writes dead letters, and follows a cursor that was moved.

This waits for disks and for the daemon, so it is not part of the commit loop. A dead letter is written exactly once:

    the journal has it, synced ─▶ the dead letter is durable ─▶ the journal has the record as done

The producer id of a dead letter is derived from its journal line, so the daemon recognizes one that is sent again. The
daemon forgets its oldest producers, so a dead letter that may be in the log is searched for before it is sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from queue import SimpleQueue

from wald.errors import Gone, Replaced, WaldError
from wald.files.disk import Disk
from wald.format.records import Record
from wald.format.work import DeadRecord
from wald.log import Log
from wald.retention.cursors import CursorState
from wald.retention.handovers import PinWriter
from wald.retention.missing import Missing
from wald.work.commit_loop import CommitLoop, Request
from wald.work.dead_letters import SEQUENCE, Origin, Undeliverable, dead_letter, headers_of, payloads, prepare, send
from wald.work.owner import DeadLetter, Owner

_EVERY_SECONDS = 1.0
_RETRY_SECONDS = 1.0  # short, because the thread tries again and must not delay its end
_log = logging.getLogger("wald.work")


@dataclass(eq=False)
class Maintenance:
    """Maintenance of ``group`` on ``route``.

    Args:
        cursor: the position of the cursor.
        daemon: where dead letters are sent.
        report: called with a line for each dead letter and each failure; None to log them.
        wake: set when there is something to do at once.
        lost: records that a repair gave up and the group has passed over.
        moves_cursor: False if the commit loop moves the cursor.

    Attributes:
        letter_errors: why dead letters could not be written, by sequence.
    """

    _log: Log
    _route: str
    _group: str
    _cursor: int
    _owner: Owner
    _loop: CommitLoop
    _: KW_ONLY
    daemon: Path
    report: Callable[[str], None] | None
    wake: threading.Event
    lost: SimpleQueue[Missing]
    moves_cursor: bool = True

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
        """End the thread after its current step."""
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
        """Mark everything before a cursor done that an operator has moved."""
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
        """Report a failure once while it lasts, instead of every second."""
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
        """Pin the routes of dead letters, so that a retry after an interruption finds them in the log."""
        pinned = self._pinned or {}
        positions = self._loop.call(Request(self._owner.dead_letter_positions))
        if any(pinned.get(route, at + 1) > at for route, at in positions.items()):
            self._pin_writer.pin(positions)
            self._pinned = positions

    def _send_dead_letter(self, record: Record, dead: DeadRecord, may_be_sent: bool) -> int:
        """Return the sequence of a record's dead letter, which is durable then."""
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
