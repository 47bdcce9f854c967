"""Metrics of ``wald-drain feed`` since its start."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from wald.exposition import Histogram, Metric, Samples


class Result(StrEnum):
    """Outcome of a run of the command."""

    SUCCESS = "success"
    LATER = "later"  # exit code 75
    FAILURE = "failure"


@dataclass(slots=True)
class Counts:
    """Counters that the threads of a drain write and the metrics server reads.

    Attributes:
        given_up: records that went to the dead-letter route.
        failing_since: time of the first failure of records that are still unprocessed; 0 without one.
        succeeded_ns: time of the last success in ns since 1970, or 0.
    """

    records: int = 0
    given_up: int = 0
    runs: Counter[Result] = field(default_factory=Counter)
    run_seconds: Histogram = field(
        default_factory=lambda: Histogram(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
    )
    failing_since: float = 0.0
    succeeded_ns: int = 0
    _changes: threading.Lock = field(default_factory=threading.Lock)

    def ran(self, result: Result, seconds: float, *, now: float) -> None:
        with self._changes:
            self.runs[result] += 1
            self.run_seconds.observe(seconds)
            if result is not Result.SUCCESS:
                self.failing_since = self.failing_since or now

    def processed(self, records: int, *, now_ns: int, failing_since: float = 0.0) -> None:
        """Count processed records; others may have been failing since ``failing_since``."""
        with self._changes:
            self.records += records
            self.failing_since, self.succeeded_ns = failing_since, now_ns

    def gave_up(self, records: int, *, failing_since: float = 0.0) -> None:
        with self._changes:
            self.given_up += records
            self.failing_since = failing_since


def of_drain(counts: Counts, route: str, group: str, now: float) -> Iterator[Metric]:
    """Yield the metrics of ``wald-drain``; ``now`` is on the monotonic clock."""
    labels, values = ("route", "group"), (route, group)
    records: Samples = {values: counts.records}
    meaning = "Records that the command processed"
    yield Metric("wald_drain_records_total", "counter", meaning, labels, records)
    given_up: Samples = {values: counts.given_up}
    meaning = "Records moved to the dead-letter route"
    yield Metric("wald_drain_dead_letters_total", "counter", meaning, labels, given_up)
    runs: Samples = {(*values, result.value): counts.runs[result] for result in Result}
    yield Metric("wald_drain_runs_total", "counter", "Runs of the command", (*labels, "result"), runs)
    seconds: Samples = {values: counts.run_seconds}
    yield Metric("wald_drain_run_seconds", "histogram", "Duration of a run of the command", labels, seconds)
    since = counts.failing_since  # written by another thread
    failing: Samples = {values: max(0.0, now - since) if since else 0.0}
    meaning = "Time that the command has failed on the next records"
    yield Metric("wald_drain_failing_seconds", "gauge", meaning, labels, failing)
    succeeded: Samples = {values: counts.succeeded_ns / 1e9} if counts.succeeded_ns else {}
    meaning = "Time of the last successful run"
    yield Metric("wald_drain_last_success_timestamp_seconds", "gauge", meaning, labels, succeeded)
