"""A drain from its start to its end.

    leftovers of earlier drains ─▶ the group is opened ─▶ a thread for each worker ─▶ the group is closed

A start waits for all commands that earlier drains have left running, however many workers it has. So a record is never
with two commands. An error of a worker ends all of them, once their commands have ended. A record that cannot be read
ends them when no command runs and no earlier record has failed. After a full disk, drain opens the group again once
there is space. What commands have done until then is in their state files, whose space is allocated, so nothing is
processed twice.
"""

from __future__ import annotations

import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from wald.errors import DISK_ERRORS, DISK_FULL, Damaged, DiskFailure, GivenUp, Interrupted, NotFound
from wald.exposition import serving
from wald.format.ledger_lines import decode_line
from wald.format.names import COMMAND_SUFFIX
from wald.format.records import Record
from wald.hints import command_line, room_commands
from wald.log import Log
from wald.loop import stop_on_signals, threads_without_signals
from wald.retention.cursors import CursorState
from wald.retention.progress import last_sequences
from wald.work.group import WorkGroup
from wald.work.journal import discard, recover_progress
from wald.work.ownership import command_files, done_above, running, worker_name, workers_of
from wald.work.window import runs_of
from wald_drain.process import (
    KILLED_TOO,
    LINE_BYTES,
    Runner,
    StateFile,
    check_command,
    cursor_identity,
    ending,
    is_failure,
    pause_seconds,
    runners_for,
)
from wald_drain.redrive import Consumer, HandoverFile, Handovers
from wald_drain.worker import Counts, Job, RunContext, Shared, Worker, of_drain

OUTLIVED = "processed by a command that has outlived its wald-drain, or a full disk"


class Leftovers:
    """State files of earlier drains, which stay open until ``held`` is closed."""

    def __init__(self, consumer: Consumer, held: ExitStack) -> None:
        self._consumer = consumer
        root, route, group = consumer.log.root, consumer.route, consumer.group
        directory = root.cursor_directory(route)
        workers: list[int | None] = [*workers_of(directory, group)]
        if (directory / f"{group}{COMMAND_SUFFIX}").exists():  # of a drain before work groups were strict
            workers.append(None)
        self._files = [held.enter_context(StateFile(root, route, group, worker, consumer.disk)) for worker in workers]

    def wait(self, stop: threading.Event, report: Callable[[str], None]) -> bool:
        """Wait until no command runs; return False if ``stop`` is set first."""
        return all(each.wait(stop, report) for each in self._files)

    def move_cursor(self, report: Callable[[str], None]) -> None:
        """Move the cursor past the records that the command of a strict group has processed.

        A cursor that was set in the meantime takes precedence, even if it was set to the same position.
        """
        consumer = self._consumer
        for each in self._files:
            found = _processed_in_order(each)
            if found is None:
                continue
            identity, first, last = found
            if identity == cursor_identity(consumer.cursor.path):
                consumer.commit(last)
                report(f"{consumer.named(first, last)}: {OUTLIVED}")
            each.settle()

    def require_order(self, command: tuple[str, ...]) -> None:
        """Check that a strict group does not redeliver records that workers have processed."""
        consumer = self._consumer
        log, route, group = consumer.log, consumer.route, consumer.group
        if consumer.cursor.state is CursorState.ABSENT:
            discard(log.root, consumer.disk, route, group)  # of a removed group with this name
        else:
            found = recover_progress(log, route, group)
            runs = [run for each in self._files if (run := each.last_run()) is not None and run.is_processed]
            if found.done or any(sequence > found.floor for run in runs for sequence in run.sequences):
                raise done_above(log, route, group, found.floor, shlex.join(command))
        for each in self._files:
            each.remove()

    def settle(self, work: WorkGroup, report: Callable[[str], None]) -> None:
        """Acknowledge the records that commands of workers have processed, and count failed tries.

        If all processes were killed, for example by the OOM killer, the try of a command with a single record has
        failed.
        """

        def report_runs(sequences: Collection[int], text: str) -> None:
            for first, last in runs_of(sorted(sequences)):
                report(f"{self._consumer.named(first, last)}: {text}")

        for each in self._files:
            run = each.last_run()
            if run is None or each.worker is None:
                continue
            worker, sequences = worker_name(each.worker), run.sequences
            if run.is_processed:
                refused = {refusal.sequence for refusal in work.ack(worker, sequences)}
                report_runs([sequence for sequence in sequences if sequence not in refused], OUTLIVED)
                report_runs(refused, f"{OUTLIVED}; processing it again, as the group's journal does not record it")
                continue
            if run.outcome is None:
                how = KILLED_TOO if run.is_started else ""
            else:
                exit_code, error = run.outcome
                how = ending(exit_code) if is_failure(exit_code) and not error else ""
            if how and len(sequences) == 1 and run.cursor is None:
                work.nack(worker, sequences, reason=how, tries=run.number)
                if work.failed(sequences[0]):  # otherwise it is done by now, or skipped
                    report_runs(sequences, f"{how}, try {run.number}, in an earlier wald-drain, or with a full disk")
        for each in self._files:
            each.remove()


