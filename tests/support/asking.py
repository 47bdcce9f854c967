"""A daemon's socket in tests: relevant sizes, short answers, and the stored records."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from running import Client, Daemon, readable

REQUEST_MAX = 1 << 20
SPOOLED = 300 << 10  # larger than a connection keeps in memory
CHUNK = 512 << 10  # read at once from a pipe


def written(root: Path) -> object:
    """Return every byte of the raw segments and the head, and the names of the routes."""
    files = [*sorted(root.glob("segments/*.wal")), root / "head"]
    return [(path.name, path.read_bytes()) for path in files], sorted(os.listdir(root / "routes"))


def stat(daemon: Daemon) -> dict[str, Any]:
    """Return the answer to STAT."""
    reported: dict[str, Any] = json.loads(daemon.ask("STAT").removeprefix("OK "))
    return reported


def sequence(reply: str) -> int:
    """Return the first sequence in a positive reply to PUB."""
    verdict, first, _ = reply.split()
    assert verdict == "OK"
    return int(first)


def is_quiet(client: Client) -> bool:
    """Return True if no answer has arrived yet."""
    return not readable(client.socket.fileno())


@contextmanager
def entering(daemon: Daemon) -> Iterator[Client]:
    """Yield a connection once the daemon admits one."""
    while True:
        with Client(daemon.socket_path) as client:
            answer = ""
            with suppress(OSError):
                answer = client.ask(b"PING\n")
            if answer == "OK pong":
                yield client
                return


def events(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    """Return the fields of each event that the daemon has logged under ``name``; ``Any``: it is JSON."""
    logged = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{") and line.endswith("}")]
    return [event for event in logged if event["event"] == name]
