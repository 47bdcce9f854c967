"""Where a group begins that has no cursor on a route yet: at the oldest record there is."""

from __future__ import annotations

from dataclasses import dataclass

from wald.store.retention.history import History
from wald.store.retention.missing import Wanted, count
from wald.store.segments.view import View


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a new group begins.

    Attributes:
        sequence: the first record that it has not processed; one that is missing, if no ledger says it was reclaimed.
        message: which records of the route were reclaimed before; "" if none were.
    """

    sequence: int
    message: str = ""


def beginning(view: View, route: str, group: str) -> Beginning:
    """Where ``group`` begins on ``route``, of which it has processed nothing.

    Raises:
        Damaged: the ledger that would say what was reclaimed is damaged.
    """
    oldest = view.segments[0].base_sequence if view.segments else 1
    if oldest == 1:
        return Beginning(1)
    history = History(view.root)
    sequence, _ = next(history.unexplained(1, oldest - 1), (oldest, oldest))
    last = sequence - 1
    gone = count(history.gone(1, last), Wanted(lambda _: 1, frozenset([route]), 1, last))
    if not gone.records:
        return Beginning(sequence)
    records = f"record {gone.first} was" if gone.first == gone.last else f"records {gone.first} to {gone.last} were"
    return Beginning(
        sequence, f"group {group} is new on route {route} and begins at record {sequence}: {records} reclaimed before"
    )
