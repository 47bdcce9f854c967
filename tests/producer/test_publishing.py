"""Publishing and sending: records are appended once and in order, even if threads or forks share a producer."""

import os
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Answering, ok
from running import Daemon, eventually

import wald
from wald.client.payloads import encode_values
from wald.client.producer import Durable, Producer, frames
from wald.client.session import WINDOW
from wald.errors import InvalidInput, NotFound, NotPermitted, Refused, Unavailable
from wald.format.protocol import FRAME_MAX_BYTES, Publish
from wald.format.records import decode_columns, not_before


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=20))
def test_frames_are_whole_lines_and_lose_nothing(lines: list[bytes]) -> None:
    """Each frame is within the limit, or is a single longer line."""
    with mock.patch("wald.client.producer.FRAME_MAX_BYTES", 16):
        found = [bytes(frame) for frame in frames(b"".join(lines))]

    assert b"".join(found) == b"".join(lines)
    assert all(frame.endswith(b"\n") for frame in found if lines)
    assert all(len(frame) <= 16 or frame.count(b"\n") == 1 for frame in found)


def test_a_fork_makes_two_producers(daemon: Daemon) -> None:
    """Both continue with requests in flight: records reported as durable by either one are in the log."""
    with Producer(daemon.root) as producer:
        producer.publish("a", b"before\n")
        producer.publish("a", b"under way\n")
        child = os.fork()
        name = b"child" if child == 0 else b"parent"
        status = 1
        try:
            for number in range(5):
                producer.publish("a", b"%b %d\n" % (name, number))
            acknowledged = len(producer.flush())
            status = 0 if acknowledged == 5 else 1
        finally:
            if child == 0:
                os._exit(status)
        _, ended = os.waitpid(child, 0)

    assert (ended, acknowledged) == (0, 7)
    found = [record.value for record in wald.open(daemon.root).records("a")]
    assert sorted(found) == sorted(
        [b"before", b"under way", *(b"%b %d" % (name, n) for name in (b"child", b"parent") for n in range(5))]
    )


def is_refused_in_a_child(call: Callable[[], object]) -> bool:
    """Return True if the call raises Refused in a fork."""
    if (child := os.fork()) == 0:
        try:
            call()
        except Refused:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def test_a_given_id_stays_with_the_process_it_was_given_to(daemon: Daemon) -> None:
    """The child of a fork is rejected, and the parent continues."""
    with Producer(daemon.root, producer_id=7) as producer:
        producer.publish("a", b"before\n")
        assert is_refused_in_a_child(lambda: producer.publish("a", b"child\n"))
        producer.publish("a", b"parent\n")
        assert producer.flush() == [Durable(1, 1), Durable(2, 2)]


