"""Feeding a route to a command: batch after batch, until there is no more, or a signal says stop.

    take ─▶ try ─▶ exit 0 ──────────────────────────────────────────────▶ cursor
             ▲       │ else
             └─ pause ┴ after the last try: tell the file ─▶ dead letters ─▶ cursor ─▶ clear the file

A record that is too large for a dead letter ends it; the records before that one have been given up by then, so whoever
moves the cursor behind it passes over nothing else.

Whatever is interrupted before the cursor has moved is done again by the next start: the command gets the same records,
or what the file tells is handed over, wholly.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path

from sidecars.drain.attempt import attempt
from sidecars.drain.deadletters import Origin, Undeliverable, fits, headers_of, payloads, prepare, seed_of, send
from sidecars.drain.handover import Handover, HandoverFile
from sidecars.drain.portions import Form, Portion, portions
from sidecars.drain.verdict import Verdict, ending, judge, pause_seconds, reason
from wald.errors import Damaged, DiskFailure, InvalidInput
from wald.format.framing import REQUEST_MAX_BYTES
from wald.format.record import Record
from wald.log import Log
from wald.store.cursors import CursorState
from wald.store.disk import Disk

_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for.

    Attributes:
        records_max: how many the command gets at a time.
        tries: how often, before they are given up.
        daemon: the root of the log, or the daemon's socket.
        letter_max_bytes: of a dead letter with a single record; what is longer is not even tried.
    """

    route: str
    group: str
    command: tuple[str, ...]
    form: Form
    records_max: int
    tries: int
    dead_letter: str
    daemon: Path
    exit_at_end: bool
    letter_max_bytes: int = REQUEST_MAX_BYTES


