"""Headers of segments, and sparse indexes, which never lead past the wanted batch even if damaged."""

import struct

import pytest
from crc32c import crc32c
from damage import every_flip, every_truncation, flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_segments import LOG_ID

from wald.format.segment import (
    SPARSE_MAGIC,
    BadHeader,
    NewerVersion,
    SegmentHeader,
    SparseIndex,
    decode_segment_header,
    decode_sparse_index,
    encode_segment_header,
    encode_sparse_entry,
)

U64 = st.integers(0, (1 << 64) - 1)
HEADERS = st.builds(
    SegmentHeader,
    st.binary(min_size=16, max_size=16),
    U64,
    U64,
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, (1 << 32) - 1),
)
ENCODED = encode_segment_header(SegmentHeader(bytes(range(16)), 250, 3, 1, 7))


def crafted(*, version: int = 1, header_bytes: int = 64) -> bytes:
    rest = struct.pack("<HH16sQQqQ", version, header_bytes, bytes(16), 1, 1, 1, 0)
    return b"WALDSEG1" + struct.pack("<I", crc32c(rest)) + rest


@settings(max_examples=100, deadline=None)
@given(header=HEADERS, behind=st.binary(max_size=10), magic=st.sampled_from([b"WALDSEG1", SPARSE_MAGIC]))
def test_a_header_comes_back(header: SegmentHeader, behind: bytes, magic: bytes) -> None:
    encoded = encode_segment_header(header, magic)
    assert len(encoded) == 64
    assert decode_segment_header(encoded + behind, magic) == header


def test_every_flipped_bit_and_every_truncation_is_refused() -> None:
    for data in [*every_flip(ENCODED), *every_truncation(ENCODED)]:
        with pytest.raises(BadHeader):
            decode_segment_header(data)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_refused(data: bytes) -> None:
    for candidate in (data, b"WALDSEG1" + data):
        with pytest.raises(BadHeader):
            decode_segment_header(candidate)


def test_a_newer_version_is_distinguished_from_damage() -> None:
    with pytest.raises(NewerVersion, match="version 2"):
        decode_segment_header(crafted(version=2, header_bytes=128))
    with pytest.raises(BadHeader, match="96 bytes") as caught:
        decode_segment_header(crafted(header_bytes=96))
    assert not isinstance(caught.value, NewerVersion)


HEADER = SegmentHeader(LOG_ID, 10, 3, 1, 7)
ENTRIES = [(10, 64, 100), (10, 70_000, 100), (30, 140_000, 100), (50, 210_000, 200), (50, 280_000, 300)]
INDEX_ENCODED = encode_segment_header(HEADER, SPARSE_MAGIC) + b"".join(encode_sparse_entry(*entry) for entry in ENTRIES)


def entries_of(index: SparseIndex | None) -> list[tuple[int, int, int]]:
    assert index is not None
    return index.entries


def decoded(data: bytes) -> SparseIndex | None:
    return decode_sparse_index(data, log_id=LOG_ID, base_sequence=10)


def test_an_entry_with_a_flipped_bit_is_passed_over() -> None:
    """It could lead into a payload that holds what looks like a batch."""
    for number in range(len(ENTRIES)):
        for bit in range(8 * 28):
            index = decoded(INDEX_ENCODED[:64] + flipped(INDEX_ENCODED[64:], 8 * 32 * number + bit))
            assert entries_of(index) == ENTRIES[:number] + ENTRIES[number + 1 :]


def test_every_truncation_leaves_the_whole_entries_before_it() -> None:
    for length in range(len(INDEX_ENCODED) + 1):
        index = decoded(INDEX_ENCODED[:length])
        if length < 64:
            assert index is None
        else:
            assert entries_of(index) == ENTRIES[: (length - 64) // 32]


@settings(max_examples=100, deadline=None)
@given(changed=st.binary(min_size=1, max_size=40), position=st.integers(0, len(INDEX_ENCODED)))
def test_overwritten_entries_end_the_index_or_still_grow(changed: bytes, position: int) -> None:
    index = decoded(
        (INDEX_ENCODED[:position] + changed + INDEX_ENCODED[position + len(changed) :])[: len(INDEX_ENCODED)]
    )
    if index is None:
        return
    found = entries_of(index)
    assert found == sorted(found)
    assert all(sequence >= 10 and place >= 64 for sequence, place, _ in found)


def test_an_entry_that_goes_back_and_all_behind_it_are_ignored() -> None:
    for bad in [(9, 300_000, 300), (49, 300_000, 300), (60, 280_000, 300), (60, 300_000, 299)]:
        data = INDEX_ENCODED + encode_sparse_entry(*bad) + encode_sparse_entry(99, 999_999, 999)
        assert entries_of(decoded(data)) == ENTRIES


def test_the_index_of_another_segment_is_none() -> None:
    for header in (SegmentHeader(bytes(16), 10, 3, 1, 7), SegmentHeader(LOG_ID, 11, 3, 1, 7)):
        assert decoded(encode_segment_header(header, SPARSE_MAGIC) + INDEX_ENCODED[64:]) is None
    assert decoded(encode_segment_header(HEADER) + INDEX_ENCODED[64:]) is None
