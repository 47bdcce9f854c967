"""Descriptors that systemd passes, stores and passes back, and notifications to it."""

import errno
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from contents import records, values
from manager import manager_at
from running import Client, Daemon, Start, eventually
from tracing import traced

from wald.systemd import Systemd

_GIVING = """
import fcntl, os, sys
given = list(map(int, sys.argv[2].split(",")))
numbers = [fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in given]
for number in given:
    os.close(number)
for place, number in enumerate(numbers, 3):
    os.dup2(number, place)
    os.close(number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(numbers)), LISTEN_FDNAMES=sys.argv[1])
os.execv(sys.argv[3], sys.argv[3:])
"""


def giving(**given: int) -> list[str]:
    """The command before another that it hands descriptors over to, as systemd does."""
    return [sys.executable, "-c", _GIVING, ":".join(given), ",".join(map(str, given.values()))]


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen()
        yield listener


def stopped(start: Start, *descriptors: int, **options: object) -> Daemon:
    """A daemon that has made its root and a route with a FIFO, and will get ``descriptors`` at its next start."""
    daemon = start(pass_fds=descriptors, **options, routes=["r fifo"])
    assert daemon.stop() == 0
    return daemon


@contextmanager
def stopped_with_socket(start: Start) -> Iterator[tuple[Daemon, list[str]]]:
    """Yield a daemon whose socket listens, and the command before its next start that hands the socket over."""
    with socket.socket(socket.AF_UNIX) as listener:
        daemon = stopped(start, listener.fileno())
        listener.bind(os.fspath(daemon.socket_path))
        daemon.socket_path.chmod(0o600)
        listener.listen()
        yield daemon, giving(**{"wald.socket": listener.fileno()})


def test_the_listening_socket_is_used_and_left_in_its_place(start: Start, root: Path, tmp_path: Path) -> None:
    """Connections wait in it before a start and after a kill; it keeps its inode and its mode."""
    with stopped_with_socket(start) as (daemon, prefix):
        before = daemon.socket_path.lstat()
        for line, end in ((b"first\n", daemon.kill), (b"second\n", daemon.stop)):
            with Client(daemon.socket_path) as early:
                early.publish("r", line)
                daemon.spawn(*prefix)
                assert early.reply().startswith("OK ")
            end()
        after = daemon.socket_path.lstat()
        assert (after.st_ino, stat.S_IMODE(after.st_mode), daemon.process.returncode) == (before.st_ino, 0o600, 0)

        # A removed socket is reported and left to systemd.
        daemon.spawn(*prefix)
        daemon.await_ready()
        with Client(daemon.socket_path) as client:
            daemon.socket_path.unlink()
            eventually(lambda: "the socket that systemd created was removed" in daemon.log)
            assert client.ask(b"PING\n").startswith("OK")
        assert "systemctl restart wald.socket" in daemon.log
        assert not daemon.socket_path.exists()
        assert daemon.stop() == 0
    assert values(root) == [b"first", b"second"]


def test_a_log_is_made_around_the_socket_that_systemd_has_made(root: Path) -> None:
    root.mkdir()
    with listening_at(root / "wald.sock") as listener:
        prefix = giving(**{"wald.socket": listener.fileno()})
        with Daemon(root, pass_fds=[listener.fileno()], prefix=prefix) as daemon:
            assert daemon.stop() == 0


def test_a_socket_that_systemd_has_made_anew_is_left_in_its_place(start: Start, root: Path) -> None:
    """systemd removes the socket at its path, even if a manually started daemon listens there."""
    daemon = start()
    daemon.socket_path.unlink()
    with listening_at(daemon.socket_path):
        before = daemon.socket_path.lstat().st_ino
        assert daemon.stop() == 0
        assert daemon.socket_path.lstat().st_ino == before


def test_other_sockets_are_refused(start: Start, tmp_path: Path) -> None:
    """Their clients would never get an answer. Nothing is written."""
    made = [socket.socket(socket.AF_UNIX, kind) for kind in (*[socket.SOCK_STREAM] * 3, socket.SOCK_DGRAM)]
    one, other, unbound, datagram = made
    for number, each in enumerate((one, other)):
        each.bind(str(tmp_path / f"{number}.sock"))
        each.listen()
    daemon = stopped(start, *(each.fileno() for each in made))
    epoch = (daemon.root / "lock").read_bytes()
    for given in ([one, other], [datagram], [unbound]):
        daemon.spawn(*giving(**{str(number): each.fileno() for number, each in enumerate(given)}))
        assert daemon.wait() == 2
        assert (daemon.root / "lock").read_bytes() == epoch
    assert daemon.log.count("wald accepts only one listening unix socket") == 3
    for each in made:
        each.close()


def test_a_fifo_that_was_replaced_meanwhile_is_read_to_its_end(start: Start, root: Path) -> None:
    """systemd still has the one that was at the path before; an unfinished line in it is that FIFO's."""
    daemon = start(routes=["r fifo"])
    fifo = root / "routes/r/in"
    kept = os.open(fifo, os.O_RDWR)
    os.write(kept, b"x" * (700 << 10))  # a line that the log has the beginning of
    eventually(lambda: daemon.ask("HEAD").split()[1] != "0")
    daemon.kill()
    daemon.pass_fds = (kept,)

    os.write(kept, b" old\nalso old")
    fifo.unlink()
    os.mkfifo(fifo)
    new = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(new, b"new\n")
    daemon.spawn(*giving(r=kept))
    daemon.await_ready()
    os.close(kept)

    eventually(lambda: len(values(root)) == 3)
    assert sorted(len(value) for value in values(root)) == [3, 8, (700 << 10) + 4]
    os.close(new)


