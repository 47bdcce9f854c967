"""Transfers: a slot says which bytes are leaving a pipe and whether they have left it, or nothing."""

from __future__ import annotations

from damage import every_flip, every_truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.transfers import MARK_OFFSET, SLOT_BYTES, Transfer, decode_transfer, encode_transfer

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
