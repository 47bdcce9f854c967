"""What ``wald metrics`` prints of work groups: by their journals, read beside their owners and without a lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wald.answers.work import WorkCounts
from wald.exposition import Metric, Samples

_LABELS = ("route", "group")


def of_work_groups(counts: Mapping[tuple[str, str], WorkCounts]) -> Iterator[Metric]:
    """The counts as metrics; of a damaged journal there is only that it is."""
    whole = {name: each for name, each in counts.items() if not each.unusable}
    leased: Samples = {name: each.leased for name, each in whole.items()}
    yield Metric("wald_work_leased_records", "gauge", "Records that workers of the group have", _LABELS, leased)
    waiting: Samples = {name: each.waiting for name, each in whole.items()}
    meaning = "Records of the group that are not due, as they were sent or given back with a delay"
    yield Metric("wald_work_waiting_records", "gauge", meaning, _LABELS, waiting)
    giving_up: Samples = {name: each.giving_up for name, each in whole.items()}
    meaning = "Records of the group that are to become dead letters, and are none yet"
    yield Metric("wald_work_giving_up_records", "gauge", meaning, _LABELS, giving_up)
    damaged: Samples = {name: float(each.unusable) for name, each in counts.items()}
    meaning = "1 if the journal of the group is damaged"
    yield Metric("wald_work_journal_damaged", "gauge", meaning, _LABELS, damaged)
