"""Reads over HTTP: positions, formats, waits, heartbeats, and damage found during a response."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from gating import Gate
from group_requests import GROUP
from logs import Built
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of, reclaim

import wald
from wald.files.uptime import ClockStep, add_step
from wald.format.names import Kind, segment_name

ORDERS = "/v1/routes/orders/records"


@pytest.fixture(scope="module")
def filled(shared: Gate) -> Gate:
    """A gate on a log of 10,000 records; no test adds any."""
    shared.post(ORDERS, b"".join(b"%d\n" % number for number in range(1, 10_001)))
    return shared


def test_positions_are_those_of_read(filled: Gate) -> None:
    wald.open(filled.root).set_cursor("orders", 9000, "billing")
    for query, options in [
        ("", ()),
        ("from=9990", ("--from", "9990")),
        ("from=5&to=7", ("--from", "5", "--to", "7")),
        ("limit=3", ("--limit", "3")),
        ("from=5m", ("--from", "5m")),
        ("from=end", ("--from", "end")),
        ("from=cursor&group=billing", ("--from", "cursor", "--group", "billing")),
    ]:
        read = output_of("read", "orders", "--root", filled.root, *options)
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


def test_a_value_other_than_text_is_in_base64(gate: Gate) -> None:
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


def test_other_answers_are_not_compressed_and_those_without_an_end_are_not_buffered(filled: Gate) -> None:
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
    for path in ("follow=1", "format=events", "wait=1ms&from=end"):
        with filled.asked("GET", f"{ORDERS}?{path}", headers={"Accept-Encoding": "gzip"}) as response:
            assert response.getheader("content-encoding") is None
            assert response.getheader("x-accel-buffering") == "no"
    assert "x-accel-buffering" not in filled.get(f"{ORDERS}?limit=1").headers


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


def test_an_arrow_stream_says_what_json_says(gate: Gate) -> None:
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


def test_a_follower_gets_each_record_that_is_appended(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n")
    with gate.asked("GET", f"{ORDERS}?from=2&follow=1&format=raw") as lines:
        assert lines.readline() == b"2\n"
        for number in range(3):
            gate.post(ORDERS, b"later %d\n" % number)
            assert lines.readline() == b"later %d\n" % number


def test_a_record_of_another_route_does_not_end_a_wait(gate: Gate, daemon: Daemon) -> None:
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


def test_a_wait_that_ends_during_a_read_ends_without_a_heartbeat(gate: Gate) -> None:
    """The gate sees some records only while the next request waits and searches for its record."""
    for last in range(1, 51):
        gate.post(ORDERS, b"x\n")
        assert gate.get(f"{ORDERS}?from={last + 1}&wait={last % 10 + 1}ms").body == b""


@pytest.fixture
def spoiled(gate: Gate) -> Gate:
    """A gate on a log of three records, the second of which is unreadable."""
    for line in (b"one\n", b"two\n", b"three\n"):
        gate.post(ORDERS, line)
    position = wald.open(gate.root).where(2).position
    assert position is not None
    with (gate.root / "segments" / segment_name(1, Kind.RAW)).open("r+b") as segment:
        segment.seek(position)
        segment.write(b"\x55" * 8)
    return gate


def cut_off(gate: Gate) -> bytes:
    """Request all records; return the bytes received before the response is aborted."""
    with gate.asked("GET", f"{ORDERS}?format=raw") as response, pytest.raises(http.client.IncompleteRead) as broken:
        response.read()
    return broken.value.partial


def test_a_client_gets_the_records_before_damage_and_can_continue_after_it(spoiled: Gate) -> None:
    said = len(spoiled.log)
    before = cut_off(spoiled)
    eventually(lambda: b"wald_gate_broken_answers_total 1" in spoiled.get("/metrics").body)
    (line,) = spoiled.log[said:].splitlines()
    assert "cannot be read" in json.loads(line)["detail"]
    refused = spoiled.get(f"{ORDERS}?from=2&format=raw")

    assert before == b"one\n"
    assert (refused.status, refused.json()["code"], refused.json()["next"]) == (500, "damaged", 3)
    assert "?from=3 " in refused.json()["hint"]
    assert spoiled.get(f"{ORDERS}?from=3&format=raw").body == b"three\n"


def test_a_client_that_leaves_before_the_damage_leaves_no_traceback(spoiled: Gate) -> None:
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", spoiled.port)) as client:
            client.sendall(f"GET {ORDERS}?format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert client.recv(4) == b"HTTP"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset

    assert spoiled.stop() == 0
    assert "Traceback" not in spoiled.log


def answer(gate: Gate, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[list[str], bytes]:
    """Send an HTTP/1.0 request; return the response's head and all bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS) as connection:
        head = f"{method} {path} HTTP/1.0\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)
        found = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, rest = found.partition(b"\r\n\r\n")
    return top.decode().lower().split("\r\n"), rest


