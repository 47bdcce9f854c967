"""Figures for ``wald top``, ``wald status --latency`` and the gate's page.

Sources take samples. The difference of two samples, divided by the time between them, is a rate.

    HeadSample    head, sealer, daemon                      quick for a log of any size
    LogSample     a walk: states of segments, groups, disk  seconds at 10,000 segments
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from wald.errors import Damaged, WaldError
from wald.files.disk import Disk
from wald.files.listing import Segment
from wald.files.locks import is_locked
from wald.files.routes import fifo_problems
from wald.format.names import Kind
from wald.hints import command_line
from wald.log import Log
from wald.retention.backlog import Backlog, Condition, GroupBacklog, Growth, SegmentStatus, condition_of
from wald.retention.blockers import sealed_index
from wald.retention.cursors import CursorState
from wald.retention.progress import last_sequences
from wald.segments.view import SegmentGone, View
from wald.writing.daemon_lock import describe_daemon
from wald.writing.run_reports import last_daemon_fields

MEASURED = ("commit_seconds", "sync_seconds", "round_records", "round_bytes")
_SLOW_SECONDS = 0.01  # producers do not notice shorter commits on average
_MOST = 0.5  # of the time of a commit
Item = Mapping[str, Any]  # JSON


def measured(before: Item, after: Item, root: Path) -> dict[str, Any]:
    """Return the differences between two answers to STAT; ``before`` may be empty."""
    earlier = before.get("histograms", {})
    found: dict[str, Any] = {name: _spread(after["histograms"][name], earlier.get(name)) for name in MEASURED}
    sent = before.get("received", {})
    received = {user: total - sent.get(user, 0) for user, total in after["received"].items()}
    found |= {name: after[name] for name in ("degraded", "degraded_by", "held_requests", "stalled_seconds")}
    found |= {
        "segments_sealed": after["sealed"] - before.get("sealed", 0),
        "received_bytes_of_users": {user: length for user, length in received.items() if length},
        "connections": after["senders"],
    }
    return {"conclusion": conclusion(found, root)} | found


def conclusion(found: Item, root: Path) -> str:
    """Describe in a sentence what producers wait for."""
    commit, sync = found["commit_seconds"], found["sync_seconds"]
    if found["degraded"]:
        explain = command_line(root, "explain")
        return f"Input waits for room on the disk ({found['degraded_by']}): {explain} shows what fills it."
    if found["stalled_seconds"] >= 1:
        status = command_line(root, "status")
        return f"Input has waited for {found['stalled_seconds']:g} s while the head did not move: {status} shows more."
    if not commit["count"]:
        return "Nothing was committed, so no producer of records has waited for a commit."
    share = sync["mean"] * sync["count"] / (commit["mean"] * commit["count"]) if commit["mean"] else 0.0
    mean = f"{1000 * commit['mean']:.3g} ms on average"
    if commit["mean"] <= _SLOW_SECONDS:
        return f"Commits are fast ({mean}): a producer that waits longer waits for something else."
    if share >= _MOST:
        return f"The disk is slow: a commit takes {mean}, {share:.0%} of it the sync."
    return f"The daemon is slow: a commit takes {mean}, {share:.0%} of it the sync; check its CPU usage."


def _spread(after: Item, before: Item | None) -> dict[str, Any]:
    counts = list(after["counts"])
    total = after["sum"]
    if before is not None:
        counts = [now - then for now, then in zip(counts, before["counts"], strict=True)]
        total -= before["sum"]
    count = sum(counts)
    quantiles = {f"p{percent}": _quantile(counts, after["bounds"], percent) for percent in (50, 90, 99)}
    return {"count": count, "mean": total / count if count else 0.0} | quantiles


def _quantile(counts: list[int], bounds: list[float], percent: int) -> float | None:
    """Return the upper bound of the bucket with a percentile; None without values, or beyond the last bound."""
    wanted = sum(counts) * percent / 100
    reached = (bound for bound, total in zip(bounds, accumulate(counts), strict=False) if total and total >= wanted)
    return next(reached, None)


@dataclass(frozen=True, slots=True)
class HeadSample:
    """One quick sample."""

    taken: float  # time on the monotonic clock
    sequence: int
    durable_ns: int  # append time of the last commit; 0 before the first one
    written_bytes: int  # raw bytes of the log up to the head, starting at a fixed point
    waiting_segments: int  # complete segments that are not sealed yet
    sealed_segments: int  # since the first sample; raw bytes
    sealed_bytes: int
    daemon: str  # description of the running daemon; "" if none runs


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of segments, and their bytes on disk."""

    segments: int = 0
    stored_bytes: int = 0


