"""Listing a route's groups with their progress, and removing a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gating import Answer, Gate, entry
from group_requests import GROUP, RECORDS, lease
from running import Daemon, refusal_of

import wald

GROUPS = "/v1/routes/orders/groups"
pytestmark = pytest.mark.usefixtures("billing")


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
