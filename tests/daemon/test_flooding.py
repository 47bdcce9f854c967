"""Clients that ask much, send much or read nothing: others do not wait for them, and memory is bounded."""

import os
import re
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from asking import stat
from contents import records
from flooding import connected, stopped
from running import Client, Daemon, Start, eventually
from users import acting_as

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.routes import add_route
from wald.format.records import encode_columns

MIB = 1 << 20


def made_at(root: Path, name: str) -> int:
    """Return the creation time of a route in ns since 1970; file times may be some ms late."""
    return (root / "routes" / name).stat().st_ctime_ns


def test_a_record_does_not_wait_for_a_flood_of_commands(start: Start, root: Path) -> None:
    """At most a few of 640 earlier ROUTE ADD commands run before the record is durable."""
    daemon = start(routes=["r"])
    with ExitStack() as closing:
        *flooding, good = connected(daemon, 21, closing)
        names = [f"f{number}" for number in range(640)]
        with stopped(daemon):
            for number, client in enumerate(flooding):
                client.send("".join(f"ROUTE ADD {name}\n" for name in names[number::20]).encode())
            good.send(b"PUB r 2\nx\n")
        assert good.reply() == "OK 1 1"
        for client in flooding:
            assert [client.reply().split()[0] for _ in range(32)] == ["OK"] * 32

    durable_at = next(iter(records(root, "r"))).append_time_ns
    assert sum(made_at(root, name) < durable_at for name in names) < 32


def test_connections_take_turns_in_what_they_ask(start: Start, root: Path) -> None:
    """A client that asks once does not wait for all that another has asked."""
    daemon = start()
    with ExitStack() as closing:
        greedy, modest = connected(daemon, 2, closing)
        with stopped(daemon):
            greedy.send(b"".join(b"ROUTE ADD g%d\n" % number for number in range(300)))
            modest.send(b"ROUTE ADD modest\n")
        assert modest.reply() == "OK added modest"
        assert [greedy.reply() for _ in range(300)] == [f"OK added g{number}" for number in range(300)]

    at = made_at(root, "modest")
    assert sum(made_at(root, f"g{number}") < at for number in range(300)) < 32


def test_one_cut_answers_all_who_asked_for_it_at_once(start: Start) -> None:
    daemon = start(routes=["r"])
    with ExitStack() as closing:
        clients = connected(daemon, 10, closing)
        with stopped(daemon):
            for client in clients:
                client.send(b"PUB r 2\nx\nCUT\n")
        for client in clients:
            assert client.reply().startswith("OK ")
        assert [client.reply() for client in clients] == ["OK cut 11"] * 10
    assert '"cuts": 1,' in daemon.ask("STAT")


@pytest.mark.skipif(os.geteuid() != 0, reason="floods as another user")
def test_a_record_does_not_wait_for_a_flood_of_another_users(
    start: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a few hundred of 100,000 earlier records on 200 connections come first."""
    daemon = start(socket_mode="0666", connections_per_user=256, connections_max=512, routes=["r"])
    monkeypatch.chdir(root)
    root.chmod(0o755)
    with ExitStack() as closing:
        with acting_as(54331):
            flooding = [closing.enter_context(Client(Path("wald.sock"))) for _ in range(200)]
        for client in flooding:
            assert client.ask(b"PING\n") == "OK pong"
        good = closing.enter_context(Client(Path("wald.sock")))
        assert good.ask(b"PING\n") == "OK pong"
        with stopped(daemon):
            for client in flooding:
                client.send(b"PUB r 2\nx\n" * 500)
            good.send(b"PUB r 2\nx\n")
        assert int(good.reply().split()[1]) < 10_000


def test_half_sent_requests_cost_a_fixed_amount_of_memory(start: Start) -> None:
    """500 of 64 MiB of which the beginning has come, and 500 that wait in memory for their other half."""
    daemon = start(connections_max=2000, connections_per_user=2000, request_max_bytes="64MiB", routes=["r"])
    with ExitStack() as closing:
        before = resident_bytes(daemon)
        clients = [closing.enter_context(Client(daemon.socket_path)) for _ in range(1000)]
        for number, client in enumerate(clients):
            client.send(b"PUB r %d\n" % (64 * MIB if number % 2 else 200_000) + bytes(100_000))
        eventually(lambda: stat(daemon)["connections"] >= 1000)
        assert daemon.ask("PUB r 2\nx") == "OK 1 1"
        assert resident_bytes(daemon) - before < 20 * MIB
        clients[0].send(bytes(99_999) + b"\n")
        assert clients[0].reply() == "OK 2 2"


def resident_bytes(daemon: Daemon) -> int:
    """Return the resident memory of the daemon."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) << 10


def test_answers_that_are_not_read_cost_a_fixed_amount_of_memory(start: Start, root: Path) -> None:
    """100 clients repeatedly request the state of a log of 2,000 routes; other clients still get answers."""
    daemon = start()
    daemon.stop()
    for number in range(2000):
        add_route(Root(root), Unsynced(), f"{number:0100d}")
    daemon.start_again()
    with ExitStack() as closing:
        mute = connected(daemon, 100, closing)
        before = resident_bytes(daemon)
        for client in mute:
            client.socket.setblocking(False)
            with suppress(BlockingIOError):
                for _ in range(50):
                    client.send(b"STAT\n" * 1000)
        for _ in range(100):
            assert daemon.ask("PING") == "OK pong"
        with Client(daemon.socket_path) as reading:
            for _ in range(10):
                assert reading.ask(b"STAT\n").startswith("OK {")
        assert resident_bytes(daemon) - before < 48 * MIB
        eventually(lambda: "unread replies used up the memory limit" in daemon.log)


class Unsynced(Disk):
    """A faster disk, for a test without crashes."""

    def sync_directory(self, path: Path) -> None:
        pass


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
    daemon = start(anew=True, routes=["a fifo"])
    with (root / "routes/a/in").open("wb") as fifo:
        subprocess.run(["cat", tmp_path / "input"], stdout=fifo, check=True)
    lines = count * (1 << 14)
    eventually(lambda: f'"records": {lines},' in daemon.ask("STAT"), timeout=600)
    eventually(lambda: '"sealed": 16,' in daemon.ask("STAT"), timeout=600)

    assert peak_kib(daemon) < LIMIT_KIB


def test_64_connections_that_all_send_large_requests(start: Start) -> None:
    """Halves of requests wait in memory, as far as there is room for them, and in files beyond that."""
    daemon = start(anew=True, routes=["a"])
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


def test_taking_a_record_of_64_megabytes(start: Start, root: Path) -> None:
    """Over the socket, as a line and as a column, and through a FIFO. (Sealing takes more: a frame holds it whole.)"""
    daemon = start(anew=True, request_max_bytes="80MiB", segment_max_bytes="1GiB", routes=["a fifo"])
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
