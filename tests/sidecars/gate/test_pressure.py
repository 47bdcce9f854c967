"""Slow clients and floods of requests cost the gate bounded time and memory, and others are served."""

from __future__ import annotations

import gzip
import json
import os
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
from gating import Answer, Gate, entry
from group_requests import GROUP, RECORDS
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
        assert "Traceback" not in gate.log


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


def test_a_client_that_stops_sending_is_disconnected(impatient: Gate) -> None:
    cases = (
        (b"GET /v1/head HTTP/1.1\r\nHo", b"HTTP/1.1 408 "),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 100\r\n\r\nevil\n", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nev", b"HTTP/1.1 408 "),
        (b"", b""),
    )
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(impatient)) for _ in cases]
        for (sent, _), connection in zip(cases, connections, strict=True):
            connection.sendall(sent)
        for (_, status), connection in zip(cases, connections, strict=True):
            received = b"".join(iter(partial(connection.recv, 4096), b""))
            assert received.startswith(status)
            assert received.count(b"HTTP/1.1") <= 1
    assert impatient.get(f"{ORDERS}?from=earliest").body.count(b"evil") == 0


def test_an_empty_line_after_a_request_leaves_the_connection_idle(impatient: Gate) -> None:
    """An idle connection is closed without a response."""
    before = endings(impatient, "head too slow")
    with connected(impatient) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"\r\n")
        assert connection.recv(1) == b""
    assert endings(impatient, "head too slow") == before


def test_a_client_that_trickles_its_head_or_body_is_disconnected(impatient: Gate) -> None:
    """Each byte arrives in time, but the complete head or body does not."""
    for begin in (b"GET /v1/head HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 100000\r\n\r\n"):
        with connected(impatient) as connection:
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


def test_a_bomb_is_refused_within_bounded_memory(daemon: Daemon) -> None:
    packed: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("gzip", partial(gzip.compress, compresslevel=1)),
        ("zstd", zstandard.compress),
    ]
    with limited(daemon, 'body_max_bytes = "32MiB"') as gate:
        gate.post(ORDERS, b"warm\n")
        before = resident_bytes(gate)
        for encoding, compress in packed:
            headers = {"Content-Type": "text/plain", "Content-Encoding": encoding}
            assert gate.ask("POST", ORDERS, compress(bytes(200 << 20)), headers).status == 413
            assert resident_bytes(gate) - before < 100 << 20


def test_a_thousand_idle_connections_keep_nobody_out(shared: Gate) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connected(shared))
        assert shared.get("/v1/routes").status == 200


def test_idle_connections_make_way_and_an_address_may_have_a_bound(daemon: Daemon) -> None:
    with limited(daemon, "connections_max = 10\nconnections_per_address = 0") as gate, ExitStack() as stack:
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


def test_who_sends_without_end_before_the_answers_gets_a_number_of_them(shared: Gate) -> None:
    with connected(shared) as connection, ending(shared, "too many requests at once"):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        answers = b"".join(iter(partial(connection.recv, 1 << 16), b"")).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [b"connection: close" in answer for answer in answers] == [False] * 64 + [True]


