"""What the journal of a work group says: its lines carried out again, and written anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from wald.format.work import Commit, DeadRecord, FailureReason, JournalLine, JournalPage, JournalStart, WorkerLease
from wald.work.deliveries import Deliveries
from wald.work.terms import Failure
from wald.work.window import Run, runs_of


class Replayed:
    """What the owner before had written; what was out is free again, as its consumers are gone.

    Attributes:
        deliveries: the records above the ack floor.
        failures: why records came back the last time, if that was said.
        dead: what is being given up.
    """

    def __init__(self, *, by_key: bool) -> None:
        self.deliveries = Deliveries(0, by_key=by_key)
        self.failures: dict[int, Failure] = {}
        self.dead: dict[int, DeadRecord] = {}

    def end(self, floor: int) -> None:
        """Take in that there are no more lines, and the ack floor by the cursor."""
        self.deliveries.window.pass_over(floor)
        self.deliveries.finish_all(Run(0, floor))
        is_open = self.deliveries.window.is_open
        self.failures = {sequence: failure for sequence, failure in self.failures.items() if is_open(sequence)}
        self.dead = {sequence: dead for sequence, dead in self.dead.items() if is_open(sequence)}

    def carry_out(self, line: JournalLine) -> None:
        """Carry out the next line."""
        deliveries = self.deliveries
        window = deliveries.window
        match line:
            case JournalStart():
                window.floor, window.end = line.floor, line.end
            case JournalPage():
                window.put_page(line.first, line.tries)
                self._delay(line.due)
            case Commit():
                window.finish(line.done)
                for first, last in line.read:
                    deliveries.take_in(Run(first, last))
                self._delay(line.due)
                for held in line.leased:
                    for first, last in held.runs:
                        window.count_try(Run(first, last))
                for why in line.reasons:
                    note(self.failures, why)
                self.dead |= {dead.sequence: dead for dead in line.dead}

    def _delay(self, due: Iterable[tuple[int, int]]) -> None:
        for sequence, due_ns in due:
            self.deliveries.delay(sequence, due_ns)


def note(failures: dict[int, Failure], why: FailureReason) -> None:
    """Take in why records came back; how often they have failed does not go down."""
    alike = Failure(why.reason, why.tries)
    for first, last in why.runs:
        for sequence in range(first, last + 1):
            before = failures.get(sequence, alike)
            failures[sequence] = (
                alike
                if why.reason and why.tries >= before.tries
                else Failure(why.reason or before.reason, max(why.tries, before.tries))
            )


def written(
    start: JournalStart,
    deliveries: Deliveries,
    failures: Mapping[int, Failure],
    dead: Mapping[int, DeadRecord],
    since_1970_ns: int,
) -> Iterator[JournalLine]:
    """All that is known, as lines.

    Args:
        start: whose journal it is.
        since_1970_ns: at 0 of the clock by which leases end.
    """
    yield replace(start, floor=deliveries.window.floor, end=deliveries.window.end)
    yield from _pages(deliveries)
    given: dict[Failure, list[int]] = {}
    for sequence, failure in failures.items():
        given.setdefault(failure, []).append(sequence)
    why = [FailureReason(*failure, list(runs_of(sorted(sequences)))) for failure, sequences in given.items()]
    if rest := Commit(extended=_held(deliveries, since_1970_ns), reasons=why, dead=list(dead.values())):
        yield rest


def _held(deliveries: Deliveries, since_1970_ns: int) -> list[WorkerLease]:
    """Who has what."""
    held: dict[int, WorkerLease] = {}
    for run, lease in deliveries.holdings():
        if lease.consumer:
            entry = WorkerLease(lease.consumer, lease.until_ns + since_1970_ns, [])
            held.setdefault(id(lease), entry).runs.append((run.first, run.last))
    return list(held.values())


def _pages(deliveries: Deliveries) -> Iterator[JournalPage]:
    """What is open, and how often it was delivered."""
    due = deliveries.due_times()
    for first, tries in deliveries.window.pages():
        waiting = [(s, due[s]) for s in Run(first, first + len(tries) - 1).among(due)] if due else []
        yield JournalPage(first, tries, waiting)
