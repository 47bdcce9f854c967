"""The head line: 160 bytes of text that are whole or None, whatever half of them a reader sees."""

from __future__ import annotations

import pytest
from damage import every_flip, every_truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.head import HEAD_BYTES, Head, decode_head, encode_head

HEADS = st.builds(
    Head,
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 10**12 - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 63) - 1),
)
ENCODED = encode_head(Head(260, 250, 4096, 3, 1_700_000_000_000_000_000))


@settings(max_examples=100, deadline=None)
@given(head=HEADS, behind=st.binary(max_size=10))
def test_a_head_comes_back(head: Head, behind: bytes) -> None:
    encoded = encode_head(head)
    assert len(encoded) == HEAD_BYTES
    assert encoded.endswith(b"\n")
    assert encoded.isascii()
    assert decode_head(encoded + behind) == head


def test_every_flipped_bit_and_every_truncation_is_torn() -> None:
    for data in [*every_flip(ENCODED), *every_truncation(ENCODED)]:
        assert decode_head(data) is None


@settings(max_examples=200, deadline=None)
@given(old=HEADS, new=HEADS, torn_at=st.integers(0, HEAD_BYTES))
def test_a_torn_update_is_the_old_head_the_new_head_or_none(old: Head, new: Head, torn_at: int) -> None:
    seen = encode_head(new)[:torn_at] + encode_head(old)[torn_at:]
    assert decode_head(seen) in (old, new, None)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_head(data: bytes) -> None:
    assert decode_head(data) is None


@pytest.mark.parametrize("data", [b"", bytes(HEAD_BYTES), b" " * 159 + b"\n"])
def test_an_empty_head_is_none(data: bytes) -> None:
    assert decode_head(data) is None
