"""A daemon that lost its lock or socket, or that started together with another one, harms nothing."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import TIMEOUT_SECONDS, Client, Daemon, Start, command, eventually, output_of
from tracing import hangs_in, strace, traced

FDATASYNC = 75  # its number on x86-64


def take_over(start: Start, root: Path) -> Daemon:
    """Start another daemon on the same root; the first one does not notice."""
    (root / "lock").unlink()
    daemon = start(ready=False)
    eventually(lambda: any('"epoch": 2' in line and '"ready"' in line for line in daemon.log.splitlines()))
    return daemon


@pytest.mark.parametrize("without_head", [False, True])
def test_an_idle_one_neither_cuts_nor_writes_the_head(start: Start, root: Path, *, without_head: bool) -> None:
    """Its next segment would replace the active one of the other; its head would hide acknowledged records."""
    first = start(segment_max_age="2s", segment_age_jitter=0, routes=["a"])
    with Client(first.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
        first.process.send_signal(signal.SIGSTOP)  # however long the other takes to start, it comes before the cut
        if without_head:
            (root / "head").unlink()
        second = take_over(start, root)
        assert second.ask("PUB a 2\ny") == "OK 2 2"
        first.process.send_signal(signal.SIGCONT)
        assert first.wait() == 5
        assert client.reply() == ""
    assert f"another daemon has taken over (pid {second.process.pid} " in first.log
    assert "Traceback" not in first.log
    assert second.ask("CUT") == "OK cut 3"
    assert second.ask("PUB a 2\nz") == "OK 3 3"
    assert second.stop() == 0
    assert values(root) == [b"x", b"y", b"z"]


def test_one_that_stops_leaves_the_socket_of_the_other(start: Start, root: Path) -> None:
    """And the files it is making."""
    first = start()
    second = take_over(start, root)
    assert first.stop() in (0, 3, 5, -signal.SIGTERM)  # it may have noticed, even before the other had the lock
    assert second.ask("PING") == "OK pong"
    assert second.stop() == 0


@pytest.mark.parametrize("end", ["stop", "publish"])
def test_one_that_ends_leaves_the_segment_as_it_is(start: Start, root: Path, tmp_path: Path, end: str) -> None:
    """The other daemon may have written to it, or may be writing; the first one acknowledges nothing."""
    first = start(routes=["a"])
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
        with suppress(ConnectionResetError):
            assert client.reply() in ("ERR failed the daemon is stopping after a failure", "")
    assert second.stop() == 0


def test_one_that_was_syncing_does_not_acknowledge(start: Start, root: Path, tmp_path: Path) -> None:
    """Its batch was written before the other started, so it may be in the log; it was not promised."""
    first = start(routes=["a"])
    with Client(first.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n") == "OK 1 1"
        with traced(first.process.pid, tmp_path / "trace", "inject=fdatasync:delay_enter=60000000") as trace:
            client.publish("a", b"y\n")
            eventually(lambda: hangs_in(first.process.pid, FDATASYNC))
            second = take_over(start, root)
            trace.release()
            assert not client.reply().startswith("OK")
        assert first.wait() == 5
    assert second.ask("PUB a 2\nz").startswith("OK ")
    assert second.stop() == 0


def test_a_pipe_is_not_taken_by_two(start: Start, root: Path) -> None:
    """Both have it open; whichever reads first, the line is there once."""
    start(routes=["a fifo"])
    second = take_over(start, root)
    descriptor = os.open(root / "routes/a/in", os.O_RDWR)
    os.write(descriptor, b"line\n")
    eventually(lambda: values(root) == [b"line"])
    assert second.stop() == 0
    os.close(descriptor)


@contextmanager
def unlocked(root: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many daemons on one root, started at once, for each of which flock(2) succeeds and does nothing."""
    prefix = [strace(), "-f", "-qq", "-o", os.devnull, "-e", "trace=flock", "-e", "inject=flock:retval=0"]
    with root.with_name("log.log").open("ab") as log:
        line = [*prefix, *command("run", "--root", root)]
        started = [subprocess.Popen(line, stderr=log, start_new_session=True) for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)  # strace alone would let go of its daemon
                each.wait()


