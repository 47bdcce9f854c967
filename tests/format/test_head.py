"""Head line, cursor files and slots of transfers: encoding is reversible, and torn or other bytes are rejected."""

from contextlib import suppress

import pytest
from damage import every_flip, every_truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.head import (
    CURSOR_MAX_BYTES,
    HEAD_BYTES,
    BadCursor,
    CursorLines,
    Head,
    decode_cursor,
    decode_head,
    encode_cursor,
    encode_head,
)
from wald.format.transfers import MARK_OFFSET, SLOT_BYTES, Transfer, decode_transfer, encode_transfer

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


@settings(max_examples=100, deadline=None)
@given(old=HEADS, new=HEADS, torn_at=st.integers(0, HEAD_BYTES))
def test_a_torn_update_is_the_old_head_the_new_head_or_none(old: Head, new: Head, torn_at: int) -> None:
    seen = encode_head(new)[:torn_at] + encode_head(old)[torn_at:]
    assert decode_head(seen) in (old, new, None)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200) | st.sampled_from([bytes(HEAD_BYTES), b" " * 159 + b"\n"]))
def test_any_bytes_are_no_head(data: bytes) -> None:
    assert decode_head(data) is None


SEQUENCES = st.integers(0, (1 << 64) - 1)
CURSOR = CursorLines(250, bytes(range(16)), 3, "processed", "2026-11-21T10:00:00Z")
CURSOR_ENCODED = encode_cursor(CURSOR)


@settings(max_examples=100, deadline=None)
@given(
    cursor=st.builds(
        CursorLines,
        SEQUENCES,
        st.binary(min_size=16, max_size=16),
        st.integers(0, 1 << 64),
        st.text(max_size=20),
        st.text(max_size=20),
    )
    | SEQUENCES.map(CursorLines)
)
def test_a_cursor_comes_back(cursor: CursorLines) -> None:
    assert decode_cursor(encode_cursor(cursor)) == cursor


def test_a_number_from_a_shell_is_a_cursor() -> None:
    for data in [b"250", b"250\n", b" 250 \n", b"250\r\n", b"250\n\n", b"0250\n"]:
        assert decode_cursor(data) == CursorLines(250)


def test_what_is_no_cursor_is_refused() -> None:
    for data in [
        *(b"", b"\n", b"\0\0\0\0", b"-1\n", b"+1\n", b"1_0\n", b"2.5\n", b"0x10\n", "\u0661\n".encode()),
        *(b"18446744073709551616\n", b"9" * 21, b"250 251\n"),
        *(b"250\n{}", b"250\nnull", b"250\n[1]", b"250\n" + b"[" * 3000),
        b'250\n{"crc":"9368d570","log":"","epoch":0,"group":"","at":""}',
        b'250\n{"crc":"9368d570","log":"00","epoch":0,"group":"","at":""}',
        b'250\n{"crc":"9368d570","log":"000102030405060708090a0b0c0d0e0f","epoch":Infinity,"group":"","at":""}',
        b'250\n{"crc":"9368d570","log":5,"epoch":0,"group":"","at":""}',
        b"250\n" + b" " * CURSOR_MAX_BYTES,
        CURSOR_ENCODED.replace(b"250", b"251"),
        CURSOR_ENCODED.replace(b"250", b"0250"),
    ]:
        with pytest.raises(BadCursor):
            decode_cursor(data)


def test_a_truncated_cursor_never_says_more_than_was_processed_and_a_flipped_one_nothing_else() -> None:
    """Other fields may change: a wrong log id or epoch pins, which is safe."""
    for data in [*every_truncation(CURSOR_ENCODED), *every_flip(CURSOR_ENCODED)]:
        with suppress(BadCursor):
            found = decode_cursor(data).sequence
            assert found == 250 or (found < 250 and len(data) < len(CURSOR_ENCODED))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: b"7\n" + rest))
def test_any_bytes_are_a_cursor_or_bad_cursor(data: bytes) -> None:
    with suppress(BadCursor):
        assert 0 <= decode_cursor(data).sequence < 1 << 64


U64 = st.integers(0, (1 << 64) - 1)
TRANSFERS = st.builds(
    Transfer,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", fullmatch=True),
    U64,
    st.integers(1, (1 << 32) - 1),
    U64,
    U64,
    st.integers(0, 255),
)
TAKE = Transfer("web", 4711, 4096, 250, 128, 0x41)


@settings(max_examples=100, deadline=None)
@given(transfer=TRANSFERS)
def test_a_transfer_comes_back_as_not_taken_until_its_mark_is_set(transfer: Transfer) -> None:
    slot = encode_transfer(transfer).ljust(SLOT_BYTES, b"\0")
    taken = slot[:MARK_OFFSET] + bytes([transfer.first_byte]) + slot[MARK_OFFSET + 1 :]

    assert len(slot) == SLOT_BYTES
    assert decode_transfer(slot) == (transfer, False)
    assert decode_transfer(taken) == (transfer, True)


def test_every_flipped_bit_empties_the_slot_or_leaves_it_not_taken_and_every_truncation_empties_it() -> None:
    """No single flip can make bytes that are still in the pipe look taken: they would be lost."""
    for data in every_flip(encode_transfer(TAKE)):
        assert decode_transfer(data) in (None, (TAKE, False))
    for data in every_truncation(encode_transfer(TAKE)):
        assert decode_transfer(data) is None


@settings(max_examples=100, deadline=None)
@given(old=TRANSFERS, new=TRANSFERS, torn_at=st.integers(0, MARK_OFFSET + 1))
def test_a_torn_slot_is_the_old_take_the_new_one_or_none(old: Transfer, new: Transfer, torn_at: int) -> None:
    found = decode_transfer(encode_transfer(new)[:torn_at] + encode_transfer(old)[torn_at:])
    assert found is None or found[0] in (old, new)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=SLOT_BYTES))
def test_any_bytes_are_an_empty_slot(data: bytes) -> None:
    assert decode_transfer(data.ljust(SLOT_BYTES, b"\0")) is None
