"""A disconnected client's connection slot, descriptors and memory are released at once."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from gating import Gate
from running import TIMEOUT_SECONDS, Daemon, eventually

ORDERS = "/v1/routes/orders/records"
CLIENTS = 20
LOG_BYTES = 48 << 20
BOUND_BYTES = 8 << 20  # per client; about 3 MiB are used
LEASE = {"worker": "ann", "wait": 300}


def gate_of(daemon: Daemon, limits: str) -> Gate:
    config = daemon.root.with_name("gate.toml")
    config.write_text(f"[limits]\n{limits}\n")
    return Gate(daemon.root, "--config", config)


def connected(gate: Gate) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(TIMEOUT_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the kernel buffers little for the client
    connection.connect(("127.0.0.1", gate.port))
    return connection


def request(line: str, body: bytes = b"", media_type: str = "application/json") -> bytes:
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def segments_open(gate: Gate) -> int:
    """Return the number of segments that the gate has open."""
    directory = Path(f"/proc/{gate.process.pid}/fd")
    return sum("/segments/" in os.readlink(each) for each in directory.iterdir() if each.is_symlink())


def resident_bytes(gate: Gate) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{gate.process.pid}/status").read_text())
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize(
    "sent",
    [
        request(f"GET {ORDERS}?from=end&wait=300s"),
        request(f"GET {ORDERS}?from=1&to=99&wait=300s&limit=5&format=raw"),
        request(f"GET {ORDERS}?follow=1"),
        request(f"GET {ORDERS}?format=events"),
        request("POST /v1/routes/orders/groups/packing/lease", json.dumps(LEASE).encode()),
        request(f"POST {ORDERS}?wait_processed=billing&wait=300s", b"x\n", "text/plain"),
        request("GET /live").replace(b"\r\n", b"\r\nAccept: text/event-stream\r\n", 1),
    ],
    ids=["poll", "poll to an end", "follow", "events", "lease", "processed", "page"],
)
def test_a_client_that_goes_gives_its_place_back(daemon: Daemon, sent: bytes) -> None:
    daemon.ask("ROUTE ADD other")
    with gate_of(daemon, "requests_at_once = 2") as gate:
        gate.make_group("billing")
        gate.make_group("packing")
        with connected(gate) as first, connected(gate) as second:
            first.sendall(sent)
            second.sendall(sent)
            eventually(lambda: gate.get("/v1/head").status == 429)
        eventually(lambda: gate.get("/v1/routes").status == 200)
        with connected(gate) as third:
            third.sendall(sent)
            eventually(lambda: gate.get("/v1/routes").status == 200)
        eventually(lambda: b"\nwald_gate_streams 0" in gate.get("/metrics").body)
        assert "Traceback" not in gate.log


def test_clients_that_take_nothing_cost_bounded_memory_and_are_cut_off(daemon: Daemon) -> None:
    with gate_of(daemon, "send_timeout = 0.5") as gate, ExitStack() as stack:
        for _ in range(3):
            assert gate.post(ORDERS, (b"x" * 1000 + b"\n") * (LOG_BYTES // 3000)).status == 200
        assert len(gate.get(f"{ORDERS}?format=raw&limit=1").body) == 1001
        before = resident_bytes(gate)

        for number in range(CLIENTS):
            connection = stack.enter_context(connected(gate))
            connection.sendall(request(f"GET {ORDERS}?follow={number % 2}&format=raw"))
        eventually(lambda: f'{{reason="answer not taken"}} {CLIENTS}'.encode() in gate.get("/metrics").body)

        assert resident_bytes(gate) - before < CLIENTS * BOUND_BYTES < CLIENTS * LOG_BYTES
        eventually(lambda: segments_open(gate) == 0)
        assert b"\nwald_gate_streams 0" in gate.get("/metrics").body
        assert "Traceback" not in gate.log


def test_a_client_that_breaks_off_leaves_no_segment_open(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate:
        for _ in range(3):
            gate.post(ORDERS, (b"x" * 1000 + b"\n") * 4000)
        for _ in range(10):
            with connected(gate) as connection:
                connection.sendall(request(f"GET {ORDERS}?format=ndjson"))
                assert connection.recv(1) == b"H"
        eventually(lambda: segments_open(gate) == 0)


def test_head_of_a_stream_ends_with_its_headers(gate: Gate) -> None:
    sent = request(f"HEAD {ORDERS}?follow=1") + request("GET /healthz").replace(
        b"\r\n", b"\r\nConnection: close\r\n", 1
    )
    with connected(gate) as connection, connection.makefile("rb") as answers:
        connection.sendall(sent)
        assert answers.read().count(b"HTTP/1.1 200 OK") == 2
