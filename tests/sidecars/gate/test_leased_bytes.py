"""Leased records count against the gate's memory limit until their client has received them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Answer, Gate
from group_requests import GROUP, RECORDS
from running import TIMEOUT_SECONDS, Daemon, eventually

RECORD = b"x" * (12 << 20)
LEASE = {"max_bytes": 16 << 20, "lease_for": 3600}


@pytest.fixture
def gate(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    """A gate with memory for one lease of one record, on a log with two such records."""
    config = tmp_path / "gate.toml"
    config.write_text('[limits]\nkept_max_bytes = "18MiB"\n')
    with Gate(daemon.root, "--config", config) as running:
        running.make_group("billing")
        for _ in range(2):
            assert running.post(RECORDS, RECORD, "application/octet-stream").status == 200
        yield running
        assert "Traceback" not in running.log


def leasing(gate: Gate, worker: str) -> socket.socket:
    """Lease records over a connection whose client reads only a little; return the connection."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(TIMEOUT_SECONDS)
    connection.connect(("127.0.0.1", gate.port))
    body = json.dumps({"worker": worker, **LEASE}).encode()
    head = f"POST {GROUP}/lease HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def lease(gate: Gate, **fields: int) -> Answer:
    return gate.post(f"{GROUP}/lease", {"worker": "second", **LEASE, **fields})


def out(gate: Gate) -> list[tuple[int, int, str, int]]:
    """Return the pending leases with their workers and tries."""
    lines = gate.get(f"{GROUP}/pending").lines()
    return [(each["first"], each["last"], each["worker"], each["tries"]) for each in lines]


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "closed"])
def test_a_lease_waits_for_what_another_client_has_not_taken_and_leases_nothing(gate: Gate, *, is_read: bool) -> None:
    with leasing(gate, "first") as connection:
        refused = lease(gate)
        assert (refused.status, refused.json()["code"], refused.headers["retry-after"]) == (503, "memory", "2")
        assert out(gate) == [(1, 1, "first", 1)]
        assert len(lease(gate, max_bytes=1).json()["records"]) == 1  # small leases fit; each gets a record
        assert gate.post(f"{GROUP}/nack", {"worker": "second", "sequences": [2]}).status == 200
        while is_read and connection.recv(1 << 20):
            pass
    eventually(lambda: lease(gate).status == 200)
    assert out(gate) == [(1, 1, "first", 1), (2, 2, "second", 2)]


def test_a_lease_that_asks_for_more_than_there_ever_is_gets_it_alone(daemon: Daemon, tmp_path: Path) -> None:
    config = tmp_path / "gate.toml"
    config.write_text('[limits]\nkept_max_bytes = "1MiB"\n')
    with Gate(daemon.root, "--config", config) as gate:
        gate.make_group("billing")
        gate.post(RECORDS, b"one\n")
        assert [record["value"] for record in lease(gate).json()["records"]] == ["one"]
