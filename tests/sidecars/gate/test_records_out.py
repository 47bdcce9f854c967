"""Reads over HTTP: positions, formats, waits, heartbeats, and damage found during a response."""

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
from typing import Any

import pyarrow as pa
import pytest
from gating import BILLING, JSON, NDJSON, ORDERS, TEXT, Gate, received, serving
from logs import Built
from running import Daemon, eventually, output_of, reclaim

import wald
from wald.files.uptime import ClockStep, add_step
from wald.format.names import Kind, segment_name

CURSORS = "/v1/routes/orders/cursors"
EVENTS = "text/event-stream"


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


def test_an_arrow_stream_says_what_json_says(gate: Gate) -> None:
    full = b'{"value": "v", "key": "ann", "headers": {"h": "1"}, "time": 1700000000000000000}\n'
    for body, media_type, key in (
        (b"a\nb\n", TEXT, None),
        (full, NDJSON, None),
        (b"c\nd\n", TEXT, "one"),
        (b"e\n", TEXT, "two"),
        (b"f", "application/octet-stream", None),
        (b"g\n", TEXT, None),
    ):
        keyed = {} if key is None else {"Idempotency-Key": key}
        assert gate.ask("POST", ORDERS, body, {"Content-Type": media_type, **keyed}).status == 200

    answer = gate.get(ORDERS, accept="application/vnd.apache.arrow.stream")
    assert answer.body == gate.get(f"{ORDERS}?format=arrow").body
    rows = pa.ipc.open_stream(io.BytesIO(answer.body)).read_all().to_pylist()
    for row, record in zip(rows, gate.get(ORDERS).lines(), strict=True):
        found = {
            "sequence": row["sequence"],
            "value": row["value"].decode(),
            "key": row["key"] and row["key"].decode(),
            "headers": row["headers"] and json.loads(row["headers"]),
            "event_time_ns": row["event_time"] and row["event_time"].value,
        }
        assert found == {name: record.get(name) for name in found}
    assert len(rows) == 8


