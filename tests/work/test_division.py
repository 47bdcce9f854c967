"""Division of new records among waiting workers, as if each leased its share in turn."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from wald.reading.assembler import Rows
from wald.work.owner import Leased, LeaseOrder, divide, hand_out
from wald.work.window import Run

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12)
LIMITS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=6)


def rows(sizes: list[int]) -> Rows:
    return Rows("a", 1, len(sizes), 0, [bytes(size) for size in sizes])


def handed_out(sizes: list[int], tries: bytes, wanted: list[LeaseOrder]) -> None:
    some = rows(sizes)
    if shares := list(divide(some.values, wanted)):
        run = Run(1, sum(count for _, count in shares))
        hand_out(some, run, tries[: run.size], shares)


def alone(sizes: list[int], records_max: int, bytes_max: int) -> int:
    """Return how many of the first records a worker without records gets."""
    count = 0
    while count < min(len(sizes), records_max) and (count == 0 or sum(sizes[: count + 1]) <= bytes_max):
        count += 1
    return count


@given(SIZES, LIMITS)
def test_each_gets_what_it_would_get_alone_of_what_is_left(sizes: list[int], limits: list[tuple[int, int]]) -> None:
    wanted = [LeaseOrder(f"worker-{place}", *limit, 1) for place, limit in enumerate(limits)]
    handed_out(sizes, bytes(range(1, len(sizes) + 1)), wanted)
    at = 0
    for each, limit in zip(wanted, limits, strict=True):
        count = alone(sizes[at:], *limit)
        expected = [(sequence, sequence) for sequence in range(at + 1, at + count + 1)]
        assert [(delivery.record.sequence, delivery.tries) for delivery in Leased(each.shares, ())] == expected
        assert each.runs == ([(at + 1, at + count)] if count else [])
        at += count


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 30))
def test_what_comes_in_parts_counts_together(parts: list[list[int]], records_max: int, bytes_max: int) -> None:
    wanted = LeaseOrder("worker", records_max, bytes_max, 1)
    first = 0
    for sizes in parts:
        if not wanted.is_full:
            handed_out(sizes, bytes(len(sizes)), [wanted])
        first += len(sizes)
    sizes = [size for part in parts for size in part]
    values = [len(delivery.record.value) for delivery in Leased(wanted.shares, ())]
    assert len(values) <= records_max
    assert values == sizes[: len(values)]
    assert sum(values) <= bytes_max or len(values) == 1
    if len(values) < len(sizes):
        assert wanted.is_full
        assert len(values) == records_max or sum(values) + sizes[len(values)] > bytes_max or sum(values) == bytes_max
