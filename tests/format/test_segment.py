"""The 64 bytes that open a segment: any change of them shows."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from damage import every_flip, every_truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.segment import (
    SPARSE_MAGIC,
    BadHeader,
    NewerVersion,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
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
