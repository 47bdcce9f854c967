"""Feeding a route to a command without workers: batch after batch, until there is no more, or a signal stops it.

    read ─▶ try ─▶ exit 0 ─────────────────────────▶ cursor
             ▲       │ else
             └─ pause ┤ in halves, from the third failure on
                      └ after the last try of a single record ─▶ handed over to the dead-letter route ─▶ cursor

A record that is too large for a dead letter ends the run with the cursor just before it.

What was interrupted before the cursor moved is done again by the next start: the command gets the same records again,
or the handover is finished. If a command outlives its drain, the next start waits for it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import count

from wald_drain.attempt import Attempts
from wald_drain.counts import Result
from wald_drain.handover import HandoverFile, Handovers
from wald_drain.job import Drain, disk_failures, variables
from wald_drain.leftovers import Leftovers, move_past, require_no_gaps
from wald_drain.portions import Portion, portions
from wald_drain.retries import NextStep, ending, failure, is_failure, next_step, pause_seconds, reason, tries_of
from wald_drain.runner import Runner


class Feed:
    """Job of a drain without workers; ``runner`` starts its commands."""

    def __init__(self, drain: Drain, runner: Runner) -> None:
        self._drain = drain
        self._runner = runner
        self._consumer, self._job = drain.consumer, drain.job
        self._given_up = 0

    def run(self) -> int:
        """Run to the end of the route, if the job exits there, or until ``stop`` is set; return how many were given up.

        Raises:
            NotFound: there is no such route, or records that the group has not processed were reclaimed.
            Locked: another process drains the route for this group.
            Refused: workers have processed records above the cursor.
            Damaged: the cursor cannot be trusted, or a record cannot be read; the cursor stays before that record.
            InvalidInput: the command cannot be run, or a record is too large for a dead letter.
            Unavailable: records are to be given up, and no daemon runs; the cursor stays before them.
            DiskFailure: the disk is full, or fails.
        """
        with disk_failures(self._consumer.log.root):
            self._run()
        return self._given_up

    def _run(self) -> None:
        consumer, job = self._consumer, self._job
        root, route, group, disk = consumer.log.root, consumer.route, consumer.group, consumer.disk
        with ExitStack() as held:
            file = held.enter_context(HandoverFile(root, route, group, disk))
            attempts = held.enter_context(Attempts(root, route, group, disk))
            handovers = Handovers(
                consumer, file, daemon=job.daemon, report=self._drain.report, letter_max_bytes=job.letter_max_bytes
            )
            if not attempts.wait(self._drain.stop, self._drain.report_of_route):
                return
            self._given_up += handovers.finish()
            move_past(attempts, consumer, self._drain.report)
            with Leftovers(consumer) as leftovers:
                if not leftovers.wait(self._drain.stop, self._drain.report_of_route):
                    return
                require_no_gaps(consumer, leftovers, job.command)
            consumer.enter(self._drain.report)
            while True:
                for portion in portions(consumer.unprocessed(), records_max=job.records_max):
                    step = self._process(portion, attempts, handovers)
                    if step is NextStep.LEAVE:
                        return
                    if step is NextStep.SKIPPED:
                        break
                else:
                    if job.exit_at_end or not consumer.more_come(self._drain.stop):
                        return

    def _process(self, portion: Portion, attempts: Attempts, handovers: Handovers) -> NextStep:
        """Have the command process a portion, or give up what fails in it.

        Returns:
            COMMIT; LEAVE if drain stopped before the end; SKIPPED if records are to be read again, after the cursor.
        """
        parts = [portion]
        while parts:
            part = parts.pop()
            match self._try(part, attempts, handovers, halved=part is not portion):
                case NextStep.LEAVE | NextStep.SKIPPED as step:
                    return step
                case NextStep.HALVE:
                    parts.extend(reversed(part.halves()))
        return NextStep.COMMIT

    def _try(self, part: Portion, attempts: Attempts, handovers: Handovers, *, halved: bool) -> NextStep:
        """Have the command process a part; return what follows, which for COMMIT and GIVE_UP is done already."""
        job = self._job
        stdin = part.encoded(job.stdin_format)
        tries = tries_of(part.count, halved=halved, tries=job.tries)
        number = 1
        for runs in count(1):
            if not attempts.wait(self._drain.stop, self._drain.report_of_route) or self._drain.is_stopping:
                return NextStep.LEAVE
            if runs > 1 and self._consumer.cursor.sequence >= part.first:
                self._drain.report_of_route(f"the cursor was moved past record {part.first}; going on behind it")
                return NextStep.SKIPPED
            exit_code = self._run_command(attempts, part, stdin, variables(self._consumer, part, number))
            step = next_step(exit_code, number=number, tries=tries, count=part.count, stopping=self._drain.is_stopping)
            if step is NextStep.COMMIT:
                self._consumer.commit(part.last)
                self._drain.counts.processed(part.count, now_ns=self._consumer.now_ns())
                return step
            seconds = pause_seconds(1 if step is NextStep.HALVE else runs)
            named = self._consumer.named(part.first, part.last)
            self._drain.report(failure(named, step, exit_code, number, job.tries, seconds))
            if step is NextStep.GIVE_UP:
                handovers.give_up(
                    part.records[0], reason(ending(exit_code), number), tries=number, route=job.dead_letter
                )
                self._given_up += 1
                self._drain.counts.gave_up(1)
                return step
            if step is NextStep.LEAVE or self._drain.stop.wait(seconds):
                return NextStep.LEAVE
            if step is NextStep.HALVE:
                return step
            number += step is NextStep.RETRY
        raise AssertionError("unreachable")

    def _run_command(self, attempts: Attempts, part: Portion, stdin: bytes, environment: dict[str, str]) -> int:
        """Run the command and count the run; returns its exit code."""
        began = time.monotonic()
        exit_code = attempts.run(self._runner, stdin, environment, first=part.first, last=part.last)
        now = time.monotonic()
        failed = Result.FAILURE if is_failure(exit_code) else Result.LATER
        self._drain.counts.ran(failed if exit_code else Result.SUCCESS, now - began, now=now)
        return exit_code
