"""What the journal of a work group says: its lines carried out again, and written anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wald.format.work import Commit, Dead, Line, Page, Start
from wald.work.deliveries import Deliveries
from wald.work.window import Run


class Replayed:
    """What the owner before had written; what was out is free again, as its consumers are gone.

    Attributes:
        deliveries: the records above the ack floor.
        reasons: why records came back the last time, if that was said.
        dead: what is being given up.
    """

    def __init__(self, *, by_key: bool) -> None:
        self.deliveries = Deliveries(0, by_key=by_key)
        self.reasons: dict[int, str] = {}
        self.dead: dict[int, Dead] = {}

    def end(self, floor: int) -> None:
        """Take in that there are no more lines, and the ack floor by the cursor."""
        self.deliveries.window.pass_over(floor)
        self.deliveries.finish_all(Run(0, floor))
        is_open = self.deliveries.window.is_open
        self.reasons = {sequence: reason for sequence, reason in self.reasons.items() if is_open(sequence)}
        self.dead = {sequence: dead for sequence, dead in self.dead.items() if is_open(sequence)}

    def carry_out(self, line: Line) -> None:
        """Carry out the next line."""
        deliveries = self.deliveries
        window = deliveries.window
        match line:
            case Start():
                window.floor, window.end = line.floor, line.end
            case Page():
                window.put_page(line.first, line.tries)
                self._delay(line.due)
            case Commit():
                window.finish(line.done)
                for first, last in line.taken_in:
                    deliveries.take_in(Run(first, last))
                self._delay(line.due)
                for held in line.out:
                    for first, last in held.runs:
                        window.count_try(Run(first, last))
                for why in line.why:
                    for first, last in why.runs:
                        self.reasons |= dict.fromkeys(range(first, last + 1), why.reason)
                self.dead |= {dead.sequence: dead for dead in line.dead}

    def _delay(self, due: Iterable[tuple[int, int]]) -> None:
        for sequence, due_ns in due:
            self.deliveries.delay(sequence, due_ns)


def pages(deliveries: Deliveries) -> Iterator[Page]:
    """The lines that say what is open, and how often it was delivered."""
    due = deliveries.due_times()
    for first, tries in deliveries.window.pages():
        waiting = [(s, due[s]) for s in Run(first, first + len(tries) - 1).among(due)] if due else []
        yield Page(first, tries, waiting)
