"""Two daemons that start together where flock does not lock: one of them gives up before it has written anything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contents import assert_sound, values
from running import TIMEOUT_SECONDS, Client, command, eventually
from tracing import strace


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
