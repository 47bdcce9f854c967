"""Errors, timeouts and broken connections: every record is appended once, or the producer reports the missing ones."""

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from full_disk import fill, small_file_system
from peer import Answering, Peer, ok
from running import TIMEOUT_SECONDS, Daemon, eventually, refusal_of

import wald
from wald.client.producer import Durable, Producer
from wald.errors import DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, Unavailable, WaldError
from wald.format.protocol import Publish, parse_request
from wald.format.records import encode_columns


@pytest.mark.parametrize("code", ["full", "timeout"])
def test_an_error_that_passes_is_sat_out(answering: Answering, code: str) -> None:
    """A request fails twice, and later requests are rejected as a gap: finally each record is there once, in order."""
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


def test_a_connection_that_breaks_again_and_again_loses_and_doubles_nothing(answering: Answering) -> None:
    """After every fifth request, the peer closes the connection without an answer."""
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


def test_a_receipt_does_not_raise_the_error_of_a_later_request(answering: Answering) -> None:
    """Both answers arrive together."""

    def answer(number: int, request: Publish) -> bytes | None:
        match number:
            case 1:
                return ok(request)
            case 2:
                return None
        return b"OK 2 2\nERR no-route there is none\n"

    with Producer(answering(answer)) as producer:
        producer.publish("a", b"1\n").result()
        durable, failed = producer.publish("a", b"2\n"), producer.publish("b", b"3\n")
        assert durable.result() == [2]
        with pytest.raises(NotFound):
            failed.result()
        assert durable.result() == [2]


def test_a_daemon_that_does_not_answer_is_given_up(daemon: Daemon) -> None:
    """It accepts the connection and does not answer: every wait ends after ``retry_for`` with the reason."""
    reader, writer = os.pipe()
    waits: dict[str, Callable[[Producer], object]] = {
        "publish": lambda producer: producer.publish("a", b"more than a socket holds\n" * 100_000),
        "flush": lambda producer: producer.flush(),
        "command": lambda producer: producer.command("HEAD"),
        "wait_for": lambda producer: producer.wait_for(reader),
    }
    with open(reader), open(writer, "w"):
        for name, wait in waits.items():
            with Producer(daemon.root, retry_for=0.3) as producer:
                producer.publish("a", b"x\n")
                producer.flush()
                daemon.process.send_signal(signal.SIGSTOP)
                started = time.monotonic()
                if name != "command":
                    producer.publish("a", b"x\n")
                with pytest.raises(Unavailable, match="does not answer") as caught:
                    wait(producer)
            assert caught.value.hint == f"ps -o pid,stat,wchan,args -p $(fuser {daemon.root}/lock 2>&-)"
            assert time.monotonic() - started >= 0.3
            daemon.process.send_signal(signal.SIGCONT)


def test_a_full_disk_is_called_one(tmp_path: Path) -> None:
    """The daemon blocks producers without answering them; the reason comes from its status."""
    with (
        small_file_system(tmp_path / "disk", 16 << 20) as disk,
        Daemon(disk / "log", env={"WALD_SEGMENT_MAX_BYTES": "64KiB", "WALD_FREE_SPACE_MIN": "1MiB"}) as daemon,
    ):
        assert daemon.ask("ROUTE ADD a") == "OK added a"
        fill(disk / "filler")
        code, message, hint = refusal_of("append", "a", "--root", daemon.root, "--retry-for", "0.3s", stdin=b"x\n")
        assert code == DiskFailure.exit_code
        assert re.search(r"wald\.sock: the disk is full: \d+ of the required \d+ bytes are free", message)
        assert hint.startswith("df -h ")


def test_the_time_between_two_calls_does_not_count(daemon: Daemon) -> None:
    """Earlier acknowledgements are read and a restart is waited out, however long ago the record was published."""
    with Producer(daemon.root, retry_for=2.0) as producer:
        producer.publish("a", b"x\n")
        published = time.monotonic()
        eventually(lambda: time.monotonic() - published > 2)
        daemon.kill()
        daemon.start_again()

        assert producer.flush() == [Durable(1, 1)]


def test_an_answer_that_nobody_has_read_ends_an_outage(daemon: Daemon) -> None:
    """A second outage, long after the first, is waited out as well."""
    with Producer(daemon.root, retry_for=2.0) as producer:
        producer.publish("a", b"1\n").result()
        daemon.kill()
        daemon.start_again()
        producer.publish("a", b"2\n")  # over a new connection
        published = time.monotonic()
        eventually(lambda: time.monotonic() - published > 2)
        daemon.kill()
        daemon.start_again()

        assert producer.publish("a", b"3\n").result() == [3]


def test_without_a_daemon_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.json").touch()
    for at in (tmp_path, tmp_path / "absent.sock"):
        with pytest.raises(Unavailable) as caught:
            Producer(at, connect_for=0)
        assert "no daemon answers" in caught.value.message
        assert caught.value.hint == (f"wald --root {at} run" if at == tmp_path else f"ls -l {at}; start its daemon")


