"""The producer: everything once, in order, whatever the daemon answers and however often it goes away."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from full_disk import fill, small_file_system
from hypothesis import given
from hypothesis import strategies as st
from peer import Answer, Peer, ok
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of, refusal_of

import wald
from wald import producer as module
from wald.errors import DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, Unavailable, WaldError
from wald.format.columns import encode
from wald.format.framing import Publish, parse_request
from wald.producer import FRAME_MAX_BYTES, WINDOW, Durable, Producer

Answering = Callable[[Answer], Path]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "log") as running:
        output_of("route", "add", "a", "--root", running.root)
        yield running


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    """Make a peer that answers its n-th request; returns its socket's path."""
    peers: list[Peer] = []

    def make(answer: Answer) -> Path:
        path = tmp_path / "peer.sock"
        peers.append(Peer(path, answer))
        return path

    yield make
    for peer in peers:
        peer.close()


def test_what_is_published_is_in_the_log(daemon: Daemon) -> None:
    with Producer(daemon.root) as producer:
        producer.publish("a", b"one\ntwo\n")
        producer.publish("a", encode([b"three"], keys=[b"k"]), columns=True)

        assert producer.flush() == [Durable(1, 2), Durable(3, 3)]
        assert producer.flush() == []
    records = list(wald.open(daemon.root).read("a"))
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
    """Each is within the limit, or one line alone that is longer."""
    limit, module.FRAME_MAX_BYTES = module.FRAME_MAX_BYTES, 16
    try:
        frames = [bytes(frame) for frame in module._frames(b"".join(lines))]
    finally:
        module.FRAME_MAX_BYTES = limit

    assert b"".join(frames) == b"".join(lines)
    assert all(frame.endswith(b"\n") for frame in frames if lines)
    assert all(len(frame) <= 16 or frame.count(b"\n") == 1 for frame in frames)


def test_a_repeated_request_is_acknowledged_with_its_first_sequences(daemon: Daemon) -> None:
    """The same producer id and number from another connection, even after a restart: nothing is appended twice."""
    for restart in (False, True):
        if restart:
            daemon.kill()
            daemon.start_again()
        with Producer(daemon.root, producer_id=7) as producer:
            producer.publish("a", b"one\n")
            producer.publish("a", b"two\n")
            assert producer.flush() == [Durable(1, 1), Durable(2, 2)]

    assert [record.value for record in wald.open(daemon.root).read("a")] == [b"one", b"two"]


def test_a_fork_makes_two_producers(daemon: Daemon) -> None:
    """Both go on where they are, with requests under way: what either was told is durable is in the log."""
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
    found = [record.value for record in wald.open(daemon.root).read("a")]
    assert sorted(found) == sorted(
        [b"before", b"under way", *(b"%b %d" % (name, n) for name in (b"child", b"parent") for n in range(5))]
    )


def test_a_given_id_stays_with_the_process_it_was_given_to(daemon: Daemon) -> None:
    """A fork's child is refused, and the parent goes on."""
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
    """Each call is whole: nothing is lost, doubled or cut by another thread's."""
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

    found = [record.value.decode() for record in wald.open(daemon.root).read("a")]
    assert sorted(found) == sorted(f"{name} {number}" for name in "tuvw" for number in range(100) for _ in range(50))


def test_commands_wait_for_what_was_published(daemon: Daemon) -> None:
    with Producer(daemon.root) as producer:
        producer.publish("a", b"one\n")

        assert producer.command("HEAD").startswith("seq=00000000000000000001 ")
        assert producer.acknowledged() == [Durable(1, 1)]


def test_a_root_too_deep_for_a_socket_address_is_reached(tmp_path: Path) -> None:
    """A socket's address holds 107 bytes; a path may have more."""
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
    """A new producer's second request could be taken for its first; so it waits until the first is answered."""
    with Producer(answering(lambda _, request: ok(request))) as producer:
        producer.publish("a", b"x\n")
        assert producer.unanswered == 1
        producer.publish("a", b"x\n")
        assert producer.unanswered == 1