def test_a_follower_gets_each_record_that_is_appended(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n")
    with gate.asked("GET", f"{ORDERS}?from=2&follow=1&format=raw") as lines:
        assert lines.readline() == b"2\n"
        for number in range(3):
            gate.post(ORDERS, b"later %d\n" % number)
            assert lines.readline() == b"later %d\n" % number
    with gate.asked("GET", f"{ORDERS}?format=json&follow=1&from=5&limit=2") as answer:
        begun = answer.read1()
        gate.post(ORDERS, b"\xff\x00", "application/octet-stream")
        first, last = json.loads(begun + answer.read())
    assert (first["value"], last["value_base64"]) == ("later 2", "/wA=")  # base64 for a value other than text


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


def test_a_client_gets_the_records_before_damage_and_can_continue_after_it(spoiled: Gate) -> None:
    said = len(spoiled.log)
    with spoiled.asked("GET", f"{ORDERS}?format=raw") as response, pytest.raises(http.client.IncompleteRead) as broken:
        response.read()
    eventually(lambda: spoiled.metric("wald_gate_broken_answers_total") == 1)
    (line,) = spoiled.log[said:].splitlines()
    assert "cannot be read" in json.loads(line)["detail"]
    refused = spoiled.get(f"{ORDERS}?from=2&format=raw")

    assert broken.value.partial == b"one\n"
    assert (refused.status, refused.json()["code"], refused.json()["next"]) == (500, "damaged", 3)
    assert "?from=3 " in refused.json()["hint"]
    assert spoiled.get(f"{ORDERS}?from=3&format=raw").body == b"three\n"
    for _ in range(10):  # a client that leaves before the damage leaves no traceback
        with spoiled.begin(f"GET {ORDERS}?format=raw") as client:
            assert client.recv(4) == b"HTTP"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
    assert spoiled.stop() == 0
    assert "Traceback" not in spoiled.log


def test_http_1_0_clients_get_answers_that_they_can_parse(filled: Gate) -> None:
    for header in ("", "Connection: keep-alive\r\n"):

        def answer(asked: str, header: str = header) -> tuple[list[str], bytes]:
            """Return the head of the response and all bytes until the connection ends."""
            with filled.connect(f"{asked} HTTP/1.0\r\nHost: localhost\r\n{header}\r\n".encode()) as connection:
                top, _, rest = received(connection).partition(b"\r\n\r\n")
            return top.decode().lower().split("\r\n"), rest

        head, body = answer(f"GET {ORDERS}?format=raw")
        assert "transfer-encoding: chunked" not in head
        assert "connection: close" in head
        assert body.count(b"\n") == 10_000
        head, body = answer("GET /v1/head")
        assert f"content-length: {len(body)}" in head
        assert json.loads(body)["sequence"] == 10_000
        assert answer("HEAD /")[1] == b""


@pytest.mark.slow
@pytest.mark.usefixtures("billing")
def test_what_waits_sends_something_every_15_seconds(gate: Gate) -> None:
    """Plain values, in which a heartbeat would look like a record, have none unless the client asks for it."""
    body: dict[str, Any] = {"body": b'{"worker": "ann", "wait": 300}', "media_type": JSON}
    requests = {
        f"GET {ORDERS}?from=end&follow=1": b"\r\n\n\r\n",
        f"GET {ORDERS}?from=end&follow=1&format=json": b"\r\n\n\r\n",
        f"GET {ORDERS}?from=end&follow=1&format=raw&heartbeat=1": b"\r\n\n\r\n",
        f"GET {ORDERS}?from=end&format=events": b": nothing new\nid: 0\n\n",
        f"GET {ORDERS}?from=end&wait=300s": b"\r\n\n\r\n",
        f"POST {BILLING}/lease": b"\r\n\n\r\n",
    }
    connections = {asked: gate.begin(asked, **(body if "POST" in asked else {})) for asked in requests}
    silent = gate.begin(f"GET {ORDERS}?from=end&follow=1&format=raw")
    before = {asked: received(connection, requests[asked]) for asked, connection in connections.items()}
    gate.post(ORDERS, b"one\n")

    assert before[f"POST {BILLING}/lease"].startswith(b"HTTP/1.1 200 ")
    for connection in connections.values():
        received(connection, b"one")
        connection.close()
    with silent:
        assert b"\r\n\n\r\n" not in received(silent, b"one\n")


@pytest.mark.slow
@pytest.mark.usefixtures("billing")
def test_a_lease_that_has_begun_to_answer_ends_with_its_client_and_with_the_gate(gate: Gate) -> None:
    lease = b'{"worker": "%b", "wait": 300}'
    gone, stays = (gate.begin(f"POST {BILLING}/lease", body=lease % each, media_type=JSON) for each in (b"g", b"s"))
    for each in (gone, stays):
        received(each, b"\r\n\n\r\n")
    gone.close()
    assert gate.stop() == 0
    with stays:
        answer = received(stays, b"0\r\n\r\n")

    assert b'{"records":[]}' in answer


@pytest.fixture(scope="module")
def reclaimed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log with records 1 to 3 reclaimed and 4 and 5 present, of which billing has processed 1."""
    with serving(tmp_path_factory.mktemp("positions") / "log") as gate:
        gate.post(ORDERS, b"1\n2\n3\n")
        gate.daemon.ask("CUT")
        gate.post(ORDERS, b"4\n5\n")
        log = wald.open(gate.root)
        log.set_cursor("orders", 3, "billing")
        sealed = gate.root / "segments" / segment_name(1, Kind.SEALED)
        eventually(sealed.exists)
        reclaim(gate.root, "--grace", 0)
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
    for start in ("4", "earliest"):
        assert reclaimed.get(f"{ORDERS}?from={start}&format=raw").body == b"4\n5\n"
    # A group behind the position learns how to continue, and one without a cursor how to begin.
    answer = reclaimed.get(f"{ORDERS}?from=cursor&group=billing")
    assert (answer.status, answer.json()["code"], answer.json()["next"]) == (410, "reclaimed", 4)
    assert f'PUT {{"sequence": 3}} to {CURSORS}/billing' in answer.json()["hint"]
    answer = reclaimed.get(f"{ORDERS}?from=cursor&group=biling")
    assert (answer.status, answer.json()["code"]) == (404, "not-found")
    assert f'PUT {{"sequence": "earliest"}} to {CURSORS}/biling creates it' in answer.json()["hint"]


def test_a_time_ago_counts_back_from_the_request(gate: Gate) -> None:
    """The time does not count from the first request that specified it."""
    gate.post(ORDERS, b"1\n")
    assert gate.get(f"{ORDERS}?from=1h&format=raw").body == b"1\n"
    gate.post(ORDERS, b"2\n")
    assert gate.get(f"{ORDERS}?from=1h&format=raw").body == b"1\n2\n"
    eventually(lambda: gate.get(f"{ORDERS}?from=0.1s&format=raw").body == b"")


def test_a_group_begins_at_the_oldest_record_or_after_the_last_one(reclaimed: Gate) -> None:
    for group, position, sequence in (("first", "earliest", 3), ("next", "end", 5)):
        made = reclaimed.put(f"{CURSORS}/{group}", {"sequence": position})
        assert made.json() == {"sequence": sequence, "state": "valid", "message": ""}
    leased = reclaimed.post("/v1/routes/orders/groups/first/lease", {"worker": "w"}).json()["records"]
    assert [record["sequence"] for record in leased] == [4, 5]
    assert reclaimed.post("/v1/routes/orders/groups/next/lease", {"worker": "w"}).json() == {"records": []}
    back = reclaimed.put(f"{CURSORS}/next", {"sequence": "earliest"})
    assert (back.status, back.json()["hint"]) == (409, '{"sequence": "earliest", "rewind": true} moves it anyway')
    other = reclaimed.put(f"{CURSORS}/next", {"sequence": "latest"})
    assert (other.status, other.json()["code"]) == (400, "invalid")


def test_an_invalid_position_is_refused(reclaimed: Gate) -> None:
    for query, status in [
        ("group=billing", 400),
        ("from=5&group=billing", 400),
        ("from=0", 400),
        ("from=zzz", 400),
        ("from=1&from=2", 400),
        ("from=20000", 404),
        ("from=7", 404),
        ("from=6", 200),
    ]:
        with reclaimed.asked("GET", f"{ORDERS}?{query}", headers={"Accept": EVENTS}) as answer:
            assert answer.status == status
    ids = {"null": 400, "-1": 400, "4.0": 400, "9" * 5000: 400, "9" * 19: 404, "5": 200, "6": 404}
    for event_id, status in ids.items():
        with reclaimed.asked("GET", ORDERS, headers={"Accept": EVENTS, "Last-Event-ID": event_id}) as answer:
            assert answer.status == status
    # With an empty id they begin with the oldest record.
    with reclaimed.asked("GET", f"{ORDERS}?from=5", headers={"Accept": EVENTS, "Last-Event-ID": ""}) as answer:
        assert [answer.readline() for _ in range(4)][1:] == [b"id: 4\n", b"\n", b"id: 5\n"]


def test_a_path_with_a_trailing_slash_and_a_wait_for_nothing_are_refused(reclaimed: Gate) -> None:
    answer = reclaimed.post(f"{ORDERS}/", b"lost\n")

    assert (answer.status, answer.json()["code"]) == (404, "no-such-path")
    assert answer.json()["hint"] == f"{ORDERS}, without a slash at its end"

    answer = reclaimed.post(f"{ORDERS}?wait=1s", b"6\n")

    assert (answer.status, answer.json()["hint"]) == (400, "?wait_processed=GROUP&wait=1s")
