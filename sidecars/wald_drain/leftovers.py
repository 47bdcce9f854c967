"""Commands that an earlier wald-drain has left running, and the records that they have processed.

A start waits for all of them, however many workers it has. So a record is never with two commands.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from wald.format.ledger_lines import decode_line
from wald.format.names import COMMAND_SUFFIX
from wald.retention.cursors import CursorState
from wald.work.group import WorkGroup
from wald.work.journal import discard, recover_progress
from wald.work.ownership import done_above, worker_name, workers_of
from wald.work.window import runs_of
from wald_drain.process import KILLED_TOO, ending, is_failure
from wald_drain.redrive import Consumer
from wald_drain.state_file import LINE_BYTES, StateFile, cursor_identity

OUTLIVED = "processed by a command that has outlived its wald-drain, or a full disk"


@contextmanager
def leftovers_of(consumer: Consumer) -> Iterator[Leftovers]:
    root, route, group = consumer.log.root, consumer.route, consumer.group
    directory = root.cursor_directory(route)
    workers: list[int | None] = [*workers_of(directory, group)]
    if (directory / f"{group}{COMMAND_SUFFIX}").exists():  # of a drain before work groups were strict
        workers.append(None)
    with ExitStack() as held:
        files = [held.enter_context(StateFile(root, route, group, worker, consumer.disk)) for worker in workers]
        yield Leftovers(consumer, files)


class Leftovers:
    """State files of earlier drains."""

    def __init__(self, consumer: Consumer, files: Sequence[StateFile]) -> None:
        self._consumer = consumer
        self._files = files

    def wait(self, stop: threading.Event, report: Callable[[str], None]) -> bool:
        """Wait until no command runs; return False if ``stop`` was set before that."""
        return all(each.wait(stop, report) for each in self._files)

    def move_cursor(self, report: Callable[[str], None]) -> None:
        """Move the cursor past the records that the command of a strict group has processed.

        A cursor that was set since counts for more, even if it was set to its own position.
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
        """Check that a strict group does not deliver again what workers have processed."""
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
        """Acknowledge the records that commands of workers have processed, and count the tries that have failed.

        A single record that was with a command when all processes were killed, as for a lack of memory, has failed.
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
                report_runs(refused, f"{OUTLIVED}, and again now, as the group's journal does not record it")
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
    """Return the identity of the cursor and the first and last record of a strict run that has succeeded."""
    run = file.last_run()
    if run is not None and run.cursor is not None and run.is_processed:
        return run.cursor, run.sequences[0], run.sequences[-1]
    if file.worker is None:
        match decode_line(file.path.read_bytes()[:LINE_BYTES]):
            case {"cursor": [inode, changed], "first": int(first), "last": int(last), "exit_code": 0, "error": 0}:
                return (inode, changed), first, last
    return None
