"""Dead letters preserve the record, report its origin, and are not sent twice."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import records as records_of
from forgetting import forget
from hypothesis import given
from hypothesis import strategies as st
from running import Daemon, output_of

import wald
from wald.client.producer import Producer
from wald.errors import InvalidInput
from wald.files.layout import Root
from wald.format.log_state import PRODUCER_WINDOW
from wald.format.protocol import FRAME_MAX_BYTES
from wald.format.records import Record, decode_columns
from wald.work.dead_letters import (
    Origin,
    SentBefore,
    Undeliverable,
    dead_letter,
    fits,
    original,
    payloads,
    prepare,
    producer_id,
    send,
)
from wald_drain.redrive import Handover

ORIGIN = Origin(bytes(range(16)), "orders", "billing")
HANDOVER = Handover(10, 11, 20, "exit 3 after 5 tries", 5, "dead_letter", 7)
HEADERS = ORIGIN.headers(HANDOVER.reason, HANDOVER.tries)
SEED = ORIGIN.seed(HANDOVER)

some_records = st.lists(
    st.builds(
        Record,
        route=st.just("orders"),
        sequence=st.integers(1, 1 << 40),
        value=st.binary(max_size=30) | st.just(b"x" * 60_000),
        append_time_ns=st.integers(0, 1 << 60),
        key=st.none() | st.binary(max_size=5),
        event_time_ns=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        headers=st.none() | st.binary(max_size=10) | st.just(b'{"a":"b"}'),
    ),
    max_size=20,
)


def dead(record: Record, route: str = "dead_letter") -> Record:
    return dead_letter(record, HEADERS, route)


def letter(record: Record) -> Record:
    """Return the dead letter of one record as a reader sees it."""
    ((_, payload),) = payloads([dead(record)])
    columns = decode_columns(payload)
    return Record(
        "dead_letter",
        1,
        columns.values.to_list()[0] or b"",
        0,
        columns.keys.to_list()[0] if columns.keys else None,
        columns.times.cast("q")[0] if columns.times else None,
        columns.headers.to_list()[0] if columns.headers else None,
    )


def headers(record: Record) -> dict[str, str]:
    reported: dict[str, str] = json.loads(letter(record).headers or b"")
    return reported


@given(some_records)
def test_a_dead_letter_tells_all_that_the_record_was(given_records: list[Record]) -> None:
    """The encoding of headers may differ."""
    for record in given_records:
        back = original(letter(record), ORIGIN.log_id, Path("/log"))
        assert (back.route, back.value, back.key) == (record.route, record.value, record.key)
        assert back.event_time_ns == record.event_time_ns
        assert (back.headers or b"").replace(b" ", b"") == (record.headers or b"").replace(b" ", b"")


def test_what_is_no_dead_letter_of_this_log_goes_nowhere() -> None:
    cases: list[bytes | None] = [None, b"", b"{}", b'{"wald.origin.route":"orders"}']
    for content in cases:
        with pytest.raises(InvalidInput, match="dead_letter 1: is not a dead letter of this log"):
            original(Record("dead_letter", 1, b"x", 5, headers=content), ORIGIN.log_id, Path("/log"))
        with pytest.raises(InvalidInput):
            original(letter(Record("orders", 12, b"x", 5)), bytes(16), Path("/log"))
        with pytest.raises(InvalidInput):
            original(Record("dead_letter", 1, b"x", 5, headers=odd_route()), ORIGIN.log_id, Path("/log"))


def odd_route() -> bytes:
    """Return the headers of a dead letter whose route name is invalid."""
    return (letter(Record("orders", 12, b"x", 5)).headers or b"").replace(b"orders", b"../ab")


def test_headers_say_where_and_why() -> None:
    assert headers(Record("orders", 12, b"x", 1_795_255_200_000_000_001)) == {
        "wald.origin.log": "000102030405060708090a0b0c0d0e0f",
        "wald.origin.route": "orders",
        "wald.origin.sequence": "12",
        "wald.origin.append_time_ns": "1795255200000000001",
        "wald.group": "billing",
        "wald.reason": "exit 3 after 5 tries",
        "wald.tries": "5",
    }


def test_own_headers_are_kept_beside_ours() -> None:
    reported = headers(Record("orders", 12, b"x", 5, headers='{"trace":"ж","wald.tries":"9"}'.encode()))

    assert reported["trace"] == "ж"
    assert reported["wald.tries"] == "5"


def test_odd_headers_are_kept_in_hexadecimal() -> None:
    for odd in [b"\xff", b"[1]", b'{"a":1}', b'{"a":"\\ud800"}', b"", b"[" * 5000]:
        reported = headers(Record("orders", 12, b"x", 5, headers=odd))

        assert bytes.fromhex(reported["wald.origin.headers"]) == odd
        assert reported["wald.origin.sequence"] == "12"


@given(some_records)
def test_payloads_are_all_records_in_order_and_small_enough(given_records: list[Record]) -> None:
    found: list[tuple[bytes | None, bytes | None, int | None]] = []
    for _, payload in payloads(map(dead, given_records)):
        columns = decode_columns(payload)
        keys = columns.keys.to_list() if columns.keys else [None] * columns.count
        times = columns.times.cast("q").tolist() if columns.times else [None] * columns.count
        found += zip(columns.values.to_list(), keys, times, strict=True)
        assert len(payload) <= FRAME_MAX_BYTES

    assert found == [(record.value, record.key, record.event_time_ns) for record in given_records]


def test_payloads_are_as_large_as_they_may_be() -> None:
    """Short records without key and time, the worst case of the size estimate, fill a payload to 90 percent."""
    sizes = [len(payload) for _, payload in payloads([dead(Record("a", 1, b"x", 5))] * 5000)]

    assert all(size > 0.9 * FRAME_MAX_BYTES for size in sizes[:-1])
    assert len(sizes) > 2


def test_a_window_has_the_id_of_its_content() -> None:
    window = [("a", b"one"), ("a", b"two")]

    assert producer_id(SEED, window) == producer_id(SEED, window) > 0
    others = [
        producer_id(SEED, window[:1]),
        producer_id(SEED, [("a", b"one"), ("a", b"twp")]),
        producer_id(SEED, [("a", b"one"), ("b", b"two")]),
        producer_id(b"", window),
    ]
    assert producer_id(SEED, window) not in others


def test_another_handover_has_another_seed() -> None:
    """Records that are given up again after a rewind are sent again."""
    cases: list[tuple[Handover, Origin]] = [
        (HANDOVER, Origin(bytes(16), "orders", "billing")),
        (HANDOVER, Origin(ORIGIN.log_id, "order", "billing")),
        (HANDOVER, Origin(ORIGIN.log_id, "orders", "b")),
        (Handover(10, 11, 20, "exit 3 after 5 tries", 5, "dead_letter", 8), ORIGIN),
        (Handover(10, 11, 21, "exit 3 after 5 tries", 5, "dead_letter", 7), ORIGIN),
        (Handover(10, 12, 20, "exit 3 after 5 tries", 5, "dead_letter", 7), ORIGIN),
    ]
    for handover, origin in cases:
        assert origin.seed(handover) != SEED


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of this module; each test has a separate route."""
    with Daemon(tmp_path_factory.mktemp("letters") / "log", env={"WALD_REQUEST_MAX_BYTES": "128KiB"}) as running:
        yield running