class Drain:
    """One job at work.

    Args:
        stop: once it is set no command is started any more.
        tell: gets a line for every failed try and every batch given up.
        on_damage: gets what cannot be read, which is passed over.
        now_ns: the time, ns since 1970.
    """

    def __init__(
        self,
        log: Log,
        job: Job,
        *,
        disk: Disk,
        stop: threading.Event,
        tell: Callable[[str], None],
        on_damage: Callable[[Damaged], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._log = log
        self._job = job
        self._disk = disk
        self._stop = stop
        self._tell = tell
        self._on_damage = on_damage
        self._now_ns = now_ns

    def run(self) -> None:
        """Return at the end, if the job is to exit there, or once ``stop`` is set.

        Raises:
            NotFound: no such route, or records that the group has not processed were reclaimed.
            Locked: the route is being drained for this group already.
            Damaged: the cursor cannot be trusted.
            InvalidInput: the command cannot be run, or a record is too large for a dead letter.
            Unavailable: records are to be given up and there is no daemon; the cursor is in front of them.
            DiskFailure: the disk is full, or fails.
        """
        try:
            self._run()
        except OSError as error:
            if error.errno not in _DISK_FAILS:
                raise
            raise DiskFailure(
                f"{error.filename or self._log.root.routes}: {error.strerror}; nothing is lost",
                hint=f"df -h {self._log.root.path}; then start wald-drain again, which goes on behind the cursor",
            ) from error

    def _run(self) -> None:
        job = self._job
        with HandoverFile(self._log.root, job.route, job.group, self._disk) as file:
            self._finish_handover(file)
            while True:
                for portion in portions(self._unprocessed(), records_max=job.records_max):
                    if self._stop.is_set() or not self._process(portion, file):
                        return
                if job.exit_at_end or not self._more_come():
                    return

    def _process(self, portion: Portion, file: HandoverFile) -> bool:
        """Have the command process a portion, or give it up; False if it was left because of a stop."""
        job = self._job
        stdin = portion.encoded(job.form)
        for number in count(1):
            exit_code = attempt(job.command, stdin, self._variables(portion, number))
            verdict = judge(exit_code, number=number, tries=job.tries, stopping=self._stop.is_set())
            if verdict is Verdict.COMMIT:
                self._commit(portion.last)
                return True
            again = f", again in {pause_seconds(number):g} s" if verdict is Verdict.RETRY else ""
            self._tell(
                f"{self._named(portion.first, portion.last)}: {ending(exit_code)}, try {number} of {job.tries}{again}"
            )
            if verdict is Verdict.GIVE_UP:
                self._give_up(portion, reason(exit_code, job.tries), file)
                return True
            if verdict is Verdict.LEAVE or self._stop.wait(pause_seconds(number)):
                return False
        raise AssertionError("unreachable")

    def _give_up(self, portion: Portion, why: str, file: HandoverFile) -> None:
        job = self._job
        prepare(job.daemon, self._log.root, job.dead_letter)  # before the file: without a daemon nothing is begun
        after = self._log.cursor(job.route, job.group).effective
        handover = Handover(after, portion.first, portion.last, why, job.tries, job.dead_letter, self._now_ns())
        headers = headers_of(handover, self._origin())
        records = list(takewhile(lambda record: fits(record, headers, bytes_max=job.letter_max_bytes), portion.records))
        if records:
            handover = replace(handover, last=records[-1].sequence)
            file.begin(handover)
            self._hand_over(handover, records, file)
        if len(records) < portion.count:
            sequence = portion.records[len(records)].sequence
            raise self._undeliverable(sequence, f"more than {job.letter_max_bytes} bytes", "mend the command")

    def _finish_handover(self, file: HandoverFile) -> None:
        """What an earlier drain has begun is done as it was begun."""
        handover = file.begun()
        cursor = self._log.cursor(self._job.route, self._job.group)
        if handover is None or cursor.state not in (CursorState.VALID, CursorState.ABSENT):
            return
        if cursor.effective != handover.after:  # it was finished but for this, or somebody has moved the cursor
            file.end()
            return
        job = self._job
        records = self._log.read(job.route, handover.first, handover.last, on_damage=self._on_damage)
        self._hand_over(handover, list(records), file)

    def _hand_over(self, handover: Handover, records: Sequence[Record], file: HandoverFile) -> None:
        """Dead letters, cursor, file, in this order: each is done again if what follows it was not."""
        job = self._job
        origin = self._origin()
        letters = payloads(records, headers_of(handover, origin))
        try:
            durable = send(job.daemon, handover.dead_letter, letters, seed=seed_of(handover, origin))
        except Undeliverable as error:
            sequence = records[error.sent].sequence
            raise self._undeliverable(sequence, str(error), "raise request_max_bytes of the daemon") from error
        self._commit(handover.last)
        file.end()
        named = self._named(handover.first, handover.last)
        where = f" as {durable[0].first} to {durable[-1].last}" if durable else ""
        self._tell(
            f"{named}: given up: {handover.reason}; {_records(len(records))} sent to {handover.dead_letter}{where}"
        )

    def _undeliverable(self, sequence: int, words: str, remedy: str) -> InvalidInput:
        """The error about a record that cannot be given up either."""
        job = self._job
        cursor = f"wald --root {self._log.root.path} cursor set {job.route} {sequence} --group {job.group}"
        return InvalidInput(
            f"{self._named(sequence, sequence)}: cannot be a dead letter: {words}",
            hint=f"{remedy}, or pass over this record: {cursor}; then start wald-drain again",
        )

    def _origin(self) -> Origin:
        return Origin(self._log.identity.log_id, self._job.route, self._job.group)

    def _commit(self, sequence: int) -> None:
        now = datetime.fromtimestamp(self._now_ns() / 1e9, UTC).isoformat(timespec="seconds")
        self._log.move_cursor(self._job.route, sequence, self._job.group, disk=self._disk, now=now)

    def _unprocessed(self) -> Iterator[Record]:
        """What is there now behind the cursor."""
        return self._log.read(self._job.route, "cursor", group=self._job.group, on_damage=self._on_damage)

    def _more_come(self) -> bool:
        """Wait until there is a record behind the cursor; False if ``stop`` was set instead."""
        job = self._job
        coming = self._log.batches(
            job.route,
            "cursor",
            group=job.group,
            limit=1,
            follow=True,
            cancel=self._stop,
            on_damage=self._on_damage,
        )
        return next(coming, None) is not None

    def _variables(self, portion: Portion, number: int) -> dict[str, str]:
        return {
            "WALD_ROUTE": self._job.route,
            "WALD_GROUP": self._job.group,
            "WALD_FIRST": str(portion.first),
            "WALD_LAST": str(portion.last),
            "WALD_COUNT": str(portion.count),
            "WALD_TRY": str(number),
        }

    def _named(self, first: int, last: int) -> str:
        return f"{self._job.route} {first}" if first == last else f"{self._job.route} {first} to {last}"


def _records(number: int) -> str:
    return "1 record" if number == 1 else f"{number} records"
