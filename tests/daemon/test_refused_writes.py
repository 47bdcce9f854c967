"""The disk refuses a turn, as a quota does: the turn stays in hand, and requests that need no disk are answered."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import events, stat
from contents import assert_sound, values
from full_disk import fill, small_file_system
from running import Client, Daemon, eventually, readable
from tracing import traced

Start = Callable[..., Daemon]
REFUSED = "ERR full the disk refused a write; STAT reports the cause"


def refuses(daemon: Daemon) -> bool:
    return bool(json.loads(daemon.ask("STAT").removeprefix("OK "))["degraded_by"] == "refused")


def test_every_verb_is_answered_while_the_disk_refuses_a_turn(start: Start, root: Path, tmp_path: Path) -> None:
    """A connection gets its answers in order: those behind the refused records come after them."""
    daemon = start()
    daemon.ask("ROUTE ADD a")
    daemon.ask("ROUTE ADD r fifo")
    with Client(daemon.socket_path) as first, Client(daemon.socket_path) as second:
        assert first.ask(b"PUB a 2\nx\n") == "OK 1 1"
        with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC"):
            first.send(b"PUB a 4\ny\nz\nPING\nSTAT\nPUB a 2\nv\n")
            eventually(lambda: refuses(daemon))
            assert daemon.ask("PING") == "OK pong"
            assert daemon.ask("HEAD").startswith("OK seq=00000000000000000001 ")
            for refused in ("CUT", "ROUTE ADD b", "ROUTE RETIRE r"):
                assert daemon.ask(refused) == REFUSED
            second.publish("a", b"w\n")
            assert json.loads(daemon.ask("STAT").removeprefix("OK "))["held_requests"] >= 1
            (root / "routes/r/in").write_bytes(b"fifo\n")
            daemon.ask("PING")
            assert not readable(first.socket.fileno())
            assert not readable(second.socket.fileno())
        assert first.reply() == "OK 2 3"
        assert first.reply() == "OK pong"
        assert first.reply().startswith('OK {"head"')
        assert first.reply().startswith("OK ")
        assert second.reply().startswith("OK ")
        assert second.ask(b"ROUTE ADD b\n") == "OK added b"
        eventually(lambda: values(root, "r") == [b"fifo"])
    assert sorted(values(root, "a")) == [b"v", b"w", b"x", b"y", b"z"]
    assert daemon.stop() == 0
    assert_sound(root)


def test_a_connection_that_leaves_has_its_records_stored(start: Start, root: Path, tmp_path: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC"):
        with Client(daemon.socket_path) as client:
            client.publish("a", b"x\n")
            eventually(lambda: refuses(daemon))
        daemon.ask("PING")
    eventually(lambda: values(root) == [b"x"])
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\ny\n") == "OK 2 2"
    assert daemon.stop() == 0
    assert_sound(root)


@contextmanager
def refusing(daemon: Daemon, client: Client, tmp_path: Path) -> Iterator[None]:
    """Let the disk refuse the turn with a record of route a, until the block ends."""
    with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC"):
        client.publish("a", b"x\n")
        eventually(lambda: refuses(daemon))
        yield


def test_sighup_takes_settings_while_the_disk_refuses_a_turn(start: Start, root: Path, tmp_path: Path) -> None:
    """Routes need the disk, so they wait until it has taken the turn."""
    config = tmp_path / "wald.toml"
    config.write_text("[routes.a]\n")
    daemon = start("--config", config)
    with Client(daemon.socket_path) as client:
        with refusing(daemon, client, tmp_path):
            config.write_text('segment_max_bytes = "128KiB"\n[routes.a]\n[routes.b]\n')
            daemon.process.send_signal(signal.SIGHUP)
            eventually(lambda: events(daemon, "reloaded"))
            assert [event["applied"] for event in events(daemon, "reloaded")] == [["segment_max_bytes"]]
            assert len(events(daemon, "reload deferred")) == 1
            assert daemon.ask("PING") == "OK pong"
            assert refuses(daemon)
            assert not (root / "routes/b").exists()
        assert client.reply() == "OK 1 1"
    eventually(lambda: len(events(daemon, "reloaded")) == 2)
    assert events(daemon, "reloaded")[1]["applied"] == ["routes"]
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB b 2\ny\n") == "OK 2 2"
    assert daemon.stop() == 0
    assert_sound(root)


def test_sighup_ends_the_wait_for_a_disk_that_refuses_a_turn(start: Start, root: Path, tmp_path: Path) -> None:
    config = tmp_path / "wald.toml"
    config.write_text("[routes.a]\n")
    daemon = start("--config", config)
    with Client(daemon.socket_path) as client:
        with refusing(daemon, client, tmp_path):
            config.write_text('on_full = "reject"\n[routes.a]\n')
            daemon.process.send_signal(signal.SIGHUP)
            assert client.reply() == "ERR full the disk is full"
        eventually(lambda: client.ask(b"PUB a 2\ny\n") == "OK 1 1")
    assert values(root) == [b"y"]
    assert daemon.stop() == 0
    assert_sound(root)


@pytest.mark.slow
def test_a_connection_that_leaves_just_when_there_is_room_has_its_records_stored(start: Start, tmp_path: Path) -> None:
    """Its request joins a turn, which the disk refuses, after the poller has reported its end."""
    with small_file_system(tmp_path / "disk", 16 << 20) as disk:
        daemon = start(at=disk / "log", segment_max_bytes="64KiB", free_space_min="1MiB")
        daemon.ask("ROUTE ADD a")
        fill(disk / "filler")
        with Client(daemon.socket_path) as client:
            client.publish("a", b"x\n")
            eventually(lambda: stat(daemon)["held_requests"] == 1)
            with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC") as trace:
                daemon.process.send_signal(signal.SIGSTOP)
                eventually(lambda: any("stopped by SIGSTOP" in call for call in trace.calls))
                (disk / "filler").unlink()
                client.close()
                daemon.process.send_signal(signal.SIGCONT)
                eventually(lambda: refuses(daemon))
                assert daemon.ask("PING") == "OK pong"
        eventually(lambda: values(daemon.root) == [b"x"])
        assert daemon.stop() == 0, daemon.log
        assert_sound(daemon.root)


def test_a_daemon_stops_while_the_disk_refuses_a_turn(start: Start, root: Path, tmp_path: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
        with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC"):
            client.publish("a", b"y\n")
            eventually(lambda: refuses(daemon))
            assert daemon.stop() == 0
        assert client.reply() == ""
    assert values(root) == [b"x"]


def test_a_refusal_before_the_write_leaves_the_segment(start: Start, root: Path, tmp_path: Path) -> None:
    """The file of transfers cannot be made again: nothing has been written, so the segment is as good as before."""
    daemon = start()
    daemon.ask("ROUTE ADD r fifo")
    segments = sorted(path.name for path in (root / "segments").glob("*.wal"))
    (root / "transfers").unlink()
    with traced(daemon.process.pid, tmp_path / "trace", "inject=fallocate:error=ENOSPC") as trace:
        (root / "routes/r/in").write_bytes(b"line\n")
        eventually(lambda: sum("fallocate" in call for call in trace.calls) >= 3)
        assert refuses(daemon)
        assert sorted(path.name for path in (root / "segments").glob("*.wal")) == segments
    eventually(lambda: values(root) == [b"line"])
    assert "write failed" not in daemon.log
    assert daemon.stop() == 0
    assert_sound(root)
