"""Packing loses no block, repeats none and keeps its limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wald_spark.plan import Block, fair_share, joined_blocks, packed

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
    made = blocks(sizes)
    found = list(joined_blocks(made, first=1, last=10**9, limit_bytes=limit))
    assert all(one.last < other.first for one, other in pairwise(found))
    for block in made:
        assert sum(joined.first <= block.first and block.next - 1 <= joined.last for joined in found) == 1
    assert sum(joined.raw_bytes for joined in found) == sum(block.raw_bytes for block in made)


@given(SIZES, st.integers(1, 200))
def test_a_joined_block_is_larger_than_the_limit_only_if_its_block_is(
    sizes: list[tuple[int, int, int]], limit: int
) -> None:
    made = blocks(sizes)
    for joined in joined_blocks(made, first=1, last=10**9, limit_bytes=limit):
        inside = [block for block in made if joined.first <= block.first <= joined.last]
        assert joined.raw_bytes <= limit or len([block for block in inside if block.raw_bytes]) == 1


def test_a_joined_block_ends_where_a_segment_was_passed_over() -> None:
    apart = [Block(1, 1, 5, 10), Block(20, 20, 25, 10)]
    assert list(joined_blocks(apart, first=1, last=99, limit_bytes=100)) == apart
    same = [Block(1, 1, 5, 10), Block(1, 20, 25, 10), Block(25, 25, 30, 10)]
    assert list(joined_blocks(same, first=1, last=99, limit_bytes=100)) == [Block(1, 1, 30, 30)]


def test_the_rest_of_a_long_record_is_no_block_of_its_own() -> None:
    rest = [Block(1, 1, 1, 70), Block(1, 1, 5, 10), Block(5, 5, 5, 300), Block(9, 9, 9, 50), Block(9, 9, 12, 10)]
    assert list(joined_blocks(rest, first=1, last=99, limit_bytes=100)) == [Block(1, 1, 5, 360), Block(9, 9, 12, 10)]


def test_joined_blocks_are_cut_to_what_is_wanted() -> None:
    assert list(joined_blocks([Block(1, 1, 100, 10)], first=7, last=9, limit_bytes=100)) == [Block(1, 7, 10, 10)]


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 150))
def test_tasks_hold_everything_in_order_and_up_to_the_limit(sizes: list[int], limit: int) -> None:
    pieces = [Block(1, number, number + 1, size) for number, size in enumerate(sizes)]
    tasks = packed(pieces, limit_bytes=limit)
    assert [piece for task in tasks for piece in task] == pieces
    assert all(sum(piece.raw_bytes for piece in task) <= limit or len(task) == 1 for task in tasks)
    for task, following in pairwise(tasks):
        assert sum(piece.raw_bytes for piece in (*task, following[0])) > limit


@pytest.mark.parametrize(
    ("total", "most", "share"),
    [
        (0, 64 << 20, 8 << 20),
        (64 << 20, 64 << 20, 8 << 20),
        (128 << 20, 64 << 20, 16 << 20),
        (1 << 40, 64 << 20, 64 << 20),
        (1 << 40, 1 << 20, 1 << 20),
    ],
)
def test_a_small_log_is_shared_by_several_tasks_too(total: int, most: int, share: int) -> None:
    assert fair_share(total, most) == share
