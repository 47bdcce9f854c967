"""Proxies forward waiting responses at once, and heartbeats prevent their timeouts."""

from __future__ import annotations

import json
import socket

import pytest
from gating import Gate
from group_requests import GROUP
from running import TIMEOUT_SECONDS

ORDERS = "/v1/routes/orders/records"


def begun(gate: Gate, method: str, path: str, body: str = "") -> socket.socket:
    """Send a request; return its connection."""
    connection = socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    connection.sendall(head.encode())
    return connection


def received(connection: socket.socket, end: bytes) -> bytes:
    """Return the bytes received on a connection up to the first ``end``."""
    found = b""
    while end not in found:
        data = connection.recv(65536)
        assert data, found
        found += data
    return found


def test_nginx_is_told_not_to_buffer_what_comes_bit_by_bit(gate: Gate) -> None:
    for path, is_unbuffered in [
        ("?follow=1", True),
        ("?format=events", True),
        ("?wait=1ms&from=end", True),
        ("", False),
    ]:
        with begun(gate, "GET", ORDERS + path) as connection:
            head = received(connection, b"\r\n\r\n").decode().lower()

        assert ("\r\nx-accel-buffering: no\r\n" in head) is is_unbuffered


@pytest.mark.slow
@pytest.mark.usefixtures("billing")
def test_what_waits_sends_something_every_15_seconds(gate: Gate) -> None:
    """Plain values, in which a heartbeat would look like a record, have none unless the client asks for it."""
    lease = json.dumps({"worker": "ann", "wait": 300})
    requests = {
        "ndjson": ("GET", f"{ORDERS}?from=end&follow=1", "", b"\r\n\n\r\n"),
        "json": ("GET", f"{ORDERS}?from=end&follow=1&format=json", "", b"\r\n\n\r\n"),
        "raw": ("GET", f"{ORDERS}?from=end&follow=1&format=raw&heartbeat=1", "", b"\r\n\n\r\n"),
        "events": ("GET", f"{ORDERS}?from=end&format=events", "", b": nothing new\nid: 0\n\n"),
        "wait": ("GET", f"{ORDERS}?from=end&wait=300s", "", b"\r\n\n\r\n"),
        "lease": ("POST", f"{GROUP}/lease", lease, b"\r\n\n\r\n"),
    }
    connections = {
        name: (begun(gate, method, path, body), beat) for name, (method, path, body, beat) in requests.items()
    }
    silent = begun(gate, "GET", f"{ORDERS}?from=end&follow=1&format=raw")
    before = {name: received(connection, beat) for name, (connection, beat) in connections.items()}
    gate.post(ORDERS, b"one\n")

    assert before["lease"].startswith(b"HTTP/1.1 200 ")
    for name, (connection, _) in connections.items():
        assert b"one" in received(connection, b"one"), name
        connection.close()
    with silent:
        assert b"\r\n\n\r\n" not in received(silent, b"one\n")


@pytest.mark.slow
@pytest.mark.usefixtures("billing")
def test_a_lease_that_has_begun_to_answer_ends_with_its_client_and_with_the_gate(gate: Gate) -> None:
    gone, stays = (begun(gate, "POST", f"{GROUP}/lease", f'{{"worker": "{who}", "wait": 300}}') for who in ("g", "s"))
    for each in (gone, stays):
        received(each, b"\r\n\n\r\n")
    gone.close()
    assert gate.stop() == 0
    with stays:
        answer = received(stays, b"0\r\n\r\n")

    assert b'{"records":[]}' in answer
