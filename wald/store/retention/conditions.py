"""What keeps a segment, or that nothing does: under these conditions ``wald top`` and the metrics count segments."""

from __future__ import annotations

from enum import Enum

from wald.store.retention.backlog import SegmentStatus
from wald.store.segments.view import State


class Condition(Enum):
    """Conditions of segments, from those of the oldest to that of the newest."""

    RELEASED = "released"
    FREE = "free"
    HELD_BACK = "held back"
    UNREADABLE = "unreadable"
    WAITING = "not sealed yet"
    """Cut, and no cursor holds it back."""
    ACTIVE = "active"


def condition_of(status: SegmentStatus) -> Condition:
    """The condition under which a segment is counted."""
    if not status.readable:
        return Condition.UNREADABLE
    if status.pins:
        return Condition.HELD_BACK
    match status.state:
        case State.ACTIVE:
            return Condition.ACTIVE
        case State.CUT:
            return Condition.WAITING
        case State.RELEASED:
            return Condition.RELEASED
    return Condition.FREE