def listens(root: Path) -> bool:
    """Return True if a daemon listens on the root's socket."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(str(root / "wald.sock")) == 0


def test_all_but_one_give_up(tmp_path: Path) -> None:
    root, log, count = tmp_path / "log", tmp_path / "log.log", 3
    with unlocked(root, count) as started:
        eventually(lambda: sum(each.poll() is None for each in started) == 1 and '"ready"' in log.read_text())
        assert sorted(str(each.poll()) for each in started) == ["5"] * (count - 1) + ["None"]
        assert "two daemons" in log.read_text() or "another daemon has taken over" in log.read_text()  # one came late
        eventually(lambda: listens(root))  # the line "ready" may be one of a daemon that has given up
        with Client(root / "wald.sock") as client:
            assert client.ask(b"ROUTE ADD a\n").startswith("OK")
            assert client.ask(b"PUB a 4\nx\ny\n") == "OK 1 2"
        survivor = next(each for each in started if each.poll() is None)
        pid = int((Path("/proc") / str(survivor.pid) / "task" / str(survivor.pid) / "children").read_text().split()[0])
        os.kill(pid, signal.SIGTERM)
        assert survivor.wait(TIMEOUT_SECONDS) == 0
    assert_sound(root)
    assert values(root) == [b"x", b"y"]


def test_a_removed_socket_is_made_again(start: Start, root: Path) -> None:
    """It keeps its mode, the connections that are open stay, and a stop removes it."""
    daemon = start(socket_mode="0600", routes=["a"])
    with Client(daemon.socket_path) as before:
        for _ in range(2):
            assert before.ask(b"PUB a 2\nx\n").startswith("OK ")
            daemon.socket_path.unlink()
            output_of("append", "a", "--root", root, stdin=b"y\n")
        assert before.ask(b"PUB a 2\nz\n").startswith("OK ")
    assert stat.S_IMODE(daemon.socket_path.stat().st_mode) == 0o600
    assert daemon.log.count("the socket was removed; the daemon recreated it") == 2
    assert daemon.stop() == 0
    assert not daemon.socket_path.exists()
    assert values(root) == [b"x", b"y", b"x", b"y", b"z"]


def test_one_whose_directory_is_removed_is_made_again_once_it_is_back(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    daemon = start(socket=directory / "s", ready=False)
    eventually(lambda: '"ready"' in daemon.log)
    shutil.rmtree(directory)
    eventually(lambda: "cannot listen" in daemon.log)
    directory.mkdir()
    with Client(eventually_there(directory / "s")) as client:
        assert client.ask(b"PING\n").startswith("OK")
    assert daemon.log.count("cannot listen") == 1


def test_what_takes_the_place_of_a_socket_is_replaced_if_it_is_a_dead_one(start: Start, root: Path) -> None:
    """Anything else is reported once and stays, and the daemon listens again once it is gone."""
    daemon = start()
    other = root / "other"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(other))
    other.rename(daemon.socket_path)
    eventually(lambda: daemon.log.count("; the daemon recreated it") == 1)
    assert daemon.ask("PING").startswith("OK")
    for number, instead in enumerate(("a file", "another"), start=2):
        with socket.socket(socket.AF_UNIX) as listener:
            if instead == "a file":
                other.write_bytes(b"precious")
            else:
                listener.bind(os.fspath(other))
                listener.listen()
            other.rename(daemon.socket_path)
            eventually(lambda instead=instead: f"the socket was replaced by {instead}" in daemon.log)  # type: ignore[misc]
            assert stat.S_ISSOCK(daemon.socket_path.stat().st_mode) == (instead == "another")
            daemon.socket_path.unlink()
            eventually(lambda number=number: daemon.log.count("; the daemon recreated it") == number)  # type: ignore[misc]
            assert daemon.ask("PING").startswith("OK")
    assert daemon.log.count("the socket was replaced by") == 2


def removed_lock(root: Path) -> None:
    (root / "lock").unlink()


def copied_lock(root: Path) -> None:
    shutil.copy2(root / "lock", root / "copy")
    (root / "copy").rename(root / "lock")


def moved_root(root: Path) -> None:
    root.rename(root.with_name("away"))


def emptied_root(root: Path) -> None:
    """Leave the mount point, as an unmount does."""
    moved_root(root)
    root.mkdir()


@pytest.mark.parametrize(
    ("harm", "code", "words"),
    [
        (removed_lock, 3, "wald: {root}/lock: the lock file was removed while the daemon was running"),
        (copied_lock, 5, "the lock file of this daemon was replaced by a copy"),
        (moved_root, 3, "wald: {root}: the root is gone.*\n  hint: ls -ld {root}; "),
        (emptied_root, 3, " is gone"),
    ],
)
def test_a_lost_lock_or_root_ends_the_daemon_and_is_not_called_another_daemon(
    start: Start, root: Path, harm: Callable[[Path], None], code: int, words: str
) -> None:
    daemon = start()
    harm(root)
    assert daemon.wait() == code
    assert re.search(words.format(root=re.escape(str(root))), daemon.log)
    assert "another daemon" not in daemon.log
    if harm is removed_lock:
        report = json.loads((root / "recovery/0000000001.json").read_text())
        assert "the lock file was removed" in report["ended"]
        daemon.start_again()
        assert daemon.stop() == 0
        assert_sound(root)


def eventually_there(path: Path) -> Path:
    eventually(path.is_socket)
    return path
