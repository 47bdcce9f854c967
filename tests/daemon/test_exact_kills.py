"""SIGKILL at one exact system call after the other, while other processes hold the pipes: every line once, in order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import Client, Daemon, eventually
from tracing import strace, traced

Start = Callable[..., Daemon]


class Pipe:
    """A FIFO that the test holds open like a service manager, and the bytes written to it."""

    def __init__(self, daemon: Daemon, route: str) -> None:
        assert daemon.ask(f"ROUTE ADD {route} fifo") == f"OK added {route}"
        self.route = route
        self.root = daemon.root
        self.descriptor = os.open(daemon.root / "routes" / route / "in", os.O_RDWR)
        self.lines: list[bytes] = []

    def write(self, *lines: bytes) -> None:
        os.write(self.descriptor, b"".join(line + b"\n" for line in lines))
        self.lines += lines

    def is_read(self) -> bool:
        return values(self.root, self.route) == self.lines


def kill_at(daemon: Daemon, path: Path, calls: str, number: int, work: Callable[[], None]) -> None:
    """Do ``work`` with a daemon that is killed when it enters the ``number``-th of ``calls``, then start it again."""
    with traced(daemon.process.pid, path, f"trace={calls}", f"inject={calls}:signal=SIGKILL:when={number}"):
        work()
        eventually(lambda: not daemon.wait_or_ready())  # if that was not enough, asking makes it call more
    assert daemon.wait() == -9
    daemon.start_again()


@pytest.mark.slow
def test_every_call_of_a_turn_that_reads_pipes(start: Start, root: Path, tmp_path: Path) -> None:
    """Two pipes in one round; all lines differ, so that a lost or repeated one is noticed."""
    daemon = start()
    pipes = [Pipe(daemon, "a"), Pipe(daemon, "b")]
    for number in range(1, 15):

        def work(number: int = number) -> None:
            for line in range(3):
                pipes[0].write(b"%d.%d" % (number, line))
                pipes[1].write(b"tick")

        kill_at(daemon, tmp_path / "trace", "all", number, work)
        eventually(lambda: all(pipe.is_read() for pipe in pipes))
    assert_sound(root)


@pytest.mark.slow
def test_every_call_of_a_turn_inside_a_long_line(start: Start, root: Path, tmp_path: Path) -> None:
    """Its pieces are taken one by one."""
    daemon = start()
    pipe = Pipe(daemon, "a")
    for number in range(1, 10):

        def work(number: int = number) -> None:
            pipe.lines.append(b"%d" % (number % 10) * (600 << 10))
            os.write(pipe.descriptor, pipe.lines[-1])  # more than a chunk: at least two pieces

        kill_at(daemon, tmp_path / "trace", "all", number, work)
        os.write(pipe.descriptor, b"\n")
        eventually(pipe.is_read)
    assert_sound(root)


@pytest.mark.parametrize(
    ("calls", "number"),
    [("tee", 1), ("readv", 1), ("readv", 2), ("fdatasync", 2), ("rename", 2)],
)
def test_a_start_that_finishes_a_take_may_be_killed_too(
    start: Start, root: Path, tmp_path: Path, calls: str, number: int
) -> None:
    """The last life left a batch in the log whose bytes are still in the pipe."""
    daemon = start()
    pipe = Pipe(daemon, "a")
    pipe.write(b"before")
    eventually(pipe.is_read)
    with traced(daemon.process.pid, tmp_path / "first", "trace=readv", "inject=readv:signal=SIGKILL:when=2"):
        pipe.write(b"tick", b"tick")
        assert daemon.wait() == -9
    injected = f"inject={calls}:signal=SIGKILL:when={number}"
    daemon.spawn(strace(), "-D", "-o", str(tmp_path / "second"), "-e", f"trace={calls}", "-e", injected)
    if daemon.wait_or_ready():
        daemon.kill()  # it never came to that call
    pipe.write(b"tick")
    daemon.start_again()

    eventually(pipe.is_read)
    assert_sound(root)


@pytest.mark.parametrize("calls", ["/pwritev", "fdatasync", "sendto"])
def test_acknowledged_means_in_the_log(start: Start, root: Path, tmp_path: Path, calls: str) -> None:
    """Before the write, before the sync, before the reply: a producer that asks again gets each record once."""
    daemon = start()
    daemon.ask("ROUTE ADD a")
    for number in (1, 2):
        request = b"PUB a 4 pid=7 pseq=%d\n%03d\n" % (number, number)

        def work(request: bytes = request) -> None:
            with Client(daemon.socket_path) as client:
                client.send(request)
                assert client.reply() == ""

        kill_at(daemon, tmp_path / "trace", calls, 1, work)
        with Client(daemon.socket_path) as client:
            assert client.ask(request) == f"OK {number} {number}"

    assert values(root) == [b"001", b"002"]
    assert_sound(root)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["rename", "ftruncate", "fsync", "fdatasync"])
def test_every_call_of_a_cut(start: Start, root: Path, tmp_path: Path, calls: str) -> None:
    daemon = start()
    pipe = Pipe(daemon, "a")
    for number in (1, 2, 3):
        pipe.write(b"%d" % number)
        eventually(pipe.is_read)
        expressions = (f"trace={calls}", f"inject={calls}:signal=SIGKILL:when={number}")
        with traced(daemon.process.pid, tmp_path / "trace", *expressions), Client(daemon.socket_path) as client:
            client.send(b"CUT\n")
            if client.reply():
                daemon.kill()  # there are fewer such calls in a cut
            daemon.wait()
        daemon.start_again()
    assert pipe.is_read()
    assert_sound(root)
