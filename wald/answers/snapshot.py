"""The numbers of ``wald top`` and of the page: the last two samples of each kind in, one snapshot out.

    HeadSample    what moves every second: the head, the sealer, the daemon         quick, whatever the size of the log
    LogSample     what takes a walk through every segment: states, routes, disk     seconds at 10,000 segments

A rate is the difference of two samples divided by the time between them; None while there is only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wald.retention.backlog import Condition, GroupBacklog, Growth
from wald.retention.cursors import CursorState


@dataclass(frozen=True, slots=True)
class HeadSample:
    """One quick sample.

    Attributes:
        taken: when, in seconds of a clock that only moves forward.
        durable_ns: append time of the last commit, ns since 1970; 0 before the first one.
        written_bytes: raw bytes of the log up to the head, from a point on that stays the same.
        waiting_segments: cut, and not sealed yet.
        sealed_segments, sealed_bytes: since the first sample; raw bytes.
        daemon: which one runs, as text; "" if none does.
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
    """A number of segments, and their bytes on disk."""

    segments: int = 0
    stored_bytes: int = 0


class SegmentSeen(NamedTuple):
    """A segment, in little memory: there may be tens of thousands.

    Attributes:
        base: its first sequence.
        last: its last one; None if it is not known.
        is_damaged: whether something is wrong with it, which the problems of the sample say.
    """

    base: int
    condition: Condition
    stored_bytes: int
    is_damaged: bool = False
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LogSample:
    """One sample of the whole log.

    Attributes:
        taken: when it began, by the clock of :class:`HeadSample`.
        last_sequences: of each route; None if it is not known.
        received: records of each route since the sample before; None in the first one.
        fifo_problems: what keeps lines that were written to a FIFO from the log.
        segments: all of them, the released ones first.
        problems: what is wrong with segments, and what can be done about it.
        lost_routes: those with records whose directory is gone.
    """

    taken: float
    states: Mapping[Condition, Amount]
    groups: Sequence[GroupBacklog]
    last_sequences: Mapping[str, int | None]
    received: Mapping[str, int] | None
    growth: Growth | None
    free_bytes: int
    total_bytes: int
    fifo_problems: tuple[str, ...] = ()
    segments: tuple[SegmentSeen, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    lost_routes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Activity:
    """What the last head samples show; ``durable_seconds`` is the age of the last commit, None before the first."""

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
        oldest_seconds: how long its first unprocessed record has been waiting; None if there is none.
        held_bytes: of the complete segments that it keeps from being reclaimed, alone or with other groups.
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
class Inventory:
    """What the last log samples show.

    Attributes:
        age_seconds: since the newest of them began.
        rows: those that pin the most come first.
        seconds_until_full: if nothing is reclaimed; None if the log does not grow, or its growth is not known.
    """

    age_seconds: float
    states: Mapping[Condition, Amount]
    rows: tuple[Row, ...]
    free_bytes: int
    total_bytes: int
    growth_bytes_per_second: float | None
    seconds_until_full: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything on the screen; a part is None before its first sample, and after one that failed."""

    root: str
    activity: Activity | None
    inventory: Inventory | None
    troubles: tuple[str, ...] = ()


def activity(head_samples: Sequence[HeadSample], *, now_ns: int) -> Activity | None:
    """What the last two head samples, or the only one, show."""
    if not head_samples:
        return None
    before, after = head_samples[0], head_samples[-1]
    seconds = after.taken - before.taken
    return Activity(
        after.sequence,
        max(0.0, (now_ns - after.durable_ns) / 1e9) if after.durable_ns else None,
        _rate(after.sequence - before.sequence, seconds),
        _rate(after.written_bytes - before.written_bytes, seconds),
        after.waiting_segments,
        after.sealed_segments,
        _rate(after.sealed_bytes - before.sealed_bytes, seconds),
        after.daemon,
    )


def inventory(log_samples: Sequence[LogSample], *, now: float, now_ns: int) -> Inventory | None:
    """What the last two log samples, or the only one, show.

    Args:
        now: seconds, by the clock of the log_samples.
    """
    if not log_samples:
        return None
    before, after = log_samples[0], log_samples[-1]
    seconds = after.taken - before.taken
    lags = {(group.cursor.route, group.cursor.group): group.lag.records for group in before.groups}
    rows = [_row(group, after, lags, seconds, now_ns) for group in after.groups]
    rows.sort(key=lambda row: (-row.held_bytes, -row.lag_records, row.route, row.group))
    growth = after.growth
    return Inventory(
        now - after.taken,
        after.states,
        tuple(rows),
        after.free_bytes,
        after.total_bytes,
        growth.bytes_per_second if growth else None,
        growth.seconds_until_full(after.free_bytes) if growth else None,
    )


def _row(
    group: GroupBacklog, log_sample: LogSample, lags: Mapping[tuple[str, str], int], seconds: float, now_ns: int
) -> Row:
    cursor = group.cursor
    received = processed = None
    if log_sample.received is not None:
        count = log_sample.received.get(cursor.route, 0)
        received = _rate(count, seconds)
        lag_before = lags.get((cursor.route, cursor.group))
        if lag_before is not None:  # a cursor that moved back has processed nothing
            processed = _rate(max(0, lag_before + count - group.lag.records), seconds)
    return Row(
        cursor.route,
        log_sample.last_sequences.get(cursor.route),
        received,
        cursor.group,
        cursor.sequence,
        cursor.state,
        group.retired,
        group.lag.records,
        group.lag.seconds(now_ns) if group.lag.records else None,
        processed,
        group.pinned_bytes,
    )


def _rate(difference: int, seconds: float) -> float | None:
    """None if it is not known: no time has passed, or another log has taken the place of the one sampled before."""
    return difference / seconds if seconds > 0 and difference >= 0 else None
