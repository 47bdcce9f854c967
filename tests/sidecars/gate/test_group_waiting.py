"""Waiting leases over HTTP: they use no threads, and a disconnected client leases no records."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from gating import Gate
from group_requests import GROUP, RECORDS, lease
from running import TIMEOUT_SECONDS, eventually

pytestmark = pytest.mark.usefixtures("billing")
MANY = 500


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
    for sequence in range(1, 31):
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


def test_a_gate_that_ends_answers_those_that_wait_at_once(gate: Gate) -> None:
    assert lease(gate) == []
    connection = waiting(gate, "w1")
    eventually(lambda: leases(gate) == 1)
    assert gate.stop() == 0
    assert answer(connection) == []


def test_a_wait_that_is_over_is_answered_with_nothing(gate: Gate) -> None:
    assert lease(gate, wait=0.2) == []