MANY = [Record("orders", number, b"%d " % number + b"x" * 100_000, 5) for number in range(1, 2 * PRODUCER_WINDOW + 4)]


@pytest.mark.parametrize(
    ("sent", "forgotten"),
    [
        *((sent, False) for sent in (0, 1, PRODUCER_WINDOW, PRODUCER_WINDOW + 1, 2 * PRODUCER_WINDOW + 3)),
        *((sent, True) for sent in (7, PRODUCER_WINDOW, 2 * PRODUCER_WINDOW)),
    ],
)
def test_what_was_sent_before_a_crash_is_not_doubled(daemon: Daemon, sent: int, forgotten: bool) -> None:
    """Three windows of requests, interrupted after any request, finally exist once and in order."""
    route, seed = f"sent.{sent}.{forgotten}", SEED + bytes([sent, forgotten])
    log = wald.open(daemon.root)
    head = log.head()
    after = 0 if head is None else head.sequence
    prepare(daemon.root, Root(daemon.root), route)
    letters = list(payloads(dead(record, route) for record in MANY))
    assert len(letters) == len(MANY)
    for start in range(0, sent, PRODUCER_WINDOW):
        window = letters[start : start + PRODUCER_WINDOW]
        with Producer(daemon.root, producer_id=producer_id(seed, window)) as producer:
            for _, payload in window[: sent - start]:
                producer.publish(route, payload, columns=True)
            producer.flush()

    if forgotten:
        forget(daemon)

    durable = send(daemon.root, iter(letters), seed=seed, sent_before=SentBefore(log, after) if forgotten else None)

    assert [record.value for record in records_of(daemon.root, route)] == [record.value for record in MANY]
    assert sum(last - first + 1 for first, last in durable) == len(MANY)


def test_a_missing_route_is_made_and_an_old_one_left_alone(daemon: Daemon) -> None:
    root = Root(daemon.root)
    prepare(daemon.root, root, "made")
    assert "made" in root.route_names()
    output_of("route", "retire", "made", "--root", daemon.root)
    prepare(daemon.root, root, "made")

    assert root.retired("made").exists()


def test_a_record_above_the_daemons_limit_is_refused(daemon: Daemon) -> None:
    """Drain stops rather than lose the record; it continues once the operator raises the limit."""
    prepare(daemon.root, Root(daemon.root), "large")
    large = Record("orders", 1, b"x" * 200_000, 5)

    with pytest.raises(Undeliverable, match="the limit is 131072") as refused:
        send(daemon.root, payloads([dead(large, "large")]), seed=SEED)
    assert refused.value.sent == 0
    assert records_of(daemon.root, "large") == []


@pytest.mark.parametrize("before", [1, PRODUCER_WINDOW - 1, PRODUCER_WINDOW, PRODUCER_WINDOW + 2])
def test_what_comes_before_a_refused_record_is_on_disk(daemon: Daemon, before: int) -> None:
    """Records after it are not."""
    route = f"before.{before}"
    prepare(daemon.root, Root(daemon.root), route)
    given_up = [*MANY[:before], Record("orders", 99, b"x" * 200_000, 5), *MANY[before:]]

    for _ in range(2):
        with pytest.raises(Undeliverable) as refused:
            send(daemon.root, payloads(dead(each, route) for each in given_up), seed=SEED + route.encode())
        assert refused.value.sent == before
        assert [record.value for record in records_of(daemon.root, route)] == [each.value for each in MANY[:before]]


@given(some_records)
def test_what_fits_makes_a_payload_of_that_size_and_little_is_wasted(given_records: list[Record]) -> None:
    for record in given_records:
        ((_, payload),) = payloads([dead(record)])
        assert not fits(dead(record), bytes_max=len(payload) - 1)
        assert fits(dead(record), bytes_max=len(payload) + 200)
