"""Work groups over HTTP: leases, waits, listing, settings, and refused requests."""

import base64
import json
import socket
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from gating import BILLING, JSON, NDJSON, ORDERS, Answer, Gate, entry, received
from running import Daemon, eventually, refusal_of

import wald

pytestmark = pytest.mark.usefixtures("billing")
GROUPS = "/v1/routes/orders/groups"
MANY = 200


def pending(gate: Gate) -> list[Any]:
    return gate.get(f"{BILLING}/pending").lines()


def tries(gate: Gate, worker: str = "w1", **fields: Any) -> list[tuple[int, int]]:
    """Return the sequences and tries of the records of a lease."""
    records = gate.worked("lease", worker, **fields)["records"]
    return [(record["sequence"], record["tries"]) for record in records]


def test_a_leased_record_is_that_of_wald_read_with_its_tries(gate: Gate) -> None:
    shapes = [
        {"value": "text\n\u2028\x1b[31m", "key": "ann", "headers": {"a": "b"}, "time": "2026-01-02T03:04:05Z"},
        {"value_base64": base64.b64encode(b"\xff\x00").decode()},
        {"value": ""},
    ]
    gate.post(ORDERS, "".join(json.dumps(each) + "\n" for each in shapes).encode(), NDJSON)
    leased = gate.worked("lease")["records"]
    assert [record.pop("tries") for record in leased] == [1, 1, 1]
    assert leased == gate.get(ORDERS).lines()
    # Each is acknowledged once, also with the next lease.
    assert gate.worked("ack", sequences=[1]) == {"refused": []}
    assert gate.leased("w2") == []
    assert gate.worked("lease", done=[2, 3]) == {"records": []}
    assert pending(gate) == []


def test_what_is_given_back_comes_again_after_its_delay_and_with_its_tries(gate: Gate) -> None:
    gate.post(ORDERS, b"one\ntwo\n")
    assert gate.leased() == [1, 2]
    assert gate.worked("nack", sequences=[2], delay=3600, reason="no paper") == {"refused": []}
    assert gate.worked("nack", sequences=[1]) == {"refused": []}
    assert tries(gate) == [(1, 2)]
    waiting = [each for each in pending(gate) if each["kind"] == "waiting"]
    assert [(each["first"], each["last"], each["reason"]) for each in waiting] == [(2, 2, "no paper")]


def test_what_another_consumer_has_is_refused_and_its_holder_named(gate: Gate) -> None:
    gate.post(ORDERS, b"one\ntwo\nthree\n")
    assert gate.leased(max_records=2) == [1, 2]
    held = [{"sequence": 1, "holder": "w1"}, {"sequence": 2, "holder": "w1"}]
    for verb in ("ack", "nack", "extend"):
        assert gate.worked(verb, "w2", sequences=[1, 3, 99]) == {
            "refused": [held[0], {"sequence": 3}, {"sequence": 99}]
        }, verb
    late = gate.worked("lease", "w2", done=[2, 1])
    assert late["refused"] == held
    assert [record["sequence"] for record in late["records"]] == [3]
    waited = gate.worked("lease", "w2", done=[1, 3], wait=0.1)
    assert waited == {"records": [], "refused": held[:1]}
    assert gate.worked("lease", done=[1, 2]) == {"records": []}


