"""Requests while the disk has no room: they wait or are refused at once, and what can never fit is refused."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import SPOOLED, entering, is_quiet, stat, written
from contents import text
from full_disk import fill, small_file_system
from running import Client, Daemon, eventually, readable
from users import acting_as

Start = Callable[..., Daemon]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk that is soon full."""
    with small_file_system(tmp_path / "disk", 16 << 20) as disk:
        yield disk


def on(small: Path, start: Start, **options: Any) -> Daemon:
    """A daemon on that disk, with a route. ``Any``: they are handed on."""
    daemon = start(at=small / "log", segment_max_bytes="64KiB", free_space_min="1MiB", **options)
    daemon.ask("ROUTE ADD r")
    return daemon


def test_without_room_a_producer_is_told_if_it_shall_be(small: Path, start: Start) -> None:
    """on_full = "reject": ERR full at once, for small and for large; what writes no record is answered as ever."""
    daemon = on(small, start, on_full="reject")
    before = written(daemon.root)
    fill(small / "filler")
    with Client(daemon.socket_path) as client:
        client.send(b"PUB r 2\nx\nPUB r %d\n%b" % (SPOOLED, bytes(SPOOLED)))
        client.send(b"PUB absent 2\nx\nHEAD\n")
        assert client.reply() == "ERR full the disk is full; STAT reports the cause"
        assert client.reply().startswith("ERR full ")
        assert client.reply().startswith("ERR no-route ")
        assert client.reply().startswith("OK seq=00000000000000000000 ")
        assert stat(daemon)["degraded_by"] == "others"
        assert written(daemon.root) == before
        (small / "filler").unlink()
        eventually(lambda: client.ask(b"PUB r 2\nx\n") == "OK 1 1")


def spooled_bytes(daemon: Daemon) -> int:
    """Return the size of the unnamed files with payloads."""
    descriptors = Path(f"/proc/{daemon.process.pid}/fd").iterdir()
    total = 0
    for each in descriptors:
        with suppress(FileNotFoundError):  # a connection that was closed in between
            if os.readlink(each).endswith("(deleted)"):
                total += each.stat().st_size
    return total


def test_without_room_a_payload_under_way_is_not_gathered_on(small: Path, start: Start) -> None:
    daemon = on(small, start)
    with Client(daemon.socket_path) as client:
        client.send(b"PUB r %d\n" % (2 * SPOOLED) + bytes(SPOOLED))
        eventually(lambda: spooled_bytes(daemon) == SPOOLED)
        fill(small / "filler")
        eventually(lambda: stat(daemon)["degraded"])
        client.send(bytes(100 << 10))
        for _ in range(3):
            assert daemon.ask("PING") == "OK pong"
        assert spooled_bytes(daemon) == SPOOLED
        (small / "filler").unlink()
        client.send(bytes(SPOOLED - (100 << 10) - 1) + b"\n")
        assert client.reply() == "OK 1 1"

    assert text(daemon.root, "r") == bytes(2 * SPOOLED - 1) + b"\n"


def all_is_read(clients: Sequence[Client]) -> bool:
    """Return True if the daemon has read all bytes that these clients sent."""
    unread = struct.pack("i", 0)
    return all(fcntl.ioctl(each.socket, termios.TIOCOUTQ, unread) == unread for each in clients)


@pytest.mark.skipif(os.geteuid() != 0, reason="announces as another user")
@pytest.mark.parametrize(("user_id", "count"), [(54331, 1000), (0, 128)], ids=["of another user", "of the same user"])
def test_a_small_request_does_not_wait_for_room_that_half_sent_ones_were_promised(
    start: Start, small: Path, monkeypatch: pytest.MonkeyPatch, user_id: int, count: int
) -> None:
    """They announce more than the disk has room for, and keep more than the memory holds; nothing counts as held."""
    daemon = on(small, start, socket_mode="0666", connections_max=2048, connections_per_user=2048, frame_timeout="1h")
    daemon.root.chmod(0o755)
    monkeypatch.chdir(daemon.root)
    request = b"PUB r 120000\n" + (b"x" * 119 + b"\n") * 1000
    with ExitStack() as closing:
        with acting_as(user_id):
            half_sent = [closing.enter_context(Client(Path("wald.sock"))) for _ in range(count)]
        announced, begun = half_sent[:-80], half_sent[-80:]
        for clients, data in ((announced, b"PUB r %d\n" % SPOOLED), (begun, request[:-1000])):
            for client in clients:
                client.send(data)
            eventually(partial(all_is_read, clients))
        assert stat(daemon)["held_requests"] == 0
        with Client(Path("wald.sock")) as good:
            good.send(request[:60_000])
            eventually(partial(all_is_read, [good]))
            good.send(request[60_000:])
            assert good.reply() == "OK 1 1000"


def test_a_payload_for_which_there_will_never_be_room_is_refused(small: Path, start: Start) -> None:
    """Otherwise it would wait for ever; the connection stays open."""
    daemon = on(small, start)
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB r %d\n" % (8 << 20) + bytes(8 << 20)).startswith("ERR too-large ")
        assert client.ask(b"PUB r 2\nx\n") == "OK 1 1"


def test_a_payload_that_would_take_the_last_room_is_not_begun(start: Start, tmp_path: Path) -> None:
    """It counts twice, spooled and copied, plus the promises to others; small requests are accepted."""
    status = os.statvfs(tmp_path)
    path, payload_bytes = tmp_path / "wald.toml", 500 << 20
    minimum = status.f_bavail * status.f_frsize - 3 * payload_bytes  # others use this disk, too
    path.write_text(f"free_space_min = {minimum}\n[routes.r]\n")
    daemon = start("--config", path, on_full="reject", request_max_bytes="512MiB", segment_max_bytes="64KiB")
    with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        first.send(b"PUB r %d\n" % payload_bytes)
        assert daemon.ask("PING") == "OK pong"
        assert is_quiet(first)
        assert second.ask(b"PUB r 2\nx\n") == "OK 1 1"
        assert second.ask(b"PUB r %d\n" % payload_bytes).startswith("ERR full ")


def test_who_leaves_while_he_waits_makes_room(start: Start, small: Path) -> None:
    """The daemon does not read a waiting connection but notices that it was closed; a half-close is not enough."""
    daemon = on(small, start, connections_max=2)
    fill(small / "filler")
    with Client(daemon.socket_path) as half_closed:
        half_closed.send(b"PUB r 2\nx\n")
        half_closed.socket.shutdown(socket.SHUT_WR)
        for _ in range(4):
            daemon.await_ready()  # there is a place again
            with entering(daemon) as leaving:
                leaving.send(b"PUB r 2\ny\n")
        daemon.await_ready()
        (small / "filler").unlink()
        assert half_closed.reply() == "OK 1 1"


def test_a_half_request_that_was_parked_has_its_time_from_then_on(start: Start, small: Path) -> None:
    """Its rest could not come before."""
    daemon = on(small, start, frame_timeout=3)
    fill(small / "filler")
    with Client(daemon.socket_path) as client, Client(daemon.socket_path) as half:
        client.send(b"PUB r 2\nx\nPUB r 7\nabc")
        half.send(b"half")
        assert half.reply().startswith("ERR timeout ")
        (small / "filler").unlink()
        assert client.reply() == "OK 1 1"
        assert not readable(client.socket.fileno(), within=1.1)  # a sweep later
        assert client.ask(b"def\n") == "OK 2 2"
