"""What the journal of a work group says of its deliveries: its lines carried out again, and written anew."""

from __future__ import annotations

from collections.abc import Iterator

from wald.format.work import Commit, Line, Page, Start
from wald.work.deliveries import Deliveries
from wald.work.window import Run


def replay(deliveries: Deliveries, line: Line) -> None:
    """Carry out a line; what was out is free again, as its consumer is gone."""
    match line:
        case Start():
            deliveries.window.end = max(deliveries.window.end, line.end)
        case Page():
            deliveries.window.put_page(line.first, line.tries)
            for sequence, due_ns in line.due:
                deliveries.delay(sequence, due_ns)
        case Commit():
            for first, last in line.done:
                deliveries.finish_all(Run(first, last))
            delivered = [run for held in line.out for run in held.runs]
            for first, last in (*line.taken_in, *delivered):  # so that what lies between two leases is taken in, too
                if first >= deliveries.window.end:
                    deliveries.take_in(Run(first, last))
            for sequence, due_ns in line.due:
                deliveries.delay(sequence, due_ns)
            for first, last in delivered:
                deliveries.window.count_try(Run(first, last))


def pages(deliveries: Deliveries) -> Iterator[Page]:
    """The lines that say what is open, and how often it was delivered."""
    due = deliveries.due_times()
    for first, tries in deliveries.window.pages():
        waiting = [(s, due[s]) for s in Run(first, first + len(tries) - 1).among(due)] if due else []
        yield Page(first, tries, waiting)
