"""A full disk never blocks the daemon for ever, leaves the reserve to others, and requests wait or are refused."""

import fcntl
import os
import re
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
from contents import text, values
from filling import Row, walk
from full_disk import fill, small_file_system
from running import Client, Daemon, Start, eventually, readable, wald
from users import acting_as

from wald.errors import DiskFailure
from wald.files.disk import free_bytes
from wald.setting_types import MIB

DISK_BYTES = 64 * MIB


def flood(daemon: Daemon, line: Callable[[int], bytes]) -> int:
    """Publish until the disk is full; returns how many records were acknowledged."""
    number = 0
    with Client(daemon.socket_path) as client:
        while True:
            client.publish("r", b"%08d%b\n" % (number, line(number)))
            if not client.reply().startswith("OK "):
                return number
            number += 1


def random_line(_: int) -> bytes:
    return os.urandom(100 << 10).replace(b"\n", b" ")


@pytest.mark.parametrize("line", [random_line, lambda _: b"." * (100 << 10)], ids=["random", "equal"])
def test_whatever_was_cut_can_be_sealed_on_a_full_disk(start: Start, disk: Path, line: Callable[[int], bytes]) -> None:
    """Input stops while there is room for that; and neither of the two touches the reserve."""
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB", on_full="reject", routes=["r"])
    taken = flood(daemon, line)
    assert '"degraded_by": "segments"' in daemon.log
    eventually(lambda: len(list(daemon.root.glob("segments/*.wal"))) == 1)
    assert free_bytes(disk) >= 16 * MIB
    assert len(values(daemon.root)) == taken


def test_a_large_request_that_waits_for_room_is_reported_by_itself(start: Start, disk: Path) -> None:
    """Small ones are still taken, so one request is reported as held, and not all input."""
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB", routes=["r"])
    eventually(lambda: stat(daemon)["needed_bytes"] < 22 * MIB)  # the next segment is allocated by now
    needed = stat(daemon)["needed_bytes"]
    (disk / "filler").write_bytes(bytes(free_bytes(disk) - needed - 5 * MIB))
    begun = b"x" * (64 << 10)
    with Client(daemon.socket_path) as large:
        large.send(b"PUB r %d\n" % (6 * MIB) + begun)
        eventually(lambda: "room" in daemon.log or "disk full" in daemon.log)
        with Client(daemon.socket_path) as small:
            assert small.ask(b"PUB r 2\ny\n") == "OK 1 1"
        status = stat(daemon)
        assert (status["degraded"], status["degraded_by"], status["held_requests"]) == (False, "", 1)
        assert '"request waits for room"' in daemon.log
        assert '"disk full: input waits"' not in daemon.log
        (disk / "filler").unlink()
        large.send(b"x" * (6 * MIB - len(begun) - 1) + b"\n")
        assert large.reply() == "OK 2 2"
    assert stat(daemon)["held_requests"] == 0


def test_what_the_disk_has_room_for_again_is_not_reported_to_wait(start: Start, disk: Path) -> None:
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB", routes=["r"])
    fill(disk / "filler")
    eventually(lambda: stat(daemon)["degraded"])
    said = wald("status", "--root", daemon.root).stdout
    assert re.search(rb"the disk is full, so input waits; other files fill it; .* are free, .* are needed", said)
    with Client(daemon.socket_path) as client:
        client.publish("r", b"x\n")
        eventually(lambda: stat(daemon)["held_requests"] == 1)
        (disk / "filler").unlink()
        assert client.reply() == "OK 1 1"
    assert '"disk has room again"' in daemon.log
    assert '"request waits for room"' not in daemon.log


def test_large_requests_wait_for_each_other(start: Start, disk: Path) -> None:
    """Each gathers in a file first and is copied from there: admitted together, they filled the disk for good."""
    (disk / "filler").write_bytes(bytes(16 * MIB))
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="1MiB", routes=["r"])
    eventually(lambda: stat(daemon)["needed_bytes"] < 10 * MIB)  # the next segment is allocated by now
    length = 12 * MIB
    with Client(daemon.socket_path) as one, Client(daemon.socket_path) as other:
        one.send(b"PUB r %d\n" % length + bytes(length - 1024))
        eventually(lambda: stat(daemon)["connections"] >= 2)
        other.send(b"PUB r %d\n" % length + bytes(64 << 10))
        eventually(lambda: stat(daemon)["held_requests"] == 1)
        one.send(bytes(1023) + b"\n")
        assert one.reply() == "OK 1 1"
        assert stat(daemon)["head"] == 1


