"""Background sealing: each error is reported, counted and retried, and connections cannot take its descriptors."""

import shutil
import socket
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack
from logging import DEBUG
from pathlib import Path
from typing import NoReturn

import pytest
import structlog
from asking import SPOOLED
from endpoint import free_address
from full_disk import small_file_system
from logs import Built
from running import TIMEOUT_SECONDS, Client, Start, eventually

from wald.daemon.background import Background
from wald.daemon.metrics import Metrics
from wald.files.disk import Disk
from wald.writing.disk_budget import DiskBudget, Sizes


class Reported(list[dict[str, object]]):
    """Recorder of the thread's reports, the first of which may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def write(self, _: object, __: str, event: MutableMapping[str, object]) -> NoReturn:
        self.append(dict(event))
        if self.fails and len(self) == 1:
            raise BrokenPipeError("the journal is closed")
        raise structlog.DropEvent

    def events(self) -> list[object]:
        return [each["event"] for each in self]


def sealing(built: Built, counted: Metrics, reported: Reported) -> Background:
    room = DiskBudget(built.root.segments, Sizes(segment_bytes=1 << 20, reserve_bytes=0, payload_bytes=1 << 20))
    filtering = structlog.make_filtering_bound_logger(DEBUG)
    journal = structlog.wrap_logger(None, [reported.write], filtering)
    return Background(built.root, built.disk, built.ledger, built.writer, room, counted, journal, 3)


@pytest.mark.parametrize(("disk_bytes", "held"), [(4 << 20, True), (32 << 20, False)])
def test_the_room_to_seal_is_held_first_where_there_is_not_plenty(tmp_path: Path, disk_bytes: int, held: bool) -> None:
    reserved = []

    class Watching(Disk):
        def reserve(self, descriptor: int, offset: int, length: int) -> None:
            reserved.append(length)

    with small_file_system(tmp_path / "disk", disk_bytes) as place:
        built = Built(place / "log", segment_max_bytes=1 << 20, disk=Watching())
        built.lines("web", [b"one"], cut=True)
        counted = Metrics()
        background = sealing(built, counted, Reported())
        try:
            eventually(lambda: counted.sealed == 1)
        finally:
            background.stop()
            built.crash()
        assert bool(reserved) == held


def test_no_error_ends_the_thread(tmp_path: Path) -> None:
    """Neither when the directory cannot be listed, nor when that cannot be reported."""
    built = Built(tmp_path / "log")
    built.lines("web", [b"one"], cut=True)
    away = tmp_path / "away"
    built.root.segments.rename(away)
    reported, counted = Reported(fails=True), Metrics()
    background = sealing(built, counted, reported)
    try:
        eventually(lambda: reported)
        assert reported.events() == ["sealing failed"]
        assert "No such file" in str(reported[0]["reason"])
        eventually(lambda: counted.seal_failures == 1)
        assert counted.seal_waits_since > 0
        background.wake()
        eventually(lambda: counted.seal_failures == 2)
        assert len(reported) == 1  # once, however often it is tried
        away.rename(built.root.segments)
        background.wake()
        eventually(lambda: "sealed" in reported.events())
        eventually(lambda: counted.seal_waits_since == 0)
    finally:
        background.stop()
    assert counted.sealed == 1


def test_a_file_for_the_next_cut_is_prepared_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut may have used it while a segment was sealed, and no event reports that there is room again."""
    built = Built(tmp_path / "log")
    built.lines("web", [b"one"], cut=True)
    results = [True, False, True]  # the last first: at the start, after sealing, and a second later
    monkeypatch.setattr(built.writer, "prepare_spare", results.pop)
    background = sealing(built, Metrics(), Reported())
    try:
        eventually(lambda: not results, timeout=30)
    finally:
        background.stop()


def test_a_segment_that_cannot_be_sealed_holds_up_no_other(tmp_path: Path) -> None:
    """It is reported once, counted each time, and stays the one that waits."""
    built = Built(tmp_path / "log")
    for number in range(3):
        built.lines("web", [b"%d" % number], cut=True)
    first = min(built.root.segments.glob("*.wal"))
    first.write_bytes(b"\0" * 64 + first.read_bytes()[64:])
    reported, counted = Reported(), Metrics()
    background = sealing(built, counted, reported)
    try:
        eventually(lambda: counted.sealed == 2)
        eventually(lambda: counted.seal_failures == 1)
        background.wake()
        eventually(lambda: counted.seal_failures == 2)
    finally:
        background.stop()
    assert reported.events() == ["sealing failed", "sealed", "sealed"]
    assert counted.seal_waits_since > 0


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_connections_leave_the_log_the_descriptors_it_needs(start: Start, root: Path) -> None:
    """The daemon uses all that it may; with few, it refuses connections, and commits, cuts and sealing continue."""
    daemon = start(ready=False)
    daemon.kill()
    daemon.spawn("prlimit", "--nofile=64:80")
    daemon.await_ready()
    limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
    assert next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")) == ["80"] * 2
    assert daemon.ask("ROUTE ADD r") == "OK added r"
    with ExitStack() as closing:
        clients, answers = [], []
        for _ in range(100):
            clients.append(client := closing.enter_context(Client(daemon.socket_path)))
            try:
                answers.append(client.ask(b"PING\n"))
            except (BrokenPipeError, ConnectionResetError):
                answers.append(client.reply())
        assert answers[0] == "OK pong"
        assert answers[-1].startswith("ERR busy ")
        for client in (clients[1], clients[2]):
            client.publish("r", bytes(SPOOLED))
            assert client.reply() == "ERR failed too few file descriptors are left"
        assert {answer[:8] for answer in answers} == {"OK pong", "ERR busy"}
        for number in range(1, 5):
            assert clients[0].ask(b"PUB r 2\nx\n") == f"OK {number} {number}"
            assert clients[0].ask(b"CUT\n") == f"OK cut {number + 1}"
        eventually(lambda: len(list(root.glob("segments/*.zst"))) == 4)
        assert daemon.log.count("connection refused") == 1
    daemon.await_ready()


@pytest.mark.slow
def test_a_scraper_that_is_slow_is_hung_up_on(start: Start) -> None:
    """Byte by byte, each in time: a question may take so long and no longer."""
    address = free_address()
    start(metrics=address)
    host, _, port = address.partition(":")
    done = threading.Event()
    with socket.create_connection((host, int(port))) as slow:
        slow.settimeout(TIMEOUT_SECONDS)

        def drip() -> None:
            while not done.wait(0.2):
                try:
                    slow.sendall(b"G")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert slow.recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            done.set()
            dripping.join()
