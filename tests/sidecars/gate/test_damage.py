"""Damage found during a response aborts it after the readable records, and the client learns how to continue."""

from __future__ import annotations

import http.client
import json
import socket
import struct

import pytest
from gating import Gate
from running import eventually

import wald
from wald.format.names import Kind, segment_name

ORDERS = "/v1/routes/orders/records"


@pytest.fixture
def spoiled(gate: Gate) -> Gate:
    """A gate on a log of three records, the second of which is unreadable."""
    for line in (b"one\n", b"two\n", b"three\n"):
        gate.post(ORDERS, line)
    position = wald.open(gate.root).where(2).position
    assert position is not None
    with (gate.root / "segments" / segment_name(1, Kind.RAW)).open("r+b") as segment:
        segment.seek(position)
        segment.write(b"\x55" * 8)
    return gate


def cut_off(gate: Gate) -> bytes:
    """Request all records; return the bytes received before the response is aborted."""
    with gate.asked("GET", f"{ORDERS}?format=raw") as response, pytest.raises(http.client.IncompleteRead) as broken:
        response.read()
    return broken.value.partial


def test_a_client_gets_what_is_before_damage_and_can_go_on_behind_it(spoiled: Gate) -> None:
    before = cut_off(spoiled)
    refused = spoiled.get(f"{ORDERS}?from=2&format=raw")

    assert before == b"one\n"
    assert (refused.status, refused.json()["code"], refused.json()["next"]) == (500, "damaged", 3)
    assert "?from=3 " in refused.json()["hint"]
    assert spoiled.get(f"{ORDERS}?from=3&format=raw").body == b"three\n"


def test_an_answer_that_breaks_off_is_counted_and_one_line_in_the_log(spoiled: Gate) -> None:
    said = len(spoiled.log)
    cut_off(spoiled)
    eventually(lambda: b"wald_gate_broken_answers_total 1" in spoiled.get("/metrics").body)
    (line,) = spoiled.log[said:].splitlines()

    assert "cannot be read" in json.loads(line)["detail"]


def test_a_client_that_leaves_before_the_damage_leaves_no_traceback(spoiled: Gate) -> None:
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", spoiled.port)) as client:
            client.sendall(f"GET {ORDERS}?format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert client.recv(4) == b"HTTP"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset

    assert spoiled.stop() == 0
    assert "Traceback" not in spoiled.log
