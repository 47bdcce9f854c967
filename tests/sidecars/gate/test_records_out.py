"""Reads over HTTP return the same records as ``wald read``: positions, formats and later appends."""

from __future__ import annotations

import gzip
import io
import json
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from gating import Gate
from logs import Built
from running import Daemon, output_of

import wald
from wald.files.uptime import ClockStep, add_step

ORDERS = "/v1/routes/orders/records"


@pytest.fixture
def filled(gate: Gate) -> Gate:
    """A gate on a log of 10,000 records."""
    gate.post(ORDERS, b"".join(b"%d\n" % number for number in range(1, 10_001)))
    return gate


def test_positions_are_those_of_read(filled: Gate, root: Path) -> None:
    for query, options in [
        ("", ()),
        ("from=9990", ("--from", "9990")),
        ("from=5&to=7", ("--from", "5", "--to", "7")),
        ("limit=3", ("--limit", "3")),
        ("from=5m", ("--from", "5m")),
        ("from=end", ("--from", "end")),
        ("from=cursor&group=billing", ("--from", "cursor", "--group", "billing")),
    ]:
        wald.open(root).set_cursor("orders", 9000, "billing")
        read = output_of("read", "orders", "--root", root, *options)

        assert filled.get(f"{ORDERS}?format=raw&{query}").body == read


@pytest.mark.slow
def test_times_on_both_sides_of_a_clock_step_are_ranges_of_their_own(root: Path) -> None:
    """Records 1 and 2 were stamped by a clock years ahead, 3 and 4 by the corrected clock."""
    now_ns = time.time_ns()
    built = Built(root, now_ns=now_ns + 10**18)
    built.lines("orders", [b"1"])
    built.lines("orders", [b"2"])
    step = ClockStep(built.last + 1, built.writer.state.append_time_ns, now_ns - 30 * 60 * 10**9)
    add_step(built.root, built.disk, step)
    built.now_ns = step.at_ns
    built.writer.step_clock(now_ns=step.at_ns)
    built.lines("orders", [b"3"])
    built.lines("orders", [b"4"])
    built.crash()
    with Daemon(root), Gate(root) as gate:
        for query, expected in (
            ("from=1h&to=now", b"3\n4\n"),
            ("to=now", b"3\n4\n"),
            ("from=1h", b"1\n2\n3\n4\n"),
            ("from=1h&to=2", b"1\n2\n"),
            ("from=2&to=now", b"3\n4\n"),
            ("to=1h", b""),
            ("from=1h&to=5m&follow=1", b"3\n4\n"),
            ("from=1h&to=5m&wait=300s", b"3\n4\n"),
            ("from=5m&to=now", b""),
        ):
            assert (query, gate.get(f"{ORDERS}?format=raw&{query}").body) == (query, expected)
        page = gate.get("/records?route=orders&from=1h").body.decode()
        assert all(f'<tr id="r{number}">' in page for number in (1, 2, 3, 4)), page


def test_what_is_no_text_is_in_base64(gate: Gate) -> None:
    gate.post(ORDERS, b"\xff\x00", "application/octet-stream")

    (record,) = gate.get(ORDERS).lines()
    assert record["value_base64"] == "/wA="


def test_an_array_has_the_objects_of_the_lines(filled: Gate) -> None:
    for query in ["", "from=9990", "from=end", "limit=0", "from=earliest&limit=5000"]:
        answer = filled.get(f"{ORDERS}?{query}", accept="application/json")

        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == filled.get(f"{ORDERS}?{query}").lines()


def test_a_long_answer_is_compressed_for_a_client_that_accepts_it(filled: Gate) -> None:
    for path, lines in [("records", 10_000), ("records?from=end", 0), ("records?format=raw", 10_000), ("groups", 1)]:
        for number in range(30 if path == "groups" else 0):
            filled.make_group(f"group-{number}")
        plain = filled.get(f"/v1/routes/orders/{path}")
        packed = filled.get(f"/v1/routes/orders/{path}", accept_encoding="br, gzip;q=0.5")

        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.body) == plain.body
        assert len(plain.body.splitlines()) == lines
        assert len(packed.body) < len(plain.body) / 2 or not lines
        for answer in (plain, packed):
            assert "Accept-Encoding" in answer.headers["vary"]
            assert answer.headers["content-type"] == plain.headers["content-type"]


def test_other_answers_are_not_compressed(filled: Gate) -> None:
    for path, accepted in [
        ("records", "identity"),
        ("records", "gzip; q=0"),
        ("records?wait=1ms", "gzip"),
        ("records?format=events&limit=3", "gzip"),
        ("cursors/g", "gzip"),
    ]:
        filled.make_group("g")
        answer = filled.get(f"/v1/routes/orders/{path}", accept_encoding=accepted)

        assert answer.status == 200
        assert "content-encoding" not in answer.headers
        assert answer.body == filled.get(f"/v1/routes/orders/{path}").body


