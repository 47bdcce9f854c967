"""SIGKILL at exact system calls, and FIFOs that are read late: every line once, in order."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import Client, Daemon, Start, eventually, run, sidecar
from tracing import strace, traced
from users import OWNER, daemon_of, needs_root

import wald
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import Kind


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


@pytest.mark.parametrize(("calls", "number"), [("tee", 1), ("readv", 1), ("readv", 2), ("fdatasync", 2), ("rename", 2)])
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


@pytest.mark.parametrize("calls", ["/pwritev", "fdatasync", "sendto"])
def test_acknowledged_means_in_the_log(start: Start, root: Path, tmp_path: Path, calls: str) -> None:
    """Before the write, before the sync, before the reply: a producer that asks again gets each record once."""
    daemon = start(routes=["a"])
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


LINES = [b"before", b"tick", b"tick"]


@dataclass
class Killed:
    """A daemon that was killed when the last two of LINES were durable and still in their FIFO.

    Attributes:
        held: the FIFO, open for writing.
    """

    daemon: Daemon
    fifo: Path
    held: int

    def write(self, *lines: bytes) -> None:
        os.write(self.held, b"".join(line + b"\n" for line in lines))

    def values(self) -> list[bytes]:
        return values(self.daemon.root)

    def start_again(self) -> None:
        """Return when the segment with the lines is a sealed one."""
        self.daemon.start_again()
        eventually(lambda: list_segments(Root(self.daemon.root)).segments[0].kind is Kind.SEALED)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    with daemon_of(OWNER) as daemon:
        assert daemon.ask("ROUTE ADD a fifo") == "OK added a"
        fifo = daemon.root / "routes/a/in"
        it = Killed(daemon, fifo, os.open(fifo, os.O_RDWR))
        it.write(b"before")
        eventually(lambda: it.values() == LINES[:1])
        with traced(daemon.process.pid, tmp_path / "trace", "trace=readv", "inject=readv:signal=SIGKILL:when=2"):
            it.write(b"tick", b"tick")
            assert daemon.wait() == -9
        yield it
        os.close(it.held)


@needs_root
def test_one_that_could_not_be_opened_at_two_starts(killed: Killed) -> None:
    os.chown(killed.fifo, 0, 0)
    killed.fifo.chmod(0o600)
    killed.start_again()
    assert killed.daemon.stop() == 0
    killed.start_again()
    os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)
    killed.write(b"after")

    eventually(lambda: killed.values()[3:])
    assert killed.daemon.stop() == 0
    assert killed.values() == [*LINES, b"after"]
    assert_sound(killed.daemon.root)


@needs_root
def test_one_whose_segment_was_reclaimed_meanwhile(killed: Killed) -> None:
    os.chown(killed.fifo, 0, 0)
    killed.fifo.chmod(0o600)
    killed.start_again()
    wald.open(killed.daemon.root).set_cursor("a", len(LINES))

    def reclaimed() -> bool:
        done = run(sidecar("reclaim", "--root", killed.daemon.root, "--grace", "0"))
        assert done.returncode == 0, done.stderr
        return killed.values() == []

    eventually(reclaimed)  # a segment that is just being sealed is left for the next run
    os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)
    killed.write(b"after")

    eventually(killed.values)
    assert killed.daemon.stop() == 0
    assert killed.values() == [b"after"]


@needs_root
@pytest.mark.parametrize("instead", ["nothing", "fifo"])
def test_one_whose_place_another_had_at_the_start(killed: Killed, instead: str) -> None:
    away = killed.fifo.with_name("away")
    killed.fifo.rename(away)
    if instead == "fifo":
        os.mkfifo(killed.fifo)
        os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)
    killed.start_again()
    away.rename(killed.fifo)
    if instead == "nothing":
        assert killed.daemon.ask("ROUTE ADD a fifo").startswith("OK")
    killed.write(b"after")

    eventually(lambda: killed.values()[3:])
    assert killed.daemon.stop() == 0
    assert killed.values() == [*LINES, b"after"]


@needs_root
def test_what_another_producer_wrote_meanwhile_is_not_taken_for_it(killed: Killed) -> None:
    """A recorded batch was never written, and the next run has an equal batch at its position."""
    killed.daemon.start_again()
    os.chown(killed.fifo, 0, 0)
    killed.fifo.chmod(0o600)
    with traced(killed.daemon.process.pid, killed.fifo.parent / "trace", "inject=/pwritev:signal=SIGKILL:when=1"):
        killed.write(b"again")
        assert killed.daemon.wait() == -9
    killed.daemon.start_again()
    with Client(killed.daemon.socket_path) as client:
        assert client.ask(b"PUB a 6\nagain\n").startswith("OK")
    os.chown(killed.fifo, OWNER.user_id, OWNER.group_id)

    eventually(lambda: killed.values() == [*LINES, b"again", b"again"])
    assert killed.daemon.stop() == 0
