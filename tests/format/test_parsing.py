"""Fast iteration over batches, compared with parsing one batch at a time."""

from __future__ import annotations

from damage import every_truncation, flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_segments import BATCHES, SALT, batch, control_batch, crafted, joined, moved

from wald.format.batch import (
    PAYLOAD_MAX_BYTES,
    Batches,
    ParseOutcome,
    ParseResult,
    StoredBatch,
    parse_batch,
    seed,
)
from wald.format.log_state import LogState

SOME = [control_batch(LogState(3, 5, {"web": 2})), batch(b"a\nb\n", base=3), batch(b"", base=5), batch(b"c\n", base=5)]


def one_by_one(data: bytes, at: int, position: int) -> tuple[list[StoredBatch], int, ParseResult]:
    """Return the batches, their end and the reason there, by :func:`parse_batch` alone."""
    found: list[StoredBatch] = []
    while True:
        parsed = parse_batch(data, at, seed(SALT, position + at))
        if parsed.outcome is not ParseOutcome.WHOLE or parsed.header is None:
            return found, at, parsed
        route = data[at + 64 : at + 64 + parsed.header.route_bytes].decode("ascii", "replace")
        found.append(StoredBatch(data, at, position + at, parsed.header, route))
        at += parsed.header.total_bytes


def iterated(data: bytes, at: int, position: int) -> tuple[list[StoredBatch], int, ParseResult]:
    batches = Batches(data, at, position=position, salt=SALT)
    return list(batches), batches.end, batches.rest


@settings(max_examples=300, deadline=None)
@given(
    batches=st.lists(BATCHES, max_size=4),
    before=st.binary(max_size=20),
    position=st.integers(0, 1 << 36).map(lambda number: number & ~7),
    damage=st.tuples(st.integers(0, 2000), st.binary(max_size=30)),
    behind=st.binary(max_size=100),
)
def test_the_fast_way_finds_what_the_plain_way_does(
    batches: list[bytes], before: bytes, position: int, damage: tuple[int, bytes], behind: bytes
) -> None:
    before += bytes(-len(before) % 8)
    data = before + joined(batches, start=position + len(before)) + behind
    at, garbage = damage
    data = (data[:at] + garbage + data[at + len(garbage) :])[: len(data)]

    assert iterated(data, len(before), position) == one_by_one(data, len(before), position)


def test_every_flipped_bit_and_every_truncation_end_the_iteration_alike() -> None:
    data = joined(SOME)
    for bit in range(8 * len(data)):
        assert iterated(flipped(data, bit), 0, 64) == one_by_one(flipped(data, bit), 0, 64)
    for cut in every_truncation(data):
        assert iterated(cut, 0, 64) == one_by_one(cut, 0, 64)


def test_a_header_that_lies_ends_the_iteration() -> None:
    for changes in [
        {"payload_bytes": PAYLOAD_MAX_BYTES + 1},
        {"count": 9},
        {"encoding": 3},
        {"encoding": 0},
        {"flags": 8},
        {"route_bytes": 128},
    ]:
        data = moved(crafted(bytes(8), **changes), 0) + bytes(256)

        assert iterated(data, 0, 0) == one_by_one(data, 0, 0)
        assert iterated(data, 0, 0)[:2] == ([], 0)


def test_a_verified_buffer_is_not_checked_again() -> None:
    data = joined(SOME)
    whole = list(Batches(data, position=64, salt=SALT))
    body = whole[1].offset + whole[1].header.payload_offset
    changed = flipped(data, 8 * body)

    assert [each.header for each in Batches(changed, position=64, salt=SALT, verified=True)] == [
        each.header for each in whole
    ]
    assert len(list(Batches(changed, position=64, salt=SALT))) == 1


def test_a_batch_knows_its_place_and_its_payload() -> None:
    data = bytes(8) + joined(SOME, start=72)
    found = list(Batches(data, 8, position=64, salt=SALT))

    assert [each.offset + 64 for each in found] == [each.position for each in found]
    assert [each.end for each in found[:-1]] == [each.position for each in found[1:]]
    assert [bytes(each.payload) for each in found[1:]] == [b"a\nb\n", b"", b"c\n"]
