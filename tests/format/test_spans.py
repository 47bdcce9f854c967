"""Sets of spans and their run lengths."""

from __future__ import annotations

import base64
import json
import random
from array import array
from collections.abc import Iterable
from itertools import pairwise

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from wald.format.spans import BadRunLengths, Span, Spans, pack, run_lengths, spans_of, unpack

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


@pytest.mark.parametrize("turns", [[], [0, 2], [3, 1] * 32, [1, 1] * 5000, [0, 1, 2**40, 5] * 100])
def test_what_is_packed_comes_back(turns: list[int]) -> None:
    packed = json.loads(json.dumps(pack(array("Q", turns))))

    assert unpack(packed, sum(turns[1::2])).tolist() == turns
    assert isinstance(packed, list) == (len(turns) <= 64)


def test_routes_that_take_turns_cost_no_two_numbers_a_record() -> None:
    """In turn nearly nothing; at random less than a byte and a half."""
    dice = random.Random(1)
    regular, chance = [1, 1] * 50_000, [dice.choice((1, 1, 1, 2, 3)) for _ in range(100_000)]

    assert len(pack(regular)) < 1000
    assert len(pack(chance)) < 1.5 * sum(chance[1::2])


def test_what_are_no_turns_is_refused() -> None:
    for stored in [None, 7, "*", "AAAA", [1], [1, "x"], [-1, 1], [1, 2**64]]:
        with pytest.raises(BadRunLengths):
            unpack(stored, 5)


def test_a_bomb_is_not_decompressed() -> None:
    bomb = base64.b64encode(zstandard.ZstdCompressor().compress(bytes(1 << 24))).decode()
    with pytest.raises(BadRunLengths, match="more numbers than records"):
        unpack(bomb, 100)
