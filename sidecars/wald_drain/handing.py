"""Handing records over to other routes, each exactly once: to the dead-letter route, or from there back.

    tell the file ─▶ send ─▶ cursor ─▶ clear the file

Each step is done again if what follows it was not: what was begun is finished by the next start as it was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from wald.errors import InvalidInput, NotFound, command_line
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.format.record import Record
from wald.store.retention.cursors import CursorState
from wald_drain.consumer import Consumer
from wald_drain.deadletters import (
    Origin,
    Undeliverable,
    dead_letter,
    fits,
    headers_of,
    original,
    payloads,
    prepare,
    seed_of,
    send,
)
from wald_drain.handover import Handover, HandoverFile


class Handing:
    """What a consumer hands over.

    Args:
        file: of the consumer, held.
        daemon: the root of the log, or the daemon's socket.
        tell: gets a line for every handover.
        letter_max_bytes: of a dead letter with a single record; what is longer is not even tried.
    """

    def __init__(
        self,
        consumer: Consumer,
        file: HandoverFile,
        *,
        daemon: Path,
        tell: Callable[[str], None],
        letter_max_bytes: int = REQUEST_MAX_BYTES,
    ) -> None:
        self._consumer = consumer
        self._file = file
        self._daemon = daemon
        self._tell = tell
        self._letter_max_bytes = letter_max_bytes
        self._origin = Origin(consumer.log.identity.log_id, consumer.route, consumer.group)

    def give_up(self, record: Record, why: str, *, tries: int, route: str) -> None:
        """Make a dead letter on ``route`` of the record behind the cursor, and move the cursor.

        Raises:
            InvalidInput: it is too large for a dead letter.
            Unavailable: there is no daemon, and nothing has happened.
        """
        prepare(self._daemon, self._consumer.log.root, route)  # before the file: without a daemon nothing is begun
        handover = self._handover([record], reason=why, tries=tries, dead_letter=route)
        if not fits(self._letter(record, handover), bytes_max=self._letter_max_bytes):
            raise self._undeliverable(record.sequence, f"more than {self._letter_max_bytes} bytes", "mend the command")
        self._file.begin(handover)
        self._hand_over(handover, [record])

    def put_back(self, letters: Sequence[Record]) -> None:
        """Send dead letters, those behind the cursor, to where they came from, and move the cursor.

        Raises:
            InvalidInput: one of them is no dead letter of this log; those before it are back.
            NotFound: there is no such route any more.
        """
        handover = self._handover(letters, reason="put back", tries=0, dead_letter=None)
        root = self._consumer.log.root
        for number, letter in enumerate(letters):
            try:
                root.require_route(self._letter(letter, handover).route)
            except (InvalidInput, NotFound):
                if number:
                    self.put_back(letters[:number])
                raise
        self._file.begin(handover)
        self._hand_over(handover, letters)

    def finish(self) -> int:
        """What was begun is done as it was begun; returns how many records were given up by that."""
        handover = self._file.begun()
        cursor = self._consumer.cursor
        if handover is None or cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            return 0
        if cursor.effective != handover.after:  # it was finished but for this, or somebody has moved the cursor
            self._file.end()
            return 0
        records = list(self._consumer.records(handover.first, handover.last))
        self._hand_over(handover, records)
        return 0 if handover.dead_letter is None else len(records)

    def _handover(self, records: Sequence[Record], *, reason: str, tries: int, dead_letter: str | None) -> Handover:
        consumer = self._consumer
        first, last = records[0].sequence, records[-1].sequence
        return Handover(consumer.cursor.effective, first, last, reason, tries, dead_letter, consumer.now_ns())

    def _letter(self, record: Record, handover: Handover) -> Record:
        if handover.dead_letter is None:
            return original(record, self._origin.log_id, self._consumer.log.root.path)
        return dead_letter(record, headers_of(handover, self._origin), handover.dead_letter)

    def _hand_over(self, handover: Handover, records: Sequence[Record]) -> None:
        letters = payloads(self._letter(record, handover) for record in records)
        try:
            durable = send(self._daemon, letters, seed=seed_of(handover, self._origin))
        except Undeliverable as error:
            sequence = records[error.sent].sequence
            raise self._undeliverable(sequence, str(error), "raise request_max_bytes of the daemon") from error
        self._consumer.commit(handover.last)
        self._file.end()
        named = self._consumer.named(handover.first, handover.last)
        first, last = (durable[0].first, durable[-1].last) if durable else (0, 0)
        where = f" as {first}" + (f" to {last}" if last > first else "") if durable else ""
        told = "1 record" if len(records) == 1 else f"{len(records)} records"
        if handover.dead_letter is None:
            self._tell(f"{named}: {told} put back{where}")
        else:
            self._tell(f"{named}: given up: {handover.reason}; {told} sent to {handover.dead_letter}{where}")

    def _undeliverable(self, sequence: int, words: str, remedy: str) -> InvalidInput:
        """The error about a record that cannot be handed over either."""
        consumer = self._consumer
        set_ = command_line(consumer.log.root.path, f"cursor set {consumer.route} {sequence} --group {consumer.group}")
        return InvalidInput(
            f"{consumer.named(sequence, sequence)}: cannot be a dead letter: {words}",
            hint=f"{remedy}, or pass over this record: {set_}; then start wald-drain again",
        )
