"""The gate as a service: health, metrics, request logs, systemd, and stops with requests in flight."""

import http.client
import json
import os
import re
import resource
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from contents import values
from endpoint import samples_of
from flooding import stopped
from gating import JSON, ORDERS, Gate, entry, received, request
from manager import manager_at
from running import TIMEOUT_SECONDS, Daemon, eventually, refused, run, sidecar

from wald.errors import InvalidInput

NOWHERE = "/v1/routes/nowhere/records"


def samples(gate: Gate) -> dict[tuple[str, ...], float]:
    return samples_of(gate.get("/metrics").body.decode())


def lines(gate: Gate) -> list[dict[str, object]]:
    """Return the log lines about requests."""
    return [json.loads(line) for line in gate.log.splitlines() if line.startswith("{")]


def test_what_is_done_is_counted(gate: Gate) -> None:
    gate.post(ORDERS, b"one\ntwo\n")
    gate.post(NOWHERE, b"one\n")
    gate.get(ORDERS, accept="application/octet-stream")
    gate.get("/nothing")
    found = samples(gate)

    assert found["wald_gate_requests_total", "200", "append"] == 1
    assert found["wald_gate_requests_total", "404", "append"] == 1
    assert found["wald_gate_requests_total", "404", "none"] == 1
    assert found["wald_gate_request_seconds_count", "append"] == 2
    assert found["wald_gate_request_seconds_count", "cut"] == 0
    assert found["wald_gate_publish_seconds_count",] == 2
    assert (found["wald_gate_stored_records_total",], found["wald_gate_stored_bytes_total",]) == (2, 8)
    assert (found["wald_gate_sent_records_total",], found["wald_gate_sent_bytes_total",]) == (2, 8)
    assert found["wald_gate_connections", "busy"] == 1
    assert found["process_start_time_seconds",] > 0


def test_a_request_that_is_not_http_gets_a_problem_and_a_log_line(daemon: Daemon) -> None:
    host, chunked = b"Host: localhost\r\n", b"Transfer-Encoding: chunked\r\n"
    cases = [
        (b"GET /a?secret HTTP/1.1\r\n\r\n", 400, "host", "/a"),
        (b"GET /b HTTP/1.1\r\n" + host + host + b"\r\n", 400, "host", "/b"),
        (b"GET /c HTTP/1.9\r\n" + host + b"\r\n", 400, "malformed", "/c"),
        (b"\x16\x03\x01\x02\x00", 400, "malformed", ""),
        (b"GET /d HTTP/1.1\r\n" + host + b"X: " + b"x" * 100_000, 431, "head-size", "/d"),
        (b"POST /e HTTP/1.1\r\n" + host + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "transfer-encoding", "/e"),
        (b"POST " + ORDERS.encode() + b" HTTP/1.1\r\n" + host + chunked + b"\r\nzz\r\n", 400, "malformed", ORDERS),
    ]
    with Gate(daemon.root, "--log-requests") as gate:
        for count, (sent, status, code, path) in enumerate(cases, 1):
            with gate.connect(sent) as connection, http.client.HTTPResponse(connection) as response:
                response.begin()
                body = json.loads(response.read())
                assert response.headers["Content-Type"] == "application/problem+json", sent
            assert (response.status, body["status"], body["code"], bool(body["detail"])) == (status, status, code, True)
            eventually(lambda: len(lines(gate)) == count)  # noqa: B023
            last = lines(gate)[-1]
            assert (last["status"], last["path"], last["address"]) == (status, path, "127.0.0.1"), sent


def test_a_gate_is_ready_while_its_daemon_answers(gate: Gate, daemon: Daemon, root: Path) -> None:
    gate.post(ORDERS, b"one\n")
    gate.get("/nothing")
    assert gate.get("/readyz").json() == {"status": "ready"}
    daemon.process.send_signal(signal.SIGSTOP)
    eventually(lambda: gate.get("/readyz").status == 503)
    frozen = gate.get("/readyz").json()
    daemon.kill()
    eventually(lambda: gate.get("/readyz").json()["detail"] == "no daemon runs")
    healthy = gate.get("/healthz")
    daemon.start_again()
    eventually(lambda: gate.get("/readyz").status == 200)

    assert (frozen["code"], frozen["detail"]) == ("not-ready", "the daemon is frozen")
    assert healthy.json() == {"status": "ok"}
    assert "kill -CONT" in gate.log
    assert gate.log.splitlines()[-1] == "ready"
    # Requests that failed are logged, and no others.
    failed = {(line["path"], line["status"], line["detail"]) for line in lines(gate)}
    assert ("/readyz", 503, "no daemon runs") in failed
    assert {(path, status) for path, status, _ in failed} == {("/readyz", 503)}
    root.rename(root.with_name("moved"))
    eventually(lambda: gate.get("/readyz").status == 503)
    assert gate.get("/readyz").json()["detail"] == "the log is no longer at its path"


