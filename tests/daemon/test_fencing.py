"""A daemon whose lock was taken away harms nothing of the one that has it now."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import Client, Daemon, eventually
from tracing import hangs_in, traced

Start = Callable[..., Daemon]

FDATASYNC = 75  # its number on x86-64


def take_over(start: Start, root: Path) -> Daemon:
    """Start another daemon on the same root; the first one does not notice."""
    (root / "lock").unlink()
    daemon = start(ready=False)
    eventually(lambda: any('"epoch": 2' in line and '"ready"' in line for line in daemon.log.splitlines()))
    return daemon


def test_an_idle_one_does_not_cut(start: Start, root: Path) -> None:
    """Its next segment would have the name of the active one of the other, and replace it."""
    first = start(segment_max_age="2s", segment_age_jitter=0)
    first.ask("ROUTE ADD a")
    with Client(first.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
    first.process.send_signal(signal.SIGSTOP)  # however long the other takes to start, it comes before the cut
    second = take_over(start, root)
    with Client(second.socket_path) as client:
        assert client.ask(b"PUB a 2\ny\n") == "OK 2 2"
    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 5
    assert f"another daemon has taken over (pid {second.process.pid} " in first.log
    assert values(root) == [b"x", b"y"]
    assert second.stop() == 0
    assert_sound(root)


def test_an_idle_one_leaves_the_head_of_the_other(start: Start, root: Path) -> None:
    """Even if its own lock was removed: its head would hide records that the other has acknowledged."""
    first = start()
    first.ask("ROUTE ADD a")
    with Client(first.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
    first.process.send_signal(signal.SIGSTOP)
    (root / "head").unlink()
    second = take_over(start, root)
    with Client(second.socket_path) as client:
        assert client.ask(b"PUB a 2\ny\n") == "OK 2 2"
    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 5
    assert second.ask("PING") == "OK pong"
    assert values(root) == [b"x", b"y"]


def test_one_that_stops_leaves_the_socket_of_the_other(start: Start, root: Path) -> None:
    """And the files it is making."""
    first = start()
    second = take_over(start, root)
    assert first.stop() in (0, 3, 5, -signal.SIGTERM)  # it may have noticed, even before the other had the lock
    assert second.ask("PING") == "OK pong"
    assert second.stop() == 0
    assert_sound(root)


@pytest.mark.parametrize("end", ["stop", "publish"])
def test_one_that_ends_leaves_the_segment_as_it_is(start: Start, root: Path, tmp_path: Path, end: str) -> None:
    """The other daemon may have written to it, or may be writing."""
    first = start()
    first.ask("ROUTE ADD a")
    with Client(first.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
        first.process.send_signal(signal.SIGSTOP)  # otherwise it would notice
        second = take_over(start, root)
        with traced(first.process.pid, tmp_path / "trace", "trace=ftruncate,fdatasync,fsync") as trace:
            if end == "stop":
                first.process.send_signal(signal.SIGTERM)
            else:
                client.publish("a", b"y\n")
            first.process.send_signal(signal.SIGCONT)
            assert first.wait() in (0, 5)
            trace.release()
            assert not [call for call in trace.calls if ".wal" in call]
    assert second.stop() == 0
    assert_sound(root)


def test_one_that_was_syncing_does_not_acknowledge(start: Start, root: Path, tmp_path: Path) -> None:
    """Its batch was written before the other started, so it may be in the log; it was not promised."""
    first = start()
    first.ask("ROUTE ADD a")
    with Client(first.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
        with traced(first.process.pid, tmp_path / "trace", "inject=fdatasync:delay_enter=60000000") as trace:
            client.publish("a", b"y\n")
            eventually(lambda: hangs_in(first.process.pid, FDATASYNC))
            second = take_over(start, root)
            trace.release()
            assert not client.reply().startswith("OK")
        assert first.wait() == 5
    with Client(second.socket_path) as client:
        assert client.ask(b"PUB a 2\nz\n").startswith("OK ")
    assert second.stop() == 0
    assert_sound(root)


def test_a_pipe_is_not_taken_by_two(start: Start, root: Path) -> None:
    """Both have it open; whichever reads first, the line is there once."""
    start().ask("ROUTE ADD a fifo")
    second = take_over(start, root)
    descriptor = os.open(root / "routes/a/in", os.O_RDWR)
    os.write(descriptor, b"line\n")
    eventually(lambda: values(root) == [b"line"])
    assert second.stop() == 0
    assert_sound(root)
    os.close(descriptor)
