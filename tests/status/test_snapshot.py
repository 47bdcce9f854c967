"""The statements of ``wald top`` follow from two samples and the time between them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from wald.files.listing import Segment
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry, RouteTable
from wald.retention.backlog import Condition, GroupBacklog, Growth, SegmentStatus, condition_of
from wald.retention.blockers import NO_BLOCKERS, CursorSnapshot
from wald.retention.cursors import Cursor, CursorState
from wald.retention.progress import Lag
from wald.segments.view import State
from wald.status.rates import HeadSample, LogSample, activity, inventory

NOW_NS = 1_700_000_000_000_000_000
PULSE = HeadSample(
    taken=10.0,
    sequence=100,
    durable_ns=NOW_NS - 500_000_000,
    written_bytes=5000,
    waiting_segments=2,
    sealed_segments=1,
    sealed_bytes=4000,
    daemon="pid 1",
)


def group(route: str, group: str = "g", *, lag: int = 0, held: int = 0, oldest_ns: int | None = None) -> GroupBacklog:
    cursor = Cursor(route, group, Path(route), CursorState.VALID, 7)
    return GroupBacklog(cursor, Lag(cursor.effective, lag, oldest_ns), retired=False, pinned_bytes=held)


def log_sample(taken: float, *groups: GroupBacklog, received: dict[str, int] | None = None) -> LogSample:
    return LogSample(taken, {}, groups, {"a": 9}, received, Growth(10.0, {}), free_bytes=1000, total_bytes=4000)


def test_rates_are_differences_by_the_time_between_the_looks() -> None:
    later = replace(PULSE, taken=14.0, sequence=300, written_bytes=5400, sealed_segments=3, sealed_bytes=12000)
    found = activity((PULSE, later), now_ns=NOW_NS)

    assert found is not None
    assert (found.records_per_second, found.bytes_per_second, found.sealed_bytes_per_second) == (50.0, 100.0, 2000.0)
    assert (found.sequence, found.sealed_segments, found.durable_seconds) == (300, 3, 0.5)


def test_without_two_looks_in_order_there_are_no_rates() -> None:
    assert activity((), now_ns=NOW_NS) is None
    assert inventory((), now=1.0, now_ns=NOW_NS) is None
    replaced = replace(PULSE, taken=11.0, sequence=5, written_bytes=64)  # another log since the first look
    for pulses in ((PULSE,), (PULSE, replaced)):
        alone = activity(pulses, now_ns=NOW_NS)
        assert alone is not None
        assert (alone.records_per_second, alone.bytes_per_second) == (None, None)
    total = inventory((log_sample(1.0, group("a", lag=3)),), now=1.0, now_ns=NOW_NS)
    assert total is not None
    assert (total.rows[0].received_per_second, total.rows[0].processed_per_second) == (None, None)


def test_a_commit_has_an_age_and_none_in_the_future() -> None:
    ages = [activity((replace(PULSE, durable_ns=at),), now_ns=NOW_NS) for at in (0, NOW_NS + 1)]

    assert [found and found.durable_seconds for found in ages] == [None, 0.0]


@pytest.mark.parametrize(
    ("lag_before", "received", "lag", "processed"),
    [(10, 0, 4, 3.0), (10, 6, 10, 3.0), (0, 8, 8, 0.0), (4, 0, 10, 0.0)],
    ids=["catches up", "keeps up", "stands still", "moved back"],
)
def test_what_a_group_processed_is_what_it_had_and_got_less_what_is_left(
    lag_before: int, received: int, lag: int, processed: float
) -> None:
    before, after = (
        log_sample(1.0, group("a", lag=lag_before)),
        log_sample(3.0, group("a", lag=lag), received={"a": received}),
    )
    found = inventory((before, after), now=3.0, now_ns=NOW_NS)

    assert found is not None
    assert (found.rows[0].processed_per_second, found.rows[0].received_per_second) == (processed, received / 2)


def test_a_group_that_was_not_there_before_has_no_rate_of_its_own() -> None:
    found = inventory((log_sample(1.0), log_sample(2.0, group("a", lag=1), received={"a": 5})), now=2.0, now_ns=NOW_NS)

    assert found is not None
    assert (found.rows[0].processed_per_second, found.rows[0].received_per_second) == (None, 5.0)


def test_rows_are_sorted_by_pinned_bytes_then_lag_then_name() -> None:
    groups = [group("c"), group("b"), group("late", lag=5), group("pins", held=1), group("pins most", held=9)]
    found = inventory((log_sample(1.0, *groups),), now=1.0, now_ns=NOW_NS)

    assert found is not None
    assert [row.route for row in found.rows] == ["pins most", "pins", "late", "b", "c"]


def test_a_row_has_the_age_of_the_oldest_record_and_the_last_sequence() -> None:
    waiting = group("a", lag=1, oldest_ns=NOW_NS - 2_000_000_000)
    found = inventory((log_sample(1.0, waiting, group("b")),), now=4.0, now_ns=NOW_NS)

    assert found is not None
    assert [(row.oldest_seconds, row.last_sequence) for row in found.rows] == [(2.0, 9), (None, None)]
    assert (found.age_seconds, found.growth_bytes_per_second, found.seconds_until_full) == (3.0, 10.0, 100.0)


@pytest.mark.parametrize("state", [State.ACTIVE, State.CUT, State.SEALED, State.RELEASED])
@pytest.mark.parametrize(("pinned", "readable"), list(itertools.product([False, True], [False, True])))
def test_every_segment_is_in_one_condition(state: State, pinned: bool, readable: bool) -> None:
    """The groups that pin an unreadable segment are unknown."""
    segment = Segment(1, Kind.RAW, Path("1"))
    routes = RouteTable.from_entries([RouteEntry("a", 1, 1, 1, 10)])
    pins = CursorSnapshot().blockers(routes) if pinned else NO_BLOCKERS
    expected = {
        State.ACTIVE: Condition.ACTIVE,
        State.CUT: Condition.WAITING,
        State.SEALED: Condition.FREE,
        State.RELEASED: Condition.RELEASED,
    }

    found = condition_of(SegmentStatus(segment, state, 1, 10, pins, readable=readable))

    assert found is (Condition.UNREADABLE if not readable else Condition.PINNED if pinned else expected[state])
