"""A request with an Idempotency-Key can be repeated: it gets the same response and is stored once."""

from __future__ import annotations

import gzip
import json
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gating import Gate
from repeating import ORDERS, outcome, send
from running import Daemon, eventually
from tracing import traced

import wald as library

LINES = b"".join(b"line %d\n" % number for number in range(40_000))  # several parts


def values(root: Path) -> list[bytes]:
    return [record.value for record in library.open(root).records("orders")]


@pytest.mark.parametrize(
    ("media_type", "body", "count"),
    [
        ("text/plain", b"one\ntwo", 2),
        ("text/plain", LINES, 40_000),
        ("application/octet-stream", b"a\nb\0", 1),
        ("application/x-ndjson", b'{"value": "a", "headers": {"h": "1"}, "event_time_ns": 5}\n{"value": "b"}\n', 2),
    ],
)
def test_a_repeated_request_gets_the_first_answer(
    gate: Gate, root: Path, media_type: str, body: bytes, count: int
) -> None:
    first = send(gate, "k", body, media_type)
    again = send(gate, "k", body, media_type)

    assert (first.status, first.json()["count"]) == (200, count)
    assert outcome(again) == (200, True, first.body)
    assert len(values(root)) == count


def test_a_key_changes_nothing_but_a_header_of_the_first_record(gate: Gate, root: Path) -> None:
    first = b'{"value": "a", "headers": {"h": "1"}, "key": "x", "event_time_ns": 5}\n'
    lines = first + b'{"value": "b", "key": "y", "event_time_ns": 6}\n'
    gate.post(ORDERS, lines, "application/x-ndjson")
    send(gate, "k", lines, "application/x-ndjson")

    plain, other, keyed, last = library.open(root).records("orders")
    without = json.loads(keyed.headers or b"")
    mark = without.pop("wald.idempotency")

    assert mark.endswith("/1/last")
    assert without == json.loads(plain.headers or b"")
    assert (keyed.value, keyed.key, keyed.event_time_ns) == (plain.value, plain.key, plain.event_time_ns)
    assert last._replace(sequence=2, append_time_ns=0) == other._replace(append_time_ns=0)


def test_a_gzip_body_repeats_a_plain_one(gate: Gate, root: Path) -> None:
    first = send(gate, "k", LINES)

    assert outcome(send(gate, "k", gzip.compress(LINES), **{"Content-Encoding": "gzip"})) == (200, True, first.body)
    assert len(values(root)) == 40_000


@pytest.mark.parametrize(
    "other", [b"one\nthree\n", b"one\n", b"one\ntwo\nthree\n", LINES + b"more\n", LINES[: LINES.rindex(b"line")]]
)
def test_another_body_under_a_key_is_refused_and_not_stored(gate: Gate, root: Path, other: bytes) -> None:
    body = LINES if other.startswith(b"line") else b"one\ntwo\n"
    send(gate, "k", body)

    answer = send(gate, "k", other)

    assert (answer.status, answer.json()["code"]) == (422, "other-body")
    assert b"".join(value + b"\n" for value in values(root)) == body


def test_a_route_has_keys_of_its_own(gate: Gate, daemon: Daemon, root: Path) -> None:
    daemon.ask("ROUTE ADD others")
    send(gate, "k")

    answer = gate.ask(
        "POST", "/v1/routes/others/records", b"three\n", {"Content-Type": "text/plain", "Idempotency-Key": "k"}
    )

    assert answer.json() == {"first": 3, "last": 3, "count": 1}


def test_a_string_in_quotes_is_the_same_key_as_the_plain_word(gate: Gate) -> None:
    first = send(gate, "8e03978e-40d5")

    assert outcome(send(gate, '"8e03978e-40d5"')) == (200, True, first.body)


@pytest.mark.parametrize("key", ["", " ", '"', "a b", "x" * 256, '"a"b"', "caf\u00e9"])
def test_what_is_no_key(gate: Gate, root: Path, key: str) -> None:
    answer = send(gate, key)

    assert (answer.status, answer.json()["code"]) == (400, "invalid")
    assert values(root) == []


def test_a_wrong_line_can_be_mended_under_the_same_key(gate: Gate, root: Path) -> None:
    """Only whole parts before the wrong line are stored, and the corrected body has the same parts."""
    good = [b'{"value": "%d"}\n' % number for number in range(20_000)]
    wrong = [*good[:-1], b"}\n"]

    refused = send(gate, "k", b"".join(wrong), "application/x-ndjson")
    mended = send(gate, "k", b"".join(good), "application/x-ndjson")

    assert (refused.status, mended.status) == (400, 200)
    assert 0 < refused.json()["stored"]["count"] < 20_000
    assert values(root) == [b"%d" % number for number in range(20_000)]


def test_of_fifty_at_once_one_is_stored(gate: Gate, root: Path) -> None:
    """The others get a retry response while the first is in flight, and then its response."""
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(lambda _: send(gate, "k", LINES), range(50)))

    busy = [answer for answer in answers if answer.status == 409]
    assert len({answer.body for answer in answers if answer.status == 200}) == 1
    assert Counter(answer.status for answer in answers) == {200: 50 - len(busy), 409: len(busy)}
    assert all(answer.headers["retry-after"] == "1" and answer.json()["code"] == "under-way" for answer in busy)
    assert len(values(root)) == 40_000


def test_a_retry_is_recognised_after_a_kill_of_both(gate: Gate, daemon: Daemon, root: Path) -> None:
    first = send(gate, "k", LINES)
    gate.kill()
    daemon.kill()
    daemon.start_again()
    gate.start()

    assert outcome(send(gate, "k", LINES)) == (200, True, first.body)
    assert send(gate, "other").json()["first"] == 40_001


def test_a_retry_is_recognised_while_the_first_request_is_still_in_the_daemon(
    gate: Gate, daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    """The gate is killed while the daemon is paused; the next gate repeats the request under the same number."""
    send(gate, "before")
    daemon.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        with traced(gate.process.pid, tmp_path / "calls", "trace=write,writev,sendmsg,sendto") as trace:
            lost = threads.submit(send, gate, "k", b"x\n")
            eventually(lambda: any("PUB orders" in call for call in trace.calls))
            gate.kill()
        assert isinstance(lost.exception(), ConnectionError)
    gate.start()
    with ThreadPoolExecutor() as threads:
        again = threads.submit(send, gate, "k", b"x\n")
        daemon.process.send_signal(signal.SIGCONT)

    assert again.result().json() == {"first": 3, "last": 3, "count": 1}
    assert values(root) == [b"one", b"two", b"x"]
