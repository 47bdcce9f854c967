"""Sending values with keys, times and headers as Python objects, and leaving a ``with`` block."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer import Answering, ok
from running import Daemon, eventually

import wald
from wald.client.payloads import encode_values
from wald.client.producer import Durable, Producer
from wald.errors import InvalidInput, NotFound, NotPermitted, Refused, Unavailable
from wald.format.protocol import FRAME_MAX_BYTES
from wald.format.records import decode_columns, not_before

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOON_NS = 1_795_262_400 * 10**9


def test_values_are_stored_with_their_keys_times_and_headers(daemon: Daemon) -> None:
    with Producer(daemon.root) as producer:
        producer.send(
            "a",
            ["grüß dich", b"\n\xff"],
            keys=["k", None],
            times=[NOON.astimezone(timezone(timedelta(hours=2))), NOON_NS + 1],
            headers=[{"from": "web", "é": "ü"}, None],
        )
        assert producer.flush() == [Durable(1, 2)]

    first, second = wald.open(daemon.root).records("a")
    assert (first.value, first.key, first.event_time_ns) == ("grüß dich".encode(), b"k", NOON_NS)
    assert first.headers == '{"from":"web","é":"ü"}'.encode()
    assert (second.value, second.key, second.event_time_ns, second.headers) == (b"\n\xff", None, NOON_NS + 1, None)


def test_a_receipt_returns_the_sequence_of_each_record(daemon: Daemon) -> None:
    """Sequences that a receipt has returned are not reported again."""
    with Producer(daemon.root) as producer:
        first = producer.send("a", ["x", "y"])
        second = producer.send("a", ["z" * FRAME_MAX_BYTES] * 3)
        third = producer.publish("a", b"v\nw\n")
        assert second.result() == [3, 4, 5]
        assert first.done()
        assert producer.flush() == [Durable(1, 2), Durable(6, 7)]
    assert (first.result(), third.result()) == ([1, 2], [6, 7])


def test_a_receipt_looks_for_the_acknowledgement_without_waiting(answering: Answering) -> None:
    with Producer(answering(lambda number, request: ok(request) if number == 1 else None)) as producer:
        first = producer.send("a", ["x"])
        eventually(first.done)
        assert not producer.send("a", ["y"]).done()
        producer.close()
        with pytest.raises(Refused, match="has ended"):
            producer.flush()


def test_a_receipt_raises_the_error_that_ended_the_producer(answering: Answering) -> None:
    with Producer(answering(lambda number, request: ok(request) if number == 1 else b"ERR denied no\n")) as producer:
        first, second, third = (producer.send("a", [value]) for value in "xyz")
        with pytest.raises(NotPermitted):
            second.result()
        with pytest.raises(Refused, match="has ended"):
            third.result()
        assert first.result() == [1]


def test_a_receipt_stays_with_the_process_that_sent(answering: Answering) -> None:
    with Producer(answering(lambda _, __: None), retry_for=0.1) as producer:
        receipt = producer.send("a", ["x"])
        if (child := os.fork()) == 0:
            try:
                receipt.result()
            except Refused:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        producer.close()


def test_a_log_appends_with_one_producer(daemon: Daemon) -> None:
    with wald.open(daemon.root) as log:
        assert [log.append("a", value) for value in ("one", b"two")] == [1, 2]
        assert log.append("a", "three", key="k", headers={"h": "1"}, time=NOON, not_before=NOON) == 3
        with pytest.raises(NotFound):
            log.append("nothing", "x")
        with pytest.raises(InvalidInput):
            log.append("a", 4)  # type: ignore[arg-type]
        assert log.append("a", "four") == 4

    assert log.append("a", "five") == 5
    log.close()
    third = list(log.records("a"))[2]
    assert (third.key, third.event_time_ns) == (b"k", NOON_NS)
    assert third.headers == b'{"h":"1","wald.not-before":"%d"}' % NOON_NS


def test_a_block_ends_once_everything_is_durable(daemon: Daemon) -> None:
    """Its sequences are still available afterwards."""
    with Producer(daemon.root) as producer:
        for number in range(100):
            producer.send("a", [str(number)])

    assert len(list(wald.open(daemon.root).records("a"))) == 100
    assert [first for first, _ in producer.acknowledged()] == list(range(1, 101))


def test_a_block_that_raises_waits_for_nothing(answering: Answering) -> None:
    producer = Producer(answering(lambda _, __: None))
    with pytest.raises(KeyError), producer:
        raise KeyError(producer.send("a", ["x"]))


def test_a_block_whose_records_stay_unanswered_raises(answering: Answering) -> None:
    with pytest.raises(Unavailable), Producer(answering(lambda _, __: None), retry_for=0.1) as producer:
        producer.send("a", ["x"])


def test_nothing_to_send_is_sent_as_nothing(answering: Answering) -> None:
    with Producer(answering(lambda _, request: ok(request))) as producer:
        producer.send("a", [])
        assert producer.flush() == []


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ("abc", {}),
        (b"abc", {}),
        ([1], {}),
        (["\ud800"], {}),
        (["a"], {"keys": []}),
        (["a"], {"times": [0, 1]}),
        (["a"], {"keys": [7]}),
        (["a"], {"keys": "k"}),
        (["a"], {"times": ["2026-11-21"]}),
        (["a"], {"times": [1 << 63]}),
        (["a"], {"times": [True]}),
        (["a"], {"times": [1_795_255_200]}),
        (["a"], {"times": [datetime(2300, 1, 1, tzinfo=UTC)]}),
        (["a"], {"times": [datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))]}),
        (["a"], {"times": [datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))]}),
        (["a"], {"not_before": []}),
        (["a"], {"not_before": [1 << 63]}),
        (["a"], {"not_before": [1_795_255_200]}),
        (["a"], {"not_before": [1_795_255_200_000]}),
        (["a"], {"not_before": [1_795_255_200_000_000]}),
        (["a"], {"not_before": [10**18 - 1]}),
        (["a"], {"not_before": [-1]}),
        (["a"], {"not_before": ["5m"]}),
        (["a"], {"not_before": "5m"}),
        (["a"], {"headers": ["a"], "not_before": [NOON_NS]}),
        (["a"], {"headers": [{"a": 1}]}),
        (["a"], {"headers": ["a"]}),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_sent(
    answering: Answering, values: Any, columns: dict[str, Any]
) -> None:
    with Producer(answering(lambda _, request: ok(request))) as producer:
        with pytest.raises(InvalidInput) as caught:
            producer.send("a", values, **columns)
        assert caught.value.hint
        assert producer.flush() == []


def test_when_a_record_is_due_is_a_header_beside_its_others(daemon: Daemon) -> None:
    """It overrides a header of the same name from the program."""
    with Producer(daemon.root) as producer:
        producer.send(
            "a",
            ["1", "2", "3"],
            headers=[{"h": "1", "wald.not-before": "7"}, None, {"h": "3"}],
            not_before=[NOON, NOON_NS + 1, None],
        )
        producer.send("a", ["4", "5"], not_before=[10**18, datetime(1999, 1, 1, tzinfo=UTC)])

    assert [record.headers for record in wald.open(daemon.root).records("a")] == [
        b'{"h":"1","wald.not-before":"%d"}' % NOON_NS,
        b'{"wald.not-before":"%d"}' % (NOON_NS + 1),
        b'{"h":"3"}',
        b'{"wald.not-before":"1000000000000000000"}',
        b'{"wald.not-before":"915148800000000000"}',
    ]


@given(st.lists(st.binary(max_size=FRAME_MAX_BYTES // 3), max_size=12), st.integers(1, 400))
def test_requests_hold_whole_records_in_order_and_stay_small(values: list[bytes], times: int) -> None:
    values = values * times
    keys = [value[:2] if len(value) % 2 else None for value in values]
    dues = [10**18 + len(value) if value else None for value in values]
    payloads = list(encode_values(values, keys=keys, times=[0] * len(values), not_before=dues))
    found = [decode_columns(payload) for payload in payloads]

    assert [value for columns in found for value in columns.values.to_list()] == values
    assert [key for columns in found if columns.keys for key in columns.keys.to_list()] == keys
    assert [not_before(each) or None for columns in found if columns.headers for each in columns.headers.to_list()] == (
        dues
    )
    assert all(len(payload) <= FRAME_MAX_BYTES for payload in payloads)


def test_threads_may_send_through_one_producer(daemon: Daemon) -> None:
    with Producer(daemon.root) as producer:

        def send(thread: int) -> None:
            for number in range(50):
                producer.send("a", [f"{thread} {number}"])

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = [record.value.decode().split() for record in wald.open(daemon.root).records("a")]
    for name in "0123":
        assert [number for thread, number in found if thread == name] == [str(number) for number in range(50)]


def test_a_path_may_be_text(daemon: Daemon) -> None:
    for at in (str(daemon.root), Path(daemon.root), daemon.socket_path):
        with Producer(at) as producer:
            producer.send("a", ["x"])