def test_an_answer_that_follows_is_not_compressed(filled: Gate) -> None:
    with filled.asked("GET", f"{ORDERS}?follow=1&limit=1", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.getheader("content-encoding") is None
        assert json.loads(answer.readline())["value"] == "1"


def test_an_array_that_follows_comes_record_by_record(gate: Gate) -> None:
    gate.post(ORDERS, b"one\n")
    with gate.asked("GET", f"{ORDERS}?format=json&follow=1&limit=2") as answer:
        begun = answer.read1()
        gate.post(ORDERS, b"two\n")
        found = json.loads(begun + answer.read())

    assert [each["value"] for each in found] == ["one", "two"]


def test_an_arrow_stream_has_all_records(filled: Gate) -> None:
    answer = filled.get(ORDERS, accept="application/vnd.apache.arrow.stream")

    table = pa.ipc.open_stream(io.BytesIO(answer.body)).read_all()
    assert table.column("value").to_pylist() == [b"%d" % number for number in range(1, 10_001)]


def test_an_arrow_stream_says_what_json_says_of_records_that_came_in_all_ways(gate: Gate) -> None:
    full = b'{"value": "v", "key": "ann", "headers": {"h": "1"}, "time": 1700000000000000000}\n'
    for body, media_type, key in (
        (b"a\nb\n", "text/plain", None),
        (full, "application/x-ndjson", None),
        (b"c\nd\n", "text/plain", "one"),
        (b"e\n", "text/plain", "two"),
        (b"f", "application/octet-stream", None),
        (b"g\n", "text/plain", None),
    ):
        keyed = {} if key is None else {"Idempotency-Key": key}
        assert gate.ask("POST", ORDERS, body, {"Content-Type": media_type, **keyed}).status == 200

    rows = pa.ipc.open_stream(io.BytesIO(gate.get(f"{ORDERS}?format=arrow").body)).read_all().to_pylist()
    assert [
        {
            "sequence": row["sequence"],
            "value": row["value"].decode(),
            "key": row["key"] and row["key"].decode(),
            "headers": row["headers"] and json.loads(row["headers"]),
            "event_time_ns": row["event_time"] and row["event_time"].value,
        }
        for row in rows
    ] == [
        {name: record.get(name) for name in ("sequence", "value", "key", "headers", "event_time_ns")}
        for record in gate.get(ORDERS).lines()
    ]
    assert len(rows) == 8


def test_following_goes_on_without_an_end(filled: Gate, root: Path) -> None:
    with filled.asked("GET", f"{ORDERS}?from=10000&follow=1&format=raw") as lines:
        assert lines.readline() == b"10000\n"
        for number in range(3):
            output_of("append", "orders", "--root", root, stdin=b"later %d\n" % number)
            assert lines.readline() == b"later %d\n" % number


def test_records_of_another_route_end_no_wait(gate: Gate, daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD other")
    gate.post(ORDERS, b"first\n")
    answers: list[bytes] = []
    waiting = threading.Thread(target=lambda: answers.append(gate.get(f"{ORDERS}?from=2&format=raw&wait=60s").body))
    waiting.start()
    for _ in range(20):  # at least one arrives during the wait
        gate.post("/v1/routes/other/records", b"another\n")
    gate.post(ORDERS, b"second\n")
    waiting.join()

    assert answers == [b"second\n"]


def test_a_request_that_waits_gets_the_next_record(filled: Gate, root: Path) -> None:
    with filled.asked("GET", f"{ORDERS}?from=10000&limit=1") as at_once:
        assert json.loads(at_once.read())["value"] == "10000"
    assert filled.get(f"{ORDERS}?from=10001&wait=10ms").body == b""


def test_a_wait_that_ends_during_a_read_ends_without_a_heartbeat(gate: Gate) -> None:
    """The gate sees some records only while the next request waits and searches for its record."""
    for last in range(1, 101):
        gate.post(ORDERS, b"x\n")
        assert gate.get(f"{ORDERS}?from={last + 1}&wait={last % 10 + 1}ms").body == b""


def test_what_is_no_position(filled: Gate) -> None:
    for query, status in [
        ("from=20000", 404),
        ("from=zzz", 400),
        ("limit=-1", 400),
        ("limt=1", 400),
        ("from=1&from=2", 400),
        ("from=0", 400),
    ]:
        assert filled.get(f"{ORDERS}?{query}").status == status
