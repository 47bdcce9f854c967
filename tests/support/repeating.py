"""Requests with an Idempotency-Key, and their answers."""

from __future__ import annotations

import socket

from gating import Answer, Gate
from running import Daemon, reclaim

import wald as library

ORDERS = "/v1/routes/orders/records"


def send(gate: Gate, key: str, body: bytes = b"one\ntwo\n", media_type: str = "text/plain", **headers: str) -> Answer:
    """Send records for ``orders`` under a key."""
    return gate.ask("POST", ORDERS, body, {"Content-Type": media_type, "Idempotency-Key": key, **headers})


def outcome(answer: Answer) -> tuple[int, bool, bytes]:
    """Return the status, the replay flag of the answer, and the body."""
    return answer.status, answer.headers.get("idempotency-replayed") == "true", answer.body


def begun(gate: Gate, key: str, body: bytes, *, length: int) -> socket.socket:
    """Send a request with only the beginning of its body."""
    connection = socket.create_connection(("127.0.0.1", gate.port))
    head = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n"
    connection.sendall(f"{head}Idempotency-Key: {key}\r\n\r\n".encode() + body)
    return connection


def release(daemon: Daemon) -> None:
    """Move the cursor to the head, and let RECLAIM delete everything."""
    log = library.open(daemon.root)
    head = log.head()
    assert head
    log.set_cursor("orders", head.sequence)
    assert daemon.ask("CUT").startswith("OK cut")
    reclaim(daemon.root, "--grace", "0")
