"""Admission keeps the limits, shares them equally, makes progress at every trigger and finally admits everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from wald_spark.admission import Backlog, Extent, admit
from wald_spark.options import Limits

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 50)), max_size=6)
LIMITS = st.builds(Limits, st.none() | st.integers(1, 12), st.none() | st.integers(1, 120))


def runs_of(shape: list[tuple[int, int, int]]) -> list[Extent]:
    """Return one extent for each (gap, records, bytes); a gap skips records of other routes."""
    begins = accumulate((gap + count for gap, count, _ in shape), initial=1)
    return [Extent(begin + gap, count, size) for begin, (gap, count, size) in zip(begins, shape, strict=False)]


def backlog(extents: list[Extent], start: int, end: int) -> Backlog:
    wanted = (extent for extent in extents if start < extent.last and extent.first <= end)
    return Backlog(start, end, (extent.between(start + 1, end) if extent.count else extent for extent in wanted))


def even(count: int, size: int = 1, *, start: int = 0) -> Backlog:
    """Return a backlog of equal-sized records, each in its own batch."""
    return Backlog(start, start + count, [Extent(start + 1 + number, 1, size) for number in range(count)])


@settings(max_examples=300, deadline=None)
@given(shapes=st.lists(RUNS, min_size=1, max_size=3), limits=LIMITS)
def test_triggers_cover_everything_once_and_keep_the_limits(
    shapes: list[list[tuple[int, int, int]]], limits: Limits
) -> None:
    """Any layout of records, including records above the limit."""
    logs = [runs_of(shape) for shape in shapes]
    ends = [max([extent.last for extent in extents], default=0) for extents in logs]
    at = [0] * len(logs)
    for turn in range(200):
        waiting = [number for number, end in enumerate(ends) if at[number] < end]
        if not waiting:
            break
        before = dict(enumerate(at))
        admitted = admit([backlog(logs[n], at[n], ends[n]) for n in waiting], limits, turn=turn)
        for number, end in zip(waiting, admitted, strict=True):
            assert at[number] <= end <= ends[number]
            at[number] = end
        taken = [
            extent.between(before[n] + 1, at[n])
            for n in waiting
            for extent in logs[n]
            if extent.count and before[n] < extent.last and extent.first <= at[n]
        ]
        records = sum(extent.count for extent in taken)
        assert at != list(before.values())
        assert limits.records is None or records <= limits.records
        if (
            limits.raw_bytes is not None and records > 1
        ):  # records count as the average of their batch, rounded to bytes
            assert sum(extent.raw_bytes for extent in taken) <= limits.raw_bytes + records
    assert at == ends


def test_without_limits_nothing_is_counted() -> None:
    counted = iter([Extent(4, 1, 1)])
    assert admit([Backlog(3, 9, counted), Backlog(0, 5, [])], Limits(), turn=0) == [9, 5]
    assert next(counted) == Extent(4, 1, 1)


def test_only_as_much_is_read_as_is_needed() -> None:
    """A limit of ten records does not read a whole segment."""
    read: list[int] = []

    def extents() -> Iterator[Extent]:
        for first in range(1, 1000, 5):
            read.append(first)
            yield Extent(first, 5, 100)

    assert admit([Backlog(0, 1000, extents())], Limits(records=10), turn=0) == [10]
    assert read == [1, 6]


def test_logs_share_equally_what_the_others_leave() -> None:
    for limits, counts, ends in [
        (Limits(records=30), [100, 100, 100], [10, 10, 10]),
        (Limits(records=30), [100, 4, 100], [13, 4, 13]),
        (Limits(records=30), [100, 0, 2], [28, 2]),
        (Limits(records=2), [100, 100, 100], [1, 1, 0]),
        (Limits(raw_bytes=300), [100, 100, 100], [10, 10, 10]),
        (Limits(raw_bytes=300), [100, 4, 100], [13, 4, 13]),
        (Limits(records=12, raw_bytes=300), [100, 100, 100], [4, 4, 4]),
        (Limits(records=300, raw_bytes=60), [100, 100, 100], [2, 2, 2]),
    ]:
        assert admit([even(count, 10) for count in counts if count], limits, turn=0) == ends


def test_logs_take_turns_where_there_is_not_enough_for_all() -> None:
    at = [0, 0, 0]
    for turn in range(9):
        at = admit([even(50, start=start) for start in at], Limits(records=1), turn=turn)
    assert at == [3, 3, 3]


def test_a_batch_is_cut_where_the_limit_is() -> None:
    assert admit([Backlog(0, 1000, [Extent(1, 1000, 5000)])], Limits(records=7), turn=0) == [7]
    assert admit([Backlog(0, 1000, [Extent(1, 1000, 5000)])], Limits(raw_bytes=50), turn=0) == [10]


def test_a_record_longer_than_the_limit_goes_alone() -> None:
    long = [Backlog(0, 2, [Extent(1, 1, 900), Extent(2, 1, 900)]), Backlog(0, 1, [Extent(1, 1, 900)])]
    assert admit(long, Limits(raw_bytes=10), turn=0) == [1, 0]
    assert admit(long, Limits(raw_bytes=10), turn=1) == [0, 1]


def test_the_bytes_of_a_long_record_count_though_they_are_in_other_batches() -> None:
    """Each record has ten bytes in its first batch and ninety in the next."""
    extents = [Extent(1 + number // 2, 1 - number % 2, 90 if number % 2 else 10) for number in range(20)]
    assert admit([Backlog(0, 10, extents)], Limits(raw_bytes=300), turn=0) == [3]


def test_records_that_are_not_wanted_cost_nothing() -> None:
    assert admit([Backlog(5, 900, []), Backlog(0, 900, [Extent(3, 1, 10)])], Limits(records=1), turn=0) == [900, 3]
    assert admit([], Limits(records=1), turn=3) == []
