"""Replay of a work group's journal, its rewritten lines, and the progress that it shows while no owner runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from wald.files.cursor_directory import is_companion
from wald.format.names import WORK_SUFFIX
from wald.format.work import Commit, DeadRecord, FailureReason, JournalLine, JournalPage, JournalStart, WorkerLease
from wald.log import Log
from wald.retention.cursor_moves import EarlierReclaim
from wald.work.deliveries import Deliveries
from wald.work.journal import read_whole
from wald.work.window import Run, runs_of


class Failure(NamedTuple):
    """Reason why a record was last returned.

    Attributes:
        reason: as its worker gave it, or "".
        tries: failures that the workers counted; 0 if they do not count.
    """

    reason: str
    tries: int


class Replay:
    """State that the previous owner wrote. Leased records are free again, because their workers are gone.

    ``failures`` has the reasons of returned records, ``dead`` the records that are being given up.
    """

    def __init__(self, *, by_key: bool) -> None:
        self.deliveries = Deliveries(0, by_key=by_key)
        self.failures: dict[int, Failure] = {}
        self.dead: dict[int, DeadRecord] = {}

    def apply(self, line: JournalLine) -> None:
        window = self.deliveries.window
        match line:
            case JournalStart():
                window.floor, window.end = line.floor, line.end
            case JournalPage():
                window.put_page(line.first, line.tries)
                self._delay(line.due)
            case Commit():
                window.finish(line.done)
                for first, last in line.read:
                    self.deliveries.append(Run(first, last))
                self._delay(line.due)
                for held in line.leased:
                    for first, last in held.runs:
                        window.count_try(Run(first, last))
                for why in line.reasons:
                    record_failure(self.failures, why)
                self.dead |= {dead.sequence: dead for dead in line.dead}

    def end(self, floor: int) -> None:
        """Complete the replay with the position of the cursor."""
        self.deliveries.window.extend_to(floor)
        self.deliveries.finish_all(Run(0, floor))
        is_open = self.deliveries.window.is_open
        self.failures = {sequence: failure for sequence, failure in self.failures.items() if is_open(sequence)}
        self.dead = {sequence: dead for sequence, dead in self.dead.items() if is_open(sequence)}

    def _delay(self, due: Iterable[tuple[int, int]]) -> None:
        for sequence, due_ns in due:
            self.deliveries.delay(sequence, due_ns)


def record_failure(failures: dict[int, Failure], why: FailureReason) -> None:
    """Record why records were returned; the failures of a record never decrease."""
    new = Failure(why.reason, why.tries)
    for first, last in why.runs:
        for sequence in range(first, last + 1):
            before = failures.get(sequence, new)
            failures[sequence] = (
                new
                if why.reason and why.tries >= before.tries
                else Failure(why.reason or before.reason, max(why.tries, before.tries))
            )


def journal_lines(
    start: JournalStart,
    deliveries: Deliveries,
    failures: Mapping[int, Failure],
    dead: Mapping[int, DeadRecord],
    since_1970_ns: int,
) -> Iterator[JournalLine]:
    """Return the lines of a compacted journal; ``since_1970_ns`` is the time at 0 of the monotonic clock."""
    yield replace(start, floor=deliveries.window.floor, end=deliveries.window.end)
    due = deliveries.due_times()
    for first, tries in deliveries.window.pages():
        waiting = [(s, due[s]) for s in Run(first, first + len(tries) - 1).among(due)] if due else []
        yield JournalPage(first, tries, waiting)
    held: dict[int, WorkerLease] = {}
    for run, lease in deliveries.holdings():
        if lease.worker:
            entry = WorkerLease(lease.worker, lease.until_ns + since_1970_ns, [])
            held.setdefault(id(lease), entry).runs.append((run.first, run.last))
    alike: dict[Failure, list[int]] = {}
    for sequence, failure in failures.items():
        alike.setdefault(failure, []).append(sequence)
    why = [FailureReason(*failure, list(runs_of(sorted(sequences)))) for failure, sequences in alike.items()]
    if rest := Commit(extended=list(held.values()), reasons=why, dead=list(dead.values())):
        yield rest


@dataclass(frozen=True, slots=True)
class RecoveredProgress:
    """Progress of a group's workers by its journal.

    ``floor`` is the ack floor, at least the cursor; ``done`` records above it are done, ``dead`` are being given up.
    """

    floor: int
    done: int
    dead: int


def recover_progress(log: Log, route: str, group: str) -> RecoveredProgress:
    """Read the progress of a group that no process owns. Raise Damaged if its journal or a record is unreadable."""
    floor = log.cursor(route, group).effective
    path = log.root.cursor_directory(route) / f"{group}{WORK_SUFFIX}"
    if not is_companion(path, log.root.cursor(route, group)):
        return RecoveredProgress(floor, 0, 0)
    replay = Replay(by_key=False)
    read_whole(path, log.root, replay.apply)
    replay.end(floor)
    window = replay.deliveries.window
    done = 0
    if window.open:  # only the log shows which of the other sequences belong to this route
        skip = EarlierReclaim(log.root, route, group).skip
        for batch in log.batches(route, window.floor + 1, window.end - 1, on_missing=skip):
            sequences = range(batch.first_sequence, batch.last_sequence + 1)
            done += sum(window.floor < each < window.end and not window.is_open(each) for each in sequences)
    return RecoveredProgress(window.floor, done, len(replay.dead))
