"""The producer: published records are appended once and in order, even if threads or forks share the producer."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer import Answering, ok
from running import Daemon, eventually

import wald
from wald.client.producer import Durable, Producer, frames
from wald.client.session import WINDOW
from wald.errors import InvalidInput, Refused
from wald.format.protocol import FRAME_MAX_BYTES, Publish
from wald.format.records import encode_columns


def test_what_is_published_is_in_the_log(daemon: Daemon) -> None:
    with Producer(daemon.root) as producer:
        producer.publish("a", b"one\ntwo\n")
        producer.publish("a", encode_columns([b"three"], keys=[b"k"]), columns=True)

        assert producer.flush() == [Durable(1, 2), Durable(3, 3)]
        assert producer.flush() == []
    records = list(wald.open(daemon.root).records("a"))
    assert [(record.key, record.value) for record in records] == [(None, b"one"), (None, b"two"), (b"k", b"three")]


def test_a_large_payload_goes_in_frames(daemon: Daemon) -> None:
    payload = b"".join(b"%d\n" % number for number in range(200_000))
    with Producer(daemon.root) as producer:
        producer.publish("a", payload)
        durable = producer.flush()

    assert len(durable) == -(-len(payload) // FRAME_MAX_BYTES)
    assert (durable[0].first, durable[-1].last) == (1, 200_000)
    assert b"".join(bytes(batch.raw()) for batch in wald.open(daemon.root).batches("a")) == payload


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=20))
def test_frames_are_whole_lines_and_lose_nothing(lines: list[bytes]) -> None:
    """Each frame is within the limit, or is a single longer line."""
    with mock.patch("wald.client.producer.FRAME_MAX_BYTES", 16):
        found = [bytes(frame) for frame in frames(b"".join(lines))]

    assert b"".join(found) == b"".join(lines)
    assert all(frame.endswith(b"\n") for frame in found if lines)
    assert all(len(frame) <= 16 or frame.count(b"\n") == 1 for frame in found)


def test_a_repeated_request_is_acknowledged_with_its_first_sequences(daemon: Daemon) -> None:
    """A retry with the same producer id and number on another connection, even after a restart, appends nothing."""
    for restart in (False, True):
        if restart:
            daemon.kill()
            daemon.start_again()
        with Producer(daemon.root, producer_id=7) as producer:
            producer.publish("a", b"one\n")
            producer.publish("a", b"two\n")
            assert producer.flush() == [Durable(1, 1), Durable(2, 2)]

    assert [record.value for record in wald.open(daemon.root).records("a")] == [b"one", b"two"]


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


def test_a_given_id_stays_with_the_process_it_was_given_to(daemon: Daemon) -> None:
    """The child of a fork is rejected, and the parent continues."""
    with Producer(daemon.root, producer_id=7) as producer:
        producer.publish("a", b"before\n")
        child = os.fork()
        if child == 0:
            try:
                producer.publish("a", b"child\n")
            except Refused:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
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
        producer.publish("a", b"x\n")
        assert producer.unanswered == 1
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


def test_bad_input_is_refused_before_it_is_sent(
    answering: Answering,
) -> None:
    with Producer(answering(lambda _, request: ok(request))) as producer:
        for route, payload in (("a b", b"x\n"), ("", b"x\n"), ("a\nPING", b"x\n"), ("a", b"x"), ("a", b"")):
            with pytest.raises(InvalidInput):
                producer.publish(route, payload)
        assert producer.flush() == []


def test_a_closed_one_says_so(daemon: Daemon) -> None:
    producer = Producer(daemon.root)
    producer.close()
    with pytest.raises(Refused, match=r"has ended: .*wald\.sock: close\(\) was called"):
        producer.publish("a", b"x\n")
    assert producer.unanswered == 0
