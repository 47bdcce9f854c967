"""Slow clients and floods of requests cost the gate bounded time and memory, and others are served."""

import gzip
import json
import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard
from gating import BILLING, JSON, ORDERS, TEXT, Answer, Gate, entry, received, request, serving
from running import Daemon, eventually

HEAD = f"POST {ORDERS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n".encode()
CLOSE = b"Connection: close\r\n\r\n"
NOWHERE = HEAD.replace(ORDERS.encode(), b"/v1/nothing")  # answered before its body arrives
HEALTHZ = request("GET /healthz")
BYTES = "application/octet-stream"


@contextmanager
def limited(daemon: Daemon, limits: str, *options: object, tokens: str | None = None) -> Iterator[Gate]:
    with Gate(daemon.root, *options, config=f"[limits]\n{limits}\n", tokens=tokens) as gate:
        yield gate
        assert "Traceback" not in gate.log


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate with short timeouts."""
    limits = "[limits]\nhead_timeout = 0.5\nbody_timeout = 0.5\nsend_timeout = 0.5\nidle_timeout = 1.5"
    with serving(tmp_path_factory.mktemp("impatient") / "log", config=limits) as gate:
        yield gate


def endings(gate: Gate, reason: str) -> float:
    """Return the number of connections that the gate closed for a reason."""
    return gate.metric(f'wald_gate_connections_ended_total{{reason="{reason}"}}')


@contextmanager
def ending(gate: Gate, reason: str) -> Iterator[None]:
    """Check that the gate closes one connection for a reason."""
    before = endings(gate, reason)
    yield
    eventually(lambda: endings(gate, reason) == before + 1)


def are_busy(gate: Gate, count: int) -> bool:
    return gate.metric('wald_gate_connections{state="busy"}') == count


def resident_bytes(gate: Gate) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{gate.process.pid}/status").read_text())
    assert found
    return int(found[1]) << 10


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def trickles(connection: socket.socket) -> bool:
    """Send a byte; return True once the gate has answered 408 or closed the connection."""
    connection.settimeout(0.05)
    try:
        connection.sendall(b"a")
        answer = connection.recv(4096)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return not answer or b" 408 " in answer


def test_a_client_that_stops_sending_is_disconnected(impatient: Gate) -> None:
    cases = (
        (b"GET /v1/head HTTP/1.1\r\nHo", b"HTTP/1.1 408 "),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 100\r\n\r\nevil\n", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nev", b"HTTP/1.1 408 "),
        (b"", b""),
    )
    with ExitStack() as stack:
        connections = [stack.enter_context(impatient.connect()) for _ in cases]
        for (sent, _), connection in zip(cases, connections, strict=True):
            connection.sendall(sent)
        for (_, status), connection in zip(cases, connections, strict=True):
            answer = received(connection)
            assert answer.startswith(status)
            assert answer.count(b"HTTP/1.1") <= 1
    assert impatient.get(f"{ORDERS}?from=earliest").body.count(b"evil") == 0
    # Each byte of a head or a body arrives in time, but the complete one does not.
    for begin in (b"GET /v1/head HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 100000\r\n\r\n"):
        with impatient.connect(begin) as connection:
            eventually(partial(trickles, connection))


def test_an_empty_line_after_a_request_leaves_the_connection_idle(impatient: Gate) -> None:
    """An idle connection is closed without a response."""
    before = endings(impatient, "head too slow")
    with impatient.connect() as connection:
        for _ in range(2):
            connection.sendall(HEALTHZ)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"\r\n")
        assert connection.recv(1) == b""
    assert endings(impatient, "head too slow") == before


def test_a_bomb_is_refused_within_bounded_memory(daemon: Daemon) -> None:
    packed: dict[str, Callable[[bytes], bytes]] = {
        "gzip": partial(gzip.compress, compresslevel=1),
        "zstd": zstandard.compress,
    }
    with limited(daemon, 'body_max_bytes = "32MiB"') as gate:
        gate.post(ORDERS, b"warm\n")
        before = resident_bytes(gate)
        for encoding, compress in packed.items():
            headers = {"Content-Type": TEXT, "Content-Encoding": encoding}
            assert gate.ask("POST", ORDERS, compress(bytes(200 << 20)), headers).status == 413
            assert resident_bytes(gate) - before < 100 << 20


def test_idle_connections_make_way_and_an_address_may_have_a_bound(daemon: Daemon) -> None:
    with Gate(daemon.root) as gate, ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(gate.connect())
        assert gate.get("/v1/routes").status == 200
    with limited(daemon, "connections_max = 10\nconnections_per_address = 0") as gate, ExitStack() as stack:
        idle = [stack.enter_context(gate.connect()) for _ in range(20)]
        assert gate.get("/v1/routes").status == 200
        assert idle[0].recv(1) == b""
    with limited(daemon, "connections_per_address = 10") as gate, ExitStack() as stack:
        kept = [stack.enter_context(gate.connect()) for _ in range(10)]
        assert ended(stack.enter_context(gate.connect()))
        kept[0].sendall(HEALTHZ)
        assert kept[0].recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("limits", ["connections_per_address = 10", "connections_max = 10"])
def test_all_clients_of_a_trusted_proxy_have_places(daemon: Daemon, limits: str) -> None:
    """The limit for all connections also applies to a proxy: idle connections are evicted."""
    with limited(daemon, limits, "--trusted-proxy", "127.0.0.0/8") as gate, ExitStack() as stack:
        for _ in range(20):
            proxied = stack.enter_context(gate.begin("GET /healthz"))
            assert proxied.recv(12) == b"HTTP/1.1 200"
        assert endings(gate, "no place") == 0


def test_pipelined_requests_are_answered_up_to_a_number_whatever_follows_them(shared: Gate) -> None:
    with shared.connect() as connection, ending(shared, "too many requests at once"):
        connection.sendall(HEALTHZ * 1000)
        answers = received(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [b"connection: close" in answer for answer in answers] == [False] * 64 + [True]
    # The requests after the limit arrive in one read, and are longer than a head may be.
    before = endings(shared, "head too large")
    with shared.connect() as connection, ending(shared, "too many requests at once"):
        connection.sendall(request(f"GET {ORDERS}?from=end&wait=60s") + HEALTHZ * 64)
        eventually(lambda: are_busy(shared, 2))
        connection.sendall(HEALTHZ * 2000)
        shared.post(ORDERS, b"news\n")
        answers = received(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert len(answers) >= 65
        assert [b"connection: close" in answer for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert endings(shared, "head too large") == before


def test_256_that_wait_keep_nobody_out_and_each_gets_what_comes(gate: Gate) -> None:
    with ExitStack() as stack:
        # from=1, as from=end would skip the record for requests handled after it
        asked = f"GET {ORDERS}?from=1&wait=60s&format=raw"
        waiting = [stack.enter_context(gate.begin(asked, "Connection: close")) for _ in range(256)]
        assert gate.get("/v1/routes").status == 200
        assert gate.post(ORDERS, b"news\n").status == 200
        for each in waiting:
            answer = received(each)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"news\n" in answer


def test_a_client_has_a_bound_on_what_it_asks_at_once_and_over_time(daemon: Daemon) -> None:
    waiting = f"GET {ORDERS}?from=end&wait=60s"
    with limited(daemon, "requests_at_once = 2") as gate, gate.begin(waiting), gate.begin(waiting):
        eventually(lambda: gate.get("/v1/head").status == 429)
        refusal = gate.get("/v1/head")
        assert (refusal.json()["code"], refusal.headers["retry-after"]) == ("too-many", "1")
        assert gate.get("/healthz").status == 200
    with limited(daemon, "requests_per_second = 5") as gate:
        assert {gate.get("/v1/routes").status for _ in range(60)} == {200, 429}
        eventually(lambda: gate.get("/v1/routes").status == 200)
    with limited(daemon, "bytes_per_second = 100000") as gate:
        packed = gzip.compress(b"x" * 300_000)  # counts as what it holds
        for body, encoding in ((b"x" * 300_000, {}), (packed, {"Content-Encoding": "gzip"})):
            assert gate.ask("POST", ORDERS, body, {"Content-Type": TEXT, **encoding}).status == 200
            refusal = gate.get("/v1/routes")
            assert (refusal.status, int(refusal.headers["retry-after"]) <= 3) == (429, True)
            eventually(lambda: gate.get("/v1/routes").status == 200)


def test_a_client_that_is_no_admin_makes_only_so_many_groups_of_a_route(daemon: Daemon) -> None:
    """Each group pins the records that it has not processed."""
    tokens = entry("bob", work=["orders"]) + entry("ann", admin=True)
    with limited(daemon, "groups_per_route = 2", tokens=tokens) as gate:

        def put(name: str, group: str) -> int:
            return gate.put(f"/v1/routes/orders/cursors/{group}", {"sequence": 0}, by=name).status

        assert [put("bob", group) for group in "abc"] == [200, 200, 409]
        assert [put("bob", "b"), put("ann", "c"), put("bob", "c"), put("bob", "d")] == [200, 200, 200, 409]


def test_trailers_have_the_bound_of_a_head_and_are_not_kept(shared: Gate) -> None:
    many, long, name = b"a: b\r\n" * 1000, b"a: " + b"b" * 5000, b"b" * 5000
    for head, trailer in ((HEAD, many), (HEAD, long), (HEAD, name), (NOWHERE, many), (NOWHERE, name)):
        with shared.connect() as connection, ending(shared, "head too large"):
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
    trailers = b"X: " + b"x" * 20_000 + b"\r\n"
    # So have trailers in one packet, and the extension of a chunk.
    for body in (b"5\r\nevil\n\r\n0\r\n" + trailers * 4 + b"\r\n", b"3;x=" + b"y" * 200_000):
        with shared.connect(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body) as connection:
            assert connection.recv(12) == b"HTTP/1.1 431"


def test_what_comes_early_has_time_until_the_answer_is_complete(impatient: Gate) -> None:
    for early in (b"\r\n", b"GET /healthz HT"):
        with impatient.begin(f"GET {ORDERS}?from=end&wait=60s&format=raw") as waiting:
            eventually(lambda: are_busy(impatient, 2))
            waiting.sendall(early)
            with impatient.connect() as slow:
                slow.sendall(b"GET /healthz HT")
                assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
            impatient.post(ORDERS, b"one\n")
            assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_body_after_its_answer_that_trickles_or_has_no_end_is_cut_off(impatient: Gate, shared: Gate) -> None:
    with impatient.connect() as connection, ending(impatient, "body after its answer"):
        connection.sendall(NOWHERE + b"Content-Length: 100000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        eventually(lambda: trickles(connection))
    with shared.connect() as connection, ending(shared, "body after its answer"):
        connection.sendall(NOWHERE + b"Content-Length: 100000000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionError):
            connection.sendall(bytes(200 << 20))


def test_a_connection_is_of_use_again_once_the_body_after_an_answer_has_come(impatient: Gate) -> None:
    """The connection is then idle: it can be evicted, and is closed after ``idle_timeout``."""
    before = endings(impatient, "body after its answer")
    with impatient.connect() as connection:
        for number in range(5):
            if number == 4:
                connection.sendall(HEALTHZ)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.sendall(NOWHERE + b"Content-Length: 1000000\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
            connection.sendall(bytes(1_000_000))
        assert connection.recv(1) == b""
    assert endings(impatient, "body after its answer") == before


def test_a_client_that_takes_nothing_is_disconnected_also_if_it_asks_for_more(impatient: Gate) -> None:
    for _ in range(8):
        impatient.post(ORDERS, (b"x" * 100_000 + b"\n") * 20)
    for pipelined in (b"", HEALTHZ):
        with impatient.connect(receive_bytes=4096) as connection, ending(impatient, "answer not taken"):
            connection.sendall(request(f"GET {ORDERS}?format=raw"))
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall(pipelined)
    # The rest of these answers fits into the buffer of the connection, so the gate never waits to write.
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    for is_half_closed, served in ((False, 37), (True, 74)):
        with impatient.connect(receive_bytes=4096) as connection, ending(impatient, "answer not taken"):
            connection.sendall((asked + b"\r\n") * 36 + asked + (b"\r\n" if is_half_closed else CLOSE))
            said = f'{{status="200",verb="openapi"}} {served}'
            eventually(lambda: said in impatient.get("/metrics").body.decode())  # noqa: B023 - called at once
            if is_half_closed:
                connection.shutdown(socket.SHUT_WR)


def test_a_client_that_reads_slowly_gets_its_answer_and_others_are_served(daemon: Daemon) -> None:
    """It reads 4 MB/s, between the requests of others, so the answer takes longer than ``send_timeout``."""
    record = b"x" * 6_000_000
    with limited(daemon, "send_timeout = 1") as gate, gate.connect(receive_bytes=1 << 16) as connection:
        gate.post(ORDERS, record, BYTES)
        connection.sendall(request(f"GET {ORDERS}?format=raw", "Connection: close"))
        began, taken = time.monotonic(), 0
        while taken < len(record):
            assert gate.get("/healthz").status == 200
            if (due := int((time.monotonic() - began) * 4_000_000) - taken) > 0:
                data = connection.recv(due)
                assert data, taken
                taken += len(data)


def test_an_early_answer_reaches_a_client_that_sends_everything_first(shared: Gate) -> None:
    for head, status in (
        (NOWHERE + b"Content-Length: 20000000\r\n" + CLOSE, b"HTTP/1.1 404 "),
        (NOWHERE.replace(b"/1.1", b"/1.0") + b"Content-Length: 20000000\r\n\r\n", b"HTTP/1.1 404 "),
        (HEAD + b"X: ", b"HTTP/1.1 431 "),
    ):
        with shared.connect(head) as connection:
            connection.sendall(b"a" * 20_000_000)
            answer = b"".join(iter(partial(connection.recv, 1 << 16), b""))
            assert answer.startswith(status)
            assert b"connection: close" in answer


def test_what_is_refused_during_an_answer_puts_nothing_into_it(shared: Gate) -> None:
    for behind in (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\0\0\r\n\r\n", b"GET /" + b"a" * 100_000):
        shared.post(ORDERS, b"news\n")
        with shared.begin(f"GET {ORDERS}?follow=1") as connection:
            received(connection, b"news")
            connection.sendall(behind)
            assert b"HTTP/1.1" not in received(connection)


def test_a_stream_with_a_request_behind_it_ends_when_its_client_leaves(shared: Gate) -> None:
    with shared.begin(f"GET {ORDERS}?follow=1") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: shared.metric("wald_gate_streams") == 1)
    for _ in range(2):
        shared.post(ORDERS, b"news\n")
    eventually(lambda: shared.metric("wald_gate_streams") == 0)


def test_new_limits_begin_anew_whatever_was_taken_without(daemon: Daemon) -> None:
    with limited(daemon, "bytes_per_second = 0") as gate:
        for _ in range(5):
            assert gate.post(ORDERS, b"x" * 1_000_000).status == 200
        for limits in ("bytes_per_second = 1024\nrequests_per_second = 1000", "requests_per_second = 1"):
            gate.reload(config=f"[limits]\n{limits}\n")
            assert gate.get("/v1/routes").status == 200
            gate.post(ORDERS, b"x" * 1_000_000)
            assert gate.get("/v1/routes").status == 429


def test_unfinished_records_of_all_clients_have_a_bound_and_small_ones_pass(daemon: Daemon) -> None:
    big = b"x" * (1 << 20)
    with limited(daemon, 'kept_max_bytes = "2MiB"') as gate, ExitStack() as stack:
        began = [stack.enter_context(gate.begin(f"POST {ORDERS}", body=big, more=1)) for _ in range(6)]
        eventually(lambda: len(select.select(began, [], [], 0)[0]) == 4)  # there is memory for two
        refused, _, _ = select.select(began, [], [], 0)
        assert all(each.recv(1 << 16).startswith(b"HTTP/1.1 503 ") for each in refused)
        refusal = gate.post(ORDERS, big, BYTES)
        assert (refusal.status, refusal.json()["code"], refusal.headers["retry-after"]) == (503, "memory", "2")
        assert gate.post(ORDERS, b"small\n" * 20_000).status == 200
        for each in set(began) - set(refused):
            each.sendall(b"\n")
            assert each.recv(12) == b"HTTP/1.1 200"
        assert gate.post(ORDERS, big).status == 200


CLIENTS = 20
LOG_BYTES = 48 << 20
BOUND_BYTES = 8 << 20  # per client; about 3 MiB are used
LEASE = json.dumps({"worker": "ann", "wait": 300}).encode()


def segments_open(gate: Gate) -> int:
    """Return the number of segments that the gate has open."""
    directory = Path(f"/proc/{gate.process.pid}/fd")
    return sum("/segments/" in os.readlink(each) for each in directory.iterdir() if each.is_symlink())


def test_a_client_that_goes_gives_its_place_back(daemon: Daemon) -> None:
    with limited(daemon, "requests_at_once = 2") as gate:
        gate.make_group("billing")
        gate.make_group("packing")
        for sent in (
            request(f"GET {ORDERS}?from=end&wait=300s"),
            request(f"GET {ORDERS}?from=1&to=99&wait=300s&limit=5&format=raw"),
            request(f"GET {ORDERS}?follow=1"),
            request(f"GET {ORDERS}?format=events"),
            request("POST /v1/routes/orders/groups/packing/lease", body=LEASE, media_type=JSON),
            request("GET /live", "Accept: text/event-stream"),
            request(f"POST {ORDERS}?wait_processed=billing&wait=300s", body=b"x\n"),
        ):
            with gate.connect() as first, gate.connect() as second:
                first.sendall(sent)
                second.sendall(sent)
                eventually(lambda: gate.get("/v1/head").status == 429)
            eventually(lambda: gate.get("/v1/routes").status == 200)
            eventually(lambda: gate.metric("wald_gate_streams") == 0)


def test_clients_that_take_nothing_cost_bounded_memory_and_are_cut_off(daemon: Daemon) -> None:
    with limited(daemon, "send_timeout = 0.5") as gate, ExitStack() as stack:
        for _ in range(3):
            assert gate.post(ORDERS, (b"x" * 1000 + b"\n") * (LOG_BYTES // 3000)).status == 200
        assert len(gate.get(f"{ORDERS}?format=raw&limit=1").body) == 1001
        before = resident_bytes(gate)
        for number in range(CLIENTS):
            connection = stack.enter_context(gate.connect(receive_bytes=4096))
            connection.sendall(request(f"GET {ORDERS}?follow={number % 2}&format=raw"))
        eventually(lambda: endings(gate, "answer not taken") == CLIENTS)

        assert resident_bytes(gate) - before < CLIENTS * BOUND_BYTES < CLIENTS * LOG_BYTES
        eventually(lambda: segments_open(gate) == 0)
        assert gate.metric("wald_gate_streams") == 0
        for _ in range(10):  # nor does a client that breaks off leave a segment open
            with gate.connect(request(f"GET {ORDERS}?format=ndjson"), receive_bytes=4096) as connection:
                assert connection.recv(1) == b"H"
        eventually(lambda: segments_open(gate) == 0)


RECORD = b"x" * (12 << 20)
LARGE_LEASE: dict[str, Any] = {"max_bytes": 16 << 20, "lease_for": 3600}


def lease(gate: Gate, **fields: Any) -> Answer:
    return gate.work("lease", "second", **{**LARGE_LEASE, **fields})


def out(gate: Gate) -> list[tuple[int, int, str, int]]:
    """Return the pending leases with their workers and tries."""
    lines = gate.get(f"{BILLING}/pending").lines()
    return [(each["first"], each["last"], each["worker"], each["tries"]) for each in lines]


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "closed"])
def test_a_lease_waits_for_what_another_client_has_not_taken_and_leases_nothing(
    daemon: Daemon, *, is_read: bool
) -> None:
    """The gate has memory for one lease of one of two records."""
    with limited(daemon, 'kept_max_bytes = "18MiB"') as gate:
        gate.make_group("billing")
        for _ in range(2):
            assert gate.post(ORDERS, RECORD, BYTES).status == 200
        body = json.dumps({"worker": "first", **LARGE_LEASE}).encode()
        with gate.connect(receive_bytes=4096) as connection:
            connection.sendall(request(f"POST {BILLING}/lease", "Connection: close", body=body, media_type=JSON))
            assert connection.recv(12) == b"HTTP/1.1 200"
            refused = lease(gate)
            assert (refused.status, refused.json()["code"], refused.headers["retry-after"]) == (503, "memory", "2")
            assert out(gate) == [(1, 1, "first", 1)]
            assert len(lease(gate, max_bytes=1).json()["records"]) == 1  # small leases fit; each gets a record
            assert gate.work("nack", "second", sequences=[2]).status == 200
            while is_read and connection.recv(1 << 20):
                pass
        eventually(lambda: lease(gate).status == 200)
        assert out(gate) == [(1, 1, "first", 1), (2, 2, "second", 2)]


def test_a_lease_that_asks_for_more_than_there_ever_is_gets_it_alone(daemon: Daemon) -> None:
    with limited(daemon, 'kept_max_bytes = "1MiB"') as gate:
        gate.make_group("billing")
        gate.post(ORDERS, b"one\n")
        assert [record["value"] for record in lease(gate).json()["records"]] == ["one"]