def test_what_is_answered_is_told_without_waiting_for_more(answering: Answering) -> None:
    with Producer(answering(lambda number, request: ok(request) if number == 1 else None)) as producer:
        producer.publish("a", b"x\n")
        told: list[Durable] = []

        def is_told() -> bool:
            told.extend(producer.acknowledged())
            return bool(told)

        eventually(is_told)
        producer.publish("a", b"x\n")

        assert (told, producer.acknowledged()) == ([Durable(1, 1)], [])


def test_a_window_of_requests_is_under_way_at_once(answering: Answering) -> None:
    """A peer that answers only once it has a whole window gets it."""
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


@pytest.mark.parametrize("code", ["full", "busy", "timeout", "failed"])
def test_an_error_that_passes_is_sat_out(answering: Answering, code: str) -> None:
    """Refused twice, and what came behind it refused as a gap: in the end everything is there once and in order."""
    taken: list[int] = []
    refused: list[int] = []

    def answer(number: int, request: Publish) -> bytes:
        sequence = request.producer_sequence
        if sequence == 3 and len(refused) < 2:
            refused.append(sequence)
            return b"ERR %s not now\n" % code.encode()
        if taken and sequence > taken[-1] + 1:
            return b"ERR gap not yet\n"
        if sequence not in taken:
            taken.append(sequence)
        return ok(request)

    with Producer(answering(answer)) as producer:
        for _ in range(20):
            producer.publish("a", b"x\n")
        durable = producer.flush()

    assert taken == list(range(1, 21))
    assert durable == [Durable(number, number) for number in range(1, 21)]


def test_a_connection_that_breaks_again_and_again_loses_and_doubles_nothing(
    answering: Answering,
) -> None:
    """The peer takes a request and hangs up without an answer, every fifth time."""
    taken: list[int] = []

    def answer(number: int, request: Publish) -> bytes:
        if request.producer_sequence not in taken:
            taken.append(request.producer_sequence)
        return b"" if number % 5 == 0 else ok(request)

    with Producer(answering(answer)) as producer:
        for _ in range(30):
            producer.publish("a", b"x\n")
        durable = producer.flush()

    assert taken == list(range(1, 31))
    assert [first for first, _ in durable] == list(range(1, 31))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"ERR no-route there is none\n", NotFound),
        (b"ERR denied not you\n", NotPermitted),
        (b"ERR gap 3 is missing\n", Refused),
        (b"ERR forgotten too old\n", Refused),
        (b"ERR too-large 9 bytes\n", InvalidInput),
        (b"ERR bad-lines no newline\n", InvalidInput),
        (b"nonsense\n", InvalidInput),
        (b"ERR full no space\n", DiskFailure),
        (b"ERR failed the disk\n", Unavailable),
        (b"", Unavailable),
    ],
)
def test_an_error_that_stays_is_raised_with_a_hint(answering: Answering, answer: bytes, error: type[WaldError]) -> None:
    with Producer(answering(lambda _, __: answer), retry_for=0.1) as producer:
        producer.publish("a", b"x\n")
        with pytest.raises(error) as caught:
            producer.flush()

    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("waits", ["publish", "flush", "command", "wait_for"])
def test_a_daemon_that_does_not_answer_is_given_up(daemon: Daemon, waits: str) -> None:
    """It is connected and silent: whatever waits for it ends after ``retry_for``, and says why."""
    reader, writer = os.pipe()
    with Producer(daemon.root, retry_for=0.3) as producer, open(reader), open(writer, "w"):
        producer.publish("a", b"x\n")
        producer.flush()
        daemon.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        if waits != "command":
            producer.publish("a", b"x\n")
        wait: Callable[[], object] = {
            "publish": lambda: producer.publish("a", b"more than a socket holds\n" * 100_000),
            "flush": producer.flush,
            "command": lambda: producer.command("HEAD"),
            "wait_for": lambda: producer.wait_for(reader),
        }[waits]
        with pytest.raises(Unavailable, match="does not answer"):
            wait()

    assert time.monotonic() - started >= 0.3