def test_threads_may_share_a_producer(daemon: Daemon) -> None:
    """Calls are atomic: no record is lost, duplicated or split by another thread."""
    with Producer(daemon.root) as producer:

        def publish(name: str) -> None:
            for number in range(100):
                producer.publish("a", f"{name} {number}\n".encode() * 50)
                producer.acknowledged() if number % 7 else producer.command("PING")

        threads = [threading.Thread(target=publish, args=(name,)) for name in "tuvw"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush()

    found = [record.value.decode() for record in wald.open(daemon.root).records("a")]
    assert sorted(found) == sorted(f"{name} {number}" for name in "tuvw" for number in range(100) for _ in range(50))


def test_commands_wait_for_what_was_published(daemon: Daemon) -> None:
    with Producer(daemon.root) as producer:
        producer.publish("a", b"one\n")

        assert producer.command("HEAD").startswith("seq=00000000000000000001 ")
        assert producer.acknowledged() == [Durable(1, 1)]


def test_a_root_too_deep_for_a_socket_address_is_reached(tmp_path: Path) -> None:
    """A socket address is limited to 107 bytes; a path may be longer."""
    listener = socket.socket(socket.AF_UNIX)
    short, deep = tmp_path / "s", tmp_path / ("d" * 120)
    deep.mkdir()
    listener.bind(str(short))
    listener.listen()
    short.rename(deep / "wald.sock")
    with listener, Producer(deep, connect_for=0):
        accepted, _ = listener.accept()
        accepted.close()


def test_the_first_request_goes_alone(answering: Answering) -> None:
    """The daemon could mistake the second request of a new producer for its first, so it waits for the first answer."""
    with Producer(answering(lambda _, request: ok(request))) as producer:
        for _ in range(2):
            producer.publish("a", b"x\n")
            assert producer.unanswered == 1


def test_what_is_answered_is_reported_without_waiting_for_more(answering: Answering) -> None:
    with Producer(answering(lambda number, request: ok(request) if number == 1 else None)) as producer:
        producer.publish("a", b"x\n")
        reported: list[Durable] = []

        def is_reported() -> bool:
            reported.extend(producer.acknowledged())
            return bool(reported)

        eventually(is_reported)
        producer.publish("a", b"x\n")

        assert (reported, producer.acknowledged()) == ([Durable(1, 1)], [])
        producer.close()  # otherwise the end of the block would wait for the second answer


def test_a_window_of_requests_is_under_way_at_once(answering: Answering) -> None:
    """A peer that answers only after a full window receives one."""
    held: list[bytes] = []

    def answer(number: int, request: Publish) -> bytes | None:
        held.append(ok(request))
        if number > 1 and len(held) < WINDOW:
            return None
        replies = b"".join(held)
        held.clear()
        return replies

    with Producer(answering(answer)) as producer:
        for _ in range(1 + 3 * WINDOW):
            producer.publish("a", b"x\n")

        assert [first for first, _ in producer.flush()] == list(range(1, 2 + 3 * WINDOW))


def test_bad_input_is_refused_before_it_is_sent_and_nothing_is_sent_as_nothing(answering: Answering) -> None:
    with Producer(answering(lambda _, request: ok(request))) as producer:
        for route, payload in (("a b", b"x\n"), ("", b"x\n"), ("a\nPING", b"x\n"), ("a", b"x"), ("a", b"")):
            with pytest.raises(InvalidInput):
                producer.publish(route, payload)
        producer.send("a", [])
        assert producer.flush() == []


def test_a_closed_one_says_so(daemon: Daemon) -> None:
    producer = Producer(daemon.root)
    producer.close()
    with pytest.raises(Refused, match=r"has ended: .*wald\.sock: close\(\) was called"):
        producer.publish("a", b"x\n")
    assert producer.unanswered == 0


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
        assert is_refused_in_a_child(producer.send("a", ["x"]).result)
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


def test_a_block_that_raises_waits_for_nothing_and_one_without_answers_raises(answering: Answering) -> None:
    path = answering(lambda _, __: None)
    producer = Producer(path)
    with pytest.raises(KeyError), producer:
        raise KeyError(producer.send("a", ["x"]))
    with pytest.raises(Unavailable), Producer(path, retry_for=0.1) as producer:
        producer.send("a", ["x"])


# Times that are none: their unit is not nanoseconds, they are out of range, or of another type.
NO_TIMES: tuple[Any, ...] = (1 << 63, 1_795_255_200, *(datetime(year, 1, 1, tzinfo=UTC) for year in (1, 2300)))
WRONG: list[tuple[Any, dict[str, Any]]] = [
    *((values, {}) for values in ("abc", b"abc", [1], ["\ud800"])),
    *((["a"], {"keys": keys}) for keys in ([], [7], "k")),
    *((["a"], {"headers": headers}) for headers in ([{"a": 1}], ["a"])),
    *((["a"], {"times": times}) for times in ([0, 1], ["2026-11-21"], [True], *([each] for each in NO_TIMES))),
    (["a"], {"times": [datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))]}),
    (["a"], {"times": [datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))]}),
    *((["a"], {"not_before": dues}) for dues in ([], [10**18 - 1], [-1], ["5m"], "5m", *([n] for n in NO_TIMES[:2]))),
    (["a"], {"headers": ["a"], "not_before": [NOON_NS]}),
]


def test_what_cannot_be_stored_is_refused_before_anything_is_sent(answering: Answering) -> None:
    with Producer(answering(lambda _, request: ok(request))) as producer:
        for values, columns in WRONG:
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


@settings(max_examples=40, deadline=None)
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


def test_a_path_may_be_text(daemon: Daemon) -> None:
    for at in (str(daemon.root), Path(daemon.root), daemon.socket_path):
        with Producer(at) as producer:
            producer.send("a", ["x"])