class SegmentSeen(NamedTuple):
    """A segment, stored compactly: there may be tens of thousands."""

    base: int
    condition: Condition
    stored_bytes: int
    is_damaged: bool = False
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LogSample:
    """One sample of the whole log."""

    taken: float
    states: Mapping[Condition, Amount]
    groups: Sequence[GroupBacklog]
    last_sequences: Mapping[str, int | None]
    received: Mapping[str, int] | None  # records of each route since the previous sample; None in the first one
    growth: Growth | None
    free_bytes: int
    total_bytes: int
    fifo_problems: tuple[str, ...] = ()  # problems that keep lines in a FIFO out of the log
    segments: tuple[SegmentSeen, ...] = ()  # all segments, released ones first
    problems: tuple[tuple[str, str], ...] = ()  # message and hint of each problem of a segment
    lost_routes: tuple[str, ...] = ()  # routes with records whose directory is gone


@dataclass(frozen=True, slots=True)
class Activity:
    """Rates from the last head samples; ``durable_seconds`` is the age of the last commit, None before the first."""

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
    """One group of one route."""

    route: str
    last_sequence: int | None
    received_per_second: float | None  # records of the route; ``processed_per_second``: by the group
    group: str
    cursor: int
    state: CursorState
    retired: bool
    lag_records: int
    oldest_seconds: float | None  # the wait of its first unprocessed record
    processed_per_second: float | None
    held_bytes: int  # of the complete segments that it pins, alone or with other groups


