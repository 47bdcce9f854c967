"""What clients hold back, or ask for in masses, costs the gate bounded time and memory, and others are served."""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zstandard
from gating import Gate
from running import TIMEOUT_SECONDS, Daemon, eventually

ORDERS = "/v1/routes/orders/records"
HEAD = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n".encode()


@contextmanager
def limited(daemon: Daemon, limits: str, *options: object) -> Iterator[Gate]:
    config = daemon.root.with_name("gate.toml")
    config.write_text(f"[limits]\n{limits}\n")
    with Gate(daemon.root, "--config", config, *options) as gate:
        yield gate


def connected(gate: Gate) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gate.port), timeout=TIMEOUT_SECONDS)


def resident_bytes(gate: Gate) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{gate.process.pid}/status").read_text())
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize(
    ("limit", "sent", "status"),
    [
        ("head_timeout", b"GET /v1/head HTTP/1.1\r\nHo", b"HTTP/1.1 408 "),
        ("head_timeout", HEAD, b"HTTP/1.1 408 "),
        ("body_timeout", HEAD + b"Content-Length: 100\r\n\r\nevil\n", b"HTTP/1.1 408 "),
        ("body_timeout", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nev", b"HTTP/1.1 408 "),
        ("idle_timeout", b"", b""),
    ],
)
def test_a_client_that_does_not_go_on_is_disconnected(daemon: Daemon, limit: str, sent: bytes, status: bytes) -> None:
    with limited(daemon, f"{limit} = 0.2") as gate, connected(gate) as connection:
        connection.sendall(sent)
        received = b"".join(iter(lambda: connection.recv(4096), b""))

        assert received.startswith(status)
        assert gate.get(ORDERS).body == b""


def test_a_client_that_trickles_its_head_or_body_is_disconnected(daemon: Daemon) -> None:
    """Each byte comes in time, but all of it does not."""
    with limited(daemon, "head_timeout = 0.5\nbody_timeout = 0.5") as gate:
        for begin in (b"GET /v1/head HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 100000\r\n\r\n"):
            with connected(gate) as connection:
                connection.sendall(begin)
                connection.settimeout(0.05)
                answer = b""

                def has_ended(connection: socket.socket = connection) -> bool:
                    nonlocal answer
                    try:
                        connection.sendall(b"a")
                        answer += connection.recv(4096)
                    except TimeoutError:
                        return False
                    except ConnectionError:
                        return True
                    return b" 408 " in answer

                eventually(has_ended)


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", partial(gzip.compress, compresslevel=1)), ("zstd", zstandard.compress)],
    ids=["gzip", "zstd"],
)
def test_a_bomb_is_refused_within_bounded_memory(
    daemon: Daemon, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    with limited(daemon, 'body_max_bytes = "32MiB"') as gate:
        gate.post(ORDERS, b"warm\n")
        before = resident_bytes(gate)
        headers = {"Content-Type": "text/plain", "Content-Encoding": encoding}

        assert gate.ask("POST", ORDERS, compress(bytes(200 << 20)), headers).status == 413
        assert resident_bytes(gate) - before < 100 << 20


def test_a_thousand_idle_connections_keep_nobody_out(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate, ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connected(gate))
        assert gate.get("/v1/routes").status == 200


def test_idle_connections_make_way_and_an_address_has_a_bound(daemon: Daemon) -> None:
    with limited(daemon, "connections_max = 10") as gate, ExitStack() as stack:
        idle = [stack.enter_context(connected(gate)) for _ in range(20)]
        assert gate.get("/v1/routes").status == 200
        assert idle[0].recv(1) == b""
    with limited(daemon, "connections_per_address = 10") as gate, ExitStack() as stack:
        kept = [stack.enter_context(connected(gate)) for _ in range(10)]
        beyond = stack.enter_context(connected(gate))
        beyond.settimeout(TIMEOUT_SECONDS)
        assert ended(beyond)
        kept[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept[0].recv(12) == b"HTTP/1.1 200"


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_256_that_wait_keep_nobody_out_and_each_gets_what_comes(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate, ExitStack() as stack:
        waiting = [stack.enter_context(connected(gate)) for _ in range(256)]
        for each in waiting:
            each.sendall(f"GET {ORDERS}?from=end&wait=60s&format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert gate.get("/v1/routes").status == 200
        assert gate.post(ORDERS, b"news\n").status == 200
        for each in waiting:
            with each.makefile("rb") as answer:
                assert answer.readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_client_has_a_bound_on_what_it_asks_at_once(daemon: Daemon) -> None:
    waiting = f"GET {ORDERS}?from=end&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with limited(daemon, "requests_at_once = 2") as gate, connected(gate) as first, connected(gate) as second:
        first.sendall(waiting)
        second.sendall(waiting)
        eventually(lambda: gate.get("/v1/head").status == 429)
        refusal = gate.get("/v1/head")
        assert (refusal.json()["code"], refusal.headers["retry-after"]) == ("too-many", "1")
        assert gate.get("/healthz").status == 200


def test_a_client_has_a_bound_on_what_it_asks_over_time(daemon: Daemon) -> None:
    with limited(daemon, "requests_per_second = 5") as gate:
        assert {gate.get("/v1/routes").status for _ in range(60)} == {200, 429}
        eventually(lambda: gate.get("/v1/routes").status == 200)

    with limited(daemon, "bytes_per_second = 100000") as gate:
        assert gate.post(ORDERS, b"x" * 300_000).status == 200
        refusal = gate.get("/v1/routes")
        assert (refusal.status, int(refusal.headers["retry-after"]) <= 3) == (429, True)
        eventually(lambda: gate.get("/v1/routes").status == 200)
