"""Spans agree with sets of integers, and run lengths with spans."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wald.format.spans import Span, Spans, pack, run_lengths, spans_of, unpack

numbers = st.integers(1, 40)
given_spans = st.lists(st.tuples(numbers, numbers), max_size=8)
"""Any that last < first are empty."""


def members(spans: Iterable[Span]) -> set[int]:
    return {number for first, last in spans for number in range(first, last + 1)}


@given(given_spans, numbers, numbers)
def test_spans_are_a_set_of_sequences(added: list[Span], first: int, last: int) -> None:
    spans, expected, within = Spans(added), members(added), set(range(first, last + 1))

    assert members(spans) == expected
    assert all(begin <= end for begin, end in spans)
    assert all(one[1] + 1 < other[0] for one, other in pairwise(spans))
    assert list(Spans(spans)) == list(spans)
    assert {number for number in range(42) if number in spans} == expected
    assert spans.overlaps(first, last) == bool(within & expected)
    assert spans.covers(first, last) == (within <= expected)
    assert members(spans.gaps(first, last)) == within - expected
    assert spans.count(first, last) == len(within & expected)


@given(given_spans)
def test_run_lengths_are_spans(added: list[Span]) -> None:
    spans = list(Spans(added))
    lengths = run_lengths(spans, 1)

    assert list(spans_of(lengths, 1)) == spans
    assert list(spans_of(unpack(pack(lengths), len(members(spans))), 1)) == spans
