"""Redrive: dead letters back to the routes they came from, each exactly once.

    <group>.drain, next to the cursor    empty, or one line of JSON: {"after": 10, "first": 11, "last": 20, …}

    write the line ─▶ pin the routes ─▶ send ─▶ move the cursor ─▶ clear the line ─▶ remove the pin

After a crash at any step, the next start finishes exactly the handover of that line, whatever its options and the
records that have arrived since. It looks in the log for the copies that were sent; until then the pin protects them
from RECLAIM. The file is also the lock of its route and group. Earlier versions gave records up in the same way, so a
line may be about a record on its way to the dead-letter route.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.records import Record
from wald.format.times import utc
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursor_moves import EarlierReclaim, move_cursor, start_position
from wald.retention.cursors import Cursor, CursorState, new_group_warning
from wald.retention.handovers import ROUTES_MAX, PinWriter
from wald.retention.missing import Missing
from wald.work.dead_letters import Origin, SentBefore, Undeliverable, dead_letter, original, payloads, send
from wald.work.ownership import Ownership

_LINE_MAX_BYTES = 4096  # about ten times the longest line written
_RECORDS_MAX = 1000  # at a time; each batch is reported
_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class Consumer:
    """``group`` on ``route``; ``now_ns`` is the clock, in ns since 1970."""

    log: Log
    route: str
    group: str
    disk: Disk = field(default_factory=Disk)
    now_ns: Callable[[], int] = time.time_ns

    @property
    def cursor(self) -> Cursor:
        return self.log.cursor(self.route, self.group)

    def report_new(self, report: Callable[[str], None], *, with_workers: bool = False) -> int:
        """Report if the group is new, and which earlier records were reclaimed; return where the group starts."""
        news = new_group_warning(self.log.root, self.route, self.group, with_workers=with_workers)
        after, reclaimed = start_position(self.log.view(), self.route, self.group)
        for message in filter(None, (news, reclaimed)):
            report(message)
        return after

    def commit(self, sequence: int) -> None:
        """Move the cursor durably."""
        self.log.require_continuity()
        log_id, now = self.log.identity.log_id, utc(self.now_ns())
        move_cursor(self.log.root, self.route, self.group, sequence, log_id=log_id, disk=self.disk, now=now)

    def named(self, first: int, last: int) -> str:
        return f"{self.route} {self.span(first, last)}"

    @staticmethod
    def span(first: int, last: int) -> str:
        return f"{first}" if first == last else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class Handover:
    """Records on their way to another route."""

    after: int  # the cursor before; the handover is finished once it has moved
    first: int
    last: int
    reason: str
    tries: int
    dead_letter: str | None  # the route that gets them; None: they are dead letters, and return to their routes
    at_ns: int  # in ns since 1970; handing over the same records again is another handover
    head: int = 0  # the last record of the log at that time; all copies come after it

    @property
    def position(self) -> int:
        """Last record before those that this handover may have sent."""
        return max(self.last, self.head)

    def encoded(self) -> bytes:
        return encode_line(asdict(self))

    @classmethod
    def decode(cls, line: bytes) -> Handover | None:
        """Return the handover of a line; None for a half-written line, before which nothing was sent."""
        fields = decode_line(line)
        try:
            return None if fields is None else cls(**fields)
        except TypeError:
            return None


class HandoverFile(Ownership):
    """Exclusive right to drain ``route`` for ``group``, with the unfinished handover."""

    def begun(self) -> Handover | None:
        return Handover.decode(os.pread(self.descriptor, _LINE_MAX_BYTES, 0))

    def begin(self, handover: Handover) -> None:
        self.disk.truncate(self.descriptor, 0)
        self.disk.write(self.descriptor, [handover.encoded()], 0)
        self.disk.sync(self.descriptor)

    def end(self) -> None:
        self.disk.truncate(self.descriptor, 0)
        self.disk.sync(self.descriptor)


def redrive(consumer: Consumer, *, daemon: Path, stop: threading.Event, report: Callable[[str], None]) -> None:
    """Put back the dead letters after the cursor of ``consumer``, until ``stop`` is set, and move the cursor."""
    with HandoverFile(consumer.log.root, consumer.route, consumer.group, consumer.disk) as file:
        handovers = Handovers(consumer, file, daemon=daemon, report=report)
        before = consumer.cursor.effective
        handovers.finish()
        is_new = consumer.cursor.state is CursorState.ABSENT
        earlier = EarlierReclaim(consumer.log.root, consumer.route, consumer.group, is_new=is_new)
        if is_new:
            consumer.commit(consumer.report_new(report))

        def pass_over(missing: Missing) -> None:
            earlier.require(missing)
            report(f"{missing.message()}; continuing after them")

        records = consumer.log.records(consumer.route, "cursor", group=consumer.group, on_missing=pass_over)
        for letters in _batches(records):
            if stop.is_set():
                return
            handovers.put_back(letters)
        if consumer.cursor.effective == before:
            done = f"group {consumer.group} has processed every dead letter up to {before}"
            report(f"{consumer.route}: nothing to put back: {done}")


class Handovers:
    """Handovers of one consumer; requires its handover file. ``report`` gets a line for each."""

    def __init__(self, consumer: Consumer, file: HandoverFile, *, daemon: Path, report: Callable[[str], None]) -> None:
        self._consumer, self._file, self._daemon, self._report = consumer, file, daemon, report
        root, log_id = consumer.log.root, consumer.log.identity.log_id
        self._origin = Origin(log_id, consumer.route, consumer.group)
        self._pinning = PinWriter(root, consumer.disk, consumer.route, consumer.group, log_id, "drain")

    def put_back(self, letters: Sequence[Record]) -> None:
        """Send the dead letters after the cursor to their original routes, and move the cursor."""
        consumer = self._consumer
        head = consumer.log.head()
        handover = Handover(
            after=consumer.cursor.effective,
            first=letters[0].sequence,
            last=letters[-1].sequence,
            reason="put back",
            tries=0,
            dead_letter=None,
            at_ns=consumer.now_ns(),
            head=0 if head is None else head.sequence,
        )
        routes: set[str] = set()
        for number, letter in enumerate(letters):
            try:
                routes.add(route := self._copy(letter, handover).route)
                consumer.log.root.require_route(route)
            except (InvalidInput, NotFound):
                if number:
                    self.put_back(letters[:number])
                raise
            if len(routes) > ROUTES_MAX:
                self.put_back(letters[:number])
                self.put_back(letters[number:])
                return
        self._file.begin(handover)
        self._execute(handover, letters)

    def finish(self) -> int:
        """Finish the handover of an earlier process; return the number of records given up."""
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
        log = self._consumer.log
        records = list(log.records(self._consumer.route, handover.first, handover.last))
        self._execute(handover, records, SentBefore(log, handover.position))
        return 0 if handover.dead_letter is None else len(records)

    def _copy(self, record: Record, handover: Handover) -> Record:
        if handover.dead_letter is None:
            return original(record, self._origin.log_id, self._consumer.log.root.path)
        return dead_letter(record, self._origin.headers(handover.reason, handover.tries), handover.dead_letter)

    def _execute(self, handover: Handover, records: Sequence[Record], sent_before: SentBefore | None = None) -> None:
        consumer = self._consumer
        copies = [self._copy(record, handover) for record in records]
        self._pinning.pin(dict.fromkeys(sorted({copy.route for copy in copies}), handover.position))
        try:
            durable = send(self._daemon, payloads(copies), seed=self._origin.seed(handover), sent_before=sent_before)
        except Undeliverable as error:
            sequence = records[error.sent].sequence
            place = f"{consumer.route} {sequence} --group {consumer.group}"
            set_ = command_line(consumer.log.root.path, f"cursor set {place}")
            raise InvalidInput(
                f"{consumer.named(sequence, sequence)}: cannot be sent: {error}",
                hint=f"raise request_max_bytes of the daemon, or skip this record: {set_}; then start wald-drain again",
            ) from error
        consumer.commit(handover.last)
        self._end()
        what = "1 record" if len(records) == 1 else f"{len(records)} records"
        if handover.dead_letter is None:
            what += " put back"
        else:
            what = f"given up: {handover.reason}; {what} sent to {handover.dead_letter}"
        if durable:
            what += f" as {Consumer.span(durable[0].first, durable[-1].last)}"
        self._report(f"{consumer.named(handover.first, handover.last)}: {what}")

    def _end(self) -> None:
        """Clear the line, then remove the pin; the next start removes a pin that has no line."""
        self._file.end()
        self._pinning.unpin()


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    try:
        for record in records:
            batch.append(record)
            size += len(record.value)
            if len(batch) == _RECORDS_MAX or size >= _BYTES_MAX:
                yield batch
                batch, size = [], 0
    except Damaged:  # after the records before the damage
        if batch:
            yield batch
        raise
    if batch:
        yield batch