@dataclass(frozen=True, slots=True)
class Inventory:
    """Rates from the last log samples; the rows that pin the most come first."""

    age_seconds: float
    states: Mapping[Condition, Amount]
    rows: tuple[Row, ...]
    free_bytes: int
    total_bytes: int
    growth_bytes_per_second: float | None
    seconds_until_full: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything on the screen; a part is None before its first sample, and after a failed one."""

    root: str
    activity: Activity | None
    inventory: Inventory | None
    problems: tuple[str, ...] = ()


def activity(head_samples: Sequence[HeadSample], *, now_ns: int) -> Activity | None:
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
    """Return the figures from the last two log samples or the only one; ``now`` is a monotonic time."""
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
        if lag_before is not None:  # a cursor that moved back processed nothing
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
    """Return a rate; None if no time has passed, or another log has replaced the sampled one."""
    return difference / seconds if seconds > 0 and difference >= 0 else None


T = TypeVar("T")

_REST = 9  # times the work: a tenth of one core


def rest_seconds(took_seconds: float, interval_seconds: float) -> float:
    """Return the pause after a sample, which is long enough that sampling uses a tenth of a core at most."""
    return max(interval_seconds - took_seconds, _REST * took_seconds)


def message_of(error: WaldError | OSError) -> str:
    if isinstance(error, WaldError):
        return error.message
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"


class Sampler(Generic[T]):
    """The last two samples of one kind; none after a failure, because the last figures may be outdated."""

    def __init__(self, sample: Callable[[float], T]) -> None:
        self._sample = sample
        self.samples: tuple[T, ...] = ()
        self.problem = ""  # the error of the last sample; "" if it succeeded
        self.bug: Exception | None = None  # the unexpected error that ended the thread

    def update(self) -> None:
        try:
            self.samples = (*self.samples[-1:], self._sample(time.monotonic()))
            self.problem = ""
        except (WaldError, OSError) as error:
            self.samples, self.problem = (), message_of(error)

    def start(self, interval_seconds: float, after: Callable[[], None]) -> None:
        """Take samples in a thread until the process ends, and call ``after`` after each."""
        threading.Thread(target=self._run, args=(interval_seconds, after), daemon=True).start()

    def _run(self, interval_seconds: float, after: Callable[[], None]) -> None:
        while self.bug is None:
            began = time.monotonic()
            try:
                self.update()
            except Exception as error:  # noqa: BLE001 - a bug; the thread of the screen raises it
                self.bug = error
            after()
            time.sleep(rest_seconds(time.monotonic() - began, interval_seconds))


class HeadSource:
    """Source of head samples; it counts sealed segments starting at the first sample."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sealed_before: frozenset[int] | None = None
        self._raw_bytes: dict[int, int] = {}
        self._idle_since_ns: int | None = None

    def sample(self, now: float) -> HeadSample:
        head = self._log.head()
        view = self._log.view()  # after the head, so that every segment before the head's is listed
        if self._sealed_before is None:
            self._sealed_before = frozenset(
                s.base_sequence for s in view.including_released().segments if s.kind.form is not Kind.RAW
            )
        self._measure(view, head.segment if head else 0)
        waiting = {segment.base_sequence for segment in view.segments[:-1] if segment.kind is Kind.RAW}
        sealed = [length for base, length in self._raw_bytes.items() if base not in waiting]
        return HeadSample(
            now,
            head.sequence if head else 0,
            head.at_ns if head else 0,
            sum(self._raw_bytes.values()) + (head.position if head else 0),
            len(waiting),
            len(sealed),
            sum(sealed),
            self._daemon(),
        )

    def _measure(self, view: View, active: int) -> None:
        """Record the lengths of segments that were completed since the last sample."""
        done = self._raw_bytes.keys() | (self._sealed_before or frozenset())
        for segment in view.including_released().segments:
            if segment.base_sequence < active and segment.base_sequence not in done:
                with suppress(SegmentGone):
                    self._raw_bytes[segment.base_sequence] = view.follow(segment, self._length)

    def _length(self, segment: Segment) -> int:
        """Return the raw bytes; 0 if the index of a sealed segment is damaged."""
        if segment.kind.form is Kind.RAW:
            return segment.path.stat().st_size
        try:
            return sealed_index(segment, self._log.identity.log_id).raw_bytes
        except Damaged:
            return 0

    def _daemon(self) -> str:
        """Describe the running daemon; "" if none runs.

        The test holds the lock for a moment, and a daemon that starts then would find the root locked. So a root
        without a daemon is tested again only after its lock file has changed; a daemon changes it when it takes the
        lock.
        """
        root = self._log.root
        try:
            changed_ns = os.stat(root.lock).st_mtime_ns
        except FileNotFoundError:
            return ""
        if changed_ns != self._idle_since_ns:
            self._idle_since_ns = None if is_locked(root.lock, Disk()) else changed_ns
        return describe_daemon(last_daemon_fields(root)) if self._idle_since_ns is None else ""


class LogSource:
    """Source of log samples, each a walk that visits all segments."""

    def __init__(self, log: Log, visit: Callable[[SegmentStatus], None] = lambda _: None) -> None:
        self._log = log
        self._visit = visit
        self._end: int | None = None

    def sample(self, now: float) -> LogSample:
        root, since = self._log.root, self._end
        self._end = None  # after a failed sample, the next one has no predecessor
        view = self._log.view()
        backlog = Backlog(view, after=since)
        segments: list[SegmentSeen] = []
        problems: list[tuple[str, str]] = []
        for status in backlog.segments():
            self._visit(status)
            base, condition, is_damaged = status.segment.base_sequence, condition_of(status), bool(status.problem)
            segments.append(SegmentSeen(base, condition, status.stored_bytes, is_damaged, status.last_sequence))
            if is_damaged:
                problems.append((status.problem, status.hint))
        counts = Counter(seen.condition for seen in segments)
        sizes: Counter[Condition] = Counter()
        for seen in segments:
            sizes[seen.condition] += seen.stored_bytes
        log_sample = LogSample(
            now,
            {state: Amount(counts[state], sizes[state]) for state in Condition if counts[state]},
            tuple(backlog.groups.values()),
            last_sequences(view),
            None if since is None else backlog.received(),
            backlog.growth_meter.growth(now_ns=time.time_ns()),
            backlog.free_bytes,
            shutil.disk_usage(root.segments).total,
            tuple(message for _, message in fifo_problems(root)),
            tuple(segments),
            tuple(problems),
            backlog.lost_routes(),
        )
        self._end = max([since or 0, *(seen.last or 0 for seen in segments)])
        return log_sample
