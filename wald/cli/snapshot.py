"""What ``wald top`` says, as plain numbers: the last two looks of either kind in, one snapshot out.

    Pulse     what moves every second: the head, the sealer, the daemon         quick, whatever the size of the log
    Survey    what takes a walk through every segment: states, routes, disk     seconds at 10,000 segments

A rate is the difference of two looks by the time between them; None while there is only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from wald.store.retention.backlog import Form, Hold, Standing
from wald.store.retention.cursors import CursorState
from wald.store.retention.growth import Growth


class State(Enum):
    """What may become of a segment, from the oldest ones to the newest."""

    RELEASED = "released"
    FREE = "free"
    HELD_BACK = "held back"
    UNREADABLE = "unreadable"
    WAITING = "not sealed yet"
    """Cut, and nobody holds it back."""
    ACTIVE = "active"


def state_of(standing: Standing) -> State:
    """How the screen counts a segment."""
    if not standing.readable:
        return State.UNREADABLE
    if standing.pins:
        return State.HELD_BACK
    match standing.form:
        case Form.ACTIVE:
            return State.ACTIVE
        case Form.CUT:
            return State.WAITING
        case Form.RELEASED:
            return State.RELEASED
    return State.FREE


@dataclass(frozen=True, slots=True)
class Pulse:
    """One quick look.

    Attributes:
        taken: when, in seconds of a clock that only moves forward.
        durable_ns: append time of the last commit, ns since 1970; 0 before the first one.
        written_bytes: raw bytes of the log up to the head, from a point on that stays the same.
        waiting_segments: cut, and not sealed yet.
        sealed_segments, sealed_bytes: since the first look; raw bytes.
        daemon: who runs, in words; "" if nobody does.
    """

    taken: float
    sequence: int
    durable_ns: int
    written_bytes: int
    waiting_segments: int
    sealed_segments: int
    sealed_bytes: int
    daemon: str


@dataclass(frozen=True, slots=True)
class Amount:
    """So many segments, and what they take on disk."""

    segments: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """One look at everything.

    Attributes:
        taken: when it began, by the clock of :class:`Pulse`.
        last_sequences: of each route; None where it is not known.
        received: records of each route since the survey before; None in the first one.
        fifo_troubles: what keeps lines that were written to a FIFO from the log, in words.
    """

    taken: float
    states: Mapping[State, Amount]
    holds: Sequence[Hold]
    last_sequences: Mapping[str, int | None]
    received: Mapping[str, int] | None
    growth: Growth | None
    free_bytes: int
    total_bytes: int
    fifo_troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """What the last pulses add up to; ``durable_seconds`` is the age of the last commit, None before the first."""

    sequence: int
    durable_seconds: float | None
    records_per_second: float | None
    bytes_per_second: float | None
    waiting_segments: int
    sealed_segments: int
    sealed_bytes_per_second: float | None
    daemon: str


@dataclass(frozen=True, slots=True)
class Row:
    """One group of one route.

    Attributes:
        last_sequence: of the route; None if it is not known.
        received_per_second: records of the route; ``processed_per_second``: by the group.
        oldest_seconds: how long the first record it has not processed has been waiting; None if there is none.
        held_bytes: complete segments that it keeps from being reclaimed, alone or with others.
    """

    route: str
    last_sequence: int | None
    received_per_second: float | None
    group: str
    cursor: int
    state: CursorState
    retired: bool
    lag_records: int
    oldest_seconds: float | None
    processed_per_second: float | None
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Stock:
    """What the last surveys add up to.

    Attributes:
        age_seconds: since the newest of them began.
        rows: those that hold back most first.
        seconds_until_full: if nothing is reclaimed; None if nothing grows, or nobody can tell.
    """

    age_seconds: float
    states: Mapping[State, Amount]
    rows: tuple[Row, ...]
    free_bytes: int
    total_bytes: int
    growth_bytes_per_second: float | None
    seconds_until_full: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything on the screen; a part is None before its first look, and when that has failed."""

    root: str
    flow: Flow | None
    stock: Stock | None
    troubles: tuple[str, ...] = ()


def flow(pulses: Sequence[Pulse], *, now_ns: int) -> Flow | None:
    """What the last two pulses, or the only one, say."""
    if not pulses:
        return None
    before, after = pulses[0], pulses[-1]
    seconds = after.taken - before.taken
    return Flow(
        after.sequence,
        max(0.0, (now_ns - after.durable_ns) / 1e9) if after.durable_ns else None,
        _rate(after.sequence - before.sequence, seconds),
        _rate(after.written_bytes - before.written_bytes, seconds),
        after.waiting_segments,
        after.sealed_segments,
        _rate(after.sealed_bytes - before.sealed_bytes, seconds),
        after.daemon,
    )


def stock(surveys: Sequence[Survey], *, now: float, now_ns: int) -> Stock | None:
    """What the last two surveys, or the only one, say.

    Args:
        now: seconds, by the clock of the surveys.
    """
    if not surveys:
        return None
    before, after = surveys[0], surveys[-1]
    seconds = after.taken - before.taken
    lags = {(hold.cursor.route, hold.cursor.group): hold.lag.records for hold in before.holds}
    rows = [_row(hold, after, lags, seconds, now_ns) for hold in after.holds]
    rows.sort(key=lambda row: (-row.held_bytes, -row.lag_records, row.route, row.group))
    growth = after.growth
    return Stock(
        now - after.taken,
        after.states,
        tuple(rows),
        after.free_bytes,
        after.total_bytes,
        growth.bytes_per_second if growth else None,
        growth.seconds_until(after.free_bytes) if growth else None,
    )


def _row(hold: Hold, survey: Survey, lags: Mapping[tuple[str, str], int], seconds: float, now_ns: int) -> Row:
    cursor = hold.cursor
    received = processed = None
    if survey.received is not None:
        count = survey.received.get(cursor.route, 0)
        received = _rate(count, seconds)
        lag_before = lags.get((cursor.route, cursor.group))
        if lag_before is not None:  # a cursor that moved back has processed nothing
            processed = _rate(max(0, lag_before + count - hold.lag.records), seconds)
    return Row(
        cursor.route,
        survey.last_sequences.get(cursor.route),
        received,
        cursor.group,
        cursor.sequence,
        cursor.state,
        hold.retired,
        hold.lag.records,
        hold.lag.seconds(now_ns) if hold.lag.records else None,
        processed,
        hold.pinned_bytes,
    )


def _rate(difference: int, seconds: float) -> float | None:
    """None where it cannot be told: no time has passed, or the log is not the one of the look before."""
    return difference / seconds if seconds > 0 and difference >= 0 else None
