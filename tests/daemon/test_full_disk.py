"""A full disk never blocks the daemon for ever: it starts, seals, and leaves the reserve to other programs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import stat
from contents import assert_sound, values
from full_disk import fill, small_file_system
from running import Client, Daemon, eventually, wald

from wald.errors import DiskFailure
from wald.files.disk import free_bytes
from wald.setting_types import MIB

Start = Callable[..., Daemon]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    with small_file_system(tmp_path / "disk", 64 * MIB) as path:
        yield path


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
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB", on_full="reject")
    daemon.ask("ROUTE ADD r")
    taken = flood(daemon, line)
    assert '"degraded_by": "segments"' in daemon.log
    eventually(lambda: len(list(daemon.root.glob("segments/*.wal"))) == 1)
    assert free_bytes(disk) >= 16 * MIB
    assert len(values(daemon.root)) == taken
    assert_sound(daemon.root)


def test_a_large_request_that_waits_for_room_is_reported_by_itself(start: Start, disk: Path) -> None:
    """Small ones are still taken, so one request is reported as held, and not all input."""
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB")
    daemon.ask("ROUTE ADD r")
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
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB")
    daemon.ask("ROUTE ADD r")
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
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="1MiB")
    daemon.ask("ROUTE ADD r")
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
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="16MiB")
    daemon.ask("ROUTE ADD r")
    with Client(daemon.socket_path) as client:
        client.publish("r", random_line(0) + b"\n")
        assert client.reply().startswith("OK ")
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
    daemon = start(at=disk / "log", segment_max_bytes="4MiB", free_space_min="1MiB", on_full="reject")
    daemon.ask("ROUTE ADD r")
    taken = flood(daemon, random_line)
    daemon.kill()
    (disk / "filler").write_bytes(bytes(free_bytes(disk) - (64 << 10)))
    daemon.start_again()
    assert stat(daemon)["degraded"]
    assert len(values(daemon.root)) == taken
    assert daemon.stop() == 0


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
    daemon = start(at=disk / "log", segment_max_bytes="64MiB", free_space_min=reserve)
    daemon.ask("ROUTE ADD r")
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
