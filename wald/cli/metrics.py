"""``wald metrics``: metrics of the directory for Prometheus.

The daemon runs this command when its ``/metrics`` is asked for, in a separate process: reading the index of every
segment holds the interpreter's lock, which would delay a commit round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wald.exposition import Metric, Samples, gauge
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.format.names import VERIFY_LEDGER

if TYPE_CHECKING:
    from wald.log import Log
    from wald.retention.backlog import Condition, GroupBacklog, Growth
    from wald.status.retention import WorkCounts

GROUPS_MAX = 5000  # each has some samples, and any cursor owner can create any number of groups
_ROUTE_GROUP = ("route", "group")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the directory.

    Attributes:
        seconds: that it took to read it.
        damaged: segments of which a part cannot be read.
        groups: of routes that are not retired; those that pin the most come first.
        left_out: how many groups are not among them, because there are too many.
        quarantine: the size of each file in it.
        work: of the groups that are work groups, by route and group.
        ran: the newest entry that each program has left in its ledger; of the archive by route and group.
    """

    seconds: float
    segments: Counter[Condition]
    segment_bytes: Counter[Condition]
    damaged: int
    groups: list[GroupBacklog]
    left_out: int
    growth: Growth | None
    free_bytes: int
    quarantine: list[int]
    ran: Ran
    created_seconds: float | None
    work: Mapping[tuple[str, str], WorkCounts] = field(default_factory=dict)


def measure(log: Log) -> Measured:
    """Read the index of every segment, the cursors, and the ends of the ledgers."""
    from wald.retention.backlog import Backlog, condition_of
    from wald.status.retention import work_counts

    began = time.monotonic()
    backlog = Backlog(log.view())
    segments: Counter[Condition] = Counter()
    segment_bytes: Counter[Condition] = Counter()
    damaged = 0
    for status in backlog.segments():
        condition = condition_of(status)
        segments[condition] += 1
        segment_bytes[condition] += status.stored_bytes
        damaged += bool(status.problem)
    groups = [group for group in backlog.groups.values() if not group.retired]
    groups.sort(key=lambda group: (-group.pinned_bytes, -group.lag.records))
    ran = last_runs(log.root)
    return Measured(
        time.monotonic() - began,
        segments,
        segment_bytes,
        damaged,
        groups[:GROUPS_MAX],
        max(0, len(groups) - GROUPS_MAX),
        backlog.growth_meter.growth(now_ns=time.time_ns()),
        backlog.free_bytes,
        [path.lstat().st_size for path in log.root.quarantine.iterdir()],
        ran,
        _created_seconds(log.root),
        work_counts(log, [(group.cursor.route, group.cursor.group) for group in groups[:GROUPS_MAX]]),
    )


def _created_seconds(root: Root) -> float | None:
    """Return the creation time of the log in seconds since 1970; None if unknown."""
    try:
        return datetime.fromisoformat(read_identity(root).created).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Ran:
    """Times of the last runs of the programs in nanoseconds since 1970; None without a ledger line.

    Attributes:
        archived: by route and group.
        verified_ns: time of the last verification without an error.
        verify_errors: number of errors of the last verification.
    """

    sealed_ns: int | None
    reclaimed_ns: int | None
    archived_ns: dict[tuple[str, str], int]
    verified_ns: int | None
    verify_errors: int | None


def last_runs(root: Root) -> Ran:
    """Read the last runs from the ends of the ledgers."""
    from wald.files.ledger_read import newest_entries

    archived: dict[tuple[str, str], int] = {}
    for entry in newest_entries(root.ledger / "archive.jsonl", "finished"):
        archived.setdefault((str(entry.get("route")), str(entry.get("group"))), _at(entry))
    verified = list(newest_entries(root.ledger / VERIFY_LEDGER, "verified"))
    good = (entry for entry in verified if not entry.get("errors"))
    return Ran(
        _newest(root.ledger / "segments.jsonl", "sealed"),
        _newest(root.ledger / "reclaim.jsonl", "reclaimed", "seen"),
        archived,
        next(map(_at, good), None),
        next((int(entry["errors"]) for entry in verified), None),
    )


def _newest(path: Path, *events: str) -> int | None:
    from wald.files.ledger_read import newest_entries

    return next(map(_at, newest_entries(path, *events)), None)


def _at(entry: dict[str, Any]) -> int:
    at = entry.get("at")
    return at if isinstance(at, int) else 0


def of_directory(found: Measured, *, needed_bytes: int, now_ns: int) -> Iterator[Metric]:
    """Yield the metrics of the directory.

    Args:
        needed_bytes: free space that the daemon needs to accept input.
    """
    left = max(0, found.free_bytes - needed_bytes)
    created: Samples = {} if found.created_seconds is None else {(): found.created_seconds}
    yield Metric("wald_created_timestamp_seconds", "gauge", "Creation time of the log", (), created)
    yield gauge("wald_measured_timestamp_seconds", "Time at which the directory was read", now_ns / 1e9)
    yield gauge("wald_measurement_seconds", "Duration of reading the directory", found.seconds)
    yield gauge("wald_until_full_bytes", "Bytes that can be written before input waits", left)
    yield from _growth(found.growth, left)
    yield _by_condition("wald_segments", "Segments by state", found.segments)
    yield _by_condition("wald_segment_bytes", "Bytes of segments on disk, by state", found.segment_bytes)
    yield gauge("wald_damaged_segments", "Segments with unreadable parts", found.damaged)
    yield gauge("wald_quarantine_files", "Files in quarantine/", len(found.quarantine))
    yield gauge("wald_quarantine_bytes", "Bytes of the files in quarantine/", sum(found.quarantine))
    yield from _groups(found, now_ns)
    yield from of_work_groups(found.work)
    yield from _runs(found.ran)