def test_without_a_log_the_producer_fails_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    for root in (tmp_path, tmp_path / "missing/too"):
        with pytest.raises(NotFound) as caught:
            Producer(root, retry_for=TIMEOUT_SECONDS)
        assert caught.value.message == f"{root}: there is no log here"
        assert caught.value.hint == f"to create a log: wald --root {root} run"
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2


def test_a_producer_waits_for_a_socket_that_does_not_exist_yet(daemon: Daemon, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(Producer, tmp_path / "other.sock", retry_for=TIMEOUT_SECONDS)
        (tmp_path / "other.sock").symlink_to(daemon.root / "wald.sock")
        making.result().close()


def test_what_was_answered_before_the_daemon_went_is_durable(tmp_path: Path) -> None:
    """The answers are unread in the socket when sending the next request fails."""
    path = tmp_path / "peer.sock"
    peer = Peer(path, lambda number, request: ok(request) if number < 5 else b"")
    with peer, Producer(path, retry_for=0.2) as producer:
        for _ in range(5):
            producer.publish("a", b"x\n")
        assert peer.hung_up.wait(TIMEOUT_SECONDS)
        path.unlink()
        with pytest.raises(Unavailable):
            producer.publish("a", encode_columns([b"y", b"z"]), columns=True)

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
    """The daemon accepts no more and keeps the connection open: the producer reconnects immediately."""
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
    """The daemon recognises the request by its header without reading the rest; then it stops and restarts."""
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
                producer.close()  # otherwise the peer would keep serving it


def answer_one(listener: socket.socket) -> None:
    """Answer the first request of the next connection."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        request = parse_request(stream.readline())
        assert isinstance(request, Publish)
        connection.sendall(ok(request))


@pytest.mark.parametrize("answer", [None, b"ERR no-route there is none\n"])
def test_after_an_error_it_is_finished_and_says_so(answering: Answering, answer: bytes | None) -> None:
    """Calls that need the daemon raise the original error; durable sequences are still reported."""
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
            assert "create a new Producer" in refused.value.hint

        assert producer.unanswered == (1 if answer is None else 0)
        assert producer.acknowledged() == [Durable(1, 1)]


class Interrupted(Exception):
    """Raised by a signal handler, like KeyboardInterrupt."""


def test_half_a_request_is_not_finished_by_the_next(daemon: Daemon) -> None:
    """A signal interrupts a call while it sends: the complete request is sent again."""

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
    assert [len(record.value) for record in wald.open(daemon.root).records("a")] == [3, 2_400_000, 5]


# Python reports, and cannot raise, what interrupts a callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interruptions_at_any_moment_mix_up_no_acknowledgements(daemon: Daemon) -> None:
    """Each record is stored once, in order, and receipts have the sequences of their own records."""
    moments = random.Random(1)
    is_armed = False

    def interrupt(*_: object) -> None:
        if is_armed:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    kept = []
    try:
        with Producer(daemon.root) as producer:
            for number in range(300):
                signal.setitimer(signal.ITIMER_REAL, 10 ** moments.uniform(-5, -3))
                try:
                    is_armed = True
                    receipt = producer.send("a", [b"%d" % number, b"%d again" % number])
                    kept.append((number, receipt))
                    if number % 3 == 0:
                        receipt.result()
                    elif number % 7 == 0:
                        producer.command("HEAD")
                except Interrupted:
                    pass
                is_armed = False
            producer.flush()
            assert producer.unanswered == 0
            values = {record.sequence: record.value for record in wald.open(daemon.root).records("a")}
            for number, receipt in kept:
                assert [values[sequence] for sequence in receipt.result()] == [b"%d" % number, b"%d again" % number]
    finally:
        signal.signal(signal.SIGALRM, before)
    stored = [int(value) for value in values.values() if b"again" not in value]
    assert stored == sorted(set(stored))


def test_an_interruption_before_a_request_is_sent_leaves_no_gap(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request has the number of the one that was not sent."""
    with Producer(daemon.root) as producer:
        producer.publish("a", b"1\n")
        start, calls = producer._session._start_deadline, iter(range(2))

        def interrupt() -> float:
            if next(calls) == 1:  # the first call waits for room, and the second sends
                monkeypatch.undo()
                raise Interrupted
            return start()

        monkeypatch.setattr(producer._session, "_start_deadline", interrupt)
        with pytest.raises(Interrupted):
            producer.publish("a", b"interrupted\n")
        assert producer.publish("a", b"2\n").result() == [2]
    assert [record.value for record in wald.open(daemon.root).records("a")] == [b"1", b"2"]


def test_a_daemon_is_waited_for_at_the_start_too(tmp_path: Path) -> None:
    """The limit is the one for later outages."""
    answers: list[str] = []

    def ask() -> None:
        with Producer(tmp_path / "log/wald.sock", retry_for=TIMEOUT_SECONDS) as producer:
            answers.append(producer.command("PING"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(2.5)  # longer than the default timeout before the first connection
    assert thread.is_alive()
    with Daemon(tmp_path / "log"):
        thread.join()
    assert answers == ["pong"]
