"""Work groups over HTTP: a record from its lease to its acknowledgement."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gating import Gate
from group_requests import GROUP, RECORDS, ask, lease

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


def test_a_lease_that_waits_gets_what_comes(gate: Gate) -> None:
    assert lease(gate) == []
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lease, gate, wait=60)
        gate.post(RECORDS, b"one\n")
        assert sequences(waiting.result()) == [1]