def _growth(growth: Growth | None, left: int) -> Iterator[Metric]:
    """Yield metrics without samples if the growth is unknown: the log is too young, or the clock is wrong."""
    rates: Samples = {} if growth is None else {(): growth.bytes_per_second}
    seconds: Samples = {}
    if growth is not None:
        until = growth.seconds_until_full(left)
        seconds[()] = float("inf") if until is None else until
    yield Metric("wald_growth_bytes_per_second", "gauge", "Growth of the log on disk", (), rates)
    meaning = "Time until input waits if the growth continues and nothing is deleted"
    yield Metric("wald_until_full_seconds", "gauge", meaning, (), seconds)


def _by_condition(name: str, meaning: str, counts: Counter[Condition]) -> Metric:
    from wald.retention.backlog import Condition

    samples: Samples = {(condition.name.lower(),): counts[condition] for condition in Condition}
    return Metric(name, "gauge", meaning, ("state",), samples)


def _groups(found: Measured, now_ns: int) -> Iterator[Metric]:
    from wald.retention.cursors import CursorState

    named = [((group.cursor.route, group.cursor.group), group) for group in found.groups]
    usable = (CursorState.VALID, CursorState.ABSENT)
    lag: Samples = {name: group.lag.records for name, group in named}
    yield Metric("wald_group_lag_records", "gauge", "Records that the consumer group has not read", _ROUTE_GROUP, lag)
    waits: Samples = {name: group.lag.seconds(now_ns) for name, group in named}
    meaning = "Age of the oldest unread record, or 0"
    yield Metric("wald_group_lag_seconds", "gauge", meaning, _ROUTE_GROUP, waits)
    oldest: Samples = {name: group.lag.oldest_ns / 1e9 for name, group in named if group.lag.oldest_ns is not None}
    meaning = "Time of the oldest unread record"
    yield Metric("wald_group_oldest_unread_timestamp_seconds", "gauge", meaning, _ROUTE_GROUP, oldest)
    pinned: Samples = {name: group.pinned_bytes for name, group in named}
    meaning = "Bytes of the segments that the group pins, alone or with others"
    yield Metric("wald_group_pinned_bytes", "gauge", meaning, _ROUTE_GROUP, pinned)
    broken: Samples = {name: float(group.cursor.state not in usable) for name, group in named}
    meaning = "1 if the cursor is unusable, so that all records count as unread"
    yield Metric("wald_group_cursor_unusable", "gauge", meaning, _ROUTE_GROUP, broken)
    meaning = f"Groups without metrics, because there are more than {GROUPS_MAX}"
    yield gauge("wald_groups_left_out", meaning, found.left_out)


def _runs(ran: Ran) -> Iterator[Metric]:
    """Yield metrics without samples for a program whose ledger is empty."""
    for name, meaning, at_ns in (
        ("seal", "Time of the last sealing", ran.sealed_ns),
        (
            "reclaim",
            "Time at which wald-reclaim last deleted a segment, or recorded the segments for an age limit",
            ran.reclaimed_ns,
        ),
        ("verify", "Time of the last verification with --record that found no error", ran.verified_ns),
    ):
        samples: Samples = {} if at_ns is None else {(): at_ns / 1e9}
        yield Metric(f"wald_last_{name}_timestamp_seconds", "gauge", meaning, (), samples)
    archived: Samples = {name: at_ns / 1e9 for name, at_ns in ran.archived_ns.items()}
    meaning = "End of the last run of wald-archive that archived records"
    yield Metric("wald_last_archive_timestamp_seconds", "gauge", meaning, _ROUTE_GROUP, archived)
    errors: Samples = {} if ran.verify_errors is None else {(): ran.verify_errors}
    yield Metric("wald_last_verify_errors", "gauge", "Errors found by the last verification with --record", (), errors)


_ROUTE_GROUP = ("route", "group")


def of_work_groups(counts: Mapping[tuple[str, str], WorkCounts]) -> Iterator[Metric]:
    """Yield the counts as metrics; a damaged journal has only that metric."""
    whole = {name: each for name, each in counts.items() if not each.unusable}
    leased: Samples = {name: each.leased for name, each in whole.items()}
    yield Metric("wald_work_leased_records", "gauge", "Records leased to workers", _ROUTE_GROUP, leased)
    waiting: Samples = {name: each.waiting for name, each in whole.items()}
    meaning = "Delayed records that are not yet due"
    yield Metric("wald_work_waiting_records", "gauge", meaning, _ROUTE_GROUP, waiting)
    giving_up: Samples = {name: len(each.giving_up_to) for name, each in whole.items()}
    meaning = "Records to be moved to the dead-letter route"
    yield Metric("wald_work_giving_up_records", "gauge", meaning, _ROUTE_GROUP, giving_up)
    damaged: Samples = {name: float(each.unusable) for name, each in counts.items()}
    meaning = "1 if the journal of the work group is damaged"
    yield Metric("wald_work_journal_damaged", "gauge", meaning, _ROUTE_GROUP, damaged)