def test_sealing_takes_nothing_from_others(start: Start, disk: Path) -> None:
    """Other files fill the disk: cut segments stay readable, and are sealed once there is room."""
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB", routes=["r"])
    with Client(daemon.socket_path) as client:
        client.publish("r", random_line(0) + b"\n")
        assert client.reply().startswith("OK ")
    eventually(lambda: list(disk.glob("log/segments/spare-*")))  # the cut below needs it
    fill(disk / "filler")
    assert daemon.ask("CUT").startswith("OK cut")
    eventually(lambda: stat(daemon)["waits_to_seal"] == 1)
    assert stat(daemon)["degraded_by"] == "others"
    assert len(values(daemon.root)) == 1
    assert "sealing failed" not in daemon.log
    (disk / "filler").unlink()
    eventually(lambda: list(daemon.root.glob("segments/*.zst")))
    eventually(lambda: stat(daemon)["waits_to_seal"] == 0)


def test_a_disk_full_of_segments_is_no_reason_not_to_start(start: Start, disk: Path) -> None:
    """After a kill, with the rest of the disk used up by other files."""
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="1MiB", on_full="reject", routes=["r"])
    taken = flood(daemon, random_line)
    daemon.kill()
    (disk / "filler").write_bytes(bytes(free_bytes(disk) - (64 << 10)))
    daemon.start_again()
    assert stat(daemon)["degraded"]
    assert len(values(daemon.root)) == taken


def test_a_limit_of_the_size_of_a_file_is_not_called_a_full_disk(tmp_path: Path) -> None:
    """With `ulimit -f`, the segment cannot be allocated."""
    with Daemon(tmp_path / "log", prefix=["prlimit", "--fsize=1000000"], ready=False) as daemon:
        assert daemon.wait() == DiskFailure.exit_code
    assert "hint: ulimit -f unlimited, or LimitFSIZE=infinity in a unit" in daemon.log
    assert "df -h" not in daemon.log


@pytest.mark.parametrize("reserve", ["256MiB", "40MiB"])
def test_settings_that_the_disk_cannot_hold_are_made_smaller_and_reported(
    start: Start, disk: Path, reserve: str
) -> None:
    """Otherwise nothing could ever be written; the reported sizes cause no warning."""
    daemon = start(at=disk / "log", segment_max_bytes="64MiB", free_space_min=reserve, routes=["r"])
    with Client(daemon.socket_path) as client:
        client.publish("r", b"x\n")
        assert client.reply() == "OK 1 1"
    status = stat(daemon)
    assert status["segment_max_bytes"] < 64 * MIB
    assert "smaller sizes apply" in daemon.log
    hint = f"WALD_SEGMENT_MAX_BYTES={status['segment_max_bytes']} WALD_FREE_SPACE_MIN={status['free_space_min']}"
    assert hint in daemon.log
    assert daemon.stop() == 0
    daemon.env |= dict(setting.split("=") for setting in hint.split())
    before = len(daemon.log)
    daemon.start_again()
    assert "smaller" not in daemon.log[before:]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk that is soon full."""
    with small_file_system(tmp_path / "disk", 16 << 20) as disk:
        yield disk


def on(small: Path, start: Start, **options: Any) -> Daemon:
    """A daemon on that disk, with a route. ``Any``: they are handed on."""
    return start(at=small / "log", segment_max_bytes="64KiB", free_space_min="1MiB", **options, routes=["r"])


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


def test_without_room_a_payload_is_not_gathered_on_and_without_hope_of_room_refused(small: Path, start: Start) -> None:
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

        # One for which there will never be room would wait for ever.
        assert client.ask(b"PUB r %d\n" % (8 << 20) + bytes(8 << 20)).startswith("ERR too-large ")
        assert client.ask(b"PUB r 2\nx\n") == "OK 2 2"

    assert text(daemon.root, "r") == bytes(2 * SPOOLED - 1) + b"\nx\n"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        Row(16 * MIB, 64 * MIB, 8 * MIB, random=True),
        Row(24 * MIB, 4 * MIB, 256 * MIB, random=False),
        Row(32 * MIB, 4 * MIB, 24 * MIB, random=True),
        Row(64 * MIB, 16 * MIB, 8 * MIB, random=True),
    ],
    ids=str,
)
def test_a_full_disk_that_was_read_and_reclaimed_takes_input_again(row: Row) -> None:
    """After a kill, and again; no acknowledged record is lost, and the effective reserve stays free."""
    assert walk(row) == []
