"""Feeding a route to several workers: each leases records of a work group and has its own command process them.

    start ─▶ what earlier drains have left ─▶ the group is opened ─▶ a thread for each worker ─▶ the group is closed

An error of a worker ends all of them, once their commands have ended. A record that cannot be read ends them when no
command runs and none before it has failed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from wald.errors import Damaged, NotFound
from wald.format.records import Record
from wald.retention.cursor_moves import start_position
from wald.retention.cursors import CursorState, new_group_warning
from wald.retention.progress import last_sequences
from wald.work.group import WorkGroup
from wald.work.ownership import worker_name
from wald.work.window import runs_of
from wald_drain.attempt import Attempts
from wald_drain.handover import HandoverFile, Handovers
from wald_drain.job import Drain, disk_failures
from wald_drain.leftovers import OUTLIVED, Leftovers, move_past
from wald_drain.portions import PORTION_MAX_BYTES
from wald_drain.runner import Runner
from wald_drain.worker import Shared, Worker
from wald_drain.worker_file import WorkerFile

_WAIT_SECONDS = 0.2  # for a record, before it is looked whether all is over


class Workers:
    """Carries out the job of a drain with a worker for each of ``runners``."""

    def __init__(self, drain: Drain, runners: Sequence[Runner]) -> None:
        self._drain = drain
        self._consumer, self._job = drain.consumer, drain.job
        self._runners = runners
        self._given_up = 0

    def run(self) -> int:
        """Run until all that existed at the start is settled, if the job exits there, or until ``stop`` is set.

        After a full disk it may be called again, and goes on.

        Returns:
            how many records became dead letters, with those of earlier calls.

        Raises:
            NotFound: there is no such route, or records that the group has not processed were reclaimed.
            Locked: another process works for this group.
            Damaged: the cursor or the journal cannot be trusted, or a record cannot be read.
            InvalidInput: the command cannot be run, or a record is too large for a dead letter.
            WaldError: a process that starts commands was killed.
            DiskFailure: the disk is full, or fails.
        """
        consumer = self._consumer
        with disk_failures(consumer.log.root), ExitStack() as held:
            file = held.enter_context(HandoverFile(consumer.log.root, consumer.route, consumer.group, consumer.disk))
            finished = self._finish_handover(file)
            leftovers = held.enter_context(Leftovers(consumer))
            if not finished or not leftovers.wait(self._drain.stop, self._drain.report_of_route):
                return self._given_up
            self._report_new()
            work = held.enter_context(self._opened(file))
            try:
                self._settle(leftovers, work)
                self._work(work)
            finally:
                self._given_up += work.given_up
        return self._given_up

    def _finish_handover(self, file: HandoverFile) -> bool:
        """Finish what a drain without workers has begun; False if it was to stop."""
        consumer, job = self._consumer, self._job
        with Attempts(consumer.log.root, consumer.route, consumer.group, consumer.disk) as attempts:
            if not attempts.wait(self._drain.stop, self._drain.report_of_route):
                return False
            self._given_up += Handovers(consumer, file, daemon=job.daemon, report=self._drain.report).finish()
            move_past(attempts, consumer, self._drain.report)
            return True

    def _settle(self, leftovers: Leftovers, work: WorkGroup) -> None:
        """Take in what became of the last commands of an earlier drain, or before the disk was full."""
        for worker, sequences in leftovers.processed():
            refused = {each.sequence for each in work.ack(worker_name(worker), sequences)}
            taken = [each for each in sequences if each not in refused]
            self._report_runs(taken, OUTLIVED)
            self._report_runs(refused, f"{OUTLIVED}, and again now, as the journal of the group does not know of it")
        for worker, sequence, number, how in leftovers.failed():
            work.nack(worker_name(worker), [sequence], reason=how, tries=number)
            if work.failed(sequence):  # else it is done by now, or passed over
                self._report_runs([sequence], f"{how}, try {number}, in an earlier wald-drain, or with a full disk")
        leftovers.remove()

    def _report_runs(self, sequences: Collection[int], text: str) -> None:
        for first, last in runs_of(sorted(sequences)):
            self._drain.report(f"{self._consumer.named(first, last)}: {text}")

    def _report_new(self) -> None:
        """Report what is to be known of a group that has no cursor yet."""
        consumer = self._consumer
        if consumer.cursor.state is CursorState.ABSENT:
            news = new_group_warning(consumer.log.root, consumer.route, consumer.group, with_workers=True)
            _, reclaimed = start_position(consumer.log.view(), consumer.route, consumer.group)
            for message in filter(None, (news, reclaimed)):
                self._drain.report(message)

    def _opened(self, file: HandoverFile) -> WorkGroup:
        consumer, job = self._consumer, self._job
        return WorkGroup(
            consumer.log,
            consumer.route,
            consumer.group,
            order=job.order,
            dead_letter=job.dead_letter,
            daemon=job.daemon,
            report=self._drain.report,
            ownership=file,
        )

    def _work(self, work: WorkGroup) -> None:
        consumer = self._consumer
        shared = Shared(self._drain, work)
        with ExitStack() as held:
            workers = []
            for runner in self._runners:
                place = consumer.log.root, consumer.route, consumer.group, runner.worker
                file = held.enter_context(WorkerFile(*place, consumer.disk))
                workers.append(Worker(shared, runner, file))
            leases = _Leases(shared)
            with ThreadPoolExecutor(len(workers), "wald-drain-worker") as threads:
                working = [threads.submit(leases.work, worker) for worker in workers]
            for each in working:
                each.result()
            for worker in workers:
                worker.file.remove()


class _Leases:
    """Gives records to workers until all is over."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._drain = shared, shared.drain
        self._end = self._last() if self._drain.job.exit_at_end else None
        self._lease = threading.Lock()  # so that one worker waits for a record, and the others for that one
        self._busy: set[str] = set()

    def work(self, worker: Worker) -> None:
        """Have a worker process what there is until all is over, which an error of it makes it.

        Raises:
            Damaged, NotFound: a record cannot be read.
        """
        try:
            while records := self._next(worker.name):
                worker.process(records)
        except BaseException:
            self._drain.stop.set()
            raise
        finally:
            self._busy.discard(worker.name)

    def _next(self, name: str) -> list[Record]:
        """Records for a worker; none if all is over."""
        shared, job = self._shared, self._drain.job
        self._busy.discard(name)
        with self._lease:
            while not self._is_over():
                shared.forget_passed()
                try:
                    got = shared.work.lease(name, job.records_max, PORTION_MAX_BYTES, math.inf, _WAIT_SECONDS)
                except (Damaged, NotFound):
                    if not self._busy and not shared.troubles:
                        raise
                    self._drain.stop.wait(_WAIT_SECONDS)
                    continue
                if got:
                    self._busy.add(name)
                    shared.recall(got)
                    return [delivery.record for delivery in got]
            return []

    def _is_over(self) -> bool:
        at_end = self._end is not None and self._shared.work.floor >= self._end
        return at_end or self._drain.is_stopping

    def _last(self) -> int:
        """The last record of the route now; the first one that is damaged, if what is behind that is not known."""
        log, route = self._drain.consumer.log, self._drain.consumer.route
        last = last_sequences(log.view()).get(route)
        if last is None:
            last = self._shared.work.floor
            try:
                for batch in log.batches(route, last + 1, on_missing="skip"):
                    last = batch.last_sequence
            except Damaged:
                return last + 1  # nothing gets past it: once all before it is done, a lease raises this
        return last
