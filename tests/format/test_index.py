"""Sparse indexes: hints that never lead past the wanted batch, even if damaged."""

from __future__ import annotations

import pytest
from damage import flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_segments import LOG_ID

from wald.format.segment import (
    SPARSE_MAGIC,
    SegmentHeader,
    SparseIndex,
    decode_sparse_index,
    encode_segment_header,
    encode_sparse_entry,
)

HEADER = SegmentHeader(LOG_ID, 10, 3, 1, 7)
ENTRIES = [(10, 64, 100), (10, 70_000, 100), (30, 140_000, 100), (50, 210_000, 200), (50, 280_000, 300)]
ENCODED = encode_segment_header(HEADER, SPARSE_MAGIC) + b"".join(encode_sparse_entry(*entry) for entry in ENTRIES)


def entries_of(index: SparseIndex | None) -> list[tuple[int, int, int]]:
    assert index is not None
    return index.entries


def decoded(data: bytes) -> SparseIndex | None:
    return decode_sparse_index(data, log_id=LOG_ID, base_sequence=10)


def test_an_entry_with_a_flipped_bit_is_passed_over() -> None:
    """It could lead into a payload that holds what looks like a batch."""
    for number in range(len(ENTRIES)):
        for bit in range(8 * 28):
            index = decoded(ENCODED[:64] + flipped(ENCODED[64:], 8 * 32 * number + bit))
            assert entries_of(index) == ENTRIES[:number] + ENTRIES[number + 1 :]


def test_every_truncation_leaves_the_whole_entries_before_it() -> None:
    for length in range(len(ENCODED) + 1):
        index = decoded(ENCODED[:length])
        if length < 64:
            assert index is None
        else:
            assert entries_of(index) == ENTRIES[: (length - 64) // 32]


@settings(max_examples=200, deadline=None)
@given(changed=st.binary(min_size=1, max_size=40), position=st.integers(0, len(ENCODED)))
def test_overwritten_entries_end_the_index_or_still_grow(changed: bytes, position: int) -> None:
    index = decoded((ENCODED[:position] + changed + ENCODED[position + len(changed) :])[: len(ENCODED)])
    if index is None:
        return
    found = entries_of(index)
    assert found == sorted(found)
    assert all(sequence >= 10 and place >= 64 for sequence, place, _ in found)


@pytest.mark.parametrize("bad", [(9, 300_000, 300), (49, 300_000, 300), (60, 280_000, 300), (60, 300_000, 299)])
def test_an_entry_that_goes_back_and_all_behind_it_are_ignored(bad: tuple[int, int, int]) -> None:
    data = ENCODED + encode_sparse_entry(*bad) + encode_sparse_entry(99, 999_999, 999)
    assert entries_of(decoded(data)) == ENTRIES


@pytest.mark.parametrize(
    "header", [SegmentHeader(bytes(16), 10, 3, 1, 7), SegmentHeader(LOG_ID, 11, 3, 1, 7)], ids=["log", "segment"]
)
def test_the_index_of_another_segment_is_none(header: SegmentHeader) -> None:
    assert decoded(encode_segment_header(header, SPARSE_MAGIC) + ENCODED[64:]) is None


def test_a_segment_is_not_its_index() -> None:
    assert decoded(encode_segment_header(HEADER) + ENCODED[64:]) is None
