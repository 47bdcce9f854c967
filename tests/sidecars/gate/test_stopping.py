"""A gate stopped with all kinds of requests in flight exits in time and writes nothing about them to stderr."""

from __future__ import annotations

import json
import re
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from contents import values
from gating import Gate
from running import TIMEOUT_SECONDS, Daemon, eventually

ORDERS = "/v1/routes/orders/records"
EACH, KEYED, FOLLOWERS = 50, 20, 20


def request(line: str, *headers: str, body: bytes = b"", media_type: str = "text/plain", more: int = 0) -> bytes:
    """Return a request whose body lacks its last ``more`` bytes."""
    lines = (
        f"{line} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {media_type}",
        f"Content-Length: {len(body) + more}",
    )
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def under_way() -> list[bytes]:
    """Return requests, half of them with an incomplete body."""
    posts = [request(f"POST {ORDERS}", body=b"whole-%d\n" % n) for n in range(EACH // 2)]
    posts += [request(f"POST {ORDERS}", body=b"half-%d\n" % n, more=9) for n in range(EACH // 2)]
    keyed = [
        request(f"POST {ORDERS}", f"Idempotency-Key: key-{n}", body=b"keyed-%d\n" % n, more=9 * (n % 2))
        for n in range(KEYED)
    ]
    polls = [request(f"GET {ORDERS}?from=end&wait=300s") for _ in range(EACH)]
    follows = [
        request(f"GET {ORDERS}?follow=1&format={form}") for form in ("raw", "ndjson") for _ in range(FOLLOWERS // 2)
    ]
    lease = json.dumps({"worker": "ann", "wait": 300}).encode()
    leases = [request("POST /v1/routes/empty/groups/g/lease", body=lease, media_type="application/json")] * FOLLOWERS
    pages = [request("GET /live", "Accept: text/event-stream")] * 5
    processed = [request(f"POST {ORDERS}?wait_processed=slow&wait=300s", body=b"processed\n")] * 5
    return [*polls, *follows, *leases, *pages, *processed, *posts, *keyed]


def test_answers_that_their_client_is_reading_are_sent_before_the_exit(gate: Gate) -> None:
    answer = gate.get("/openapi.json").body
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(TIMEOUT_SECONDS)
        connection.connect(("127.0.0.1", gate.port))
        connection.sendall(request("GET /openapi.json") * 37)
        received = connection.recv(1)
        gate.process.send_signal(signal.SIGTERM)
        with suppress(ConnectionError):
            received += b"".join(iter(lambda: connection.recv(1 << 14), b""))

    assert received.count(answer) == 37
    assert gate.process.wait(TIMEOUT_SECONDS) == 0


def test_pipelined_requests_are_answered_before_the_exit(daemon: Daemon, gate: Gate) -> None:
    with socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS) as connection:
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            connection.sendall(request(f"POST {ORDERS}", body=b"one\n") + request(f"POST {ORDERS}", body=b"two\n"))
            eventually(lambda: 'wald_gate_connections{state="busy"} 2' in gate.get("/metrics").body.decode())
            gate.process.send_signal(signal.SIGTERM)
            eventually(lambda: not accepts(gate))
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))

    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert gate.process.wait(TIMEOUT_SECONDS) == 0
    assert values(daemon.root, "orders") == [b"one", b"two"]


def accepts(gate: Gate) -> bool:
    try:
        socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS).close()
    except ConnectionError:
        return False
    return True


@pytest.mark.slow  # the gate waits for incomplete bodies
def test_a_stop_with_everything_under_way_is_clean_and_answers_200_for_nothing_that_is_not_stored(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.ask("ROUTE ADD empty")
    with Gate(daemon.root) as gate, ExitStack() as stack:
        gate.make_group("slow")
        gate.make_group("g", "empty")
        connections = []
        for sent in under_way():
            connection = socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS)
            connections.append((sent, stack.enter_context(connection)))
            connection.sendall(sent)
        eventually(lambda: f"wald_gate_streams {FOLLOWERS}".encode() in gate.get("/metrics").body)
        eventually(lambda: f"wald_gate_waiting_leases {FOLLOWERS}".encode() in gate.get("/metrics").body)

        assert gate.stop() == 0

        stored = set(values(daemon.root, "orders"))
        for sent, connection in connections:
            answer = b""
            with suppress(ConnectionError):
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # noqa: B023 - read at once
            posted = re.search(rb"\r\n\r\n((?:whole|half|keyed|processed)[^\n]*)\n", sent)
            if posted and b"HTTP/1.1 200" in answer:
                assert posted[1] in stored
        assert "Traceback" not in gate.log
        assert "Exception" not in gate.log
        gate.start()
        assert gate.post(ORDERS, b"after\n").status == 200
