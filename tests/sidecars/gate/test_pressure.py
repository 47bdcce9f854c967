"""Slow clients and floods of requests cost the gate bounded time and memory, and others are served."""

from __future__ import annotations

import gzip
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import zstandard
from gating import Gate, entry
from running import TIMEOUT_SECONDS, Daemon, eventually

ORDERS = "/v1/routes/orders/records"
HEAD = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n".encode()
CLOSE = b"Connection: close\r\n\r\n"
NOWHERE = HEAD.replace(ORDERS.encode(), b"/v1/nothing")  # answered before its body arrives


@contextmanager
def limited(daemon: Daemon, limits: str, *options: object) -> Iterator[Gate]:
    config = daemon.root.with_name("gate.toml")
    config.write_text(f"[limits]\n{limits}\n")
    with Gate(daemon.root, "--config", config, *options) as gate:
        yield gate


def endings(gate: Gate, reason: str) -> int:
    """Return the number of connections that the gate closed for a reason."""
    found = re.search(rf'connections_ended_total{{reason="{reason}"}} (\d+)', gate.get("/metrics").body.decode())
    assert found
    return int(found[1])


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
    """Each byte arrives in time, but the complete head or body does not."""
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


@pytest.mark.parametrize("limits", ["connections_per_address = 10", "connections_max = 10"])
def test_all_clients_of_a_trusted_proxy_have_places(daemon: Daemon, limits: str) -> None:
    """The limit for all connections also applies to a proxy: idle connections are evicted."""
    with limited(daemon, limits, "--trusted-proxy", "127.0.0.0/8") as gate, ExitStack() as stack:
        for _ in range(20):
            proxied = stack.enter_context(connected(gate))
            proxied.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert proxied.recv(12) == b"HTTP/1.1 200"
        assert endings(gate, "no place") == 0


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_who_sends_without_end_before_the_answers_gets_a_number_of_them(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate, connected(gate) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        answers = b"".join(iter(partial(connection.recv, 1 << 16), b"")).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [b"connection: close" in answer for answer in answers] == [False] * 64 + [True]
        assert endings(gate, "too many requests at once") == 1


def test_pipelined_requests_are_answered_whatever_follows_them(daemon: Daemon) -> None:
    """The requests after the limit arrive in one read, and are longer than a head may be."""
    healthz = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Gate(daemon.root) as gate, connected(gate) as connection:
        connection.sendall(f"GET {ORDERS}?from=1&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + healthz * 64)
        eventually(lambda: 'wald_gate_connections{state="busy"} 2' in gate.get("/metrics").body.decode())
        connection.sendall(healthz * 2000)
        gate.post(ORDERS, b"news\n")
        answers = b"".join(iter(partial(connection.recv, 1 << 16), b"")).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert len(answers) >= 65
        assert [b"connection: close" in answer for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert (endings(gate, "too many requests at once"), endings(gate, "head too large")) == (1, 0)


def test_256_that_wait_keep_nobody_out_and_each_gets_what_comes(daemon: Daemon) -> None:
    asked = f"GET {ORDERS}?from=1&wait=60s&format=raw HTTP/1.1\r\nHost: localhost\r\n".encode() + CLOSE
    with Gate(daemon.root) as gate, ExitStack() as stack:
        waiting = [stack.enter_context(connected(gate)) for _ in range(256)]
        for each in waiting:  # from=1, as from=end would skip the record for requests handled after it
            each.sendall(asked)
        assert gate.get("/v1/routes").status == 200
        assert gate.post(ORDERS, b"news\n").status == 200
        for each in waiting:
            with each.makefile("rb") as answer:
                assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
                assert b"news\n" in answer.read()


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


def test_a_compressed_body_counts_as_what_it_holds(daemon: Daemon) -> None:
    with limited(daemon, "bytes_per_second = 1024") as gate:
        headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
        assert gate.ask("POST", ORDERS, gzip.compress(b"x" * 300_000), headers).status == 200
        assert gate.get("/v1/routes").status == 429


def test_a_client_that_is_no_admin_makes_only_so_many_groups_of_a_route(daemon: Daemon, tmp_path: Path) -> None:
    """Each group pins the records that it has not processed."""
    (tmp_path / "tokens").write_text(entry("bob", work=["orders"]) + entry("ann", admin=True))
    with limited(daemon, "groups_per_route = 2", "--tokens", tmp_path / "tokens") as gate:

        def put(name: str, group: str) -> int:
            headers = {"Authorization": f"Bearer {name}-token", "Content-Type": "application/json"}
            return gate.ask("PUT", f"/v1/routes/orders/cursors/{group}", b'{"sequence": 0}', headers).status

        assert [put("bob", group) for group in "abc"] == [200, 200, 409]
        assert [put("bob", "b"), put("ann", "c"), put("bob", "c"), put("bob", "d")] == [200, 200, 200, 409]


@pytest.mark.parametrize(
    "trailer", [b"a: b\r\n" * 1000, b"a: " + b"b" * 5000, b"b" * 5000], ids=["many", "long", "name"]
)
@pytest.mark.parametrize("path", [ORDERS, "/v1/nothing"], ids=["before the answer", "after the answer"])
def test_trailers_have_the_bound_of_a_head_and_are_not_kept(daemon: Daemon, trailer: bytes, path: str) -> None:
    head = (HEAD if path == ORDERS else NOWHERE) + b"Transfer-Encoding: chunked\r\n\r\n"
    with limited(daemon, "head_timeout = 60\nbody_timeout = 60") as gate, connected(gate) as connection:
        connection.sendall(head + b"3\r\nok\n\r\n0\r\n")
        if path != ORDERS:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        before = resident_bytes(gate)

        def is_refused() -> bool:
            try:
                connection.sendall(trailer)
            except ConnectionError:
                return True
            return bool(select.select([connection], [], [], 0)[0])

        eventually(is_refused)
        assert endings(gate, "head too large") == 1
        assert resident_bytes(gate) - before < 20 << 20


def test_the_extension_of_a_chunk_has_the_bound_of_a_head(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate, connected(gate) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;x=" + b"y" * 200_000)
        assert connection.recv(12) == b"HTTP/1.1 431"


@pytest.mark.parametrize("early", [b"\r\n", b"GET /healthz HT"], ids=["empty line", "next request"])
def test_what_comes_early_has_time_until_the_answer_is_complete(daemon: Daemon, early: bytes) -> None:
    with limited(daemon, "head_timeout = 0.5") as gate, connected(gate) as waiting, connected(gate) as slow:
        waiting.sendall(f"GET {ORDERS}?wait=60s&format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually(lambda: 'wald_gate_connections{state="busy"} 2' in gate.get("/metrics").body.decode())
        waiting.sendall(early)
        slow.sendall(b"GET /healthz HT")
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        gate.post(ORDERS, b"one\n")
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_an_empty_line_between_two_requests_is_none_of_a_head(daemon: Daemon) -> None:
    """An idle connection remains idle and is closed without a response."""
    with limited(daemon, "head_timeout = 1\nidle_timeout = 4") as gate, connected(gate) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"\r\n")
        assert connection.recv(1) == b""
        assert endings(gate, "head too slow") == 0


def test_a_body_that_trickles_after_its_answer_holds_no_place(daemon: Daemon) -> None:
    with limited(daemon, "head_timeout = 0.5") as gate, connected(gate) as connection:
        connection.sendall(NOWHERE + b"Content-Length: 100000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        connection.settimeout(0.05)

        def has_ended() -> bool:
            try:
                connection.sendall(b"a")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        eventually(has_ended)
        assert endings(gate, "body after its answer") == 1


def test_a_body_without_end_after_its_answer_is_cut_off(daemon: Daemon) -> None:
    with limited(daemon, "head_timeout = 600") as gate, connected(gate) as connection:
        connection.sendall(NOWHERE + b"Content-Length: 100000000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionError):
            connection.sendall(bytes(200 << 20))
        assert endings(gate, "body after its answer") == 1


def test_a_connection_is_of_use_again_once_the_body_after_an_answer_has_come(daemon: Daemon) -> None:
    """The connection is then idle: it can be evicted, and is closed after ``idle_timeout``."""
    with limited(daemon, "head_timeout = 0.5\nidle_timeout = 1") as gate, connected(gate) as connection:
        for _ in range(3):
            connection.sendall(NOWHERE + b"Content-Length: 1000000\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
            connection.sendall(bytes(1_000_000))
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(NOWHERE + b"Content-Length: 1000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        connection.sendall(bytes(1_000_000))
        assert connection.recv(1) == b""
        assert endings(gate, "body after its answer") == 0


@pytest.mark.parametrize(
    "pipelined", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["one", "pipelined"]
)
def test_a_client_that_takes_nothing_is_disconnected_also_if_it_asks_for_more(daemon: Daemon, pipelined: bytes) -> None:
    with limited(daemon, "send_timeout = 1") as gate, socket.socket() as connection:
        for _ in range(8):
            gate.post(ORDERS, (b"x" * 100_000 + b"\n") * 20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gate.port))
        connection.sendall(f"GET {ORDERS}?format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(pipelined)
        eventually(lambda: endings(gate, "answer not taken") == 1)


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_client_that_reads_nothing_before_the_connection_ends_is_disconnected(
    daemon: Daemon, *, is_half_closed: bool
) -> None:
    """The rest of the answers fits into the buffer of the connection, so the gate never waits to write."""
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    with limited(daemon, "send_timeout = 0.3") as gate, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gate.port))
        connection.sendall((asked + b"\r\n") * 36 + asked + (b"\r\n" if is_half_closed else CLOSE))
        if is_half_closed:
            eventually(lambda: '{status="200",verb="openapi"} 37' in gate.get("/metrics").body.decode())
            connection.shutdown(socket.SHUT_WR)
        eventually(lambda: endings(gate, "answer not taken") == 1)


def test_a_client_that_reads_slowly_gets_its_answer_and_others_are_served(daemon: Daemon) -> None:
    """It reads 4 MB/s, between the requests of others, so the answer takes longer than ``send_timeout``."""
    record = b"x" * 15_000_000
    with limited(daemon, "send_timeout = 1") as gate, socket.socket() as connection:
        gate.post(ORDERS, record, "application/octet-stream")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.settimeout(TIMEOUT_SECONDS)
        connection.connect(("127.0.0.1", gate.port))
        connection.sendall(f"GET {ORDERS}?format=raw HTTP/1.1\r\nHost: localhost\r\n".encode() + CLOSE)
        began, received = time.monotonic(), 0
        while received < len(record):
            assert gate.get("/healthz").status == 200
            if (due := int((time.monotonic() - began) * 4_000_000) - received) > 0:
                data = connection.recv(due)
                assert data, received
                received += len(data)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (NOWHERE + b"Content-Length: 20000000\r\n" + CLOSE, b"HTTP/1.1 404 "),
        (NOWHERE.replace(b"/1.1", b"/1.0") + b"Content-Length: 20000000\r\n\r\n", b"HTTP/1.1 404 "),
        (HEAD + b"X: ", b"HTTP/1.1 431 "),
    ],
    ids=["close", "HTTP/1.0", "large head"],
)
def test_an_early_answer_reaches_a_client_that_sends_everything_first(
    daemon: Daemon, head: bytes, status: bytes
) -> None:
    with Gate(daemon.root) as gate, connected(gate) as connection:
        connection.sendall(head)
        connection.sendall(b"a" * 20_000_000)
        received = b"".join(iter(partial(connection.recv, 1 << 16), b""))
        assert received.startswith(status)
        assert b"connection: close" in received


@pytest.mark.parametrize(
    "behind", [b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\0\0\r\n\r\n", b"GET /" + b"a" * 100_000]
)
def test_what_is_refused_during_an_answer_puts_nothing_into_it(daemon: Daemon, behind: bytes) -> None:
    with Gate(daemon.root) as gate, connected(gate) as connection:
        gate.post(ORDERS, b"news\n")
        connection.sendall(f"GET {ORDERS}?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = b""
        while b"news" not in received:
            received += connection.recv(1 << 16)
        connection.sendall(behind)
        rest = b""
        with suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                rest += data
        assert b"HTTP/1.1" not in rest


def test_a_stream_with_a_request_behind_it_ends_when_its_client_leaves(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate:
        with connected(gate) as connection:
            connection.sendall(f"GET {ORDERS}?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: b"wald_gate_streams 1" in gate.get("/metrics").body)
        gate.post(ORDERS, b"news\n")
        gate.post(ORDERS, b"news\n")
        eventually(lambda: b"wald_gate_streams 0" in gate.get("/metrics").body)


def test_new_limits_begin_anew_whatever_was_taken_without(daemon: Daemon) -> None:
    with limited(daemon, "bytes_per_second = 0") as gate:
        for _ in range(5):
            assert gate.post(ORDERS, b"x" * 1_000_000).status == 200
        for limits in ("bytes_per_second = 1024\nrequests_per_second = 1000", "requests_per_second = 1"):
            gate.root.with_name("gate.toml").write_text(f"[limits]\n{limits}\n")
            before = gate.log.count("SIGHUP")
            gate.process.send_signal(signal.SIGHUP)
            eventually(lambda: gate.log.count("SIGHUP") > before)  # noqa: B023 - it is called here
            assert gate.get("/v1/routes").status == 200
            gate.post(ORDERS, b"x" * 1_000_000)
            assert gate.get("/v1/routes").status == 429


def test_unfinished_records_of_all_clients_have_a_bound_and_small_ones_pass(daemon: Daemon) -> None:
    big = b"x" * (1 << 20)
    with limited(daemon, 'kept_max_bytes = "2MiB"') as gate, ExitStack() as stack:
        began = [stack.enter_context(connected(gate)) for _ in range(6)]
        for each in began:
            each.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (len(big) + 1) + big)
        eventually(lambda: len(select.select(began, [], [], 0)[0]) == 4)  # there is memory for two
        refused, _, _ = select.select(began, [], [], 0)
        assert all(each.recv(1 << 16).startswith(b"HTTP/1.1 503 ") for each in refused)
        refusal = gate.post(ORDERS, big, "application/octet-stream")
        assert (refusal.status, refusal.json()["code"], refusal.headers["retry-after"]) == (503, "memory", "2")
        assert gate.post(ORDERS, b"small\n" * 20_000).status == 200
        for each in set(began) - set(refused):
            each.sendall(b"\n")
            assert each.recv(12) == b"HTTP/1.1 200"
        assert gate.post(ORDERS, big).status == 200
