"""``wald metrics``: metrics of the directory for Prometheus.

The daemon runs this command in a separate process for each scrape of its ``/metrics``: reading every segment's index
holds the interpreter lock, which would delay commit rounds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime

from wald.exposition import Metric, Samples, gauge
from wald.files.layout import Root
from wald.files.ledger_read import newest_entries
from wald.format.ledger_lines import Entry
from wald.format.names import VERIFY_LEDGER
from wald.log import Log
from wald.retention.backlog import Backlog, Condition, GroupBacklog, Growth, condition_of
from wald.retention.cursors import CursorState
from wald.status.retention import WorkCounts, work_counts

GROUPS_MAX = 5000  # each has several samples, and any cursor owner can create any number of groups


def directory_metrics(log: Log, *, needed_bytes: int) -> Iterator[Metric]:
    """Read the directory, and yield its metrics; the daemon accepts no input while less than that are free."""
    began, now_ns = time.monotonic(), time.time_ns()
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
    groups.sort(key=lambda group: (-group.pinned_bytes, -group.lag.records))  # the groups that pin the most come first
    named = {(group.cursor.route, group.cursor.group): group for group in groups[:GROUPS_MAX]}
    work = work_counts(log, list(named))
    runs = list(_runs(log.root))
    quarantine = [path.lstat().st_size for path in log.root.quarantine.iterdir()]
    left = max(0, backlog.free_bytes - needed_bytes)
    created: Samples = {}
    with suppress(ValueError):
        created[()] = datetime.fromisoformat(log.identity.created).timestamp()
    yield Metric("wald_created_timestamp_seconds", "gauge", "Creation time of the log", (), created)
    yield gauge("wald_measured_timestamp_seconds", "Time at which the directory was read", now_ns / 1e9)
    yield gauge("wald_measurement_seconds", "Duration of reading the directory", time.monotonic() - began)
    yield gauge("wald_until_full_bytes", "Bytes that can be written before input waits", left)
    yield from _growth(backlog.growth_meter.growth(now_ns=now_ns), left)
    yield _by_condition("wald_segments", "Segments by state", segments)
    yield _by_condition("wald_segment_bytes", "Bytes of segments on disk, by state", segment_bytes)
    yield gauge("wald_damaged_segments", "Segments with unreadable parts", damaged)
    yield gauge("wald_quarantine_files", "Files in quarantine/", len(quarantine))
    yield gauge("wald_quarantine_bytes", "Bytes of the files in quarantine/", sum(quarantine))
    yield from _groups(named, now_ns)
    meaning = f"Groups without metrics, because there are more than {GROUPS_MAX}"
    yield gauge("wald_groups_left_out", meaning, max(0, len(groups) - GROUPS_MAX))
    yield from _work_groups(work)
    yield from runs


def _growth(growth: Growth | None, left: int) -> Iterator[Metric]:
    """Yield growth metrics, without samples if the log is too young or the clock is wrong."""
    rates: Samples = {} if growth is None else {(): growth.bytes_per_second}
    seconds: Samples = {}
    if growth is not None:
        until = growth.seconds_until_full(left)
        seconds[()] = float("inf") if until is None else until
    yield Metric("wald_growth_bytes_per_second", "gauge", "Growth of the log on disk", (), rates)
    meaning = "Time until input waits if the growth continues and nothing is deleted"
    yield Metric("wald_until_full_seconds", "gauge", meaning, (), seconds)


def _by_condition(name: str, meaning: str, counts: Counter[Condition]) -> Metric:
    samples: Samples = {(condition.name.lower(),): counts[condition] for condition in Condition}
    return Metric(name, "gauge", meaning, ("state",), samples)


def _of_groups(name: str, meaning: str, samples: Mapping[tuple[str, str], float | None]) -> Metric:
    known: Samples = {group: value for group, value in samples.items() if value is not None}
    return Metric(name, "gauge", meaning, ("route", "group"), known)


def _groups(groups: Mapping[tuple[str, str], GroupBacklog], now_ns: int) -> Iterator[Metric]:
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


def _runs(root: Root) -> Iterator[Metric]:
    """Yield the last run of each program, from the end of its ledger; no sample without a line."""

    def newest(ledger: str, *events: str) -> Iterator[Entry]:
        return newest_entries(root.ledger / ledger, *events)

    def last(name: str, meaning: str, entries: Iterator[Entry]) -> Metric:
        newest_seconds = next(map(_seconds, entries), None)
        samples: Samples = {} if newest_seconds is None else {(): newest_seconds}
        return Metric(f"wald_last_{name}_timestamp_seconds", "gauge", meaning, (), samples)

    yield last("seal", "Time of the last sealing", newest("segments.jsonl", "sealed"))
    meaning = "Time at which wald-reclaim last deleted a segment, or recorded the segments for an age limit"
    yield last("reclaim", meaning, newest("reclaim.jsonl", "reclaimed", "seen"))
    verified = list(newest(VERIFY_LEDGER, "verified"))
    meaning = "Time of the last verification with --record that found no error"
    yield last("verify", meaning, (entry for entry in verified if not entry.get("errors")))
    archived: dict[tuple[str, str], float] = {}
    for entry in newest("archive.jsonl", "finished"):
        archived.setdefault((str(entry.get("route")), str(entry.get("group"))), _seconds(entry))
    meaning = "End of the last run of wald-archive that archived records"
    yield _of_groups("wald_last_archive_timestamp_seconds", meaning, archived)
    errors: Samples = {(): int(verified[0]["errors"])} if verified else {}
    yield Metric("wald_last_verify_errors", "gauge", "Errors found by the last verification with --record", (), errors)


def _seconds(entry: Entry) -> float:
    at = entry.get("at")
    return at / 1e9 if isinstance(at, int) else 0.0
