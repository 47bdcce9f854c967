"""A listening socket and FIFOs that systemd passes to a start, as named descriptors."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from contents import assert_sound, values
from manager import manager_at
from running import Client, Daemon, eventually

Start = Callable[..., Daemon]

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
    daemon = start(pass_fds=descriptors, **options)
    daemon.ask("ROUTE ADD r fifo")
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
    """Connections wait in it before the start and after the stop; it keeps its inode and its mode."""
    with stopped_with_socket(start) as (daemon, prefix):
        before = daemon.socket_path.lstat()
        for turn in (b"first\n", b"second\n"):
            with Client(daemon.socket_path) as early:
                early.publish("r", turn)
                daemon.spawn(*prefix)
                assert early.reply().startswith("OK ")
            assert daemon.stop() == 0
        after = daemon.socket_path.lstat()

    assert (after.st_ino, stat.S_IMODE(after.st_mode)) == (before.st_ino, 0o600)
    assert values(root) == [b"first", b"second"]
    assert_sound(root)


def test_a_removed_listening_socket_is_reported_and_left_to_systemd(start: Start) -> None:
    with stopped_with_socket(start) as (daemon, prefix):
        daemon.spawn(*prefix)
        daemon.await_ready()
        with Client(daemon.socket_path) as client:
            daemon.socket_path.unlink()
            eventually(lambda: "the socket that systemd created was removed" in daemon.log)
            assert client.ask(b"PING\n").startswith("OK")
        assert "systemctl restart wald.socket" in daemon.log
        assert not daemon.socket_path.exists()
        assert daemon.stop() == 0


def test_a_killed_daemon_leaves_its_callers_in_the_queue(start: Start, root: Path) -> None:
    with stopped_with_socket(start) as (daemon, prefix):
        daemon.spawn(*prefix)
        daemon.await_ready()
        daemon.kill()
        with Client(daemon.socket_path) as waiting:
            waiting.publish("r", b"one\n")
            daemon.spawn(*prefix)
            assert waiting.reply().startswith("OK ")
            assert daemon.stop() == 0


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


@pytest.mark.parametrize("kinds", [["listener", "listener"], ["datagram"], ["unbound"]])
def test_other_sockets_are_refused(start: Start, tmp_path: Path, kinds: list[str]) -> None:
    """Their clients would never get an answer. Nothing is written."""
    made = [
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM) for kind in kinds
    ]
    for number, (kind, each) in enumerate(zip(kinds, made, strict=True)):
        if kind == "listener":
            each.bind(str(tmp_path / f"{number}.sock"))
            each.listen()
    daemon = stopped(start, *(each.fileno() for each in made))
    epoch = (daemon.root / "lock").read_bytes()
    daemon.spawn(*giving(**{str(number): each.fileno() for number, each in enumerate(made)}))

    assert daemon.wait() == 2
    assert "wald accepts only one listening unix socket" in daemon.log
    assert (daemon.root / "lock").read_bytes() == epoch
    for each in made:
        each.close()


def test_a_fifo_that_was_replaced_meanwhile_is_read_to_its_end(start: Start, root: Path) -> None:
    """systemd still has the one that was at the path before; an unfinished line in it is that FIFO's."""
    daemon = start()
    daemon.ask("ROUTE ADD r fifo")
    fifo = root / "routes/r/in"
    kept = os.open(fifo, os.O_RDWR)
    os.write(kept, b"x" * (700 << 10))  # a line that the log has the beginning of
    eventually(lambda: daemon.ask("HEAD").split()[1] != "0")
    daemon.kill()
    daemon = start(pass_fds=[kept], ready=False, anew=True)
    daemon.kill()

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
    assert daemon.stop() == 0
    os.close(new)
    assert_sound(root)


@pytest.mark.parametrize("in_its_place", ["nothing", "what cannot be opened"])
def test_a_fifo_that_is_gone_is_read_to_its_end(start: Start, root: Path, in_its_place: str) -> None:
    """It was removed while no daemon ran, and only systemd has its bytes."""
    daemon = start()
    daemon.ask("ROUTE ADD r fifo mode=0640")
    fifo = root / "routes/r/in"
    kept = os.open(fifo, os.O_RDWR)
    daemon.kill()
    daemon = start(pass_fds=[kept], ready=False, anew=True)
    daemon.kill()

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
    assert daemon.stop() == 0
    assert_sound(root)


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
    assert daemon.stop() == 0


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
