"""Feeding a route to a command: batch after batch, until there is no more, or a signal says stop.

    take ─▶ try ─▶ exit 0 ─────────────────────────▶ cursor
             ▲       │ else
             └─ pause ┤ in halves, from the third failure on
                      └ after the last try of a record alone ─▶ handed over to the dead-letter route ─▶ cursor

A record that is too large for a dead letter ends it; whoever moves the cursor behind it passes over nothing else.

Whatever is interrupted before the cursor has moved is done again by the next start: the command gets the same records,
or what was being handed over is handed over, wholly. A command that outlives its drain is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from wald.errors import DISK_ERRORS, DiskFailure
from wald.format.protocol import REQUEST_MAX_BYTES
from wald_drain.attempt import Attempts
from wald_drain.consumer import Consumer
from wald_drain.handing import Handing
from wald_drain.handover import HandoverFile
from wald_drain.portions import Form, Portion, portions
from wald_drain.verdict import Verdict, ending, judge, pause_seconds, reason, tries_of


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for.

    Attributes:
        records_max: how many the command gets at a time.
        tries: how often it gets a record alone before that is given up; None: until it succeeds.
        daemon: the root of the log, or the daemon's socket.
        letter_max_bytes: of a dead letter with a single record; what is longer is not even tried.
    """

    command: tuple[str, ...]
    form: Form
    records_max: int
    tries: int | None
    dead_letter: str
    daemon: Path
    exit_at_end: bool
    letter_max_bytes: int = REQUEST_MAX_BYTES


class Drain:
    """One job at work.

    Args:
        stop: once it is set no command is started any more.
        tell: gets a line for every failed try and every record given up.
    """

    def __init__(self, consumer: Consumer, job: Job, *, stop: threading.Event, tell: Callable[[str], None]) -> None:
        self._consumer = consumer
        self._job = job
        self._stop = stop
        self._tell = tell
        self._given_up = 0

    def run(self) -> int:
        """Return at the end, if the job is to exit there, or once ``stop`` is set: how many records were given up.

        Raises:
            NotFound: no such route, or records that the group has not processed were reclaimed.
            Locked: the route is being drained for this group already.
            Damaged: the cursor cannot be trusted, or what is behind it cannot be read; it stays in front of that.
            InvalidInput: the command cannot be run, or a record is too large for a dead letter.
            Unavailable: records are to be given up and there is no daemon; the cursor is in front of them.
            DiskFailure: the disk is full, or fails.
        """
        root = self._consumer.log.root
        try:
            self._run()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise DiskFailure(
                f"{error.filename or root.routes}: {error.strerror}; nothing is lost",
                hint=f"df -h {root.path}; then start wald-drain again, which goes on behind the cursor",
            ) from error
        return self._given_up

    def _run(self) -> None:
        consumer, job = self._consumer, self._job
        root, route, group, disk = consumer.log.root, consumer.route, consumer.group, consumer.disk
        with ExitStack() as held:
            file = held.enter_context(HandoverFile(root, route, group, disk))
            attempts = held.enter_context(Attempts(root, route, group, disk))
            handing = Handing(consumer, file, daemon=job.daemon, tell=self._tell, letter_max_bytes=job.letter_max_bytes)
            if not attempts.wait(self._stop, self._told_of_route):
                return
            self._given_up += handing.finish()
            self._finish_run(attempts)
            consumer.enter(self._tell)
            while True:
                for portion in portions(consumer.unprocessed(), records_max=job.records_max):
                    if not self._process(portion, attempts, handing):
                        return
                if job.exit_at_end or not consumer.more_come(self._stop):
                    return

    def _finish_run(self, attempts: Attempts) -> None:
        """The cursor moves behind what the command of an earlier drain has processed since that was killed."""
        ended = attempts.processed()
        if ended is not None:
            self._consumer.commit(ended.last)
            named = self._consumer.named(ended.first, ended.last)
            self._tell(f"{named}: processed by a command that has outlived its wald-drain")

    def _process(self, portion: Portion, attempts: Attempts, handing: Handing) -> bool:
        """Have the command process a portion, or give up what fails in it; False if some is left because of a stop."""
        parts = [portion]
        while parts:
            part = parts.pop()
            match self._tried(part, attempts, handing, halved=part is not portion):
                case Verdict.LEAVE:
                    return False
                case Verdict.HALVE:
                    parts.extend(reversed(part.halves()))
        return True

    def _tried(self, part: Portion, attempts: Attempts, handing: Handing, *, halved: bool) -> Verdict:
        """Have the command process a part; returns what becomes of it, COMMIT and GIVE_UP being done."""
        job = self._job
        stdin = part.encoded(job.form)
        tries = tries_of(part.count, halved=halved, tries=job.tries)
        number = 1
        for runs in count(1):
            if self._stop.is_set() or not attempts.wait(self._stop, self._told_of_route):
                return Verdict.LEAVE
            variables = self._variables(part, number)
            exit_code = attempts.run(job.command, stdin, variables, first=part.first, last=part.last)
            verdict = judge(exit_code, number=number, tries=tries, count=part.count, stopping=self._stop.is_set())
            if verdict is Verdict.COMMIT:
                self._consumer.commit(part.last)
                return verdict
            seconds = pause_seconds(1 if verdict is Verdict.HALVE else runs)
            self._tell(
                f"{self._consumer.named(part.first, part.last)}: {self._words(verdict, exit_code, number, seconds)}"
            )
            if verdict is Verdict.GIVE_UP:
                why = reason(exit_code, number)
                handing.give_up(part.records[0], why, tries=number, route=job.dead_letter)
                self._given_up += 1
                return verdict
            if verdict is Verdict.LEAVE or self._stop.wait(seconds):
                return Verdict.LEAVE
            if verdict is Verdict.HALVE:
                return verdict
            number += verdict is Verdict.RETRY
        raise AssertionError("unreachable")

    def _words(self, verdict: Verdict, exit_code: int, number: int, seconds: float) -> str:
        """What is told of a run that has failed."""
        told = ending(exit_code)
        if verdict is Verdict.LATER:
            return f"{told}, which says later, again in {seconds:g} s"
        tries = self._job.tries
        told += f", try {number}" if tries is None else f", try {number} of {tries}"
        match verdict:
            case Verdict.RETRY:
                return f"{told}, again in {seconds:g} s"
            case Verdict.HALVE:
                return f"{told}, in halves in {seconds:g} s"
        return told

    def _told_of_route(self, words: str) -> None:
        self._tell(f"{self._consumer.route}: {words}")

    def _variables(self, portion: Portion, number: int) -> dict[str, str]:
        return {
            "WALD_ROUTE": self._consumer.route,
            "WALD_GROUP": self._consumer.group,
            "WALD_FIRST": str(portion.first),
            "WALD_LAST": str(portion.last),
            "WALD_COUNT": str(portion.count),
            "WALD_TRY": str(number),
        }
