"""Log state that each segment passes to the next."""

from collections import deque
from contextlib import suppress

import pytest
from damage import every_flip, every_truncation
from golden.samples import STATE
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.batch import BatchHeader, Encoding, Flag
from wald.format.log_state import (
    PRODUCER_WINDOW,
    PRODUCERS_MAX,
    BadControl,
    DedupEntry,
    LogState,
    PreviousEnd,
    Producers,
    decode_previous,
    decode_state,
    encode_state,
    fingerprint,
)

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
ROUTES = st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True), U64, max_size=4)
WINDOWS = st.lists(st.builds(DedupEntry, U64, U64, U32, U32), max_size=PRODUCER_WINDOW).map(
    lambda w: deque(w, PRODUCER_WINDOW)
)
ENDINGS = st.none() | st.builds(PreviousEnd, U32, U64)
PRODUCERS = st.dictionaries(U64, WINDOWS, max_size=4).map(Producers)
STATES = st.builds(LogState, U64, U64, ROUTES, ROUTES, PRODUCERS, ENDINGS)
ENCODED = encode_state(STATE)


@settings(max_examples=100, deadline=None)
@given(state=STATES)
def test_state_comes_back(state: LogState) -> None:
    decoded = decode_state(encode_state(state))

    assert decoded == state
    assert decode_previous(encode_state(state)) == state.previous
    assert list(decoded.producers.table) == list(state.producers.table)  # the order determines the next eviction


def test_an_end_that_cannot_be_read_is_not_known() -> None:
    for data in (b"", b"[]\n", b"null\n", b'{"version":2,"previous":["0",1]}\n', b'{"version":1,"previous":[]}\n'):
        assert decode_previous(data) is None


def test_every_truncation_is_refused_and_every_flipped_bit_decodes_or_is_bad_control() -> None:
    """The batch's checksum sees flips; here it only matters that nothing else is raised."""
    for data in every_truncation(ENCODED):
        with pytest.raises(BadControl):
            decode_state(data)
    for data in every_flip(ENCODED):
        with suppress(BadControl):
            decode_state(data)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_refused(data: bytes) -> None:
    for candidate in (data, ENCODED + data + b"x"):
        with pytest.raises(BadControl):
            decode_state(candidate)


def test_state_that_lies_is_refused() -> None:
    for payload in [
        b"[" * 100_000 + b"\n",
        b'{"version":1,"next":Infinity,"at":0,"routes":{},"open":{},"producers":0}\n',
        b'{"version":1,"next":1,"at":0,"routes":[],"open":{},"producers":0}\n',
        b'{"version":1,"next":1,"at":0,"routes":{"a":null},"open":{},"producers":0}\n',
        b'{"version":1,"next":1,"at":0,"routes":{},"open":{},"producers":999999999999}\n',
        b'{"version":1,"next":1,"at":0,"routes":{},"open":{},"producers":1}\n' + b"\xff" * 16,
        b'{"version":2,"next":1,"at":0,"routes":{},"open":{},"producers":0}\n',
        b'{"version":1,"next":1,"at":0,"routes":{},"open":{},"producers":0}',
    ]:
        with pytest.raises(BadControl):
            decode_state(payload)


def test_a_retry_is_found_while_it_is_remembered() -> None:
    producers = Producers()
    for number in range(PRODUCER_WINDOW + 1):
        producers.add(7, DedupEntry(number, number + 1, 1, number))

    assert producers.find(7, 0) is None
    assert producers.find(7, 1) == DedupEntry(1, 2, 1, 1)
    assert producers.find(8, 1) is None
    assert producers.next_expected(7) == PRODUCER_WINDOW + 1
    assert producers.next_expected(8) is None


def test_what_a_forgotten_producer_may_have_sent_is_before_the_next_one_to_be_forgotten() -> None:
    producers = Producers()
    for sequence in range(1, PRODUCERS_MAX):
        producers.add(sequence, DedupEntry(0, sequence, 1, 0))
        assert producers.evicted_upto() == 0
    producers.add(1, DedupEntry(1, PRODUCERS_MAX, 1, 0))
    for sequence in range(PRODUCERS_MAX + 1, 2 * PRODUCERS_MAX):
        producers.add(sequence, DedupEntry(0, sequence, 1, 0))
        next_one = next(iter(producers.table.values()))
        assert producers.evicted_upto() == next_one[-1].first - 1
    assert producers.evicted_upto() >= PRODUCERS_MAX - 1
    assert (producers.next_expected(1), producers.next_expected(2)) == (2, None)
    assert len(producers.table) == PRODUCERS_MAX


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_batches_of_a_log_come_to_what_its_records_do(data: st.DataObject) -> None:
    """Compared with each record's route and completeness."""
    state = LogState(next_sequence=data.draw(st.integers(1, 100)))
    sequence, routes, begun = state.next_sequence, dict[str, int](), dict[str, int]()
    for time_ns in data.draw(st.lists(st.integers(0, 9), max_size=20)):
        route = data.draw(st.sampled_from("abc"))
        continues = begun.pop(route, 0) if data.draw(st.booleans()) else 0
        count, goes_on = data.draw(st.integers(0 if continues else 1, 3)), data.draw(st.booleans())
        flags = Flag.CONTINUES * bool(continues) | Flag.CONTINUED * goes_on
        header = BatchHeader(0, count, sequence, time_ns, 0, continues, count, 1, Encoding.LINES, flags, 1)
        before = state.append_time_ns
        state.apply(header, route)
        sequence += count
        begun.pop(route, None)
        if count:
            routes[route] = sequence - 1
        if goes_on:
            begun[route] = sequence - 1 if count else continues

        assert (state.next_sequence, state.routes, state.open_records) == (sequence, routes, begun)
        assert state.append_time_ns == max(before, time_ns)


def test_the_batch_of_a_producer_is_remembered_by_what_it_held() -> None:
    header = BatchHeader(0xABC, 9, 7, 3, 42, 6, 2, 1, Encoding.LINES, Flag.NONE, 1)
    state = LogState(7)
    state.apply(header, "a")

    digest = fingerprint(0xABC, 9, Encoding.LINES, 1)
    assert state.producers.find(42, 6) == DedupEntry(6, 7, 2, digest)