def test_a_full_disk_is_called_one(tmp_path: Path) -> None:
    """The daemon lets producers wait, and answers nothing to them; what it says of itself is asked for."""
    with (
        small_file_system(tmp_path / "disk", 16 << 20) as disk,
        Daemon(disk / "log", env={"WALD_SEGMENT_MAX_BYTES": "64KiB", "WALD_FREE_SPACE_MIN": "1MiB"}) as daemon,
    ):
        assert daemon.ask("ROUTE ADD a") == "OK added a"
        fill(disk / "filler")
        code, message, hint = refusal_of("append", "a", "--root", daemon.root, "--retry-for", "0.3s", stdin=b"x\n")
        assert code == DiskFailure.exit_code
        assert re.search(r"wald\.sock: the disk is full: \d+ bytes are free of \d+ that are needed", message)
        assert hint.startswith("df -h ")


def test_the_time_in_which_nobody_waits_does_not_count(daemon: Daemon) -> None:
    """What became durable meanwhile is taken, and a restart is sat out, however long ago it was published."""
    with Producer(daemon.root, retry_for=2.0) as producer:
        producer.publish("a", b"x\n")
        published = time.monotonic()
        eventually(lambda: time.monotonic() - published > 2)
        daemon.kill()
        daemon.start_again()

        assert producer.flush() == [Durable(1, 1)]


def test_bad_input_is_refused_before_it_is_sent(
    answering: Answering,
) -> None:
    with Producer(answering(lambda _, request: ok(request))) as producer:
        for route, payload in (("a b", b"x\n"), ("", b"x\n"), ("a\nPING", b"x\n"), ("a", b"x"), ("a", b"")):
            with pytest.raises(InvalidInput):
                producer.publish(route, payload)
        assert producer.flush() == []


def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    for at in (tmp_path, tmp_path / "absent.sock"):
        with pytest.raises(Unavailable) as caught:
            Producer(at, connect_for=0)
        assert "no daemon answers" in caught.value.message
        assert caught.value.hint == (
            f"wald --root {at} run" if at == tmp_path else f"ls -l {at}; start the daemon that listens there"
        )


def test_what_was_answered_before_the_daemon_went_is_durable(tmp_path: Path) -> None:
    """The answers lie unread in the socket when sending the next request fails."""
    path = tmp_path / "peer.sock"
    peer = Peer(path, lambda number, request: ok(request) if number < 5 else b"")
    with peer, Producer(path, retry_for=0.2) as producer:
        for _ in range(5):
            producer.publish("a", b"x\n")
        assert peer.hung_up.wait(TIMEOUT_SECONDS)
        path.unlink()
        with pytest.raises(Unavailable):
            producer.publish("a", encode([b"y", b"z"]), columns=True)

        assert producer.acknowledged() == [Durable(number, number) for number in range(1, 5)]
        assert producer.unanswered == 1 + 2


def test_what_was_answered_before_the_connection_broke_is_not_sent_again(tmp_path: Path) -> None:
    seen: list[int] = []

    def answer(number: int, request: Publish) -> bytes | None:
        seen.append(request.producer_sequence)
        return b"" if number == 5 else ok(request)

    with Peer(tmp_path / "peer.sock", answer) as peer, Producer(tmp_path / "peer.sock") as producer:
        for _ in range(5):
            producer.publish("a", b"x\n")
        assert peer.hung_up.wait(TIMEOUT_SECONDS)
        producer.publish("a", b"x\n")

        assert producer.flush() == [Durable(number, number) for number in range(1, 7)]
    assert seen == [1, 2, 3, 4, 5, 5, 6]