def _processed_in_order(file: StateFile) -> tuple[tuple[int, int], int, int] | None:
    """Return the cursor identity and the first and last record of a successful strict run."""
    run = file.last_run()
    if run is not None and run.cursor is not None and run.is_processed:
        return run.cursor, run.sequences[0], run.sequences[-1]
    if file.worker is None:
        match decode_line(file.path.read_bytes()[:LINE_BYTES]):
            case {"cursor": [inode, changed], "first": int(first), "last": int(last), "exit_code": 0, "error": 0}:
                return (inode, changed), first, last
    return None


_PORTION_MAX_BYTES = 8 << 20  # of values, so that every lease fits into memory
_WAIT_SECONDS = 0.2  # for a record, between two checks of whether drain is over
_LONG_SECONDS = 60.0  # after which a full disk is another one
_NAMED = 5  # processes, of many workers
_LEFT = b"wald-drain: interrupted; running commands continue, and the next start waits for them\n"


def feed(
    root: Path,
    route: str,
    group: str,
    job: Job,
    *,
    workers: int,
    time_limit: float | None,
    metrics: str | None,
    report: Callable[[str], None],
) -> None:
    """Feed ``route`` to the command of ``job`` until its end or a signal; raise GivenUp for dead letters."""
    check_command(job.command)
    counts, consumer = Counts(), Consumer(Log(root), route, group)
    with (
        stop_on_signals(_leave) as stop_requested,
        runners_for(job.command, workers, time_limit) as runners,  # forked before this process has other threads
        ExitStack() as held,
    ):
        context = RunContext(consumer, job, counts, threading.Event(), report, stop_requested)
        with threads_without_signals():
            held.enter_context(serving(metrics, lambda: of_drain(counts, route, group, time.monotonic())))
            held.enter_context(_stopping(context))
        given_up = drain(context, runners)
    if given_up:
        redriving = command_line(root, f"redrive {job.dead_letter}", program="wald-drain")
        raise GivenUp(
            f"{given_up} {'record of' if given_up == 1 else 'records of'} {route} given up",
            hint=f"{command_line(root, f'read {job.dead_letter} --format json')}; {redriving} puts them back",
        )


def drain(context: RunContext, runners: Sequence[Runner]) -> int:
    """Process records until the end, if the job ends there, or until ``stop`` is set."""
    given_up: list[int] = []  # the records that each step of a run has given up
    number = 1
    while True:
        began = time.monotonic()
        try:
            _run(context, runners, given_up)
            return sum(given_up)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            root = context.consumer.log.root
            failure = DiskFailure(
                f"{error.filename or root.routes}: {error.strerror}; nothing is lost",
                hint=f"{room_commands(root.path, error=error)}; start wald-drain again: it continues after the cursor",
            )
            failure.__cause__ = error
        except DiskFailure as error:  # of the daemon
            failure = error
        context.stop.clear()  # a worker that failed has set it
        if context.stop_requested.is_set():
            context.stop.set()
        cause = failure.__cause__
        if context.stop.is_set() or (isinstance(cause, OSError) and cause.errno not in DISK_FULL):
            raise failure
        number = 1 if time.monotonic() - began > _LONG_SECONDS else number
        context.report(f"{failure.message}; retrying in {pause_seconds(number):g} s")
        if context.stop.wait(pause_seconds(number)):
            return sum(given_up)
        number += 1


def _run(context: RunContext, runners: Sequence[Runner], given_up: list[int]) -> None:
    consumer, job = context.consumer, context.job
    root, route, group, disk = consumer.log.root, consumer.route, consumer.group, consumer.disk
    with ExitStack() as held:
        file = held.enter_context(HandoverFile(root, route, group, disk))
        leftovers = Leftovers(consumer, held)
        if not leftovers.wait(context.stop, context.report_of_route):
            return
        given_up.append(Handovers(consumer, file, daemon=job.daemon, report=context.report).finish())
        leftovers.move_cursor(context.report)
        if context.is_strict:
            leftovers.require_order(job.command)
        if consumer.cursor.state is CursorState.ABSENT:
            consumer.report_new(context.report, with_workers=not context.is_strict)
        make = partial(WorkGroup, consumer.log, route, group, order=job.order, dead_letter=job.dead_letter)
        with threads_without_signals():
            work = held.enter_context(make(daemon=job.daemon, report=context.report, ownership=file))
        try:
            if not context.is_strict:
                leftovers.settle(work, context.report)
            _work(Shared(context, work), runners)
        finally:
            given_up.append(work.given_up)