def test_release_takes_back_all_or_some_of_what_a_consumer_has(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n3\n")
    assert gate.leased() == [1, 2, 3]
    assert gate.worked("release", sequences=[2, 2, 99]) == {"released": 1}
    assert gate.leased("w2") == [2]
    assert gate.worked("release") == {"released": 2}
    assert gate.leased("w3") == [1, 3]


def test_a_lease_that_is_over_is_given_to_another_unless_it_was_extended(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n")
    assert gate.leased(lease_for=0.3) == [1, 2]
    assert gate.worked("extend", sequences=[2], lease_for=600) == {"refused": []}
    assert gate.leased("w2", wait=30) == [1]
    assert gate.worked("ack", sequences=[1, 2]) == {"refused": [{"sequence": 1, "holder": "w2"}]}


def test_a_lease_holds_at_most_what_was_asked_for(gate: Gate) -> None:
    gate.post(ORDERS, b"x" * 100 + b"\n" + b"y" * 100 + b"\nz\n")
    assert gate.leased(max_bytes=50) == [1]
    assert gate.leased(max_bytes=101) == [2, 3]


def listed(gate: Gate, by: str = "") -> dict[str, Any]:
    """Return the groups of the route by name."""
    answer = gate.get(GROUPS, by)
    assert answer.status == 200, answer.body
    return {each["group"]: each for each in answer.json()["groups"]}


def removed(gate: Gate, group: str = "billing", route: str = "orders") -> Answer:
    return gate.ask("DELETE", f"/v1/routes/{route}/groups/{group}")


def test_groups_are_listed_with_their_lag_and_work_groups_with_what_is_where(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n3\n4\n")
    gate.put("/v1/routes/orders/cursors/audit", {"sequence": 3})
    assert len(gate.leased(max_records=2)) == 2
    assert gate.work("nack", sequences=[2], delay=600).status == 200
    found = listed(gate)
    assert list(found) == ["audit", "billing"]
    assert (found["audit"]["sequence"], found["audit"]["lag_records"], "work" in found["audit"]) == (3, 1, False)
    assert (found["billing"]["sequence"], found["billing"]["lag_records"]) == (0, 4)
    work = found["billing"]["work"]
    assert work["owner"]["process"] == gate.process.pid
    assert [work[f"{name}_records"] for name in ("out", "waiting", "giving_up")] == [1, 1, 0]
    assert (work["floor"], work["tries_max"], work["damage"]) == (0, 1, "")
    assert gate.get("/v1/routes/nowhere/groups").status == 404


def test_a_group_is_removed_with_all_its_files_and_makes_way_for_a_new_one(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n2\n")
    gate.make_group("audit")
    with wald.WorkGroup(gate.root, "orders", "billing"):
        refused = removed(gate)
        assert (refused.status, refused.json()["code"], refused.headers["retry-after"]) == (423, "locked", "2")
    assert len(gate.leased()) == 2
    refused = removed(gate)
    assert (refused.status, refused.json()["code"]) == (409, "in-use")
    assert gate.work("ack", sequences=[1]).status == 200
    assert gate.worked("release") == {"released": 1}
    for group in ("billing", "audit"):
        assert removed(gate, group).json() == {"route": "orders", "group": group}
        assert (removed(gate, group).status, removed(gate, group).json()["code"]) == (404, "not-found")
    assert removed(gate, "billing", "nowhere").status == 404
    assert listed(gate) == {}
    assert not [*gate.root.rglob("billing*"), *gate.root.rglob("audit*")]
    assert gate.work("lease").status == 404
    gate.make_group("billing")
    assert gate.leased() == [1, 2]


def test_the_command_that_removes_a_group_says_what_the_gate_takes(daemon: Daemon) -> None:
    """The hint does not suggest stopping the gate, which would disconnect the clients of all groups."""
    with Gate(daemon.root, anew=True) as gate:
        gate.post(ORDERS, b"1\n")
        assert gate.leased() == [1]
        _, _, hint = refusal_of("group", "remove", "orders", "billing", "--root", gate.root)
    assert hint.startswith(f"ask it: DELETE {BILLING}; or wait")
    assert "kill" not in hint


def test_paths_and_commands_are_for_those_who_run_the_log(daemon: Daemon, gate: Gate) -> None:
    gate.post(ORDERS, b"1\n")
    assert gate.leased() == [1]
    broken = wald.open(daemon.root).cursor("orders", "broken").path
    broken.symlink_to("elsewhere")  # the error about it names the file
    root = str(daemon.root).encode()
    with Gate(daemon.root, tokens=entry("reader", read=["*"]) + entry("chief", admin=True)) as guarded:
        groups = listed(guarded, "chief")
        assert (groups["broken"]["state"], str(broken) in groups["broken"]["message"]) == ("unreadable", True)
        command = groups["billing"]["work"]["owner"]["command"].encode()
        assert command
        for path in ("/v1/routes", GROUPS, "/v1/head"):
            answer = guarded.get(path, "reader")
            assert answer.status == 200
            assert [word for word in (root, command, b'"path"', b'"command') if word in answer.body] == [], path
        assert root in guarded.get("/v1/routes", "chief").body


NAMES = ["", "a\nb", "\x1b[31mred", "tab\there", "\u202eback", "\u2028", "x" * 201, "\x00"]
INVALID: dict[str, dict[str, list[Any]]] = {
    "lease": {
        "worker": [None, 7, *NAMES],
        "max_record": [1],
        "max_records": [0, 10_001, 1.5, True],
        "max_bytes": [0, 10**23],
        "lease_for": [0, -1, nan, inf, 43_201, "30s"],
        "wait": [-0.1, 301],
        "done": [[0], 1],
    },
    "ack": {
        "worker": NAMES,
        "sequences": [None, [-1], [1 << 63], [1.5], ["1"], list(range(1, 100_002))],
        "reason": ["x"],
    },
    "nack": {"delay": [-1, nan, 1e10], "reason": [7, "x" * 10_001]},
    "extend": {"lease_for": [0]},
    "release": {"worker": NAMES, "sequences": [[0]]},
}


def test_an_invalid_request_is_refused_with_the_reason_and_changes_nothing(gate: Gate) -> None:
    gate.post(ORDERS, b"1\n")
    worker = "Zoë 工人 №1 \\ \" ' 🙂"
    assert gate.leased(worker) == [1]
    bodies = [("lease", each) for each in (b"", b"[]", b"null", b"{", b"{}", b'{"worker": "w", "lease_for": 1e999}')]
    bodies.append(("ack", b'{"worker": "w"}'))
    for verb, fields in INVALID.items():
        valid = {"worker": "w"} if verb == "lease" else {"worker": "w", "sequences": [1]}
        bodies += [
            (verb, json.dumps(valid | {name: each}).encode()) for name, wrong in fields.items() for each in wrong
        ]
    for verb, body in bodies:
        answer = gate.ask("POST", f"{BILLING}/{verb}", body)
        assert (answer.status, answer.json()["code"]) == (400, "invalid"), (verb, body[:80], answer.body)
    large = gate.ask("POST", f"{BILLING}/ack", b'{"worker": "w", "sequences": [' + b"1," * (3 << 20) + b"1]}")
    assert (large.status, large.json()["code"]) == (413, "too-large")
    other = gate.post(f"{BILLING}/lease", b'{"worker": "w"}')
    assert (other.status, other.json()["code"]) == (415, "media-type")
    assert gate.get(f"{BILLING}/lease").status == 405
    assert gate.get(f"{BILLING}/pending?limit=0").status == 400
    for path in ("/v1/routes/..%2Fx/groups/g/lease", "/v1/routes/orders/groups/.hidden/lease"):
        assert gate.post(path, {"worker": "w"}).status in (400, 404)
    assert [path.name for path in gate.root.rglob("*.work")] == ["billing.work"]
    [entry] = pending(gate)
    assert (entry["first"], entry["worker"], entry["tries"]) == (1, worker, 1)


CONFIG = """
[groups."orders/billing"]
order = "key"
max_tries = 2
dead_letter = "unpaid"
"""


def test_a_group_has_the_order_and_the_tries_of_its_settings(daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD unpaid")
    with Gate(daemon.root, config=CONFIG) as gate:
        lines = [{"value": "poison", "key": "ann"}, {"value": "2", "key": "ann"}, {"value": "3", "key": "bob"}]
        gate.post(ORDERS, "".join(json.dumps(each) + "\n" for each in lines).encode(), NDJSON)
        for number, life in ((1, gate.stop), (2, gate.kill)):
            assert tries(gate, max_records=1) == [(1, number)]
            if number == 1:
                assert gate.leased("w2") == [3]  # the second record has the key of the first
                assert gate.worked("release", "w2") == {"released": 1}
            assert gate.worked("nack", sequences=[1], reason=f"odd {number}") == {"refused": []}
            life()
            gate.start()
        got = gate.leased()
        while len(got) < 2:
            got += gate.leased(wait=30)
        assert sorted(got) == [2, 3]
        eventually(lambda: gate.get("/v1/routes/unpaid/records").lines())
        [letter] = gate.get("/v1/routes/unpaid/records").lines()
        assert (letter["value"], letter["headers"]["wald.reason"]) == ("poison", "odd 2")
        assert gate.worked("ack", sequences=[2, 3]) == {"refused": []}
        eventually(lambda: gate.get("/v1/routes/orders/cursors/billing").json()["sequence"] == 3)


def waiting(gate: Gate, worker: str, **fields: Any) -> socket.socket:
    """Return a connection with a pending lease request."""
    body = json.dumps({"worker": worker, "wait": 300, **fields}).encode()
    return gate.begin(f"POST {BILLING}/lease", "Connection: close", body=body, media_type=JSON)


def leases(gate: Gate) -> float:
    return gate.metric("wald_gate_waiting_leases")


def test_of_many_that_wait_one_gets_a_record_and_no_thread_is_needed_for_any(gate: Gate) -> None:
    assert gate.leased() == []
    tasks = Path(f"/proc/{gate.process.pid}/task")
    before = len(list(tasks.iterdir()))
    connections = [waiting(gate, f"w{number}") for number in range(MANY)]
    eventually(lambda: leases(gate) == MANY)
    assert len(list(tasks.iterdir())) < before + 30  # the read threads of other requests
    assert gate.metric("wald_gate_groups") == 1
    gate.post(ORDERS, b"one\n")
    eventually(lambda: leases(gate) == MANY - 1)
    assert gate.stop() == 0
    given = []
    for connection in connections:
        with connection:
            head, _, body = received(connection).partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0]
        given += [record["sequence"] for record in json.loads(body)["records"]]
    assert given == [1]


def test_no_record_is_lost_with_a_client_that_goes_before_or_as_one_comes(gate: Gate) -> None:
    assert gate.leased() == []
    for sequence in range(1, 17):
        connection = waiting(gate, "gone", lease_for=0.5)
        eventually(lambda: leases(gate) == 1)
        if sequence % 2:
            gate.post(ORDERS, b"one\n")
        connection.close()
        if sequence % 4 == 0:
            eventually(lambda: leases(gate) == 0)
        if not sequence % 2:
            gate.post(ORDERS, b"one\n")
        [(found, number)] = tries(gate, wait=60, max_records=1)
        assert (found, number <= (2 if sequence % 4 else 1)) == (sequence, True)
        assert gate.worked("lease", done=[sequence]) == {"records": []}
