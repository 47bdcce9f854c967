"""What an earlier wald-drain has left, with workers or without: commands that still run, and what they have processed.

A start waits for all of them, whatever number of workers it has itself. So a record is never with two commands.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, Self

from wald.retention.cursors import CursorState
from wald.retention.handovers import PinWriter
from wald.work.journal import discard
from wald.work.ownership import done_above, workers_of
from wald.work.replay import recover_progress
from wald_drain.attempt import Attempts
from wald_drain.consumer import Consumer
from wald_drain.retries import KILLED_TOO, ending, is_failure
from wald_drain.worker_file import WorkerFile

OUTLIVED = "processed by a command that has outlived its wald-drain, or a full disk"


def move_past(attempts: Attempts, consumer: Consumer, report: Callable[[str], None]) -> None:
    """Move the cursor past what the command of a drain without workers has processed after that was killed."""
    ended = attempts.processed()
    if ended is not None:
        consumer.commit(ended.last)
        report(f"{consumer.named(ended.first, ended.last)}: {OUTLIVED}")


class FailedTry(NamedTuple):
    """A try of a single record that failed, and that its drain could not take in any more.

    Attributes:
        number: of the try.
        how: it ended, as text.
    """

    worker: int
    sequence: int
    number: int
    how: str


class Leftovers:
    """The files of the workers of earlier drains, until it is closed."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        place = consumer.log.root, consumer.route, consumer.group
        with ExitStack() as held:
            self._files = []
            for worker in workers_of(consumer.log.root.cursor_directory(consumer.route), consumer.group):
                self._files.append(WorkerFile(*place, worker, consumer.disk))
                held.callback(self._files[-1].close)
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    def wait(self, stop: threading.Event, report: Callable[[str], None]) -> bool:
        """Wait until no command of them is running; False if ``stop`` was set before that."""
        return all(each.wait(stop, report) for each in self._files)

    def processed(self) -> Iterator[tuple[int, list[int]]]:
        """Each worker and the records that its last command has processed."""
        for each in self._files:
            if sequences := each.processed():
                yield each.worker, sequences

    def failed(self) -> Iterator[FailedTry]:
        """What failed alone: its command says so, or was killed with its keeper and drain, as for a lack of memory."""
        for each in self._files:
            last = each.last_run()
            if last is None or len(last.sequences) != 1:
                continue
            (sequence,) = last.sequences
            if last.outcome is None:
                yield FailedTry(each.worker, sequence, last.number, KILLED_TOO)
                continue
            exit_code, error = last.outcome
            if is_failure(exit_code) and not error:
                yield FailedTry(each.worker, sequence, last.number, ending(exit_code))

    def remove(self) -> None:
        """Take the files away, once what they say is taken in."""
        for each in self._files:
            each.remove()


def require_no_gaps(consumer: Consumer, leftovers: Leftovers, command: tuple[str, ...]) -> None:
    """Take care that a drain without workers delivers nothing again that workers have processed.

    The cursor is moved to their ack floor. What is done above that, only workers can pass over.

    Raises:
        Refused: records above the ack floor are done, or are being given up.
        Damaged: the journal of the group, or a record above the ack floor, cannot be read.
    """
    log, route, group = consumer.log, consumer.route, consumer.group
    if consumer.cursor.state is CursorState.ABSENT:
        discard(log.root, consumer.disk, route, group)  # of a group of this name that was removed
        leftovers.remove()
        return
    stands = recover_progress(log, route, group)
    above = {each for _, sequences in leftovers.processed() for each in sequences if each > stands.floor}
    if stands.done or stands.dead or above:
        raise done_above(log, route, group, stands.floor, shlex.join(command))
    if stands.floor > consumer.cursor.effective:
        consumer.commit(stands.floor)
    # The workers were killed, or the power failed, after the last dead letter was recorded.
    PinWriter(log.root, consumer.disk, route, group, log.identity.log_id, "work").unpin()
    leftovers.remove()
