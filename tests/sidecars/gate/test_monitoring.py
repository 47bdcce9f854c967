"""Monitoring of a gate: liveness, readiness, metrics and request logs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from endpoint import samples_of
from gating import Gate
from running import Daemon, eventually

ORDERS = "/v1/routes/orders/records"
NOWHERE = "/v1/routes/nowhere/records"


@pytest.fixture
def talkative(daemon: Daemon) -> Iterator[Gate]:
    """A gate with request logging."""
    with Gate(daemon.root, "--log-requests") as running:
        yield running


def samples(gate: Gate) -> dict[tuple[str, ...], float]:
    return samples_of(gate.get("/metrics").body.decode())


def lines(gate: Gate) -> list[dict[str, object]]:
    """Return the log lines about requests."""
    return [json.loads(line) for line in gate.log.splitlines() if line.startswith("{")]


def test_what_is_done_is_counted(gate: Gate) -> None:
    gate.post(ORDERS, b"one\ntwo\n")
    gate.post(NOWHERE, b"one\n")
    gate.get(ORDERS, accept="application/octet-stream")
    gate.get("/nothing")
    found = samples(gate)

    assert found["wald_gate_requests_total", "200", "append"] == 1
    assert found["wald_gate_requests_total", "404", "append"] == 1
    assert found["wald_gate_requests_total", "404", "none"] == 1
    assert found["wald_gate_request_seconds_count", "append"] == 2
    assert found["wald_gate_request_seconds_count", "cut"] == 0
    assert found["wald_gate_publish_seconds_count",] == 2
    assert (found["wald_gate_stored_records_total",], found["wald_gate_stored_bytes_total",]) == (2, 8)
    assert (found["wald_gate_sent_records_total",], found["wald_gate_sent_bytes_total",]) == (2, 8)
    assert found["wald_gate_connections", "busy"] == 1
    assert found["process_start_time_seconds",] > 0


def test_streams_are_counted_while_they_last(gate: Gate) -> None:
    gate.post(ORDERS, b"one\n")
    with gate.asked("GET", f"{ORDERS}?follow=1&format=raw") as following:
        assert following.readline() == b"one\n"
        assert samples(gate)["wald_gate_streams",] == 1

    eventually(lambda: samples(gate)["wald_gate_streams",] == 0)


def test_groups_and_leases_that_wait_are_counted(gate: Gate) -> None:
    group = "/v1/routes/orders/groups/billing"
    gate.make_group("billing")
    body = json.dumps({"worker": "ann", "wait": 60}).encode()
    with ThreadPoolExecutor() as asking:
        leased = asking.submit(gate.ask, "POST", f"{group}/lease", body, {"Content-Type": "application/json"})
        eventually(lambda: samples(gate)["wald_gate_waiting_leases",] == 1)
        assert samples(gate)["wald_gate_groups",] == 1
        gate.post(ORDERS, b"one\n")
        assert len(leased.result().json()["records"]) == 1

    assert samples(gate)["wald_gate_waiting_leases",] == 0


def test_requests_that_the_daemon_gets_again_are_counted(gate: Gate, daemon: Daemon) -> None:
    gate.post(ORDERS, b"first\n")
    daemon.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as asking:
        answer = asking.submit(gate.post, ORDERS, b"second\n")
        eventually(lambda: samples(gate)["wald_gate_connections", "busy"] == 2)
        daemon.kill()
        daemon.start_again()
        assert answer.result().status == 200

    assert samples(gate)["wald_gate_repeated_requests_total",] >= 1


def test_a_head_that_is_too_large_ends_its_connection_and_is_counted(gate: Gate) -> None:
    assert gate.get("/healthz", x_long="x" * (128 << 10)).status == 431
    assert samples(gate)["wald_gate_connections_ended_total", "head too large"] == 1


def test_a_gate_is_ready_while_its_daemon_answers(gate: Gate, daemon: Daemon) -> None:
    assert gate.get("/readyz").json() == {"status": "ready"}
    daemon.process.send_signal(signal.SIGSTOP)
    eventually(lambda: gate.get("/readyz").status == 503)
    frozen = gate.get("/readyz").json()
    daemon.kill()
    eventually(lambda: gate.get("/readyz").json()["detail"] == "no daemon runs")
    healthy = gate.get("/healthz")
    daemon.start_again()
    eventually(lambda: gate.get("/readyz").status == 200)

    assert (frozen["code"], frozen["detail"]) == ("not-ready", "the daemon is frozen")
    assert healthy.json() == {"status": "ok"}
    assert "kill -CONT" in gate.log
    assert gate.log.splitlines()[-1] == "ready"


def test_a_log_that_was_moved_away_or_replaced_is_noticed(gate: Gate, daemon: Daemon, root: Path) -> None:
    moved = root.with_name("moved")
    root.rename(moved)
    eventually(lambda: gate.get("/readyz").status == 503)
    assert gate.get("/readyz").json()["detail"] == "the log is no longer at its path"

    with Daemon(root):
        eventually(lambda: "another log" in gate.get("/readyz").json()["detail"])


def test_without_a_token_health_says_nothing_of_the_log(daemon: Daemon, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("")
    with Gate(daemon.root, "--tokens", tokens) as guarded:
        daemon.kill()
        eventually(lambda: guarded.get("/readyz").status == 503)
        answers = [guarded.get("/healthz"), guarded.get("/readyz")]
        assert guarded.get("/metrics").status == 401
    said = b"".join(answer.body for answer in answers).decode()

    assert str(daemon.root) not in said
    assert "orders" not in said


def test_a_request_that_failed_is_written_down(gate: Gate, daemon: Daemon) -> None:
    """Other requests are not logged."""
    gate.post(ORDERS, b"one\n")
    gate.get("/nothing")
    daemon.kill()
    eventually(lambda: gate.get("/readyz").status == 503)

    assert {(line["path"], line["status"], line["detail"]) for line in lines(gate)} == {
        ("/readyz", 503, "no daemon runs")
    }


def test_a_line_about_a_request_has_no_secret_and_changes_no_terminal(talkative: Gate) -> None:
    talkative.ask("GET", "/v1/%1b%5b2J%0a%7f%C2%9B%E2%80%AE?token=secret", headers={"Authorization": "Bearer secret"})
    talkative.ask("GET", "/" + "x" * 5000)
    eventually(lambda: len(lines(talkative)) == 2)
    hostile, long = lines(talkative)

    assert hostile["path"] == "/v1/\x1b[2J\n\x7f\x9b\u202e"
    assert len(str(long["path"])) < 300
    assert "secret" not in talkative.log
    assert all(character.isascii() and (character.isprintable() or character == "\n") for character in talkative.log)


def test_a_line_about_a_request_names_its_client(daemon: Daemon, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text('{"name": "shop", "sha256": "' + "0" * 64 + '"}\n')
    with Gate(daemon.root, "--log-requests", "--tokens", tokens) as guarded:
        guarded.ask("GET", "/v1/head", headers={"Authorization": "Bearer wrong"})
        eventually(lambda: lines(guarded) != [])
        (line,) = lines(guarded)

    assert (line["client"], line["status"], line["method"]) == ("", 401, "GET")