@pytest.mark.parametrize("in_its_place", ["nothing", "what cannot be opened"])
def test_a_fifo_that_is_gone_is_read_to_its_end(start: Start, root: Path, in_its_place: str) -> None:
    """It was removed while no daemon ran, and only systemd has its bytes."""
    daemon = start(routes=["r fifo mode=0640"])
    fifo = root / "routes/r/in"
    kept = os.open(fifo, os.O_RDWR)
    daemon.kill()
    daemon.pass_fds = (kept,)

    os.write(kept, b"waited\n")
    fifo.unlink()
    if in_its_place != "nothing":
        other = root / "routes/q"
        other.mkdir()
        os.mkfifo(other / "in")
        fifo.symlink_to(other / "in")  # the FIFO of another route
    daemon.spawn(*giving(r=kept))
    daemon.await_ready()
    os.close(kept)

    eventually(lambda: values(root) == [b"waited"])
    if in_its_place == "nothing":
        assert stat.S_IMODE(fifo.stat().st_mode) == 0o640
        with fifo.open("wb") as writer:
            writer.write(b"after\n")
        eventually(lambda: values(root) == [b"waited", b"after"])


def test_a_fifo_of_no_route_is_reported_and_given_back(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other")
    given = os.open(tmp_path / "other", os.O_RDWR)
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = stopped(start, given, env={"NOTIFY_SOCKET": address})
        daemon.spawn(*giving(other=given))
        assert manager.hear("FDSTOREREMOVE=1").splitlines()[1:] == ["FDNAME=other"]
        manager.hear("READY=1")
    os.close(given)

    assert f"{tmp_path / 'other'}: closed: systemd passed it as 'other'" in daemon.log
    with pytest.raises(OSError) as none_reads:  # noqa: PT011  (the number is what is judged)
        os.open(tmp_path / "other", os.O_WRONLY | os.O_NONBLOCK)
    assert none_reads.value.errno == errno.ENXIO


def test_settings_of_the_socket_that_do_not_apply_are_reported(start: Start, root: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        daemon = stopped(start, listener.fileno())
        daemon.env = {**daemon.env, "WALD_SOCKET": str(tmp_path / "other.sock"), "WALD_SOCKET_MODE": "0666"}
        listener.bind(os.fspath(root / "wald.sock"))
        listener.listen()
        daemon.spawn(*giving(**{"wald.socket": listener.fileno()}))
        daemon.await_ready()
        assert daemon.stop() == 0

    (line,) = [line for line in daemon.log.splitlines() if "some settings have no effect" in line]
    assert json.loads(line)["unused"] == {"socket": str(tmp_path / "other.sock"), "socket_mode": "0666"}


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
    """It is given each FIFO under its route's name, and lets go of it while the route is retired."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address}, routes=["r fifo"])
        message = manager.hear("FDSTORE=1")
        assert message.splitlines() == ["FDSTORE=1", "FDNAME=r", "FDPOLL=0"]
        with (root / "routes/r/in").open("wb", buffering=0) as fifo:
            fifo.write(b"one\nunfinished")
            eventually(lambda: values(root) == [b"one"])
        daemon.kill()
        os.write(manager.descriptors["r"], b" no more\ntwo\n")
        daemon.start_again()
        eventually(lambda: values(root) == [b"one", b"unfinished no more", b"two"])
        daemon.ask("ROUTE RETIRE r")
        assert manager.hear("FDSTOREREMOVE=1").splitlines()[1:] == ["FDNAME=r"]
        os.close(manager.descriptors.pop("r"))
        manager.messages.clear()
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


def handed_over(start: Start, fifo: Path, flags: int) -> Daemon:
    """Start a daemon that gets its FIFO, with a line and a half, from systemd; no other process has it open."""
    daemon = start(routes=["r fifo"])
    assert daemon.stop() == 0
    filled = os.open(fifo, os.O_RDWR)
    os.write(filled, b"before the start\nunfinished")
    given = os.open(fifo, flags)
    os.close(filled)
    daemon.pass_fds = (given,)
    daemon.spawn(*giving(r=given))
    os.close(given)
    daemon.await_ready()
    return daemon


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
    daemon = handed_over(start, root / "routes/r/in", os.O_RDONLY)
    eventually(lambda: [record.terminated for record in records(root)] == [True, False])

    assert daemon.ask("PING") == "OK pong"


def test_a_fifo_that_systemd_hands_over_is_read_on(start: Start, root: Path) -> None:
    """The descriptor itself, with the pipe's contents."""
    fifo = root / "routes/r/in"
    daemon = handed_over(start, fifo, os.O_RDWR)
    eventually(lambda: values(root) == [b"before the start"])

    assert links(daemon.process.pid, fifo) == [3]
    with fifo.open("wb", buffering=0) as writer:
        writer.write(b" no more\n")
        eventually(lambda: values(root) == [b"before the start", b"unfinished no more"])


def test_the_watchdog_is_fed_by_progress(start: Start, root: Path, tmp_path: Path) -> None:
    """A loop that turns while input stands still in a pipe is not alive; it is again once it takes the input."""
    address = str(tmp_path / "notify")
    with manager_at(address) as manager:
        daemon = start(env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "400000"}, routes=["r fifo"])
        manager.hear("WATCHDOG=1")
        with (root / "routes/r/in").open("wb", buffering=0) as fifo:
            with traced(daemon.process.pid, tmp_path / "trace", "trace=tee", "inject=tee:error=EAGAIN"):
                fifo.write(b"one\n")
                assert manager.is_silent(seconds=1.0)
                assert daemon.ask("PING") == "OK pong"
            fifo.write(b"two\n")
            manager.hear("WATCHDOG=1")
        assert values(root) == [b"one", b"two"]
