"""Work on executors: a function is called with each piece; results are returned as they become available.

A result is sent as an update of an accumulator. Spark passes it to the driver when a task ends, once for each task even
if it was tried several times. So the first result arrives while the last piece still waits, unlike with ``collect``,
and all executors work, unlike with ``toLocalIterator``. No rows are sent: a piece describes the work (a path and a
range, for example), the executor reads and writes, and the result is a summary.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from pyspark.accumulators import Accumulator, AccumulatorParam

from wald.errors import Unavailable, WaldError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = TypeVar("P")
_Outcome = tuple[int, bytes | WaldError | OSError]

_TASKS_PER_CORE = 64  # a task costs some 30 ms, so more pieces share tasks
_PR_SET_PDEATHSIG = 1
_TRACEBACK = "Traceback (most recent call last):"


def run(
    spark: SparkSession, pieces: Sequence[P], work: Callable[[P], bytes], *, on_done: Callable[[int], None]
) -> Generator[tuple[int, bytes], None, None]:
    """Call ``work`` with each piece on an executor; yield the number of each piece and its result, as they finish.

    The first ``next`` starts the job. Pieces are started in their order, so put the largest first. A piece is tried
    again after a failure, and after an executor was lost, so ``work`` must be repeatable. Closing the generator cancels
    the rest.

    Args:
        work: can be pickled, as the pieces: a function of a module that executors can import, or a frozen dataclass
            with ``__call__``. The results must be small, in total less than ``spark.driver.maxResultSize``.
        on_done: called in this thread with the number of each finished piece, before its result is yielded.
    """
    context, group, inbox = spark.sparkContext, f"wald {uuid.uuid4()}", _Inbox()
    task = _Task(work, context.accumulator(inbox, _Updates()))
    numbered = list(enumerate(pieces))
    count = min(len(numbered), _TASKS_PER_CORE * context.defaultParallelism)
    shares = [numbered[first::count] for first in range(count)]

    def wait_for_spark() -> None:
        end: Exception | None = None
        try:
            if shares:
                context.setJobGroup(group, "wald", interruptOnCancel=True)
                context.parallelize(shares, len(shares)).foreach(task)
        except Exception as error:  # noqa: BLE001 - raised below
            end = error
        inbox.queue.put(end)  # Spark passes on the update of a task before it counts the task as done

    thread = threading.Thread(target=wait_for_spark, daemon=True)
    thread.start()
    try:
        while (arrived := inbox.queue.get()) is not None:
            if isinstance(arrived, Exception):
                hint = "see the executors' logs; an executor that runs out of memory needs fewer cores"
                raise Unavailable(f"Spark has given up: {_reason(arrived)}", hint=hint) from arrived
            number, outcome = arrived
            if isinstance(outcome, Exception):
                raise outcome
            on_done(number)
            yield number, outcome
    finally:
        while thread.is_alive():
            with suppress(Exception):  # the JVM may have been killed; then the thread ends with an error
                context.cancelJobGroup(group)  # has no effect before the job has been submitted
            thread.join(0.2)


class _Inbox(list[_Outcome]):
    """The driver's accumulator value: additions go into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[_Outcome | Exception | None] = SimpleQueue()

    def extend(self, outcomes: Iterable[_Outcome]) -> None:
        for outcome in outcomes:
            self.queue.put(outcome)


class _Updates(AccumulatorParam[list[_Outcome]]):
    """Accumulator of outcomes: a list on an executor, the inbox on the driver."""

    def zero(self, value: list[_Outcome]) -> list[_Outcome]:  # noqa: ARG002
        return []

    def addInPlace(self, value1: list[_Outcome], value2: list[_Outcome]) -> list[_Outcome]:  # noqa: N802 - PySpark's
        value1.extend(value2)
        return value1


@dataclass(frozen=True, slots=True)
class _Task(Generic[P]):
    """Work of an executor on the pieces of one task."""

    work: Callable[[P], bytes]
    outcomes: Accumulator[list[_Outcome]]

    def __call__(self, share: list[tuple[int, P]]) -> None:
        end_with_parent()
        for number, piece in share:
            try:
                self.outcomes.add([(number, self.work(piece))])
            except (WaldError, OSError) as error:
                self.outcomes.add([(number, error)])


def end_with_parent(program: bytes = b"pyspark.daemon") -> None:
    """Make this process end when its parent ends, if ``program`` is on the parent's command line.

    PySpark forks workers from a separate process. If that process is killed with the driver, a worker would not notice
    until it has finished its piece, and would still write during the next run.
    """
    parent = os.getppid()
    try:
        forks_workers = program in Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return
    if forks_workers:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os.kill(os.getpid(), signal.SIGKILL)


def _reason(error: Exception) -> str:
    """Return the line of Spark's message that states the reason: the exception of Python, if there is one."""
    lines = str(error).splitlines()
    reason = lines[:1]
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            reason = list(takewhile(lambda each: not each.startswith("\tat "), lines[number + 1 :]))
            break
    return next((line.strip() for line in reversed(reason) if line.strip()), type(error).__name__)
