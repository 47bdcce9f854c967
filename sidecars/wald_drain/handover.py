"""Handing records over to another route, each exactly once: to the dead-letter route, or from there back.

    <group>.drain, by the cursor    empty, or one line of JSON: {"after": 10, "first": 11, "last": 20, …, "crc": "…"}

    write the line ─▶ pin the routes ─▶ send ─▶ move the cursor ─▶ clear the line ─▶ remove the pin

After a crash at any step, the next start finishes exactly the handover of that line, regardless of its options and of
records that have arrived since. It looks in the log for the copies that were sent; until then the pin protects them
from RECLAIM. The file is also the lock of its route and group.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from wald.errors import InvalidInput, NotFound
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.format.records import Record
from wald.hints import command_line
from wald.retention.cursors import CursorState
from wald.retention.handovers import ROUTES_MAX, PinWriter
from wald.work.dead_letters import (
    GROUP,
    LOG,
    REASON,
    ROUTE,
    TRIES,
    Origin,
    SentBefore,
    Undeliverable,
    dead_letter,
    fits,
    original,
    payloads,
    prepare,
    send,
)
from wald.work.ownership import Ownership
from wald_drain.consumer import Consumer

_LINE_MAX_BYTES = 4096  # some ten times what is ever written


@dataclass(frozen=True, slots=True)
class Handover:
    """Records that the command could not process, or dead letters on their way back.

    Attributes:
        after: the cursor before; the handover is finished once it has moved.
        reason, tries: why the command did not process them.
        dead_letter: the route that gets them; None: they are dead letters, and each goes to where it came from.
        at_ns: when this was decided, ns since 1970. Handing over the same records again is another handover.
        head: the last record of the log at that time; all copies come after it.
    """

    after: int
    first: int
    last: int
    reason: str
    tries: int
    dead_letter: str | None
    at_ns: int
    head: int = 0

    @property
    def position(self) -> int:
        """Last record that this handover certainly did not send."""
        return max(self.last, self.head)


def encode_handover(handover: Handover) -> bytes:
    """The line of the file."""
    return encode_line(asdict(handover))


def decode_handover(line: bytes) -> Handover | None:
    """The handover of a line; None if it is half-written, and then nothing has been sent yet."""
    fields = decode_line(line)
    try:
        return None if fields is None else Handover(**fields)
    except TypeError:
        return None


class HandoverFile(Ownership):
    """The right to drain ``route`` for ``group``, and what is being handed over."""

    def begun(self) -> Handover | None:
        """The handover that was begun; None if there is none."""
        return decode_handover(os.pread(self.descriptor, _LINE_MAX_BYTES, 0))

    def begin(self, handover: Handover) -> None:
        """Write down what is to be handed over; on disk when this returns."""
        self.disk.truncate(self.descriptor, 0)
        self.disk.write(self.descriptor, [encode_handover(handover)], 0)
        self.disk.sync(self.descriptor)

    def end(self) -> None:
        """Clear the file; on disk when this returns."""
        self.disk.truncate(self.descriptor, 0)
        self.disk.sync(self.descriptor)


class Handovers:
    """Carries out the handovers of one consumer.

    Args:
        file: of the consumer, held.
        daemon: the root of the log, or the daemon's socket.
        report: gets a line for every handover.
        letter_max_bytes: of a dead letter with a single record; a longer one is not even tried.
    """

    def __init__(
        self,
        consumer: Consumer,
        file: HandoverFile,
        *,
        daemon: Path,
        report: Callable[[str], None],
        letter_max_bytes: int = REQUEST_MAX_BYTES,
    ) -> None:
        self._consumer = consumer
        self._file = file
        self._daemon = daemon
        self._report = report
        self._letter_max_bytes = letter_max_bytes
        self._origin = Origin(consumer.log.identity.log_id, consumer.route, consumer.group)
        root, log_id = consumer.log.root, consumer.log.identity.log_id
        self._pinning = PinWriter(root, consumer.disk, consumer.route, consumer.group, log_id, "drain")

    def give_up(self, record: Record, why: str, *, tries: int, route: str) -> None:
        """Make a dead letter on ``route`` of the record after the cursor, and move the cursor.

        Raises:
            InvalidInput: the record is too large for a dead letter.
            Unavailable: no daemon runs, and nothing has happened.
        """
        self._consumer.log.require_continuity()  # the daemon that receives the letter may belong to another log
        prepare(self._daemon, self._consumer.log.root, route)  # before the file: without a daemon nothing is begun
        handover = self._handover([record], reason=why, tries=tries, dead_letter=route)
        if not fits(self._letter(record, handover), bytes_max=self._letter_max_bytes):
            raise self._undeliverable(record.sequence, f"more than {self._letter_max_bytes} bytes", "mend the command")
        self._file.begin(handover)
        self._carry_out(handover, [record])

    def put_back(self, letters: Sequence[Record]) -> None:
        """Send the dead letters after the cursor to where they came from, and move the cursor.

        Raises:
            InvalidInput: one of them is no dead letter of this log; those before it are put back.
            NotFound: the route of one of them is gone; those before it are put back.
        """
        handover = self._handover(letters, reason="put back", tries=0, dead_letter=None)
        root = self._consumer.log.root
        routes: set[str] = set()
        for number, letter in enumerate(letters):
            try:
                routes.add(route := self._letter(letter, handover).route)
                root.require_route(route)
            except (InvalidInput, NotFound):
                if number:
                    self.put_back(letters[:number])
                raise
            if len(routes) > ROUTES_MAX:
                self.put_back(letters[:number])
                self.put_back(letters[number:])
                return
        self._file.begin(handover)
        self._carry_out(handover, letters)

    def finish(self) -> int:
        """Finish the handover of an earlier process, as it was begun; return how many records that gave up."""
        handover = self._file.begun()
        cursor = self._consumer.cursor
        if handover is None:
            self._pinning.unpin()
            return 0
        if cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            return 0
        if cursor.effective != handover.after:  # only the last step is missing, or the operator has moved the cursor
            self._end()
            return 0
        records = list(self._consumer.records(handover.first, handover.last))
        self._carry_out(handover, records, SentBefore(self._consumer.log, handover.position))
        return 0 if handover.dead_letter is None else len(records)

    def _handover(self, records: Sequence[Record], *, reason: str, tries: int, dead_letter: str | None) -> Handover:
        consumer = self._consumer
        first, last = records[0].sequence, records[-1].sequence
        head = consumer.log.head()
        at = 0 if head is None else head.sequence
        return Handover(consumer.cursor.effective, first, last, reason, tries, dead_letter, consumer.now_ns(), at)

    def _letter(self, record: Record, handover: Handover) -> Record:
        if handover.dead_letter is None:
            return original(record, self._origin.log_id, self._consumer.log.root.path)
        return dead_letter(record, headers_of(handover, self._origin), handover.dead_letter)

    def _carry_out(self, handover: Handover, records: Sequence[Record], sent_before: SentBefore | None = None) -> None:
        letters = [self._letter(record, handover) for record in records]
        self._pinning.pin(dict.fromkeys(sorted({letter.route for letter in letters}), handover.position))
        try:
            seed = seed_of(handover, self._origin)
            durable = send(self._daemon, payloads(letters), seed=seed, sent_before=sent_before)
        except Undeliverable as error:
            sequence = records[error.sent].sequence
            raise self._undeliverable(sequence, str(error), "raise request_max_bytes of the daemon") from error
        self._consumer.commit(handover.last)
        self._end()
        sent_as = (durable[0].first, durable[-1].last) if durable else None
        self._report(_line(self._consumer.named(handover.first, handover.last), handover, len(records), sent_as))

    def _end(self) -> None:
        """Clear the line, then remove the pin: the next start removes a pin without a line."""
        self._file.end()
        self._pinning.unpin()

    def _undeliverable(self, sequence: int, why: str, remedy: str) -> InvalidInput:
        """The error about a record that cannot be a dead letter either."""
        consumer = self._consumer
        set_ = command_line(consumer.log.root.path, f"cursor set {consumer.route} {sequence} --group {consumer.group}")
        return InvalidInput(
            f"{consumer.named(sequence, sequence)}: cannot be a dead letter: {why}",
            hint=f"{remedy}, or skip this record: {set_}; then start wald-drain again",
        )


def headers_of(handover: Handover, origin: Origin) -> dict[str, str]:
    """The headers that all dead letters of a handover have."""
    return {
        LOG: origin.log_id.hex(),
        ROUTE: origin.route,
        GROUP: origin.group,
        REASON: handover.reason,
        TRIES: str(handover.tries),
    }


def seed_of(handover: Handover, origin: Origin) -> bytes:
    """Return a digest that is unique to a handover."""
    identity = (origin.log_id.hex(), origin.route, origin.group, *astuple(handover))
    return hashlib.sha256(repr(identity).encode()).digest()


def _line(named: str, handover: Handover, count: int, sent_as: tuple[int, int] | None) -> str:
    """The line that reports a finished handover."""
    records = "1 record" if count == 1 else f"{count} records"
    first, last = sent_as or (0, 0)
    where = f" as {first}" + (f" to {last}" if last > first else "") if sent_as else ""
    if handover.dead_letter is None:
        return f"{named}: {records} put back{where}"
    return f"{named}: given up: {handover.reason}; {records} sent to {handover.dead_letter}{where}"
