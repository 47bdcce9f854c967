"""Report and metrics of ``wald-reclaim``, and the deletions that it keeps from the ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wald.files.listing import Segment
from wald.files.uptime import Moment
from wald.format.names import Kind
from wald_reclaim.apply import ShrunkSegment
from wald_reclaim.policy import Verdict, is_grace_over
from wald_reclaim.report import Report, reclaim_metrics
from wald_reclaim.survey import Decision

SEGMENT = Segment(1, Kind.SEALED, Path("1.wal.zst"))
DELETED = Decision(SEGMENT, Verdict.MAX_AGE, 10, entry={"base": 1, "lost": {"a": 3, "b": 4}})
KEPT = Decision(SEGMENT, Verdict.UNREAD, 10)


def make(printed: list[str], *, watching: bool = True) -> Report:
    return Report(as_json=False, is_dry_run=False, watching=watching, write=printed.append, warn=printed.append)


@pytest.mark.parametrize(
    ("passes", "warned"),
    [
        (["disk", "disk", "disk"], ["disk"]),
        (["disk", "", "disk"], ["disk", "disk"]),
        (["disk", "cursor", "disk"], ["disk", "cursor", "disk"]),
    ],
    ids=["one that lasts", "two of the same", "another in between"],
)
def test_an_outage_is_reported_once(passes: list[str], warned: list[str]) -> None:
    printed: list[str] = []
    report = make(printed)
    for problem in passes:
        report.begin()
        for _ in range(2 if problem else 0):
            report.problem(problem)
    assert printed == warned


def test_kept_segments_are_those_of_the_last_successful_pass() -> None:
    report = make([])
    counts = report.counts
    times = next(each for each in reclaim_metrics(counts) if each.name.endswith("last_pass_timestamp_seconds"))
    assert (times.samples, counts.ended_ns) == ({}, 0)
    for _ in range(2):
        report.begin()
        report.decision(KEPT)
        report.decision(DELETED)
        report.end([])
    report.begin()
    report.decision(KEPT)
    report.decision(KEPT)
    report.failed("disk")

    assert counts.kept == {Verdict.UNREAD: 1}
    assert (counts.released, counts.released_bytes) == ({Verdict.MAX_AGE: 2}, {Verdict.MAX_AGE: 20})
    assert (counts.lost_records, counts.failed) == (14, 1)
    assert counts.ended_ns > 0


def test_the_summary_of_a_pass_leaves_out_the_failed_pass_before_it() -> None:
    printed: list[str] = []
    report = make(printed)
    for is_last in (False, True):
        report.begin()
        report.decision(KEPT)
        report.decision(DELETED)
        if is_last:
            report.end([])
        else:
            report.failed("disk")
    assert "now marked for deletion: 1 (10 B)" in printed[-1]
    assert "kept: 1 (10 B; 1: a group has not read it)" in printed[-1]


def test_a_released_segment_is_deleted_when_it_is_due_or_taken_back() -> None:
    report = make([])
    counts = report.counts
    report.released(DELETED, is_due=False)
    assert (counts.deleted, counts.deleted_bytes, counts.taken_back) == (0, 0, 0)
    report.released(DELETED, is_due=True)
    report.released(KEPT, is_due=True)
    report.released(replace(KEPT, keeps_name=True), is_due=True)
    assert (counts.deleted, counts.deleted_bytes, counts.taken_back) == (1, 10, 1)


def test_a_restored_shrink_has_freed_nothing() -> None:
    report, shrunk = make([]), ShrunkSegment(SEGMENT, 30, 100)
    report.shrunk(shrunk)
    report.shrunk(replace(shrunk, bytes=100, is_restored=True))
    assert (report.counts.shrunk, report.counts.shrunk_bytes) == (1, 70)


def test_the_grace_period_counts_from_the_line_and_ends_with_the_boot() -> None:
    since = Moment("b", 100)
    assert [is_grace_over(since, Moment("b", at), 50) for at in (149, 150)] == [False, True]
    assert is_grace_over(since, Moment("c", 0), 50)
    assert is_grace_over(None, since, 0)
    assert not is_grace_over(None, since, 50)