def test_http_1_0_clients_get_answers_that_they_can_parse(filled: Gate) -> None:
    for headers in ["Host: localhost\r\n", "Host: localhost\r\nConnection: keep-alive\r\n"]:
        head, body = answer(filled, "GET", f"{ORDERS}?format=raw", headers=headers)

        assert "transfer-encoding: chunked" not in head
        assert "connection: close" in head
        assert body.count(b"\n") == 10_000
        head, body = answer(filled, "GET", "/v1/head", headers=headers)
        assert f"content-length: {len(body)}" in head
        assert json.loads(body)["sequence"] == 10_000
        assert answer(filled, "HEAD", "/", headers=headers)[1] == b""


def begun(gate: Gate, method: str, path: str, body: str = "") -> socket.socket:
    """Send a request; return its connection."""
    connection = socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    connection.sendall(head.encode())
    return connection


def received(connection: socket.socket, end: bytes) -> bytes:
    """Return the bytes received on a connection up to the first ``end``."""
    found = b""
    while end not in found:
        data = connection.recv(65536)
        assert data, found
        found += data
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("billing")
def test_what_waits_sends_something_every_15_seconds(gate: Gate) -> None:
    """Plain values, in which a heartbeat would look like a record, have none unless the client asks for it."""
    lease = json.dumps({"worker": "ann", "wait": 300})
    requests = {
        "ndjson": ("GET", f"{ORDERS}?from=end&follow=1", "", b"\r\n\n\r\n"),
        "json": ("GET", f"{ORDERS}?from=end&follow=1&format=json", "", b"\r\n\n\r\n"),
        "raw": ("GET", f"{ORDERS}?from=end&follow=1&format=raw&heartbeat=1", "", b"\r\n\n\r\n"),
        "events": ("GET", f"{ORDERS}?from=end&format=events", "", b": nothing new\nid: 0\n\n"),
        "wait": ("GET", f"{ORDERS}?from=end&wait=300s", "", b"\r\n\n\r\n"),
        "lease": ("POST", f"{GROUP}/lease", lease, b"\r\n\n\r\n"),
    }
    connections = {
        name: (begun(gate, method, path, body), beat) for name, (method, path, body, beat) in requests.items()
    }
    silent = begun(gate, "GET", f"{ORDERS}?from=end&follow=1&format=raw")
    before = {name: received(connection, beat) for name, (connection, beat) in connections.items()}
    gate.post(ORDERS, b"one\n")

    assert before["lease"].startswith(b"HTTP/1.1 200 ")
    for name, (connection, _) in connections.items():
        assert b"one" in received(connection, b"one"), name
        connection.close()
    with silent:
        assert b"\r\n\n\r\n" not in received(silent, b"one\n")


@pytest.mark.slow
@pytest.mark.usefixtures("billing")
def test_a_lease_that_has_begun_to_answer_ends_with_its_client_and_with_the_gate(gate: Gate) -> None:
    gone, stays = (begun(gate, "POST", f"{GROUP}/lease", f'{{"worker": "{who}", "wait": 300}}') for who in ("g", "s"))
    for each in (gone, stays):
        received(each, b"\r\n\n\r\n")
    gone.close()
    assert gate.stop() == 0
    with stays:
        answer = received(stays, b"0\r\n\r\n")

    assert b'{"records":[]}' in answer


CURSORS = "/v1/routes/orders/cursors"
EVENTS = "text/event-stream"


