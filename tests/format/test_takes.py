"""Takes: a slot says which bytes are leaving a pipe and whether they have, or nothing."""

from __future__ import annotations

from damage import every_flip, every_truncation
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.takes import MARK_OFFSET, SLOT_BYTES, Take, decode_take, encode_take

U64 = st.integers(0, (1 << 64) - 1)
TAKES = st.builds(
    Take,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", fullmatch=True),
    U64,
    st.integers(1, (1 << 32) - 1),
    U64,
    U64,
    st.integers(0, 255),
)
TAKE = Take("web", 4711, 4096, 250, 128, 0x41)


@settings(max_examples=100, deadline=None)
@given(take=TAKES)
def test_a_take_comes_back_as_not_taken_until_its_mark_is_set(take: Take) -> None:
    slot = encode_take(take).ljust(SLOT_BYTES, b"\0")
    taken = slot[:MARK_OFFSET] + bytes([take.first]) + slot[MARK_OFFSET + 1 :]

    assert len(slot) == SLOT_BYTES
    assert decode_take(slot) == (take, False)
    assert decode_take(taken) == (take, True)


def test_every_flipped_bit_empties_the_slot_or_leaves_it_not_taken() -> None:
    """No single flip can make bytes that are still in the pipe look taken: they would be lost."""
    for data in every_flip(encode_take(TAKE)):
        assert decode_take(data) in (None, (TAKE, False))


def test_every_truncation_is_empty() -> None:
    for data in every_truncation(encode_take(TAKE)):
        assert decode_take(data) is None


@settings(max_examples=100, deadline=None)
@given(old=TAKES, new=TAKES, torn_at=st.integers(0, MARK_OFFSET + 1))
def test_a_torn_slot_is_the_old_take_the_new_one_or_none(old: Take, new: Take, torn_at: int) -> None:
    found = decode_take(encode_take(new)[:torn_at] + encode_take(old)[torn_at:])
    assert found is None or found[0] in (old, new)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=SLOT_BYTES))
def test_any_bytes_are_an_empty_slot(data: bytes) -> None:
    assert decode_take(data.ljust(SLOT_BYTES, b"\0")) is None
