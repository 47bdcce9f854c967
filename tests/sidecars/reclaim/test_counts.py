"""What ``wald-reclaim --watch`` counts, and what it keeps of the segments that the ledger says to be reclaimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wald.files.listing import Segment
from wald.files.uptime import Moment
from wald.format.names import Kind
from wald_reclaim.counts import Counts, of_reclaim
from wald_reclaim.decision import Decision
from wald_reclaim.policy import Verdict
from wald_reclaim.recorded import OnRecord
from wald_reclaim.shrink import ShrunkSegment

SEGMENT = Segment(1, Kind.SEALED, Path("1.wal.zst"))
GOES = Decision(SEGMENT, Verdict.MAX_AGE, 10, entry={"lost": {"a": 3, "b": 4}})
STAYS = Decision(SEGMENT, Verdict.UNREAD, 10)


def test_a_segment_that_stays_is_counted_by_what_keeps_it_in_the_last_whole_pass() -> None:
    counts = Counts()
    for _ in range(2):
        counts.begin()
        counts.decision(STAYS)
        counts.decision(GOES)
        counts.end(1.0, now_ns=5)
    counts.begin()
    counts.decision(STAYS)
    counts.decision(STAYS)

    assert counts.kept == {Verdict.UNREAD: 1}
    assert (counts.gone, counts.gone_bytes) == ({Verdict.MAX_AGE: 2}, {Verdict.MAX_AGE: 20})
    assert (counts.lost_records, counts.ended_ns) == (14, 5)


def test_a_released_segment_is_deleted_when_it_is_due_or_taken_back() -> None:
    counts = Counts()
    counts.released(GOES, due=False)
    assert (counts.deleted, counts.deleted_bytes, counts.taken_back) == (0, 0, 0)
    counts.released(GOES, due=True)
    counts.released(STAYS, due=True)
    assert (counts.deleted, counts.deleted_bytes, counts.taken_back) == (1, 10, 1)


def test_a_shrink_that_was_taken_back_has_freed_nothing() -> None:
    counts, shrunk = Counts(), ShrunkSegment(SEGMENT, 30, 100)
    counts.add_shrunk(shrunk)
    counts.add_shrunk(replace(shrunk, bytes=100, taken_back=True))
    assert (counts.shrunk, counts.shrunk_bytes) == (1, 70)


def test_before_the_first_pass_no_time_is_given() -> None:
    def times(counts: Counts) -> object:
        return next(each.samples for each in of_reclaim(counts) if each.name.endswith("last_pass_timestamp_seconds"))

    counts = Counts()
    assert times(counts) == {}
    counts.end(1.0, now_ns=2_000_000_000)
    assert times(counts) == {(): 2.0}


@pytest.mark.parametrize("kind", [Kind.RELEASED, Kind.DELETING])
def test_a_deletion_that_has_begun_is_due_at_any_time(kind: Kind) -> None:
    """The grace period of the others is counted from their line."""
    recorded, segment = OnRecord(), SEGMENT._replace(kind=kind)
    recorded.take_in({"event": "reclaimed", "base": 1, "rule": "read", "boot": "b", "boottime": 100})
    due = [bool(recorded.due([segment], Moment("b", at), grace_ns=50)) for at in (149, 150)]
    assert due == [kind is Kind.DELETING, True]


def test_a_line_that_takes_a_deletion_back_and_the_end_of_the_file_are_taken_in() -> None:
    recorded = OnRecord()
    line = {"event": "reclaimed", "base": 1, "rule": "read"}
    recorded.take_in(line)
    recorded.take_in({"event": "evidence", "base": 1})
    assert recorded.get(1) is not None
    recorded.take_in({"event": "kept", "base": 1})
    assert recorded.get(1) is None
    recorded.take_in(line)
    recorded.forget(1)
    assert recorded.get(1) is None
