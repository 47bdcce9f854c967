"""What the owner of a work group does by itself, in a thread: moves the cursor, and gives records up.

If an operator has moved the cursor meanwhile, the group goes on behind that.

Both take long: they wait for disks, and for the daemon. So no turn waits for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from wald.work.asks import Ask
from wald.work.deadletters import Undeliverable
from wald.work.giving_up import give_up
from wald.work.owner import DeadLetter, Owner
from wald.work.turns import Turns

_EVERY_SECONDS = 1.0
_log = logging.getLogger("wald.work")


class Upkeep:
    """The upkeep of ``group`` on ``route``.

    Args:
        floor: where the cursor is.
        daemon: where dead letters are sent.
        report: gets a line for each record that is given up, and for each failure; None to log them.
        wake: set when there is something to do at once.
        lost: what a repair has given up, and the group has passed over.
    """

    def __init__(
        self,
        log: Log,
        route: str,
        group: str,
        floor: int,
        owner: Owner,
        turns: Turns,
        *,
        daemon: Path,
        report: Callable[[str], None] | None,
        wake: threading.Event,
        lost: SimpleQueue[Missing],
    ) -> None:
        self._log = log
        self._route = route
        self._group = group
        self._cursor = floor
        self._owner = owner
        self._turns = turns
        self._daemon = daemon
        self._tell = report
        self._wake = wake
        self._lost = lost
        self._pinning = PinWriter(log.root, Disk(), route, group, log.identity.log_id, "work")
        self._pinned: Mapping[str, int] | None = None  # None: the previous owner may have left a pin
        self._closed = False
        # Reported failures that still last, of steps and of dead letters.
        self._failing_steps: dict[str, str] = {}
        self._failing_letters: dict[str, str] = {}
        self._lost_reported = ""
        self._thread = threading.Thread(target=self._run, name=f"wald-work-upkeep-{route}", daemon=True)
        self._wake.set()  # the journal may say more than the cursor
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._report_lost()

    def move_cursor(self) -> None:
        """Move the cursor to the ack floor.

        Raises:
            WaldError, OSError: it cannot be written.
        """
        floor = self._owner.floor
        if floor > self._cursor:
            self._log.set_cursor(self._route, floor, self._group)
            self._cursor = floor

    def _run(self) -> None:
        while True:
            self._wake.wait(_EVERY_SECONDS)
            self._wake.clear()
            if self._closed:
                return None
            self._report_lost()
            for do in (self._follow_cursor, self.move_cursor, self._give_up, self.move_cursor):
                try:
                    do()
                except (WaldError, OSError, ValueError, RuntimeError) as error:
                    if isinstance(error, Replaced) and not isinstance(error, Gone):  # a log that is gone may return
                        return self._report(f"{self._route}: group {self._group}: {error}", logging.ERROR)
                    why = f"{self._route}: group {self._group}: {error}"
                    self._report_failure(self._failing_steps, do.__name__, why, error)
                else:
                    self._failing_steps.pop(do.__name__, None)

    def _follow_cursor(self) -> None:
        """Pass over what is before the cursor."""
        cursor = self._log.cursor(self._route, self._group)
        if cursor.state is CursorState.VALID and cursor.sequence > max(self._cursor, self._owner.floor):
            self._turns.ask(Ask(lambda: self._owner.pass_over(cursor.sequence), durable=True))
            self._cursor = cursor.sequence
            self._report(f"{self._route}: the cursor was moved to {cursor.sequence}; going on behind it")

    def _report(self, line: str, level: int = logging.INFO) -> None:
        if self._tell is None:
            _log.log(level, "%s", line)
            return
        with suppress(Exception):  # of the program that gets it; the upkeep goes on
            self._tell(line)

    def _report_lost(self) -> None:
        """Report what was passed over, each time it is another part."""
        while not self._lost.empty():
            line = f"{self._route}: {self._lost.get().message()}; going on behind"
            if line != self._lost_reported:
                self._report(line, logging.WARNING)
            self._lost_reported = line

    def _report_failure(self, failing: dict[str, str], step: str, why: str, error: Exception) -> None:
        """Report a failure once while it lasts, instead of every second."""
        if failing.get(step) != why and not self._closed:
            hint = getattr(error, "hint", "")
            self._report(f"{why}; tried again every second" + f"\n  hint: {hint}" * bool(hint), logging.WARNING)
        failing[step] = why

    def _give_up(self) -> None:
        """Make dead letters of the records that are given up; where one fails, go on at the next look."""
        while not self._closed and (following := self._next_dead_letter()) and self._make_dead_letter(*following):
            pass
        if self._pinned != {} and not self._turns.ask(Ask(self._owner.unsettled)):
            self._pinning.unpin()
            self._pinned = {}

    def _pin(self) -> None:
        """Pin the routes of dead letters, so that a retry after an interruption finds them in the log."""
        pinned = self._pinned or {}
        positions = self._turns.ask(Ask(self._owner.unsettled))
        if any(pinned.get(route, at + 1) > at for route, at in positions.items()):
            self._pinning.pin(positions)
            self._pinned = positions

    def _next_dead_letter(self) -> DeadLetter | None:
        if not self._owner.owes_dead_letter:
            self._failing_letters.clear()
            return None
        head = self._log.head()
        durable = 0 if head is None else head.sequence
        return self._turns.ask(Ask(lambda: self._owner.next_dead_letter(durable), durable=True))

    def _make_dead_letter(self, record: Record, dead: DeadRecord, may_be_sent: bool) -> bool:
        """Make a dead letter of a record; False if that failed."""
        named = f"{self._route} {dead.sequence}"
        try:
            self._pin()
            letter = give_up(self._log, self._daemon, self._group, record, dead, may_be_sent=may_be_sent)
        except (WaldError, Undeliverable, OSError) as error:
            self._turns.ask(Ask(lambda: self._owner.not_given_up(dead.sequence)))
            self._report_failure(self._failing_letters, named, f"{named}: cannot be given up: {error}", error)
            return False
        self._failing_letters.pop(named, None)
        self._turns.ask(Ask(lambda: self._owner.gave_up(dead.sequence), durable=True))
        self._report(f"{named}: given up: {dead.reason}; sent to {dead.route} as {letter}")
        return True