def test_what_will_not_be_answered_is_not_waited_for(tmp_path: Path) -> None:
    """The daemon takes nothing more and does not hang up: a new connection is asked at once."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "peer.sock"))
        listener.listen()
        with Producer(tmp_path / "peer.sock", retry_for=TIMEOUT_SECONDS / 4) as producer:
            first, _ = listener.accept()
            with first:
                first.shutdown(socket.SHUT_RD)
                thread = threading.Thread(target=answer_one, args=(listener,))
                thread.start()
                producer.publish("a", b"x\n")

                assert producer.flush() == [Durable(1, 1)]
            thread.join()


def test_an_answer_that_is_there_when_time_is_up_is_no_failure(tmp_path: Path) -> None:
    """The daemon knows the request by its head, and does not read the rest; then it goes, and comes back."""
    path = tmp_path / "peer.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with Producer(path, retry_for=0.3) as producer:
            first, _ = listener.accept()
            with first:
                first.sendall(b"OK 1 1\n")
                path.unlink()
                producer.publish("a", b"more than a socket holds" * 100_000 + b"\n")

                assert producer.flush() == [Durable(1, 1)]
                assert producer.unanswered == 0
            with Peer(path, lambda _, request: ok(request)):
                producer.publish("a", b"x\n")
                assert producer.flush() == [Durable(2, 2)]
                producer.close()  # else the peer goes on listening to it


def answer_one(listener: socket.socket) -> None:
    """The next connection's first request."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        request = parse_request(stream.readline())
        assert isinstance(request, Publish)
        connection.sendall(ok(request))


@pytest.mark.parametrize("answer", [None, b"ERR no-route there is none\n"])
def test_after_an_error_it_is_finished_and_says_so(answering: Answering, answer: bytes | None) -> None:
    """Whatever would need the daemon is refused, with the error that ended it; what is durable is told all the same."""
    reader, writer = os.pipe()
    path = answering(lambda number, request: ok(request) if number == 1 else answer)
    with Producer(path, retry_for=0.2) as producer, open(reader), open(writer, "w"):
        for _ in range(2):
            producer.publish("a", b"x\n")
        with pytest.raises((Unavailable, NotFound)) as ended:
            producer.flush()
        waits: list[Callable[[], object]] = [
            lambda: producer.publish("a", b"x\n"),
            lambda: producer.command("HEAD"),
            lambda: producer.wait_for(reader),
        ]
        for wait in waits:
            with pytest.raises(Refused, match=f"has ended: {re.escape(ended.value.message)}") as refused:
                wait()
            assert "make another Producer" in refused.value.hint

        assert producer.unanswered == (1 if answer is None else 0)
        assert producer.acknowledged() == [Durable(1, 1)]


def test_a_closed_one_says_so(daemon: Daemon) -> None:
    producer = Producer(daemon.root)
    producer.close()
    with pytest.raises(Refused, match=r"has ended: .*wald\.sock: it was closed"):
        producer.publish("a", b"x\n")
    assert producer.unanswered == 0


class Interrupted(Exception):
    """Raised by a signal, as KeyboardInterrupt is."""


def test_half_a_request_is_not_finished_by_the_next(daemon: Daemon) -> None:
    """A signal ends a call while it sends: the request is sent again, whole."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Producer(daemon.root) as producer:
            producer.publish("a", b"one\n")
            producer.flush()
            daemon.process.send_signal(signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                producer.publish("a", b"more than a socket holds" * 100_000 + b"\n")
            daemon.process.send_signal(signal.SIGCONT)
            producer.publish("a", b"three\n")

            assert producer.flush() == [Durable(2, 2), Durable(3, 3)]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [len(record.value) for record in wald.open(daemon.root).read("a")] == [3, 2_400_000, 5]


def test_a_daemon_is_waited_for_at_the_start_too(tmp_path: Path) -> None:
    """For as long as it may be away later."""
    answers: list[str] = []

    def ask() -> None:
        with Producer(tmp_path / "log/wald.sock", retry_for=TIMEOUT_SECONDS) as producer:
            answers.append(producer.command("PING"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(2.5)  # longer than it waits without being told
    assert thread.is_alive()
    with Daemon(tmp_path / "log"):
        thread.join()
    assert answers == ["pong"]