def test_without_a_token_health_says_nothing_of_the_log(daemon: Daemon) -> None:
    with Gate(daemon.root, tokens="") as guarded:
        daemon.kill()
        eventually(lambda: guarded.get("/readyz").status == 503)
        said = guarded.get("/healthz").body + guarded.get("/readyz").body
        assert guarded.get("/metrics").status == 401
    assert str(daemon.root) not in said.decode()
    assert b"orders" not in said


def test_a_line_about_a_request_names_its_client_has_no_secret_and_changes_no_terminal(daemon: Daemon) -> None:
    with Gate(daemon.root, "--log-requests", tokens=entry("shop", admin=True)) as gate:
        gate.get("/v1/%1b%5b2J%0a%7f%C2%9B%E2%80%AE?token=secret", "secret")
        gate.get("/" + "x" * 5000)
        gate.get("/v1/head", "secret")
        gate.get("/v1/head", "shop")
        eventually(lambda: len(lines(gate)) == 4)
        hostile, long, unknown, known = lines(gate)

        assert hostile["path"] == "/v1/\x1b[2J\n\x7f\x9b\u202e"
        assert len(str(long["path"])) < 300
        assert (unknown["client"], unknown["status"], unknown["method"]) == ("", 401, "GET")
        assert (known["client"], known["status"]) == ("shop", 200)
        assert "secret" not in gate.log
        assert all(character.isascii() and (character.isprintable() or character == "\n") for character in gate.log)


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    """A listening socket, as from a socket unit."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener


@pytest.fixture
def unix(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "gate.sock"))
        listener.listen(64)
        yield listener


def test_systemd_hears_of_every_change(daemon: Daemon, tmp_path: Path) -> None:
    """The gate reports ready once it answers, reloading, ready, and stopping; it pings the watchdog even when idle."""
    address = str(tmp_path / "notify")
    env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}
    with manager_at(address) as manager, Gate(daemon.root, env=env) as gate:
        manager.hear("READY=1")
        assert gate.get("/healthz").status == 200
        assert manager.messages == ["READY=1"]
        for _ in range(3):
            manager.hear("WATCHDOG=1")
        gate.process.send_signal(signal.SIGHUP)
        assert int(manager.hear("RELOADING=1").partition("MONOTONIC_USEC=")[2]) > 0
        manager.hear("READY=1")
        gate.process.send_signal(signal.SIGTERM)
        manager.hear("STOPPING=1")
        assert gate.process.wait(TIMEOUT_SECONDS) == 0


def test_systemd_does_not_hear_of_a_gate_that_cannot_or_must_not_listen(
    daemon: Daemon, tcp: socket.socket, tmp_path: Path
) -> None:
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        line = sidecar("gate", "--root", daemon.root, "--listen", f"127.0.0.1:{tcp.getsockname()[1]}")
        done = run(line, env={**os.environ, "NOTIFY_SOCKET": address})

        assert manager.is_silent(seconds=0)
    assert done.returncode == InvalidInput.exit_code
    assert "address already in use" in done.stderr.decode().lower()
    everywhere = socket.create_server(("0.0.0.0", 0))  # a socket unit for other machines needs TLS and tokens, too
    with everywhere, pytest.raises(AssertionError, match="without TLS and tokens"):
        Gate(daemon.root, sockets=(everywhere,))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_connections_wait_in_systemds_sockets_while_a_gate_is_restarted(
    daemon: Daemon, tcp: socket.socket, unix: socket.socket, end: signal.Signals
) -> None:
    with Gate(daemon.root, sockets=(tcp, unix)) as gate:
        assert gate.port == tcp.getsockname()[1]
        gate.process.send_signal(end)
        gate.process.wait(TIMEOUT_SECONDS)
        with socket.socket(socket.AF_UNIX) as client, ThreadPoolExecutor() as asking:
            client.connect(unix.getsockname())
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = asking.submit(gate.post, ORDERS, b"waits\n")
            gate.start()
            assert answer.result().status == 200
            client.settimeout(TIMEOUT_SECONDS)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        assert gate.stop() == 0
        assert Path(unix.getsockname()).is_socket()


def test_streams_and_busy_clients_do_not_hold_up_a_stop(gate: Gate) -> None:
    gate.post(ORDERS, b"one\n")
    with ExitStack() as stack:
        opened = [stack.enter_context(gate.asked("GET", f"{ORDERS}?follow=1&format=raw")) for _ in range(5)]
        assert {answer.readline() for answer in opened} == {b"one\n"}
        events = stack.enter_context(gate.asked("GET", ORDERS, headers={"Accept": "text/event-stream"}))
        assert events.readline()
        assert gate.stop() == 0
        events.read()
        assert {answer.read() for answer in opened} == {b""}


def test_a_restart_under_load_loses_nothing_that_was_answered(daemon: Daemon, tcp: socket.socket) -> None:
    """Clients retry until answered; a request interrupted by a stop is stored at least once."""
    answered: list[bytes] = []
    over = threading.Event()

    def produce(gate: Gate, name: int) -> None:
        number = 0
        while not over.is_set():
            value = b"%d-%d" % (name, number)
            try:
                if gate.post(ORDERS, value + b"\n").status == 200:
                    answered.append(value)
                    number += 1
            except OSError:
                continue

    with Gate(daemon.root, sockets=(tcp,)) as gate, ThreadPoolExecutor() as producers:
        done = [producers.submit(produce, gate, name) for name in range(3)]
        for _ in range(2):
            before = len(answered)
            eventually(lambda before=before: len(answered) > before + 20)  # type: ignore[misc]  # bound at once
            assert gate.stop() == 0
            gate.start()
        eventually(lambda: gate.get("/readyz").status == 200)
        over.set()
        for each in done:
            each.result()

    assert set(answered) <= set(values(daemon.root))
    assert "Traceback" not in gate.log


EACH, KEYED, FOLLOWERS = 50, 20, 20


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
    leases = [request("POST /v1/routes/empty/groups/g/lease", body=lease, media_type=JSON)] * FOLLOWERS
    pages = [request("GET /live", "Accept: text/event-stream")] * 5
    processed = [request(f"POST {ORDERS}?wait_processed=slow&wait=300s", body=b"processed\n")] * 5
    return [*polls, *follows, *leases, *pages, *processed, *posts, *keyed]


def test_answers_that_their_client_is_reading_are_sent_before_the_exit(gate: Gate) -> None:
    answer = gate.get("/openapi.json").body
    with gate.connect(request("GET /openapi.json") * 37, receive_bytes=4096) as connection:
        got = connection.recv(1)
        gate.process.send_signal(signal.SIGTERM)
        got += received(connection)

    assert got.count(answer) == 37
    assert gate.process.wait(TIMEOUT_SECONDS) == 0


def test_pipelined_requests_are_answered_before_the_exit(daemon: Daemon, gate: Gate) -> None:
    with gate.connect() as connection:
        with stopped(daemon):
            connection.sendall(request(f"POST {ORDERS}", body=b"one\n") + request(f"POST {ORDERS}", body=b"two\n"))
            eventually(lambda: gate.metric('wald_gate_connections{state="busy"}') == 2)
            gate.process.send_signal(signal.SIGTERM)
            eventually(lambda: not accepts(gate))
        assert received(connection).count(b"HTTP/1.1 200 OK") == 2
    assert gate.process.wait(TIMEOUT_SECONDS) == 0
    assert values(daemon.root, "orders") == [b"one", b"two"]


def accepts(gate: Gate) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", gate.port)) == 0


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
            connection = stack.enter_context(gate.connect())
            connections.append((sent, connection))
            connection.sendall(sent)
        eventually(lambda: gate.metric("wald_gate_streams") == gate.metric("wald_gate_waiting_leases") == FOLLOWERS)

        assert gate.stop() == 0

        stored = set(values(daemon.root, "orders"))
        for sent, connection in connections:
            answer = received(connection)
            posted = re.search(rb"\r\n\r\n((?:whole|half|keyed|processed)[^\n]*)\n", sent)
            if posted and b"HTTP/1.1 200" in answer:
                assert posted[1] in stored
        assert "Traceback" not in gate.log
        assert "Exception" not in gate.log
        gate.start()
        assert gate.post(ORDERS, b"after\n").status == 200


def refusal(root: Path, path: object, *more: str) -> tuple[int, str, str]:
    """Return the error of a gate that listens only on the path."""
    return refused(run(sidecar("gate", "--root", root, "--listen", "", "--uds", path, *more)))


def test_a_file_in_the_place_of_the_socket_stays(daemon: Daemon, tmp_path: Path) -> None:
    precious, link, dangling = tmp_path / "tokens", tmp_path / "link", tmp_path / "dangling"
    precious.write_text("precious")
    link.symlink_to(precious)
    dangling.symlink_to(tmp_path / "none")
    for path, more in ((precious, ()), (precious, ("--check",)), (link, ()), (dangling, ())):
        code, message, hint = refusal(daemon.root, path, *more)
        assert (code, message) == (InvalidInput.exit_code, f"--uds {path}: the file there is not a socket")
        assert hint.startswith(f"ls -ld {path}")
        assert path.is_symlink() is (path != precious)
        assert precious.read_text() == "precious"
    for name, said in (
        ("none/gate.sock", "the directory {}/none does not exist"),
        (".", "the file there is not a socket"),
        ("x" * 108, "the path is longer than 107 bytes"),
    ):
        code, message, hint = refusal(daemon.root, tmp_path / name)
        assert (code, message) == (InvalidInput.exit_code, f"--uds {tmp_path / name}: {said.format(tmp_path)}")
        assert hint


def test_a_removed_socket_is_made_again_as_soon_as_it_can_be(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "gate.sock"
    with Gate(daemon.root, "--uds", path) as gate:
        path.unlink()
        eventually(lambda: listens(path))
        limits = resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        path.unlink()
        eventually(lambda: "cannot be recreated yet" in gate.log)
        resource.prlimit(gate.process.pid, resource.RLIMIT_NOFILE, limits)
        eventually(lambda: listens(path))
        eventually(lambda: gate.log.count("the socket was removed; recreated") == 2)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert gate.stop() == 0
    assert not path.exists()


def test_a_socket_that_was_left_is_taken_over_and_one_that_answers_is_not(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "gate.sock"
    with Gate(daemon.root, "--uds", path) as gate:
        gate.kill()
        assert path.is_socket()
        gate.start()

        assert refusal(daemon.root, path) == (
            InvalidInput.exit_code,
            f"--uds {path}: another process listens there",
            f"fuser {path}",
        )
        done = run(sidecar("gate", "--root", daemon.root, "--listen", "", "--uds", path, "--check"))  # as for a reload
        assert done.returncode == 0
        assert gate.stop() == 0
    assert not path.exists()


def test_what_takes_the_place_of_the_socket_is_reported_until_it_is_gone_and_stays(
    daemon: Daemon, tmp_path: Path
) -> None:
    path, other = tmp_path / "gate.sock", tmp_path / "other"
    with Gate(daemon.root, "--uds", path) as gate, socket.socket(socket.AF_UNIX) as listener:
        for instead in ("a file", "another socket"):
            if instead == "a file":
                other.write_bytes(b"precious")
            else:
                listener.bind(os.fspath(other))
                listener.listen()
            before = len(gate.log)
            other.rename(path)
            eventually(lambda before=before: f"--uds {path}: " in gate.log[before:])  # type: ignore[misc]
            assert path.is_socket() == (instead != "a file")
            path.unlink()
            eventually(lambda before=before: "; recreated" in gate.log[before:])  # type: ignore[misc]
            assert listens(path)
        path.unlink()
        path.write_text("precious")
        assert gate.stop() == 0
    assert path.read_text() == "precious"


def listens(path: Path) -> bool:
    """Return True if a process listens at the path."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(os.fspath(path)) == 0
