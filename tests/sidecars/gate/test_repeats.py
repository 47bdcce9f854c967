"""A request with an Idempotency-Key can be repeated: it gets the same response and is stored once."""

import asyncio
import gzip
import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from clocks import Clock
from contents import values
from gating import NDJSON, ORDERS, TEXT, Gate
from repeating import outcome, publishing, release, send, store
from running import Daemon, eventually
from tracing import traced

import wald as library
from wald_gate.records_in import keys

Stored = Callable[[], list[bytes]]
LINES = b"".join(b"line %0100d\n" % number for number in range(4_000))  # several parts


def test_a_repeated_request_gets_the_first_answer(shared: Gate, stored: Stored) -> None:
    json_lines = b'{"value": "a", "headers": {"h": "1"}, "event_time_ns": 5}\n{"value": "b"}\n'
    for number, (media_type, body, records) in enumerate(
        (
            (TEXT, b"one\ntwo", 2),
            (TEXT, LINES, 4_000),
            ("application/octet-stream", b"a\nb\0", 1),
            (NDJSON, json_lines, 2),
        )
    ):
        key = f"8e03978e-{number}"
        first = send(shared, key, body, media_type)
        assert (first.status, first.json()["count"]) == (200, records)
        for again in (
            send(shared, key, body, media_type),
            send(shared, f'"{key}"', body, media_type),  # a quoted string is the same key
            send(shared, key, gzip.compress(body), media_type, **{"Content-Encoding": "gzip"}),
        ):
            assert outcome(again) == (200, True, first.body)
        assert len(stored()) == records


def test_a_key_changes_nothing_but_a_header_of_the_first_record(gate: Gate, root: Path) -> None:
    first = b'{"value": "a", "headers": {"h": "1"}, "key": "x", "event_time_ns": 5}\n'
    lines = first + b'{"value": "b", "key": "y", "event_time_ns": 6}\n'
    gate.post(ORDERS, lines, NDJSON)
    send(gate, "k", lines, NDJSON)

    plain, other, keyed, last = library.open(root).records("orders")
    without = json.loads(keyed.headers or b"")
    mark = without.pop("wald.idempotency")

    assert mark.endswith("/1/last")
    assert without == json.loads(plain.headers or b"")
    assert (keyed.value, keyed.key, keyed.event_time_ns) == (plain.value, plain.key, plain.event_time_ns)
    assert last._replace(sequence=2, append_time_ns=0) == other._replace(append_time_ns=0)


def test_another_body_under_a_key_and_an_invalid_key_are_refused_and_not_stored(shared: Gate, stored: Stored) -> None:
    short = b"one\ntwo\n"
    for key in ("", " ", '"', "a b", "x" * 256, '"a"b"', "caf\u00e9"):
        answer = send(shared, key)
        assert (answer.status, answer.json()["code"]) == (400, "invalid")
    for key, body, others in (
        ("short", short, (b"one\nthree\n", b"one\n", short + b"three\n")),
        ("long", LINES, (LINES + b"more\n", LINES[: LINES.rindex(b"line")])),
    ):
        send(shared, key, body)
        for other in others:
            answer = send(shared, key, other)
            assert (answer.status, answer.json()["code"]) == (422, "other-body")
        assert b"".join(value + b"\n" for value in stored()) == body


def test_an_invalid_line_can_be_corrected_under_the_same_key(gate: Gate, root: Path) -> None:
    """Only whole parts before the wrong line are stored, and the corrected body has the same parts."""
    good = [b'{"value": "%d"}\n' % number for number in range(20_000)]
    wrong = [*good[:-1], b"}\n"]

    refused = send(gate, "k", b"".join(wrong), NDJSON)
    corrected = send(gate, "k", b"".join(good), NDJSON)

    assert (refused.status, corrected.status) == (400, 200)
    assert 0 < refused.json()["stored"]["count"] < 20_000
    assert values(root, "orders") == [b"%d" % number for number in range(20_000)]


def test_of_fifty_at_once_one_is_stored(gate: Gate, root: Path) -> None:
    """The others get a retry response while the first is in flight, and then its response."""
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(lambda _: send(gate, "k", LINES), range(50)))

    busy = [answer for answer in answers if answer.status == 409]
    assert len({answer.body for answer in answers if answer.status == 200}) == 1
    assert Counter(answer.status for answer in answers) == {200: 50 - len(busy), 409: len(busy)}
    assert all(answer.headers["retry-after"] == "1" and answer.json()["code"] == "under-way" for answer in busy)
    assert len(values(root, "orders")) == 4_000


def test_a_retry_is_recognised_after_a_kill_of_both_and_another_route_has_its_own_keys(
    gate: Gate, daemon: Daemon
) -> None:
    daemon.ask("ROUTE ADD others")
    first = send(gate, "k", LINES)
    gate.kill()
    daemon.kill()
    daemon.start_again()
    gate.start()

    assert outcome(send(gate, "k", LINES)) == (200, True, first.body)
    assert send(gate, "k", path="/v1/routes/others/records").json() == {"first": 4_001, "last": 4_002, "count": 2}


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
    assert values(root, "orders") == [b"one", b"two", b"x"]


