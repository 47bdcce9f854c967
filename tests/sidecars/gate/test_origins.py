"""A page of another site cannot make a browser use the gate, whatever host name that site uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from gating import Gate
from running import Daemon

ORDERS = "/v1/routes/orders/records"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:7700", 200),
        ("192.0.2.7", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:7700", 421),
        ("", 421),
    ],
)
def test_without_tokens_only_its_own_names_are_served(gate: Gate, host: str, status: int) -> None:
    answer = gate.ask("GET", ORDERS, headers={"Host": host})

    assert answer.status == status, answer.body
    assert gate.ask("GET", "/healthz", headers={"Host": host}).status == 200


def test_a_name_that_is_configured_is_served(daemon: Daemon) -> None:
    with Gate(daemon.root, "--host", "log.example") as gate:
        assert gate.ask("GET", ORDERS, headers={"Host": "log.example:7700"}).status == 200
        assert gate.ask("GET", ORDERS, headers={"Host": "evil.example"}).status == 421


def test_with_tokens_any_name_is_served_unless_some_are_configured(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "tokens").touch()
    for options, status in (((), 401), (("--host", "log.example"), 421)):
        with Gate(daemon.root, "--tokens", tmp_path / "tokens", *options) as gate:
            assert gate.ask("GET", ORDERS, headers={"Host": "any.example"}).status == status


@pytest.mark.parametrize("path", [ORDERS, "/v1/nothing", "/v1/head", "/healthz", "/openapi.json"])
def test_each_answer_forbids_guessing_and_other_sites(gate: Gate, path: str) -> None:
    answer = gate.ask("GET", path, headers={"Origin": "https://elsewhere.example"})

    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"
    assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
