"""The sequences of a bundle in its line of the ledger: small however routes take turns, and exact."""

from __future__ import annotations

import base64
import json
import random
from array import array

import pytest
import zstandard

from wald.format.spans import BadRunLengths, pack, unpack


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
