"""Work groups over HTTP: leases, waits, listing, settings, and refused requests."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gating import Answer, Gate, entry
from group_requests import GROUP, RECORDS, ask, lease
from running import TIMEOUT_SECONDS, Daemon, eventually, refusal_of

import wald

pytestmark = pytest.mark.usefixtures("billing")


def sequences(records: Iterable[Any]) -> list[int]:
    return [record["sequence"] for record in records]


def pending(gate: Gate) -> list[Any]:
    answer = gate.get(f"{GROUP}/pending")
    assert answer.status == 200, answer.body
    return answer.lines()


def test_a_record_is_leased_and_acknowledged_once(gate: Gate) -> None:
    gate.post(RECORDS, b"one\ntwo\n")
    first, second = lease(gate)
    assert (first["sequence"], first["value"], first["tries"], first["route"]) == (1, "one", 1, "orders")
    assert ask(gate, "ack", sequences=[1]) == {"refused": []}
    assert sequences(lease(gate, "w2")) == []
    assert ask(gate, "lease", done=[second["sequence"]]) == {"records": []}
    assert gate.get("/v1/routes/orders/cursors/billing").json()["sequence"] <= 2
    assert pending(gate) == []


def test_a_leased_record_is_that_of_wald_read_with_its_tries(gate: Gate) -> None:
    shapes = [
        {"value": "text\n\u2028\x1b[31m", "key": "ann", "headers": {"a": "b"}, "time": "2026-01-02T03:04:05Z"},
        {"value_base64": base64.b64encode(b"\xff\x00").decode()},
        {"value": ""},
    ]
    gate.post(RECORDS, "".join(json.dumps(each) + "\n" for each in shapes).encode(), "application/x-ndjson")
    leased = lease(gate)
    assert [record.pop("tries") for record in leased] == [1, 1, 1]
    assert leased == gate.get(RECORDS).lines()


def test_what_is_given_back_comes_again_after_its_delay_and_with_its_tries(gate: Gate) -> None:
    gate.post(RECORDS, b"one\ntwo\n")
    assert sequences(lease(gate)) == [1, 2]
    assert ask(gate, "nack", sequences=[2], delay=3600, reason="no paper") == {"refused": []}
    assert ask(gate, "nack", sequences=[1]) == {"refused": []}
    again = lease(gate)
    assert [(record["sequence"], record["tries"]) for record in again] == [(1, 2)]
    waiting = [each for each in pending(gate) if each["kind"] == "waiting"]
    assert [(each["first"], each["last"], each["reason"]) for each in waiting] == [(2, 2, "no paper")]


def test_a_lease_says_what_it_did_not_acknowledge_and_nothing_of_that_if_it_did(gate: Gate) -> None:
    gate.post(RECORDS, b"one\ntwo\nthree\n")
    assert sequences(lease(gate, "w1", max_records=2)) == [1, 2]
    late = ask(gate, "lease", "w2", done=[2, 1])
    assert late["refused"] == [{"sequence": 1, "holder": "w1"}, {"sequence": 2, "holder": "w1"}]
    assert sequences(late["records"]) == [3]
    waited = ask(gate, "lease", "w2", done=[1, 3], wait=0.1)
    assert waited == {"records": [], "refused": [{"sequence": 1, "holder": "w1"}]}
    assert ask(gate, "lease", "w1", done=[1, 2]) == {"records": []}


def test_what_another_consumer_has_is_refused_and_its_holder_named(gate: Gate) -> None:
    gate.post(RECORDS, b"one\ntwo\n")
    assert sequences(lease(gate, "w1", max_records=1)) == [1]
    for verb in ("ack", "nack", "extend"):
        found = ask(gate, verb, "w2", sequences=[1, 2, 99])
        assert found == {"refused": [{"sequence": 1, "holder": "w1"}, {"sequence": 2}, {"sequence": 99}]}, verb


def test_release_takes_back_all_or_some_of_what_a_consumer_has(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n2\n3\n")
    assert sequences(lease(gate)) == [1, 2, 3]
    assert ask(gate, "release", sequences=[2, 2, 99]) == {"released": 1}
    assert sequences(lease(gate, "w2")) == [2]
    assert ask(gate, "release") == {"released": 2}
    assert sequences(lease(gate, "w3")) == [1, 3]


def test_a_lease_that_is_over_is_given_to_another_unless_it_was_extended(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n2\n")
    assert sequences(lease(gate, lease_for=0.3)) == [1, 2]
    assert ask(gate, "extend", sequences=[2], lease_for=600) == {"refused": []}
    assert sequences(lease(gate, "w2", wait=30)) == [1]
    assert ask(gate, "ack", sequences=[1, 2]) == {"refused": [{"sequence": 1, "holder": "w2"}]}


def test_a_lease_holds_at_most_what_was_asked_for(gate: Gate) -> None:
    gate.post(RECORDS, b"x" * 100 + b"\n" + b"y" * 100 + b"\nz\n")
    assert sequences(lease(gate, max_bytes=50)) == [1]
    assert sequences(lease(gate, max_bytes=101)) == [2, 3]


GROUPS = "/v1/routes/orders/groups"


def listed(gate: Gate, **headers: str) -> dict[str, Any]:
    """Return the groups of the route by name."""
    answer = gate.get(GROUPS, **headers)
    assert answer.status == 200, answer.body
    return {each["group"]: each for each in answer.json()["groups"]}


def removed(gate: Gate, group: str = "billing", route: str = "orders") -> Answer:
    return gate.ask("DELETE", f"/v1/routes/{route}/groups/{group}")


def test_groups_are_listed_with_their_lag_and_work_groups_with_what_is_where(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n2\n3\n4\n")
    gate.ask("PUT", "/v1/routes/orders/cursors/audit", b'{"sequence": 3}')
    assert len(lease(gate, max_records=2)) == 2
    assert gate.post(f"{GROUP}/nack", {"worker": "w1", "sequences": [2], "delay": 600}).status == 200
    found = listed(gate)
    assert list(found) == ["audit", "billing"]
    assert (found["audit"]["sequence"], found["audit"]["lag_records"], "work" in found["audit"]) == (3, 1, False)
    assert (found["billing"]["sequence"], found["billing"]["lag_records"]) == (0, 4)
    work = found["billing"]["work"]
    assert work["owner"]["process"] == gate.process.pid
    counts = {name: work[f"{name}_records"] for name in ("open", "out", "waiting", "giving_up")}
    assert counts["out"] == counts["waiting"] == 1
    assert (counts["giving_up"], work["floor"], work["tries_max"], work["damage"]) == (0, 0, 1, "")
    assert gate.get("/v1/routes/nowhere/groups").status == 404


def test_a_group_is_removed_with_all_its_files_and_makes_way_for_a_new_one(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n2\n")
    gate.make_group("audit")
    assert len(lease(gate)) == 2
    refused = removed(gate)
    assert (refused.status, refused.json()["code"]) == (409, "in-use")
    assert gate.post(f"{GROUP}/ack", {"worker": "w1", "sequences": [1]}).status == 200
    assert gate.post(f"{GROUP}/release", {"worker": "w1"}).json() == {"released": 1}
    for group in ("billing", "audit"):
        assert removed(gate, group).json() == {"route": "orders", "group": group}
        assert (removed(gate, group).status, removed(gate, group).json()["code"]) == (404, "not-found")
    assert listed(gate) == {}
    assert not [*gate.root.rglob("billing*"), *gate.root.rglob("audit*")]
    assert gate.post(f"{GROUP}/lease", {"worker": "w1"}).status == 404
    gate.make_group("billing")
    assert [record["sequence"] for record in lease(gate)] == [1, 2]


def test_a_group_of_another_process_is_not_removed(gate: Gate) -> None:
    with wald.WorkGroup(gate.root, "orders", "billing"):
        refused = removed(gate)
        assert (refused.status, refused.json()["code"]) == (423, "locked")
        assert refused.headers["retry-after"] == "2"
    assert removed(gate).status == 200
    assert removed(gate, "billing", "nowhere").status == 404


def test_the_command_that_removes_a_group_says_what_the_gate_takes(daemon: Daemon) -> None:
    """The hint does not suggest stopping the gate, which would disconnect the clients of all groups."""
    with Gate(daemon.root, anew=True) as gate:
        gate.post(RECORDS, b"1\n")
        assert len(lease(gate)) == 1
        _, _, hint = refusal_of("group", "remove", "orders", "billing", "--root", gate.root)
    assert hint.startswith(f"ask it: DELETE {GROUP}; or wait")
    assert "kill" not in hint


def test_paths_and_commands_are_for_those_who_run_the_log(daemon: Daemon, gate: Gate, tmp_path: Path) -> None:
    gate.post(RECORDS, b"1\n")
    assert len(lease(gate)) == 1
    broken = wald.open(daemon.root).cursor("orders", "broken").path
    broken.symlink_to("elsewhere")  # the error about it names the file
    tokens = tmp_path / "tokens"
    tokens.write_text(entry("reader", read=["*"]) + entry("chief", admin=True))
    root = str(daemon.root).encode()
    with Gate(daemon.root, "--tokens", tokens) as guarded:
        groups = listed(guarded, authorization="Bearer chief-token")
        assert (groups["broken"]["state"], str(broken) in groups["broken"]["message"]) == ("unreadable", True)
        command = groups["billing"]["work"]["owner"]["command"].encode()
        assert command
        for path in ("/v1/routes", GROUPS, "/v1/head"):
            answer = guarded.get(path, authorization="Bearer reader-token")
            assert answer.status == 200
            assert [word for word in (root, command, b'"path"', b'"command') if word in answer.body] == [], path
        assert root in guarded.get("/v1/routes", authorization="Bearer chief-token").body


SEQUENCES = ", ".join(map(str, range(1, 100_002)))

WRONG = {
    "lease": [
        "",
        "[]",
        "null",
        "{",
        "{}",
        '{"worker": null}',
        '{"worker": 7}',
        '{"worker": "w", "max_record": 1}',
        '{"worker": "w", "max_records": 0}',
        '{"worker": "w", "max_records": 10001}',
        '{"worker": "w", "max_records": 1.5}',
        '{"worker": "w", "max_records": true}',
        '{"worker": "w", "max_bytes": 0}',
        '{"worker": "w", "max_bytes": 99999999999999999999999}',
        '{"worker": "w", "lease_for": 0}',
        '{"worker": "w", "lease_for": -1}',
        '{"worker": "w", "lease_for": NaN}',
        '{"worker": "w", "lease_for": Infinity}',
        '{"worker": "w", "lease_for": 1e999}',
        '{"worker": "w", "lease_for": 43201}',
        '{"worker": "w", "lease_for": "30s"}',
        '{"worker": "w", "wait": -0.1}',
        '{"worker": "w", "wait": 301}',
        '{"worker": "w", "done": [0]}',
        '{"worker": "w", "done": 1}',
    ],
    "ack": [
        '{"worker": "w"}',
        '{"worker": "w", "sequences": null}',
        '{"worker": "w", "sequences": [-1]}',
        '{"worker": "w", "sequences": [9223372036854775808]}',
        '{"worker": "w", "sequences": [1.5]}',
        '{"worker": "w", "sequences": ["1"]}',
        '{"worker": "w", "sequences": [1], "reason": "x"}',
        f'{{"worker": "w", "sequences": [{SEQUENCES}]}}',
    ],
    "nack": [
        '{"worker": "w", "sequences": [1], "delay": -1}',
        '{"worker": "w", "sequences": [1], "delay": NaN}',
        '{"worker": "w", "sequences": [1], "delay": 1e10}',
        '{"worker": "w", "sequences": [1], "reason": 7}',
        json.dumps({"worker": "w", "sequences": [1], "reason": "x" * 10_001}),
    ],
    "extend": ['{"worker": "w", "sequences": [1], "lease_for": 0}'],
    "release": ['{"worker": "w", "sequences": [0]}', '{"worker": ""}'],
}
NAMES = ["", "a\nb", "\x1b[31mred", "tab\there", "\u202eback", "\u2028", "x" * 201, "\x00"]


def test_an_invalid_request_is_refused_with_the_reason_and_changes_nothing(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n")
    assert [record["sequence"] for record in gate.post(f"{GROUP}/lease", {"worker": "w"}).json()["records"]] == [1]
    for verb, bodies in WRONG.items():
        for body in bodies:
            answer = gate.ask("POST", f"{GROUP}/{verb}", body.encode())
            assert (answer.status, answer.json()["code"]) == (400, "invalid"), (verb, body[:80], answer.body)
    [entry] = gate.get(f"{GROUP}/pending").lines()
    assert (entry["first"], entry["worker"], entry["tries"]) == (1, "w", 1)


def test_a_worker_has_a_name_of_any_letters_that_fits_on_a_line(gate: Gate) -> None:
    gate.post(RECORDS, b"1\n")
    for refused in NAMES:
        for verb, more in {"lease": {}, "ack": {"sequences": [1]}, "release": {}}.items():
            answer = gate.post(f"{GROUP}/{verb}", {"worker": refused, **more})
            assert (answer.status, answer.json()["code"]) == (400, "invalid"), answer.body
    name = "Zoë 工人 №1 \\ \" ' 🙂"
    assert len(gate.post(f"{GROUP}/lease", {"worker": name}).json()["records"]) == 1
    [entry] = gate.get(f"{GROUP}/pending").lines()
    assert entry["worker"] == name


def test_a_body_that_is_too_large_or_not_json_is_refused(gate: Gate) -> None:
    large = gate.ask("POST", f"{GROUP}/ack", b'{"worker": "w", "sequences": [' + b"1," * (3 << 20) + b"1]}")
    assert (large.status, large.json()["code"]) == (413, "too-large")
    other = gate.post(f"{GROUP}/lease", b'{"worker": "w"}', "text/plain")
    assert (other.status, other.json()["code"]) == (415, "media-type")
    assert gate.get(f"{GROUP}/lease").status == 405
    assert gate.get(f"{GROUP}/pending?limit=0").status == 400


def test_an_invalid_route_or_group_name_is_refused(gate: Gate) -> None:
    for path in ["/v1/routes/..%2Fx/groups/g/lease", "/v1/routes/orders/groups/.hidden/lease"]:
        assert gate.post(path, {"worker": "w"}).status in (400, 404)
        assert not list(gate.root.rglob("*.work"))


CONFIG = """
[groups."orders/billing"]
order = "key"
max_tries = 2
dead_letter = "unpaid"
"""


@pytest.fixture
def configured(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    config = tmp_path / "gate.toml"
    config.write_text(CONFIG)
    with Gate(daemon.root, "--config", config) as running:
        yield running


def test_records_of_a_key_are_with_one_consumer_at_a_time(configured: Gate) -> None:
    lines = [{"value": "1", "key": "ann"}, {"value": "2", "key": "ann"}, {"value": "3", "key": "bob"}]
    configured.post(RECORDS, "".join(json.dumps(each) + "\n" for each in lines).encode(), "application/x-ndjson")
    assert [record["value"] for record in lease(configured, max_records=1)] == ["1"]
    assert [record["value"] for record in lease(configured, "w2")] == ["3"]


def test_a_record_that_was_tried_too_often_is_a_dead_letter_with_its_reason(configured: Gate, daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD unpaid")
    configured.post(RECORDS, b"poison\n")
    for tries, life in ((1, configured.stop), (2, configured.kill)):
        assert [record["tries"] for record in lease(configured)] == [tries]
        assert ask(configured, "nack", sequences=[1], reason=f"odd {tries}") == {"refused": []}
        life()
        configured.start()
    assert lease(configured) == []
    eventually(lambda: configured.get("/v1/routes/unpaid/records").lines())
    [letter] = configured.get("/v1/routes/unpaid/records").lines()
    assert (letter["value"], letter["headers"]["wald.reason"]) == ("poison", "odd 2")
    eventually(lambda: configured.get("/v1/routes/orders/cursors/billing").json()["sequence"] == 1)
    assert lease(configured) == []


MANY = 200


def waiting(gate: Gate, worker: str, **fields: Any) -> socket.socket:
    """Return a connection with a pending lease request."""
    body = json.dumps({"worker": worker, "wait": 300, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS)
    head = f"POST {GROUP}/lease HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def answer(connection: socket.socket) -> list[int]:
    """Return the sequences leased on a connection."""
    with connection, connection.makefile("rb") as file:
        assert b" 200 " in file.readline()
        return [record["sequence"] for record in json.loads(file.read().partition(b"\r\n\r\n")[2])["records"]]


def leases(gate: Gate) -> int:
    """Return the number of waiting leases."""
    lines = gate.get("/metrics").body.decode().splitlines()
    [found] = [line for line in lines if line.startswith("wald_gate_waiting_leases")]
    return int(float(found.split()[-1]))


def test_of_many_that_wait_one_gets_a_record_and_no_thread_is_needed_for_any(gate: Gate) -> None:
    assert lease(gate) == []
    tasks = Path(f"/proc/{gate.process.pid}/task")
    before = len(list(tasks.iterdir()))
    connections = [waiting(gate, f"w{number}") for number in range(MANY)]
    eventually(lambda: leases(gate) == MANY)
    assert len(list(tasks.iterdir())) < before + 30  # the read threads of other requests
    assert b"\nwald_gate_groups 1" in gate.get("/metrics").body
    gate.post(RECORDS, b"one\n")
    eventually(lambda: leases(gate) == MANY - 1)
    assert gate.stop() == 0
    found = [answer(connection) for connection in connections]
    assert sorted(found, reverse=True) == [[1]] + [[]] * (MANY - 1)


def test_a_client_that_has_gone_while_it_waited_gets_nothing(gate: Gate) -> None:
    assert lease(gate) == []
    connection = waiting(gate, "gone")
    eventually(lambda: leases(gate) == 1)
    connection.close()
    eventually(lambda: leases(gate) == 0)
    gate.post(RECORDS, b"one\n")
    [record] = lease(gate, wait=60)
    assert (record["sequence"], record["tries"]) == (1, 1)


def test_no_record_is_lost_with_a_client_that_goes_as_one_comes(gate: Gate) -> None:
    assert lease(gate) == []
    for sequence in range(1, 17):
        connection = waiting(gate, "gone", lease_for=0.5)
        eventually(lambda: leases(gate) == 1)
        if sequence % 2:
            gate.post(RECORDS, b"one\n")
            connection.close()
        else:
            connection.close()
            gate.post(RECORDS, b"one\n")
        [record] = lease(gate, wait=60, max_records=1)
        assert (record["sequence"], record["tries"] <= 2) == (sequence, True)
        assert lease(gate, done=[sequence]) == []
