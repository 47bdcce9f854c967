"""Metrics of work groups, from journals that are read without a lock while their owners run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from wald.exposition import Metric, Samples

if TYPE_CHECKING:
    from wald.status.retention import WorkCounts
_LABELS = ("route", "group")


def of_work_groups(counts: Mapping[tuple[str, str], WorkCounts]) -> Iterator[Metric]:
    """Yield the counts as metrics; a damaged journal has only that metric."""
    whole = {name: each for name, each in counts.items() if not each.unusable}
    leased: Samples = {name: each.leased for name, each in whole.items()}
    yield Metric("wald_work_leased_records", "gauge", "Records leased to workers", _LABELS, leased)
    waiting: Samples = {name: each.waiting for name, each in whole.items()}
    meaning = "Delayed records that are not yet due"
    yield Metric("wald_work_waiting_records", "gauge", meaning, _LABELS, waiting)
    giving_up: Samples = {name: each.giving_up for name, each in whole.items()}
    meaning = "Records to be moved to the dead-letter route"
    yield Metric("wald_work_giving_up_records", "gauge", meaning, _LABELS, giving_up)
    damaged: Samples = {name: float(each.unusable) for name, each in counts.items()}
    meaning = "1 if the journal of the work group is damaged"
    yield Metric("wald_work_journal_damaged", "gauge", meaning, _LABELS, damaged)
