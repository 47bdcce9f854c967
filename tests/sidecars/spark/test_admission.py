"""Admission keeps the limits, shares them equally, makes progress at every trigger and finally admits everything."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from some_logs import STEPS, Step, build

from wald.log import Log
from wald.reading.assembler import Batch
from wald_archive.bundle import Bytes, Records, Size, bundle_batches
from wald_spark.engine import Share, Stretch, shares, stretches
from wald_spark.options import Limits
from wald_spark.plan import Block, fair_share, joined_blocks, packed
from wald_spark.stream import Backlog, Extent, admit

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


def test_a_batch_is_cut_where_the_limit_is_and_a_longer_record_goes_alone() -> None:
    """Its bytes count even if they are in other batches; logs take turns if there is not enough for all."""
    assert admit([Backlog(0, 1000, [Extent(1, 1000, 5000)])], Limits(records=7), turn=0) == [7]
    assert admit([Backlog(0, 1000, [Extent(1, 1000, 5000)])], Limits(raw_bytes=50), turn=0) == [10]
    long = [Backlog(0, 2, [Extent(1, 1, 900), Extent(2, 1, 900)]), Backlog(0, 1, [Extent(1, 1, 900)])]
    assert [admit(long, Limits(raw_bytes=10), turn=turn) for turn in (0, 1)] == [[1, 0], [0, 1]]
    # Each record has ten bytes in its first batch and ninety in the next.
    extents = [Extent(1 + number // 2, 1 - number % 2, 90 if number % 2 else 10) for number in range(20)]
    assert admit([Backlog(0, 10, extents)], Limits(raw_bytes=300), turn=0) == [3]
    assert admit([Backlog(5, 900, []), Backlog(0, 900, [Extent(3, 1, 10)])], Limits(records=1), turn=0) == [900, 3]
    at = [0, 0, 0]
    for turn in range(9):
        at = admit([even(50, start=start) for start in at], Limits(records=1), turn=turn)
    assert at == [3, 3, 3]


def shares_of(log: Log, size: Size, *, pieces: list[int], stretch_bytes: int) -> list[Share]:
    """Measure pieces that begin at the given records, even in the middle of a batch."""
    last = max((record.sequence for record in log.records()), default=0)
    starts = sorted({1, *(start for start in pieces if start <= last), last + 1})
    measured: list[Stretch] = []
    for start, following in pairwise(starts):
        found = stretches(log.batches("a", start, following - 1), size, limit_bytes=stretch_bytes)
        measured += found

    def read(stretch: Stretch) -> Iterator[Batch]:
        return log.batches("a", stretch.first, stretch.last)

    return list(shares(measured, size, after=0, read=read))


def expected(log: Log, size: Size) -> list[Share]:
    found, after = [], 0
    for portion in bundle_batches(log.batches("a"), size):
        sequences = [record.sequence for batch in portion for record in batch.records()]
        found.append(Share(after, sequences[0], sequences[-1]))
        after = sequences[-1]
    return found


@settings(max_examples=80, deadline=None)
@given(
    steps=STEPS,
    size=st.builds(Bytes, st.integers(1, 60)) | st.builds(Records, st.integers(1, 9)),
    pieces=st.lists(st.integers(1, 40), max_size=4),
    stretch_bytes=st.sampled_from([1, 20, 1000]),
)
def test_shares_are_portions(steps: list[Step], size: Size, pieces: list[int], stretch_bytes: int) -> None:
    """The batches of a share equal those of the portion: the same bytes of the same stored batches."""
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        found = shares_of(log, size, pieces=pieces, stretch_bytes=stretch_bytes)
        assert found == expected(log, size)
        for share, portion in zip(found, bundle_batches(log.batches("a"), size), strict=True):
            assert list(log.batches("a", share.first, share.last)) == list(portion)


@pytest.mark.parametrize("size", [Records(100), Bytes(10_000)])
def test_only_stretches_in_which_a_bundle_ends_are_read(built: Built, size: Size) -> None:
    for _ in range(10):
        built.lines("a", [b"x" * 99] * 10)
    measured = list(stretches(built.log.batches("a"), size, limit_bytes=1))
    assert len(measured) == 10

    def never(stretch: Stretch) -> list[Batch]:
        raise AssertionError(stretch)

    assert list(shares(measured, size, after=0, read=never)) == [Share(0, 1, 100)]


def test_small_batches_are_measured_together(built: Built) -> None:
    for _ in range(10):
        built.lines("a", [b"x" * 99])
    assert list(stretches(built.log.batches("a"), Records(1), limit_bytes=300)) == [
        Stretch(1, 3, 3),
        Stretch(4, 6, 3),
        Stretch(7, 9, 3),
        Stretch(10, 10, 1),
    ]


SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100), st.integers(0, 3)), max_size=30)


def blocks(sizes: list[tuple[int, int, int]]) -> list[Block]:
    """Return one block for each (records, bytes, gap); a gap of 3 begins another segment."""
    made: list[Block] = []
    segment = at = 1
    for records, raw_bytes, gap in sizes:
        at += gap
        segment = at if gap == 3 else segment
        made.append(Block(segment, at, at + records, raw_bytes))
        at += records
    return made


@given(SIZES, st.integers(1, 200))
def test_joined_blocks_cover_every_block_once_and_in_order(sizes: list[tuple[int, int, int]], limit: int) -> None:
    """One is larger than the limit only if its block is."""
    made = blocks(sizes)
    found = list(joined_blocks(made, first=1, last=10**9, limit_bytes=limit))
    assert all(one.last < other.first for one, other in pairwise(found))
    for block in made:
        assert sum(joined.first <= block.first and block.next - 1 <= joined.last for joined in found) == 1
    assert sum(joined.raw_bytes for joined in found) == sum(block.raw_bytes for block in made)
    for joined in found:
        inside = [block for block in made if joined.first <= block.first <= joined.last]
        assert joined.raw_bytes <= limit or len([block for block in inside if block.raw_bytes]) == 1


def test_joined_blocks_end_with_a_segment_that_was_passed_over_and_hold_all_of_a_long_record() -> None:
    def joined(*made: Block, first: int = 1, last: int = 99) -> list[Block]:
        return list(joined_blocks(made, first=first, last=last, limit_bytes=100))

    apart = [Block(1, 1, 5, 10), Block(20, 20, 25, 10)]
    assert joined(*apart) == apart
    assert joined(Block(1, 1, 5, 10), Block(1, 20, 25, 10), Block(25, 25, 30, 10)) == [Block(1, 1, 30, 30)]
    rest = [Block(1, 1, 1, 70), Block(1, 1, 5, 10), Block(5, 5, 5, 300), Block(9, 9, 9, 50), Block(9, 9, 12, 10)]
    assert joined(*rest) == [Block(1, 1, 5, 360), Block(9, 9, 12, 10)]
    assert joined(Block(1, 1, 100, 10), first=7, last=9) == [Block(1, 7, 10, 10)]


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 150))
def test_tasks_hold_everything_in_order_and_up_to_the_limit(sizes: list[int], limit: int) -> None:
    pieces = [Block(1, number, number + 1, size) for number, size in enumerate(sizes)]
    tasks = packed(pieces, limit_bytes=limit)
    assert [piece for task in tasks for piece in task] == pieces
    assert all(sum(piece.raw_bytes for piece in task) <= limit or len(task) == 1 for task in tasks)
    for task, following in pairwise(tasks):
        assert sum(piece.raw_bytes for piece in (*task, following[0])) > limit


def test_a_small_log_is_shared_by_several_tasks_too() -> None:
    for total, most, share in [
        (0, 64 << 20, 8 << 20),
        (64 << 20, 64 << 20, 8 << 20),
        (128 << 20, 64 << 20, 16 << 20),
        (1 << 40, 64 << 20, 64 << 20),
        (1 << 40, 1 << 20, 1 << 20),
    ]:
        assert fair_share(total, most) == share
