"""Notifications to systemd, and descriptors that it stores and passes back."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from contents import assert_sound, records, values
from manager import manager_at
from running import Daemon, eventually
from tracing import traced

from wald.systemd import Systemd

Start = Callable[..., Daemon]


def test_systemd_hears_of_every_change(start: Start, root: Path, tmp_path: Path) -> None:
    """Ready once it answers, reloading and ready again, stopping; and the watchdog, idle or not."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}, ready=False)
        manager.hear("READY=1")
        assert daemon.ask("PING") == "OK pong"
        assert manager.messages == ["READY=1"]
        for _ in range(3):
            manager.hear("WATCHDOG=1")
        daemon.process.send_signal(signal.SIGHUP)
        microseconds = manager.hear("RELOADING=1").partition("MONOTONIC_USEC=")[2]
        assert int(microseconds) > 0
        manager.hear("READY=1")
        daemon.process.send_signal(signal.SIGTERM)
        manager.hear("STOPPING=1")
        assert daemon.wait() == 0


def test_a_watchdog_for_another_process_is_not_fed(start: Start) -> None:
    """WATCHDOG_PID names the process that it is for; an abstract address is one too."""
    address = f"@wald-test-{os.getpid()}"
    with manager_at(address) as manager:
        env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
        daemon = start(env=env)
        daemon.process.send_signal(signal.SIGHUP)
        manager.hear("RELOADING=1")
        assert daemon.stop() == 0
        manager.hear("STOPPING=1")

    assert "WATCHDOG=1" not in manager.messages


def test_what_is_in_a_pipe_outlives_the_daemon_in_systemds_hands(start: Start, root: Path, tmp_path: Path) -> None:
    """It is given each FIFO under its route's name; no other process holds them when the daemon is killed."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address})
        daemon.ask("ROUTE ADD r fifo")
        message = manager.hear("FDSTORE=1")
        assert message.splitlines() == ["FDSTORE=1", "FDNAME=r", "FDPOLL=0"]
        with (root / "routes/r/in").open("wb", buffering=0) as fifo:
            fifo.write(b"one\nunfinished")
            eventually(lambda: values(root) == [b"one"])
        daemon.kill()
        os.write(manager.descriptors["r"], b" no more\ntwo\n")
        daemon.start_again()
        eventually(lambda: values(root) == [b"one", b"unfinished no more", b"two"])


def test_systemd_lets_go_of_a_retired_fifo(start: Start, root: Path, tmp_path: Path) -> None:
    """And is given it again when the route is taken back."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address})
        daemon.ask("ROUTE ADD r fifo")
        manager.hear("FDSTORE=1")
        daemon.ask("ROUTE RETIRE r")
        assert manager.hear("FDSTOREREMOVE=1").splitlines()[1:] == ["FDNAME=r"]
        os.close(manager.descriptors.pop("r"))
        daemon.ask("ROUTE ADD r")
        manager.hear("FDSTORE=1")


def test_a_notification_that_lacks_a_descriptor_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        systemd = Systemd({"NOTIFY_SOCKET": address})
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", refuse)
            systemd.alive()
        systemd.stopping()
        assert manager.hear("STOPPING=1")
        assert manager.messages == ["STOPPING=1"]


_HAND_OVER = """
import os, sys
given = os.open(sys.argv[1], os.O_RDWR)
os.write(given, b"before the start\\nunfinished")
os.dup2(given, 3)
os.set_inheritable(3, True)  # it may have been 3 already
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="r")
os.execv(sys.argv[2], sys.argv[2:])
"""


def links(pid: int, path: Path) -> list[int]:
    """The descriptors that a process has of a file."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in between
            if os.readlink(entry) == str(path):
                found.append(int(entry.name))
    return found


def test_only_the_end_of_stdin_is_a_stop(start: Start, root: Path) -> None:
    """A FIFO passed for reading only ends too, after the daemon has read its bytes."""
    daemon = start()
    daemon.ask("ROUTE ADD r fifo")
    assert daemon.stop() == 0
    reading = _HAND_OVER.replace("dup2(given, 3)", "dup2(os.open(sys.argv[1], os.O_RDONLY), 3)")
    daemon.spawn(sys.executable, "-c", reading, str(root / "routes/r/in"))
    daemon.await_ready()
    eventually(lambda: [record.terminated for record in records(root)] == [True, False])

    assert daemon.ask("PING") == "OK pong"
    assert daemon.stop() == 0


def test_a_fifo_that_systemd_hands_over_is_read_on(start: Start, root: Path) -> None:
    """The descriptor itself, with the pipe's contents; no other process has it open."""
    daemon = start()
    daemon.ask("ROUTE ADD r fifo")
    assert daemon.stop() == 0
    fifo = root / "routes/r/in"
    daemon.spawn(sys.executable, "-c", _HAND_OVER, str(fifo))
    daemon.await_ready()
    eventually(lambda: values(root) == [b"before the start"])

    assert links(daemon.process.pid, fifo) == [3]
    with fifo.open("wb", buffering=0) as writer:
        writer.write(b" no more\n")
        eventually(lambda: values(root) == [b"before the start", b"unfinished no more"])
    assert daemon.stop() == 0
    assert_sound(root)


def test_the_watchdog_is_fed_by_progress(start: Start, root: Path, tmp_path: Path) -> None:
    """A loop that turns while input stands still in a pipe is not alive; it is again once it takes the input."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"})
        daemon.ask("ROUTE ADD r fifo")
        manager.hear("WATCHDOG=1")
        with (root / "routes/r/in").open("wb", buffering=0) as fifo:
            with traced(daemon.process.pid, tmp_path / "trace", "trace=tee", "inject=tee:error=EAGAIN"):
                fifo.write(b"one\n")
                assert manager.is_silent(seconds=1.0)
                assert daemon.ask("PING") == "OK pong"
            fifo.write(b"two\n")
            manager.hear("WATCHDOG=1")
        assert values(root) == [b"one", b"two"]
