"""Settings of a work group in the config file apply from its first lease and survive restarts of the gate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Gate
from group_requests import RECORDS, ask, lease
from running import Daemon, eventually

CONFIG = """
[groups."orders/billing"]
order = "key"
max_tries = 2
dead_letter = "unpaid"
"""


@pytest.fixture
def gate(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    config = tmp_path / "gate.toml"
    config.write_text(CONFIG)
    with Gate(daemon.root, "--config", config) as running:
        yield running


def test_records_of_a_key_are_with_one_consumer_at_a_time(gate: Gate) -> None:
    lines = [{"value": "1", "key": "ann"}, {"value": "2", "key": "ann"}, {"value": "3", "key": "bob"}]
    gate.post(RECORDS, "".join(json.dumps(each) + "\n" for each in lines).encode(), "application/x-ndjson")
    assert [record["value"] for record in lease(gate, max_records=1)] == ["1"]
    assert [record["value"] for record in lease(gate, "w2")] == ["3"]


def test_a_record_that_was_tried_too_often_is_a_dead_letter_with_its_reason(gate: Gate, daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD unpaid")
    gate.post(RECORDS, b"poison\n")
    for tries, life in ((1, gate.stop), (2, gate.kill)):
        assert [record["tries"] for record in lease(gate)] == [tries]
        assert ask(gate, "nack", sequences=[1], reason=f"odd {tries}") == {"refused": []}
        life()
        gate.start()
    assert lease(gate) == []
    eventually(lambda: gate.get("/v1/routes/unpaid/records").lines())
    [letter] = gate.get("/v1/routes/unpaid/records").lines()
    assert (letter["value"], letter["headers"]["wald.reason"]) == ("poison", "odd 2")
    eventually(lambda: gate.get("/v1/routes/orders/cursors/billing").json()["sequence"] == 1)
    assert lease(gate) == []
