"""``wald metrics``: metrics of the directory for Prometheus.

The daemon runs this command when its ``/metrics`` is asked for, in a separate process: reading the index of every
segment holds the interpreter's lock, which would delay a commit round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from wald.exposition import Metric, Samples, gauge
from wald.files.layout import Root
from wald.format.names import VERIFY_LEDGER

if TYPE_CHECKING:
    from wald.log import Log
    from wald.retention.backlog import Condition, GroupBacklog, Growth
    from wald.status.retention import WorkCounts

GROUPS_MAX = 5000  # each has some samples, and any cursor owner can create any number of groups


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the directory.

    Attributes:
        seconds: that it took to read it.
        groups: of routes that are not retired; those that pin the most come first.
        left_out: how many groups are not among them, because there are too many.
        quarantine: the size of each file in it.
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
    shown, left_out = groups[:GROUPS_MAX], max(0, len(groups) - GROUPS_MAX)
    growth, quarantine = backlog.growth_meter.growth(now_ns=time.time_ns()), log.root.quarantine.iterdir()
    created_seconds = None
    with suppress(ValueError):
        created_seconds = datetime.fromisoformat(log.identity.created).timestamp()
    return Measured(
        seconds=time.monotonic() - began,
        segments=segments,
        segment_bytes=segment_bytes,
        damaged=damaged,
        groups=shown,
        left_out=left_out,
        growth=growth,
        free_bytes=backlog.free_bytes,
        quarantine=[path.lstat().st_size for path in quarantine],
        ran=last_runs(log.root),
        created_seconds=created_seconds,
        work=work_counts(log, [(group.cursor.route, group.cursor.group) for group in shown]),
    )


@dataclass(frozen=True, slots=True)
class Ran:
    """Last runs of the programs, by the ends of their ledgers; None without a line.

    Attributes:
        archived_ns: by route and group.
        verified_ns: time of the last verification without an error.
    """

    sealed_ns: int | None
    reclaimed_ns: int | None
    archived_ns: dict[tuple[str, str], int]
    verified_ns: int | None
    verify_errors: int | None


def last_runs(root: Root) -> Ran:
    from wald.files.ledger_read import newest_entries

    def newest(name: str, *events: str) -> int | None:
        return next(map(_at, newest_entries(root.ledger / name, *events)), None)

    archived: dict[tuple[str, str], int] = {}
    for entry in newest_entries(root.ledger / "archive.jsonl", "finished"):
        archived.setdefault((str(entry.get("route")), str(entry.get("group"))), _at(entry))
    verified = list(newest_entries(root.ledger / VERIFY_LEDGER, "verified"))
    good = (entry for entry in verified if not entry.get("errors"))
    return Ran(
        newest("segments.jsonl", "sealed"),
        newest("reclaim.jsonl", "reclaimed", "seen"),
        archived,
        next(map(_at, good), None),
        next((int(entry["errors"]) for entry in verified), None),
    )


def _at(entry: dict[str, Any]) -> int:
    at = entry.get("at")
    return at if isinstance(at, int) else 0


def of_directory(found: Measured, *, needed_bytes: int, now_ns: int) -> Iterator[Metric]:
    """Yield the metrics; the daemon accepts no input while less than ``needed_bytes`` are free."""
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
    yield from _work_groups(found.work)
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


def _of_groups(name: str, meaning: str, samples: Mapping[tuple[str, str], float | None]) -> Metric:
    known: Samples = {group: value for group, value in samples.items() if value is not None}
    return Metric(name, "gauge", meaning, ("route", "group"), known)


def _groups(found: Measured, now_ns: int) -> Iterator[Metric]:
    from wald.retention.cursors import CursorState

    groups = {(group.cursor.route, group.cursor.group): group for group in found.groups}
    lags = {name: group.lag for name, group in groups.items()}
    meaning = "Records that the consumer group has not read"
    yield _of_groups("wald_group_lag_records", meaning, {name: lag.records for name, lag in lags.items()})
    meaning = "Age of the oldest unread record, or 0"
    yield _of_groups("wald_group_lag_seconds", meaning, {name: lag.seconds(now_ns) for name, lag in lags.items()})
    oldest = {name: lag.oldest_ns and lag.oldest_ns / 1e9 for name, lag in lags.items()}
    yield _of_groups("wald_group_oldest_unread_timestamp_seconds", "Time of the oldest unread record", oldest)
    pinned = {name: group.pinned_bytes for name, group in groups.items()}
    meaning = "Bytes of the segments that the group pins, alone or with others"
    yield _of_groups("wald_group_pinned_bytes", meaning, pinned)
    usable = (CursorState.VALID, CursorState.ABSENT)
    broken = {name: float(group.cursor.state not in usable) for name, group in groups.items()}
    meaning = "1 if the cursor is unusable, so that all records count as unread"
    yield _of_groups("wald_group_cursor_unusable", meaning, broken)
    meaning = f"Groups without metrics, because there are more than {GROUPS_MAX}"
    yield gauge("wald_groups_left_out", meaning, found.left_out)


def _work_groups(counts: Mapping[tuple[str, str], WorkCounts]) -> Iterator[Metric]:
    """Yield the counts of work groups; a damaged journal has only that metric."""
    whole = {name: each for name, each in counts.items() if not each.unusable}
    leased = {name: each.leased for name, each in whole.items()}
    yield _of_groups("wald_work_leased_records", "Records leased to workers", leased)
    waiting = {name: each.waiting for name, each in whole.items()}
    yield _of_groups("wald_work_waiting_records", "Delayed records that are not yet due", waiting)
    giving_up = {name: len(each.giving_up_to) for name, each in whole.items()}
    yield _of_groups("wald_work_giving_up_records", "Records to be moved to the dead-letter route", giving_up)
    damaged = {name: float(each.unusable) for name, each in counts.items()}
    yield _of_groups("wald_work_journal_damaged", "1 if the journal of the work group is damaged", damaged)


def _runs(ran: Ran) -> Iterator[Metric]:
    """Yield metrics without samples for a program whose ledger is empty."""
    deleting = "Time at which wald-reclaim last deleted a segment, or recorded the segments for an age limit"
    for name, meaning, at_ns in (
        ("seal", "Time of the last sealing", ran.sealed_ns),
        ("reclaim", deleting, ran.reclaimed_ns),
        ("verify", "Time of the last verification with --record that found no error", ran.verified_ns),
    ):
        samples: Samples = {} if at_ns is None else {(): at_ns / 1e9}
        yield Metric(f"wald_last_{name}_timestamp_seconds", "gauge", meaning, (), samples)
    archived = {name: at_ns / 1e9 for name, at_ns in ran.archived_ns.items()}
    meaning = "End of the last run of wald-archive that archived records"
    yield _of_groups("wald_last_archive_timestamp_seconds", meaning, archived)
    errors: Samples = {} if ran.verify_errors is None else {(): ran.verify_errors}
    yield Metric("wald_last_verify_errors", "gauge", "Errors found by the last verification with --record", (), errors)