def test_pipelined_requests_are_answered_whatever_follows_them(shared: Gate) -> None:
    """The requests after the limit arrive in one read, and are longer than a head may be."""
    healthz = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = endings(shared, "head too large")
    with connected(shared) as connection, ending(shared, "too many requests at once"):
        connection.sendall(
            f"GET {ORDERS}?from=end&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + healthz * 64
        )
        eventually(lambda: 'wald_gate_connections{state="busy"} 2' in shared.get("/metrics").body.decode())
        connection.sendall(healthz * 2000)
        shared.post(ORDERS, b"news\n")
        answers = b"".join(iter(partial(connection.recv, 1 << 16), b"")).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert len(answers) >= 65
        assert [b"connection: close" in answer for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert endings(shared, "head too large") == before


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


def test_trailers_have_the_bound_of_a_head_and_are_not_kept(shared: Gate) -> None:
    many, long, name = b"a: b\r\n" * 1000, b"a: " + b"b" * 5000, b"b" * 5000
    for head, trailer in ((HEAD, many), (HEAD, long), (HEAD, name), (NOWHERE, many), (NOWHERE, name)):
        with connected(shared) as connection, ending(shared, "head too large"):
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nok\n\r\n0\r\n")
            if head is NOWHERE:  # answered before its trailers arrive
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
            before = resident_bytes(shared)

            def is_refused(connection: socket.socket = connection, trailer: bytes = trailer) -> bool:
                try:
                    connection.sendall(trailer)
                except ConnectionError:
                    return True
                return bool(select.select([connection], [], [], 0)[0])

            eventually(is_refused)
            assert resident_bytes(shared) - before < 20 << 20


def test_the_extension_of_a_chunk_has_the_bound_of_a_head(shared: Gate) -> None:
    with connected(shared) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;x=" + b"y" * 200_000)
        assert connection.recv(12) == b"HTTP/1.1 431"


def test_trailers_in_one_packet_have_the_bound_of_a_head(shared: Gate) -> None:
    trailers = b"X: " + b"x" * 20_000 + b"\r\n"
    with connected(shared) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nevil\n\r\n0\r\n" + trailers * 4 + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 431"


def test_what_comes_early_has_time_until_the_answer_is_complete(impatient: Gate) -> None:
    for early in (b"\r\n", b"GET /healthz HT"):
        with connected(impatient) as waiting:
            waiting.sendall(f"GET {ORDERS}?from=end&wait=60s&format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            eventually(lambda: 'wald_gate_connections{state="busy"} 2' in impatient.get("/metrics").body.decode())
            waiting.sendall(early)
            with connected(impatient) as slow:
                slow.sendall(b"GET /healthz HT")
                assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
            impatient.post(ORDERS, b"one\n")
            assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_trickles_after_its_answer_holds_no_place(impatient: Gate) -> None:
    with connected(impatient) as connection, ending(impatient, "body after its answer"):
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


def test_a_body_without_end_after_its_answer_is_cut_off(shared: Gate) -> None:
    with connected(shared) as connection, ending(shared, "body after its answer"):
        connection.sendall(NOWHERE + b"Content-Length: 100000000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionError):
            connection.sendall(bytes(200 << 20))


def test_a_connection_is_of_use_again_once_the_body_after_an_answer_has_come(impatient: Gate) -> None:
    """The connection is then idle: it can be evicted, and is closed after ``idle_timeout``."""
    before = endings(impatient, "body after its answer")
    with connected(impatient) as connection:
        for _ in range(4):
            connection.sendall(NOWHERE + b"Content-Length: 1000000\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
            connection.sendall(bytes(1_000_000))
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(NOWHERE + b"Content-Length: 1000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        connection.sendall(bytes(1_000_000))
        assert connection.recv(1) == b""
    assert endings(impatient, "body after its answer") == before


def test_a_client_that_takes_nothing_is_disconnected_also_if_it_asks_for_more(impatient: Gate) -> None:
    for _ in range(8):
        impatient.post(ORDERS, (b"x" * 100_000 + b"\n") * 20)
    for pipelined in (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.socket() as connection, ending(impatient, "answer not taken"):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", impatient.port))
            connection.sendall(f"GET {ORDERS}?format=raw HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(pipelined)


def test_a_client_that_reads_nothing_before_the_connection_ends_is_disconnected(impatient: Gate) -> None:
    """The rest of the answers fits into the buffer of the connection, so the gate never waits to write."""
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    for is_half_closed, served in ((False, 37), (True, 74)):
        with socket.socket() as connection, ending(impatient, "answer not taken"):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", impatient.port))
            connection.sendall((asked + b"\r\n") * 36 + asked + (b"\r\n" if is_half_closed else CLOSE))
            said = f'{{status="200",verb="openapi"}} {served}'
            eventually(lambda: said in impatient.get("/metrics").body.decode())  # noqa: B023 - called at once
            if is_half_closed:
                connection.shutdown(socket.SHUT_WR)


def test_a_client_that_reads_slowly_gets_its_answer_and_others_are_served(daemon: Daemon) -> None:
    """It reads 4 MB/s, between the requests of others, so the answer takes longer than ``send_timeout``."""
    record = b"x" * 6_000_000
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


def test_an_early_answer_reaches_a_client_that_sends_everything_first(shared: Gate) -> None:
    for head, status in (
        (NOWHERE + b"Content-Length: 20000000\r\n" + CLOSE, b"HTTP/1.1 404 "),
        (NOWHERE.replace(b"/1.1", b"/1.0") + b"Content-Length: 20000000\r\n\r\n", b"HTTP/1.1 404 "),
        (HEAD + b"X: ", b"HTTP/1.1 431 "),
    ):
        with connected(shared) as connection:
            connection.sendall(head)
            connection.sendall(b"a" * 20_000_000)
            received = b"".join(iter(partial(connection.recv, 1 << 16), b""))
            assert received.startswith(status)
            assert b"connection: close" in received


def test_what_is_refused_during_an_answer_puts_nothing_into_it(shared: Gate) -> None:
    for behind in (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\0\0\r\n\r\n", b"GET /" + b"a" * 100_000):
        with connected(shared) as connection:
            shared.post(ORDERS, b"news\n")
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


def test_a_stream_with_a_request_behind_it_ends_when_its_client_leaves(shared: Gate) -> None:
    with connected(shared) as connection:
        connection.sendall(f"GET {ORDERS}?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: b"wald_gate_streams 1" in shared.get("/metrics").body)
    for _ in range(2):
        shared.post(ORDERS, b"news\n")
    eventually(lambda: b"wald_gate_streams 0" in shared.get("/metrics").body)


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


@contextmanager
def ending(gate: Gate, reason: str) -> Iterator[None]:
    """Check that the gate closes one connection for a reason."""
    before = endings(gate, reason)
    yield
    eventually(lambda: endings(gate, reason) == before + 1)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate with short timeouts."""
    limits = "head_timeout = 0.5\nbody_timeout = 0.5\nsend_timeout = 0.5\nidle_timeout = 1.5"
    with Daemon(tmp_path_factory.mktemp("impatient") / "log") as daemon:
        daemon.ask("ROUTE ADD orders")
        with limited(daemon, limits) as gate:
            yield gate


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


CLIENTS = 20
LOG_BYTES = 48 << 20
BOUND_BYTES = 8 << 20  # per client; about 3 MiB are used
LEASE = {"worker": "ann", "wait": 300}


def slow_reader(gate: Gate) -> socket.socket:
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


def test_a_client_that_goes_gives_its_place_back(daemon: Daemon) -> None:
    daemon.ask("ROUTE ADD other")
    with limited(daemon, "requests_at_once = 2") as gate:
        gate.make_group("billing")
        gate.make_group("packing")
        for sent in (
            request(f"GET {ORDERS}?from=end&wait=300s"),
            request(f"GET {ORDERS}?from=1&to=99&wait=300s&limit=5&format=raw"),
            request(f"GET {ORDERS}?follow=1"),
            request(f"GET {ORDERS}?format=events"),
            request("POST /v1/routes/orders/groups/packing/lease", json.dumps(LEASE).encode()),
            request("GET /live").replace(b"\r\n", b"\r\nAccept: text/event-stream\r\n", 1),
            request(f"POST {ORDERS}?wait_processed=billing&wait=300s", b"x\n", "text/plain"),
        ):
            with slow_reader(gate) as first, slow_reader(gate) as second:
                first.sendall(sent)
                second.sendall(sent)
                eventually(lambda: gate.get("/v1/head").status == 429)
            eventually(lambda: gate.get("/v1/routes").status == 200)
            with slow_reader(gate) as third:
                third.sendall(sent)
                eventually(lambda: gate.get("/v1/routes").status == 200)
            eventually(lambda: b"\nwald_gate_streams 0" in gate.get("/metrics").body)


def test_clients_that_take_nothing_cost_bounded_memory_and_are_cut_off(daemon: Daemon) -> None:
    with limited(daemon, "send_timeout = 0.5") as gate, ExitStack() as stack:
        for _ in range(3):
            assert gate.post(ORDERS, (b"x" * 1000 + b"\n") * (LOG_BYTES // 3000)).status == 200
        assert len(gate.get(f"{ORDERS}?format=raw&limit=1").body) == 1001
        before = resident_bytes(gate)

        for number in range(CLIENTS):
            connection = stack.enter_context(slow_reader(gate))
            connection.sendall(request(f"GET {ORDERS}?follow={number % 2}&format=raw"))
        eventually(lambda: f'{{reason="answer not taken"}} {CLIENTS}'.encode() in gate.get("/metrics").body)

        assert resident_bytes(gate) - before < CLIENTS * BOUND_BYTES < CLIENTS * LOG_BYTES
        eventually(lambda: segments_open(gate) == 0)
        assert b"\nwald_gate_streams 0" in gate.get("/metrics").body


def test_a_client_that_breaks_off_leaves_no_segment_open(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate:
        for _ in range(3):
            gate.post(ORDERS, (b"x" * 1000 + b"\n") * 4000)
        for _ in range(10):
            with slow_reader(gate) as connection:
                connection.sendall(request(f"GET {ORDERS}?format=ndjson"))
                assert connection.recv(1) == b"H"
        eventually(lambda: segments_open(gate) == 0)


def test_head_of_a_stream_ends_with_its_headers(gate: Gate) -> None:
    sent = request(f"HEAD {ORDERS}?follow=1") + request("GET /healthz").replace(
        b"\r\n", b"\r\nConnection: close\r\n", 1
    )
    with slow_reader(gate) as connection, connection.makefile("rb") as answers:
        connection.sendall(sent)
        assert answers.read().count(b"HTTP/1.1 200 OK") == 2


RECORD = b"x" * (12 << 20)
LARGE_LEASE = {"max_bytes": 16 << 20, "lease_for": 3600}


@pytest.fixture
def narrow(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
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
    body = json.dumps({"worker": worker, **LARGE_LEASE}).encode()
    head = f"POST {GROUP}/lease HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def lease(gate: Gate, **fields: int) -> Answer:
    return gate.post(f"{GROUP}/lease", {"worker": "second", **LARGE_LEASE, **fields})


def out(gate: Gate) -> list[tuple[int, int, str, int]]:
    """Return the pending leases with their workers and tries."""
    lines = gate.get(f"{GROUP}/pending").lines()
    return [(each["first"], each["last"], each["worker"], each["tries"]) for each in lines]


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "closed"])
def test_a_lease_waits_for_what_another_client_has_not_taken_and_leases_nothing(narrow: Gate, *, is_read: bool) -> None:
    with leasing(narrow, "first") as connection:
        refused = lease(narrow)
        assert (refused.status, refused.json()["code"], refused.headers["retry-after"]) == (503, "memory", "2")
        assert out(narrow) == [(1, 1, "first", 1)]
        assert len(lease(narrow, max_bytes=1).json()["records"]) == 1  # small leases fit; each gets a record
        assert narrow.post(f"{GROUP}/nack", {"worker": "second", "sequences": [2]}).status == 200
        while is_read and connection.recv(1 << 20):
            pass
    eventually(lambda: lease(narrow).status == 200)
    assert out(narrow) == [(1, 1, "first", 1), (2, 2, "second", 2)]


def test_a_lease_that_asks_for_more_than_there_ever_is_gets_it_alone(daemon: Daemon, tmp_path: Path) -> None:
    config = tmp_path / "gate.toml"
    config.write_text('[limits]\nkept_max_bytes = "1MiB"\n')
    with Gate(daemon.root, "--config", config) as gate:
        gate.make_group("billing")
        gate.post(RECORDS, b"one\n")
        assert [record["value"] for record in lease(gate).json()["records"]] == ["one"]
