"""Every input stores the bytes unchanged."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from asking import CHUNK, stat
from contents import records, text
from running import Client, Daemon, Start, eventually, writable

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.routes import retire_route

Feed = Callable[[Daemon, bytes], None]

AWKWARD = b"crlf\r\n\rlone\r\n\n\nnul\0nul\n\xff\xfe not utf-8\n\xc3\n\r\n\0\n WBAT WALDSEG1\n"


def through_fifo(daemon: Daemon, data: bytes) -> None:
    assert daemon.ask("ROUTE ADD r fifo") == "OK added r"
    with (daemon.root / "routes/r/in").open("wb") as fifo:
        fifo.write(data)
    eventually(lambda: text(daemon.root, "r") == data)


def through_socket(daemon: Daemon, data: bytes) -> None:
    assert daemon.ask("ROUTE ADD r") == "OK added r"
    with Client(daemon.socket_path) as client:
        client.publish("r", data)
        assert client.reply().startswith("OK ")


FEEDS = pytest.mark.parametrize("feed", [through_fifo, through_socket])


@FEEDS
def test_content_is_stored_as_it_came(start: Start, root: Path, feed: Feed) -> None:
    """Awkward bytes, lines that end at every place around a chunk, and a line that is spooled or read in pieces."""
    edges = [size + delta for size in (CHUNK // 2, CHUNK, 2 * CHUNK) for delta in (-2, -1, 0, 1)]
    lines = b"".join(bytes([ord("a") + i % 26]) * length + b"\n" + b"-\n" for i, length in enumerate(edges))
    data = AWKWARD + lines + os.urandom(3 << 20).hex().encode() + b"\nafter\n"
    feed(start(), data)

    assert [record.value for record in records(root)] == data.split(b"\n")[:-1]


@pytest.mark.slow
def test_short_lines_fill_a_pipe_to_the_byte(start: Start, root: Path) -> None:
    """Many lines whose ends fall anywhere in the chunks, after a first one that shifts them all."""
    data = b"x" * 4093 + b"\n" + b"".join(b"%d\n" % i for i in range(400_000))
    through_fifo(start(), data)


def test_stdin_is_taken_to_its_end(start: Start, root: Path) -> None:
    """A pipe whose last line has no newline; the daemon reads the other pipes, too, and stops."""
    data = AWKWARD + b"y" * (3 * CHUNK) + b"\nno newline at the end"
    reader, writer = os.pipe()
    daemon = start("--stdin", "r", stdin=reader, routes=["other fifo"])
    os.close(reader)
    with (root / "routes/other/in").open("wb", buffering=0) as fifo, os.fdopen(writer, "wb") as stdin:
        stdin.write(data)
        stdin.flush()
        eventually(lambda: "r" in stat(daemon)["routes"])
        fifo.write(b"beside\nunfinished")
        stdin.close()
        assert daemon.wait() == 0

    assert text(root, "r") == data
    assert not records(root, "r")[-1].terminated
    assert text(root, "other") == b"beside\n"


@pytest.mark.parametrize("data", [b"", b"\n\n", AWKWARD + b"z" * (5 << 20)], ids=len)
def test_stdin_may_be_a_file(start: Start, root: Path, tmp_path: Path, data: bytes) -> None:
    """Also an empty one, and one that is a single line without an end."""
    (tmp_path / "input").write_bytes(data)
    with (tmp_path / "input").open("rb") as file:
        assert start("--stdin", "r", stdin=file.fileno(), ready=False).wait() == 0

    assert text(root, "r") == data


def test_a_line_goes_on_in_a_pipe_that_somebody_holds(start: Start, root: Path) -> None:
    """After a stop, and after a kill in a pipe that cannot be enlarged again; a short line waits wholly in the pipe."""
    daemon = start()
    for route in ("short", "long"):
        daemon.ask(f"ROUTE ADD {route} fifo")
    with (root / "routes/short/in").open("wb", 0) as short, (root / "routes/long/in").open("r+b", 0) as long:
        short.write(b"one\ntwo\nthr")
        long.write(b"a" * (CHUNK + 1000))
        eventually(lambda: len(stat(daemon)["routes"]) == 2)
        assert daemon.stop() == 0
        assert (text(root, "short"), text(root, "long")) == (b"one\ntwo\n", b"")
        daemon.start_again()
        short.write(b"ee\n")
        long.write(b"b\nnext\n" + b"c" * (CHUNK + 1000))
        eventually(lambda: text(root, "short") == b"one\ntwo\nthree\n")
        eventually(lambda: text(root, "long") == b"a" * (CHUNK + 1000) + b"b\nnext\n")
        eventually(lambda: stat(daemon)["routes"]["long"] == stat(daemon)["head"])
        daemon.kill()
        fcntl.fcntl(long, fcntl.F_SETPIPE_SZ, 64 << 10)  # as a new pipe is
        daemon.start_again()
        long.write(b"d\n")
        eventually(lambda: text(root, "long").endswith(b"next\n" + b"c" * (CHUNK + 1000) + b"d\n"))
    assert len(records(root, "long")) == 3


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_long_line_whose_rest_is_lost_ends_where_it_is(start: Start, root: Path, end: str) -> None:
    """No process held the pipe: later input is another line."""
    daemon = start(routes=["r fifo"])
    with (root / "routes/r/in").open("wb", buffering=0) as fifo:
        fifo.write(b"a" * CHUNK)
        eventually(lambda: '"r": 1' in daemon.ask("STAT"))
    if end == "stop":
        assert daemon.stop() == 0
    else:
        daemon.kill()
    # A writer that waits for a reader has made the pipe before the daemon opens it.
    with subprocess.Popen(["sh", "-c", 'echo next > "$0"', root / "routes/r/in"]):
        daemon.start_again()
        eventually(lambda: len(records(root)) == 2)

    assert text(root, "r") == b"a" * CHUNK + b"next\n"
    assert not records(root)[0].terminated


def test_a_pipe_may_be_full_of_a_few_spliced_bytes(start: Start, root: Path, tmp_path: Path) -> None:
    """Each splice(2) of a hundred bytes takes up a page; no newline is among them, and none fits in after them."""
    (tmp_path / "input").write_bytes(b"x" * 100)
    reader, writer = os.pipe()
    daemon = start("--stdin", "r", stdin=reader)
    os.close(reader)
    os.set_blocking(writer, False)
    data = b""
    with (tmp_path / "input").open("rb") as file:
        while writable(writer):
            data += b"x" * os.splice(file.fileno(), writer, 100, offset_src=0)
    assert len(data) < CHUNK

    def newline_fits() -> bool:
        with suppress(BlockingIOError):
            return os.write(writer, b"y\n") > 0
        return False

    eventually(newline_fits)  # each attempt wakes the daemon
    os.close(writer)

    assert daemon.wait() == 0
    assert text(root, "r") == data + b"y\n"
    assert len(records(root)) == 1


def test_publishers_never_meet_a_long_line_half_way(start: Start, root: Path) -> None:
    """Long lines begin in the same turns in which others publish on their route."""
    daemon = start(routes=["r fifo"])
    with (root / "routes/r/in").open("wb", buffering=0) as fifo, Client(daemon.socket_path) as client:
        for number in range(30):
            client.publish("r", b"short %d\n" % number)
            fifo.write(b"%d" % (number % 10) * (CHUNK + number) + b"\n")
        assert all(client.reply().startswith("OK ") for _ in range(30))
        eventually(lambda: '"r": 60' in daemon.ask("STAT"))

    found = [record.value for record in records(root)]
    assert [value for value in found if value[:5] == b"short"] == [b"short %d" % number for number in range(30)]
    assert [value for value in found if value[:5] != b"short"] == [
        b"%d" % (number % 10) * (CHUNK + number) for number in range(30)
    ]


def test_a_line_above_the_limit_becomes_several_records(start: Start, root: Path) -> None:
    """No reader has to hold more than the limit and a chunk; an unfinished line that nobody holds is one at a stop."""
    limit = 1 << 20
    daemon = start(record_max_bytes=limit)
    data = os.urandom(2 << 20).hex().encode() + b"\nnext\n"
    daemon.ask("ROUTE ADD r fifo")
    with (root / "routes/r/in").open("wb") as fifo:
        fifo.write(data + b"the rest")
    eventually(lambda: text(root, "r").startswith(data))
    assert daemon.stop() == 0

    *found, following, rest = records(root)
    assert b"".join(record.value for record in found) + b"\nnext\n" == data
    assert max(len(record.value) for record in found) <= limit + CHUNK
    assert (following.value, rest.value, rest.terminated) == (b"next", b"the rest", False)


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
def test_a_long_line_ends_where_its_route_is_retired(start: Start, root: Path, running: bool) -> None:
    """With or without a running daemon; a route that is added again starts with another line."""
    daemon = start(routes=["r fifo"])
    with (root / "routes/r/in").open("r+b", buffering=0) as fifo:
        fifo.write(b"a" * CHUNK)
        eventually(lambda: '"r": 1' in daemon.ask("STAT"))
        if running:
            assert daemon.ask("ROUTE RETIRE r") == "OK retired r"
            eventually(lambda: len(records(root)) == 1)
            daemon.stop()
        else:
            daemon.stop()
            retire_route(Root(root), Disk(), "r", now="now")
        daemon.start_again()
        assert daemon.ask("ROUTE ADD r") == "OK added r"
        fifo.write(b"next\n")
        eventually(lambda: text(root, "r") == b"a" * CHUNK + b"next\n")

    assert [record.terminated for record in records(root)] == [False, True]


def test_a_retired_fifo_is_read_again_when_its_route_is_taken_back(start: Start, root: Path) -> None:
    """Until then nothing is taken from it; what another process holds waits in the pipe."""
    daemon = start(routes=["r fifo", "other fifo"])
    with (root / "routes/r/in").open("r+b", buffering=0) as fifo, (root / "routes/other/in").open("wb", 0) as other:
        fifo.write(b"before\n")
        eventually(lambda: text(root, "r") == b"before\n")
        daemon.ask("ROUTE RETIRE r")
        fifo.write(b"meanwhile\n")
        other.write(b"so it has had its turn\n")
        eventually(lambda: text(root, "other"))
        assert text(root, "r") == b"before\n"
        for _ in range(2):  # in one turn as well
            with Client(daemon.socket_path) as client:
                client.send(b"ROUTE ADD r\nROUTE RETIRE r\nROUTE ADD r\n")
                assert [client.reply() for _ in range(3)] == ["OK added r", "OK retired r", "OK added r"]
        fifo.write(b"after\n")
        eventually(lambda: text(root, "r") == b"before\nmeanwhile\nafter\n")


@pytest.mark.slow
def test_a_write_larger_than_the_pipe_behind_an_unfinished_line(start: Start, root: Path) -> None:
    """The kernel does not report a write that waits for room in a pipe that is not empty."""
    daemon = start(routes=["r fifo"])
    data = b"rest\n" + b"line\n" * (3 * CHUNK // 5)
    with (root / "routes/r/in").open("wb", buffering=0) as fifo:
        for _ in range(3):
            fifo.write(b"unfinished ")
            daemon.ask("PING")  # so that it has been read
            assert fifo.write(data) == len(data)
        eventually(lambda: text(root, "r") == (b"unfinished " + data) * 3)
