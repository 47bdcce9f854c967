"""Resident memory stays under 64 MiB, whatever is fed and by how many."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Client, Daemon, eventually

from wald.format.records import encode_columns

Start = Callable[..., Daemon]

LIMIT_KIB = 64 << 10
GIB = 1 << 30
BLOCK = b"".join(b"%07d the quick brown fox jumps over the lazy dog %07d\n" % (n, n * n) for n in range(1 << 14))


def peak_kib(daemon: Daemon) -> int:
    """The most memory that the daemon ever had in use (VmHWM)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{daemon.process.pid}/status").read_text())
    assert found
    return int(found[1])


@pytest.mark.slow
def test_a_feed_of_a_gigabyte_through_a_fifo(start: Start, root: Path, tmp_path: Path) -> None:
    """While segments are cut and sealed."""
    count = -(-GIB // len(BLOCK))
    with (tmp_path / "input").open("wb") as file:
        for _ in range(count):
            file.write(BLOCK)
    daemon = start(anew=True)
    daemon.ask("ROUTE ADD a fifo")
    with (root / "routes/a/in").open("wb") as fifo:
        subprocess.run(["cat", tmp_path / "input"], stdout=fifo, check=True)
    lines = count * (1 << 14)
    eventually(lambda: f'"records": {lines},' in daemon.ask("STAT"), timeout=600)
    eventually(lambda: '"sealed": 16,' in daemon.ask("STAT"), timeout=600)

    assert peak_kib(daemon) < LIMIT_KIB


def test_64_connections_that_all_send_large_requests(start: Start) -> None:
    """Halves of requests wait in memory, as far as there is room for them, and in files beyond that."""
    daemon = start(anew=True)
    daemon.ask("ROUTE ADD a")
    columns = encode_columns([BLOCK[i * 60 : i * 60 + 60] for i in range(4000)])

    def feed() -> None:
        with Client(daemon.socket_path) as client:
            for payload, options in ((b"x\n" * 120_000, ""), (BLOCK, ""), (columns, "enc=columns")):
                client.publish("a", payload, options)
                assert client.reply().startswith("OK ")

    threads = [threading.Thread(target=feed) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert f'"records": {64 * (120_000 + (1 << 14) + 4000)},' in daemon.ask("STAT")
    assert peak_kib(daemon) < LIMIT_KIB


def test_64_connections_that_stop_half_way(start: Start) -> None:
    """A quarter of a megabyte each, and the rest does not come."""
    daemon = start(anew=True)
    daemon.ask("ROUTE ADD a")
    clients = [Client(daemon.socket_path) for _ in range(64)]
    for client in clients:
        client.send(b"PUB a 262144\n" + b"x" * 262_000)
    assert daemon.ask("PING") == "OK pong"
    assert peak_kib(daemon) < LIMIT_KIB
    for client in clients:
        client.send(b"x" * 143 + b"\n")
    assert all(client.reply().startswith("OK ") for client in clients)
    for client in clients:
        client.close()
    assert peak_kib(daemon) < LIMIT_KIB


def test_taking_a_record_of_64_megabytes(start: Start, root: Path) -> None:
    """Over the socket, as a line and as a column, and through a FIFO. (Sealing takes more: a frame holds it whole.)"""
    daemon = start(anew=True, request_max_bytes="80MiB", segment_max_bytes="1GiB")
    daemon.ask("ROUTE ADD a fifo")
    large = os.urandom(32 << 20).hex().encode()
    with Client(daemon.socket_path) as client:
        client.publish("a", large + b"\n")
        assert client.reply() == "OK 1 1"
        client.publish("a", encode_columns([large]), "enc=columns")
        assert client.reply() == "OK 2 2"
    with (root / "routes/a/in").open("wb") as fifo:
        fifo.write(large + b"\n")
    eventually(lambda: '"head": 3,' in daemon.ask("STAT"))

    assert peak_kib(daemon) < LIMIT_KIB
