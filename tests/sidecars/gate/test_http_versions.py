"""HTTP/1.0 clients get responses that they can parse."""

from __future__ import annotations

import json
import socket

import pytest
from gating import Gate
from running import TIMEOUT_SECONDS

ORDERS = "/v1/routes/orders/records"


def answer(gate: Gate, method: str, path: str, body: bytes = b"", headers: str = "") -> tuple[list[str], bytes]:
    """Send an HTTP/1.0 request; return the response's head and all bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS) as connection:
        head = f"{method} {path} HTTP/1.0\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)
        found = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, rest = found.partition(b"\r\n\r\n")
    return top.decode().lower().split("\r\n"), rest


@pytest.mark.parametrize("headers", ["Host: localhost\r\n", "Host: localhost\r\nConnection: keep-alive\r\n"])
def test_records_are_not_sent_in_chunks(filled: Gate, headers: str) -> None:
    head, body = answer(filled, "GET", f"{ORDERS}?format=raw", headers=headers)

    assert "transfer-encoding: chunked" not in head
    assert "connection: close" in head
    assert body == b"one\ntwo\n" * 50_000


def test_an_answer_of_known_length_has_it(gate: Gate) -> None:
    head, body = answer(gate, "POST", ORDERS, b"one\n", "Host: localhost\r\n")

    assert f"content-length: {len(body)}" in head
    assert json.loads(body)["count"] == 1


def test_head_has_no_body(gate: Gate) -> None:
    _, body = answer(gate, "HEAD", "/", headers="Host: localhost\r\n")

    assert body == b""


@pytest.fixture
def filled(gate: Gate) -> Gate:
    """A gate on a log with more records than fit in one chunk."""
    gate.post(ORDERS, b"one\ntwo\n" * 50_000)
    return gate