@pytest.fixture(scope="module")
def reclaimed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log with records 1 to 3 reclaimed and 4 and 5 present, of which billing has processed 1."""
    root = tmp_path_factory.mktemp("positions") / "log"
    with Daemon(root) as daemon:
        daemon.ask("ROUTE ADD orders")
        with Gate(root) as gate:
            gate.post(ORDERS, b"1\n2\n3\n")
            daemon.ask("CUT")
            gate.post(ORDERS, b"4\n5\n")
            log = wald.open(root)
            log.set_cursor("orders", 3, "billing")
            sealed = root / "segments" / segment_name(1, Kind.SEALED)
            eventually(sealed.exists)
            reclaim(root, "--grace", 0)
            assert not sealed.exists()
            log.set_cursor("orders", 1, "billing", rewind=True)
            yield gate


def test_a_reclaimed_position_is_gone(reclaimed: Gate) -> None:
    for query in ["from=1", "from=3", "from=2&format=events", "from=1&to=5&limit=1"]:
        answer = reclaimed.get(f"{ORDERS}?{query}")

        assert (answer.status, answer.json()["code"], answer.json()["next"]) == (410, "reclaimed", 4)
        assert "?from=4 " in answer.json()["hint"]
        assert "?from=earliest" in answer.json()["hint"]
        events = reclaimed.get(ORDERS, accept=EVENTS, last_event_id="2")
        assert (events.status, events.json()["code"], events.json()["next"]) == (410, "reclaimed", 4)
        assert reclaimed.get(f"{ORDERS}?from=4&format=raw").body == b"4\n5\n"
        assert reclaimed.get(f"{ORDERS}?from=earliest&format=raw").body == b"4\n5\n"


def test_a_time_ago_counts_back_from_the_request(gate: Gate) -> None:
    """The time does not count from the first request that specified it."""
    gate.post(ORDERS, b"1\n")
    assert gate.get(f"{ORDERS}?from=1h&format=raw").body == b"1\n"
    gate.post(ORDERS, b"2\n")
    assert gate.get(f"{ORDERS}?from=1h&format=raw").body == b"1\n2\n"
    eventually(lambda: gate.get(f"{ORDERS}?from=0.1s&format=raw").body == b"")


def test_a_group_behind_reclaimed_records_learns_how_to_continue(reclaimed: Gate) -> None:
    answer = reclaimed.get(f"{ORDERS}?from=cursor&group=billing")

    assert (answer.status, answer.json()["code"], answer.json()["next"]) == (410, "reclaimed", 4)
    assert f'PUT {{"sequence": 3}} to {CURSORS}/billing' in answer.json()["hint"]


def test_a_group_begins_at_the_oldest_record_or_after_the_last_one(reclaimed: Gate) -> None:
    for group, position, sequence in (("first", "earliest", 3), ("next", "end", 5)):
        made = reclaimed.ask("PUT", f"{CURSORS}/{group}", json.dumps({"sequence": position}).encode())
        assert made.json() == {"sequence": sequence, "state": "valid", "message": ""}
    leased = reclaimed.post("/v1/routes/orders/groups/first/lease", {"worker": "w"}).json()["records"]
    assert [record["sequence"] for record in leased] == [4, 5]
    assert reclaimed.post("/v1/routes/orders/groups/next/lease", {"worker": "w"}).json() == {"records": []}
    back = reclaimed.ask("PUT", f"{CURSORS}/next", b'{"sequence": "earliest"}')
    assert (back.status, back.json()["hint"]) == (409, '{"sequence": "earliest", "rewind": true} moves it all the same')
    other = reclaimed.ask("PUT", f"{CURSORS}/next", b'{"sequence": "latest"}')
    assert (other.status, other.json()["code"]) == (400, "invalid")


def test_a_group_without_a_cursor_gets_no_records(reclaimed: Gate) -> None:
    answer = reclaimed.get(f"{ORDERS}?from=cursor&group=biling")

    assert (answer.status, answer.json()["code"]) == (404, "not-found")
    assert f'PUT {{"sequence": "earliest"}} to {CURSORS}/biling creates it' in answer.json()["hint"]


def test_an_invalid_position_is_refused(reclaimed: Gate) -> None:
    for query, event_id, status in [
        ("group=billing", "", 400),
        ("from=5&group=billing", "", 400),
        ("from=0", "", 400),
        ("from=zzz", "", 400),
        ("from=1&from=2", "", 400),
        ("from=20000", "", 404),
        ("", "null", 400),
        ("", "-1", 400),
        ("", "4.0", 400),
        ("", "9" * 5000, 400),
        ("", "9" * 19, 404),
        ("", "5", 200),
        ("", "6", 404),
        ("from=7", "", 404),
        ("from=6", "", 200),
    ]:
        with reclaimed.asked(
            "GET", f"{ORDERS}?{query}", headers={"Accept": EVENTS, "Last-Event-ID": event_id}
        ) as answer:
            assert answer.status == status


def test_events_begin_with_the_oldest_record_if_none_came_yet(reclaimed: Gate) -> None:
    with reclaimed.asked("GET", f"{ORDERS}?from=5", headers={"Accept": EVENTS, "Last-Event-ID": ""}) as answer:
        assert [answer.readline() for _ in range(4)][1:] == [b"id: 4\n", b"\n", b"id: 5\n"]


def test_a_path_with_a_trailing_slash_and_a_wait_for_nothing_are_refused(reclaimed: Gate) -> None:
    answer = reclaimed.post(f"{ORDERS}/", b"lost\n")

    assert (answer.status, answer.json()["code"]) == (404, "no-such-path")
    assert answer.json()["hint"] == f"{ORDERS}, without a slash at its end"

    answer = reclaimed.post(f"{ORDERS}?wait=1s", b"6\n")

    assert (answer.status, answer.json()["hint"]) == (400, "?wait_processed=GROUP&wait=1s")
