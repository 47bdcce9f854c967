"""The token file limits each client to its rights."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gating import Answer, Gate, entry
from running import TIMEOUT_SECONDS, Daemon, eventually

ORDERS = "/v1/routes/orders/records"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        entry("in", write=["ord*"]) + entry("out", read=["orders"], work=["orders"]) + entry("all", admin=True)
    )
    return path


@pytest.fixture
def guarded(daemon: Daemon, tokens: Path) -> Iterator[Gate]:
    """A gate with tokens, on a log with the routes orders, which has a record, and other."""
    daemon.ask("ROUTE ADD other")
    daemon.ask("PUB orders 2\nx\n")
    with Gate(daemon.root, "--tokens", tokens) as running:
        yield running


def status(gate: Gate, token: str | None, method: str, path: str) -> int:
    headers = {"Content-Type": "text/plain"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return gate.ask(method, path, b"y\n" if method == "POST" else None, headers).status


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", ORDERS, {"in-token": 200, "out-token": 403, "all-token": 200}),
        ("POST", "/v1/routes/other/records", {"in-token": 403, "out-token": 403, "all-token": 200}),
        ("GET", ORDERS, {"in-token": 403, "out-token": 200, "all-token": 200}),
        ("GET", "/v1/routes/other/records", {"in-token": 403, "out-token": 403, "all-token": 200}),
        ("GET", "/v1/head", {"in-token": 200, "out-token": 200, "all-token": 200}),
        ("POST", "/v1/cut", {"in-token": 403, "out-token": 403, "all-token": 200}),
        ("GET", "/v1/where/1", {"in-token": 403, "out-token": 403, "all-token": 200}),
    ],
)
def test_each_token_has_its_routes(guarded: Gate, method: str, path: str, expected: dict[str, int]) -> None:
    assert {token: status(guarded, token, method, path) for token in expected} == expected
    assert [status(guarded, token, method, path) for token in (None, "guess")] == [401, 401]


def test_a_client_sees_the_routes_that_it_may_read(guarded: Gate) -> None:
    shown = guarded.get("/v1/routes", authorization="Bearer out-token").json()

    assert {each["route"] for each in shown["routes"]} == {"orders"}


def test_sighup_reads_the_tokens_again_and_a_wrong_file_changes_nothing(guarded: Gate, tokens: Path) -> None:
    tokens.write_text(entry("new", read=["*"]))
    guarded.process.send_signal(signal.SIGHUP)
    eventually(lambda: status(guarded, "new-token", "GET", ORDERS) == 200)
    eventually(lambda: "wald-gate: SIGHUP: certificates, tokens, limits and hosts are read again" in guarded.log)
    assert status(guarded, "out-token", "GET", ORDERS) == 401

    tokens.write_text("{}\n")
    guarded.process.send_signal(signal.SIGHUP)
    eventually(lambda: "not a token of wald-gate" in guarded.log)
    assert status(guarded, "new-token", "GET", ORDERS) == 200
    [line] = [line for line in guarded.log.splitlines() if "not a token of wald-gate" in line]
    assert line.startswith("wald-gate: SIGHUP: ")
    assert line.endswith("; the previous ones remain effective")


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", ORDERS, "needs the right to read the route orders"),
        ("POST", "/v1/cut", "needs the right to administer the log"),
        ("POST", "/v1/routes/new", "needs the right to administer the log"),
    ],
)
def test_a_refusal_says_which_right_is_missing(guarded: Gate, method: str, path: str, needed: str) -> None:
    headers = {"Authorization": "Bearer in-token"}

    refused = guarded.ask(method, path, headers=headers)

    assert (refused.status, refused.json()["detail"].endswith(needed)) == (403, True), refused.body


def test_a_stream_ends_when_the_file_of_tokens_says_something_else(guarded: Gate, tokens: Path) -> None:
    """Records appended after a token is removed do not reach its client."""
    headers = {"Authorization": "Bearer out-token"}
    with guarded.asked("GET", f"{ORDERS}?follow=1&format=raw", headers=headers) as lines:
        assert lines.readline() == b"x\n"
        tokens.write_text(entry("in", write=["ord*"]))
        guarded.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(guarded, "out-token", "GET", ORDERS) == 401)
        assert status(guarded, "in-token", "POST", ORDERS) == 200
        assert lines.read() == b""


def store_much(gate: Gate) -> bytes:
    """Store more than the connection and the gate buffer for a client that does not read."""
    large = b"%0999d\n" * 20_000 % tuple(range(20_000))
    storing = {"Authorization": "Bearer all-token", "Content-Type": "text/plain"}
    assert gate.ask("POST", ORDERS, large, storing).status == 200
    return large


def add_token(gate: Gate, tokens: Path) -> None:
    tokens.write_text(tokens.read_text() + entry("new", read=["*"]))
    gate.process.send_signal(signal.SIGHUP)
    eventually(lambda: status(gate, "new-token", "GET", f"{ORDERS}?limit=1") == 200)


def test_a_read_that_has_an_end_is_whole_although_the_tokens_change(guarded: Gate, tokens: Path) -> None:
    """A client could not tell a shortened response from a complete one."""
    large = store_much(guarded)
    headers = {"Authorization": "Bearer out-token"}
    with guarded.asked("GET", f"{ORDERS}?from=2&format=raw", headers=headers) as lines:
        first = lines.readline()
        add_token(guarded, tokens)
        assert first + lines.read() == large


def test_events_that_end_before_all_have_come_say_no_later_id_than_that_of_the_last(
    guarded: Gate, tokens: Path
) -> None:
    """A browser resumes after the last id."""
    store_much(guarded)
    headers = {"Authorization": "Bearer out-token"}
    with guarded.asked("GET", f"{ORDERS}?from=2&format=events", headers=headers) as lines:
        first = lines.readline()
        add_token(guarded, tokens)
        rest = first + lines.read()
    ids = [int(each) for each in re.findall(rb"^id: (\d+)$", rest, re.MULTILINE)]
    shown = [int(each) for each in re.findall(rb'"sequence": ?(\d+)', rest)]
    assert shown == [*range(2, shown[-1] + 1)]
    assert shown[-1] < 20_001
    assert ids[-1] == shown[-1]


def ask_as(gate: Gate, token: str, method: str, path: str, fields: object = None) -> Answer:
    body = None if fields is None else json.dumps(fields).encode()
    return gate.ask(method, path, body, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})


def metric(gate: Gate, name: str) -> int:
    lines = ask_as(gate, "all-token", "GET", "/metrics").body.decode().splitlines()
    [found] = [line for line in lines if line.startswith(name)]
    return int(float(found.split()[-1]))


def test_a_lease_that_waits_ends_when_its_client_may_not_lease_any_more(guarded: Gate, tokens: Path) -> None:
    """It gets the response of a new request and leases no record; other clients' leases continue."""
    leasing = "/v1/routes/orders/groups/billing/lease"
    ask_as(guarded, "all-token", "PUT", "/v1/routes/orders/cursors/billing", {"sequence": 0})
    [first] = ask_as(guarded, "all-token", "POST", leasing, {"worker": "all"}).json()["records"]
    assert first["value"] == "x"
    with ThreadPoolExecutor() as pool:
        ended, goes_on = (
            pool.submit(ask_as, guarded, f"{name}-token", "POST", leasing, {"worker": name, "wait": 300})
            for name in ("out", "all")
        )
        eventually(lambda: metric(guarded, "wald_gate_waiting_leases") == 2)
        tokens.write_text(entry("in", write=["ord*"]) + entry("all", admin=True))
        guarded.process.send_signal(signal.SIGHUP)
        refused = ended.result(TIMEOUT_SECONDS)
        assert (refused.status, refused.headers["www-authenticate"], refused.json()["code"]) == (
            401,
            'Bearer realm="wald"',
            "unauthorized",
        )
        assert metric(guarded, "wald_gate_waiting_leases") == 1
        assert status(guarded, "in-token", "POST", ORDERS) == 200
        [record] = goes_on.result(TIMEOUT_SECONDS).json()["records"]
        assert (record["sequence"], record["tries"]) == (2, 1)


def test_a_read_that_has_waited_gives_nothing_to_a_client_that_may_not_read_any_more(
    guarded: Gate, tokens: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(ask_as, guarded, "out-token", "GET", f"{ORDERS}?from=end&wait=60s")
        eventually(lambda: metric(guarded, 'wald_gate_connections{state="busy"}') == 2)
        tokens.write_text(entry("in", write=["ord*"]))
        guarded.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(guarded, "out-token", "GET", ORDERS) == 401)
        assert status(guarded, "in-token", "POST", ORDERS) == 200
        assert reading.result(TIMEOUT_SECONDS).status == 401


def test_a_page_of_another_site_changes_nothing(gate: Gate) -> None:
    headers = {"Content-Type": "text/plain", "Origin": "https://elsewhere.example"}

    assert gate.ask("POST", ORDERS, b"x\n", headers).status == 403
    assert gate.ask("POST", ORDERS, b"x\n", headers | {"Origin": f"http://127.0.0.1:{gate.port}"}).status == 200