NEW = b'{"first":5,"last":6,"count":2}'


@contextmanager
def at(root: Path, hours: float) -> Iterator[Gate]:
    """A gate and its daemon with clocks shifted by the given number of hours."""
    clock = Clock(root.with_name("clock"))
    clock.set(int(hours * 3600 * 10**9))
    env = clock.env if hours else None
    with Daemon(root, env=env) as daemon:
        daemon.ask("ROUTE ADD orders")
        with Gate(root, env=env) as gate:
            yield gate
            gate.stop()
        daemon.stop()


@pytest.mark.parametrize("has_table", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_key_is_remembered_for_a_day(root: Path, *, has_table: bool) -> None:
    with at(root, -23) as gate:
        first = send(gate, "k")
    if not has_table:
        shutil.rmtree(root / "gate")
    with at(root, 0) as gate:
        assert send(gate, "new").body == b'{"first":3,"last":4,"count":2}'
    with at(root, 0) as gate:
        assert outcome(send(gate, "k")) == (200, True, first.body)


@pytest.mark.parametrize("has_table", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_key_is_forgotten_after_a_day(root: Path, *, has_table: bool) -> None:
    with at(root, -25) as gate:
        send(gate, "k")
    with at(root, 0) as gate:
        send(gate, "new")
    if not has_table:
        shutil.rmtree(root / "gate")
    with at(root, 0) as gate:
        assert outcome(send(gate, "k")) == (200, False, NEW)
        assert outcome(send(gate, "k")) == (200, True, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("has_table", [True, False])
def test_the_day_begins_with_the_part_that_was_stored_last(root: Path, *, has_table: bool) -> None:
    """If a body was cut off and completed later, the last day of the log has only its end."""
    with at(root, -25) as gate:
        cut = gate.begin(f"POST {ORDERS}", "Idempotency-Key: k", body=LINES[:300_000], more=len(LINES) - 300_000)
        with cut:
            eventually(lambda: values(root, "orders"))
    with at(root, -23) as gate:
        whole = send(gate, "k", LINES)
        assert whole.json() == {"first": 1, "last": 4_000, "count": 4_000}
    if not has_table:
        shutil.rmtree(root / "gate")
    with at(root, 0) as gate:
        again = send(gate, "k", LINES)

    assert (outcome(again) if has_table else again.json()["code"]) == (
        (200, True, whole.body) if has_table else "forgotten"
    )
    assert len(values(root, "orders")) == 4_000


@pytest.mark.slow
def test_no_more_than_the_log_of_the_last_day_is_read(root: Path, tmp_path: Path) -> None:
    """The saved table ends long before; later keys that are older than one day are forgotten, too."""
    with at(root, -30) as gate:
        first = send(gate, "a")
        gate.stop()
        gate.start()
        assert outcome(send(gate, "a")) == (200, True, first.body)  # so the table covers the log to its end
    shutil.copytree(root / "gate", tmp_path / "table")
    with at(root, -25) as gate:
        send(gate, "b")
    shutil.rmtree(root / "gate")
    shutil.copytree(tmp_path / "table", root / "gate")
    with at(root, 0) as gate:
        assert outcome(send(gate, "b")) == (200, False, NEW)
        assert outcome(send(gate, "a")) == (200, True, first.body)  # remembered until newer parts arrive


@pytest.mark.slow
def test_a_clock_that_goes_back_forgets_no_key(root: Path) -> None:
    with at(root, 0) as gate:
        first = send(gate, "k")
    with at(root, -48) as gate:
        assert outcome(send(gate, "k")) == (200, True, first.body)
        assert send(gate, "new").json()["first"] == 3
    with at(root, -48) as gate:
        assert outcome(send(gate, "k")) == (200, True, first.body)


@pytest.mark.parametrize("by_reclaim", [True, False])
def test_the_number_of_a_slot_is_known_of_what_is_not_read(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, *, by_reclaim: bool
) -> None:
    """Another gate used the slot in the meantime, and its records are older than one day or reclaimed."""

    async def test() -> None:
        async with publishing(daemon) as one, publishing(daemon) as other:
            assert await store(one, 1, [b"a"]) == [1]
            assert await store(other, 2, [b"b"]) == [2]
            if by_reclaim:
                await asyncio.to_thread(release, daemon)
            else:
                monkeypatch.setattr(keys, "_KEPT_NS", 0)
            assert await store(one, 3, [b"c"]) == [3]

    asyncio.run(test())


def test_the_parts_that_came_last_are_remembered(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one part of a key is among the latest, all parts of that key are remembered."""
    monkeypatch.setattr(keys, "KEPT_PARTS", 4)

    async def test() -> None:
        async with publishing(daemon) as repeats:
            assert await store(repeats, 1, [b"forgotten"]) == [1]
            assert await store(repeats, 2, [b"a", b"b", b"c"]) == [2, 3, 4]
            for key in range(3, 6):
                assert await store(repeats, key, [b"x"]) == [key + 2]
        async with publishing(daemon) as repeats:
            assert await store(repeats, 2, [b"a", b"b", b"c"]) == [2, 3, 4]
            assert await store(repeats, 1, [b"forgotten"]) == [8]

    asyncio.run(test())