def _work(shared: Shared, runners: Sequence[Runner]) -> None:
    consumer, leases = shared.context.consumer, _Leases(shared)
    with ExitStack() as held:
        workers = []
        for runner in runners:
            file = StateFile(consumer.log.root, consumer.route, consumer.group, runner.worker, consumer.disk)
            workers.append(Worker(shared, runner, held.enter_context(file)))
        with ThreadPoolExecutor(len(workers), "wald-drain-worker") as threads, threads_without_signals():
            working = [threads.submit(leases.work, worker) for worker in workers]
        for each in working:
            each.result()
        for worker in workers:
            worker.file.remove()


class _Leases:
    """Distributes records to workers until the drain is over."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._context = shared, shared.context
        self._end = self._last() if shared.context.job.exit_at_end else None
        self._lease = threading.Lock()  # one worker waits for a record, and the others for that one
        self._busy: set[str] = set()

    def work(self, worker: Worker) -> None:
        """Let a worker process records until the drain is over; an error of the worker ends the drain."""
        try:
            while records := self._next(worker.name):
                worker.process(records)
        except BaseException:
            self._context.stop.set()
            raise
        finally:
            self._busy.discard(worker.name)

    def _next(self, name: str) -> list[Record]:
        shared, job, consumer = self._shared, self._context.job, self._context.consumer
        self._busy.discard(name)
        with self._lease:
            while not self._is_over():
                for sequence in [each for each in list(shared.failures) if each <= shared.work.floor]:
                    shared.failures.pop(sequence, None)  # an operator has skipped it
                shared.require_letters()
                try:
                    got = shared.work.lease(name, job.records_max, _PORTION_MAX_BYTES, math.inf, _WAIT_SECONDS)
                except (Damaged, NotFound) as error:
                    if self._busy or shared.failures:
                        self._context.stop.wait(_WAIT_SECONDS)
                        continue
                    if isinstance(error, Damaged) and error.last:
                        raise Damaged(
                            error.message,
                            case="records-lost-behind-cursor",
                            root=consumer.log.root.path,
                            route=consumer.route,
                            last=error.last,
                            group=consumer.group,
                        ) from error
                    raise
                if got:
                    self._busy.add(name)
                    shared.recall(got)
                    return [delivery.record for delivery in got]
            return []

    def _is_over(self) -> bool:
        at_end = self._end is not None and self._shared.work.floor >= self._end
        return at_end or self._context.is_stopping

    def _last(self) -> int:
        """Return the route's current last record, or the first damaged one if later records are unknown."""
        log, route = self._context.consumer.log, self._context.consumer.route
        last = last_sequences(log.view()).get(route)
        if last is None:
            last = self._shared.work.floor
            try:
                for batch in log.batches(route, last + 1, on_missing="skip"):
                    last = batch.last_sequence
            except Damaged:
                return last + 1  # never processed: once all records before it are done, a lease raises this
        return last


def _leave() -> None:
    """End this process at once, as if it were killed: the next start repeats only the work that was not on disk."""
    with suppress(OSError):  # stderr is closed, or its disk is full
        os.write(2, _LEFT)
    os._exit(Interrupted.exit_code)


@contextmanager
def _stopping(context: RunContext) -> Iterator[None]:
    """Set ``stop`` once a signal has set ``stop_requested``, and report the commands that drain then waits for."""
    over = threading.Event()

    def forward() -> None:
        context.stop_requested.wait()
        context.stop.set()
        if not over.is_set() and (text := _describe_running(context.consumer)):
            context.report_of_route(text)

    threading.Thread(target=forward, name="wald-drain-stopping", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _describe_running(consumer: Consumer) -> str:
    files = command_files(consumer.log.root.cursor_directory(consumer.route), consumer.group)
    found = running(files, [os.getpid()]).values()
    own = [str(each.process) for commands in found for each in commands if not each.left]
    if not own:
        return ""
    named = ", ".join(own[:_NAMED]) + f" and {len(own) - _NAMED} more" * (len(own) > _NAMED)
    processes = "process" if len(own) == 1 else "processes"
    return f"stops once its commands have ended, {processes} {named}; Ctrl-C again leaves them to the next start"
