"""The gate as a service: systemd notifications, sockets that survive restarts, stops and restarts under load."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contents import values
from gating import Gate
from manager import manager_at
from running import TIMEOUT_SECONDS, Daemon, eventually, run, sidecar

from wald.errors import InvalidInput

ORDERS = "/v1/routes/orders/records"


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


def test_systemd_does_not_hear_of_a_gate_that_cannot_listen(daemon: Daemon, tcp: socket.socket, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        line = sidecar("gate", "--root", daemon.root, "--listen", f"127.0.0.1:{tcp.getsockname()[1]}")
        done = run(line, env={**os.environ, "NOTIFY_SOCKET": address})

        assert manager.is_silent(seconds=0)
    assert done.returncode == InvalidInput.exit_code
    assert "address already in use" in done.stderr.decode().lower()


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


def test_systemds_socket_for_other_machines_needs_tls_and_tokens_too(daemon: Daemon) -> None:
    everywhere = socket.create_server(("0.0.0.0", 0))
    with everywhere, pytest.raises(AssertionError, match="without TLS and tokens"):
        Gate(daemon.root, sockets=(everywhere,))


def test_streams_and_busy_clients_do_not_hold_up_a_stop(gate: Gate) -> None:
    gate.post(ORDERS, b"one\n")
    streams = [gate.asked("GET", f"{ORDERS}?follow=1&format=raw") for _ in range(5)]
    opened = [stream.__enter__() for stream in streams]
    assert {answer.readline() for answer in opened} == {b"one\n"}
    with gate.asked("GET", ORDERS, headers={"Accept": "text/event-stream"}) as events:
        assert events.readline()
        assert gate.stop() == 0
        events.read()
    assert {answer.read() for answer in opened} == {b""}
    for stream in streams:
        stream.__exit__(None, None, None)


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
