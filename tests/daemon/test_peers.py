"""Senders of records, stored per batch, for processes on the socket, FIFOs and stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from asking import stat
from contents import assert_sound
from running import Client, Daemon, command, eventually

import wald

Start = Callable[..., Daemon]
PUBLISH = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
sys.stdin.readline()
connection.sendall(b"PUB a 2\\nx\\n")
print("sent", flush=True)
print(connection.recv(100).decode(), end="", flush=True)
"""


def fileno(pipe: IO[bytes] | None) -> int:
    """The descriptor of a pipe to a program."""
    assert pipe is not None
    return pipe.fileno()


def line_of(program: subprocess.Popen[bytes]) -> bytes:
    """The next line that a program prints."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(fileno(program.stdout), 1)
        assert read, line
        line += read
    return line


def senders(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the sender of each record by route, from ``wald read --format json``. ``Any``: JSON."""
    line = command("read", "--root", root, "--format", "json")
    done = subprocess.run(line, capture_output=True, check=True, text=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        found.setdefault(record["route"], []).append(record["sender"])
    return found


def test_each_way_in_says_who_it_was(start: Start, root: Path) -> None:
    """In the active segment, and in a sealed one; also after a kill."""
    reading, writing = os.pipe()
    daemon = start("--stdin", "typed", stdin=reading)
    os.close(reading)
    daemon.ask("ROUTE ADD a")
    daemon.ask("ROUTE ADD piped fifo")
    os.write(writing, b"typed\n")
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\nx\n").startswith("OK")
        assert client.ask(b"PUB a 2 pid=7 pseq=1\ny\n").startswith("OK")
    (root / "routes" / "piped" / "in").write_bytes(b"piped\n")
    eventually(lambda: wald.open(root).where(4).durable)
    me = {"via": "socket", "user": os.getuid(), "pid": os.getpid(), "process": Path("/proc/self/comm").read_text()[:-1]}

    def told() -> None:
        found = senders(root)
        first, second = found.pop("a")
        assert found == {"typed": [{"via": "stdin"}], "piped": [{"via": "fifo"}]}
        assert first == me
        assert second == me | {"producer_id": second["producer_id"]}

    told()
    daemon.kill()
    os.close(writing)
    told()
    with start():
        eventually((root / "segments" / f"{1:020}.wal.zst").exists)
        told()
    assert_sound(root)


def test_records_of_two_processes_in_one_turn_stay_apart(start: Start, root: Path) -> None:
    """On one route and without producer ids, where those of one process become one batch."""
    daemon = start()
    daemon.ask("ROUTE ADD a")
    line = [sys.executable, "-c", PUBLISH, str(daemon.socket_path)]
    with ExitStack() as running:
        processes = [
            running.enter_context(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        eventually(lambda: stat(daemon)["connections"] == 3)
        running.callback(daemon.process.send_signal, signal.SIGCONT)
        daemon.process.send_signal(signal.SIGSTOP)  # both requests have arrived when it continues
        for each in processes:
            os.write(fileno(each.stdin), b"\n")
            assert line_of(each) == b"sent\n"
        daemon.process.send_signal(signal.SIGCONT)
        numbers = {int(line_of(each).split()[1]): each.pid for each in processes}
    assert numbers == dict(enumerate((sender["pid"] for sender in senders(root)["a"]), start=1))
    assert_sound(root)
