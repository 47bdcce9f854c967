"""A gate as a process, and requests to it."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forking import Forked, forks
from running import TIMEOUT_SECONDS, eventually, sidecar

ROUTE, GROUP = "orders", "packing"
"""Names that exist, for generated requests: most requests use them, so that they get past "there is no such route"."""
Body = bytes | Iterator[bytes] | None
_HAND_OVER = """
import os, sys
numbers = [os.dup(int(number)) for number in sys.argv[1].split(",")]
for place, number in enumerate(numbers, start=3):
    os.dup2(number, place)
    os.set_inheritable(place, True)  # it may have been there already
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(numbers)))
os.execv(sys.argv[2], sys.argv[2:])
"""
_SERVES = re.compile(r"serves .* on https?://[^ ]*:(\d+)")


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body; ``Any``: it is JSON."""
        return json.loads(self.body)

    def lines(self) -> list[Any]:
        """Return the objects of an ndjson body."""
        return [json.loads(line) for line in self.body.splitlines()]


def entry(name: str, **rights: object) -> str:
    """Return a line of the token file, for the token ``name``-token."""
    return json.dumps({"name": name, "sha256": hashlib.sha256(f"{name}-token".encode()).hexdigest(), **rights}) + "\n"


class Gate:
    """``wald-gate`` as a process; leaving a ``with`` block kills it if it still runs."""

    def __init__(
        self,
        root: Path,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        sockets: Sequence[socket.socket] = (),
        prefix: Sequence[str] = (),
        anew: bool = False,
    ) -> None:
        """Prepare a gate without starting it.

        Args:
            sockets: passed to it as systemd does.
            prefix: command in front of the command line.
            anew: True to start a separate interpreter, as for a user, even if a fork would do.
        """
        self.root = root
        self._env = {**os.environ, **(env or {})}
        self._sockets = sockets
        self._prefix = prefix
        self._arguments = arguments
        self._anew = anew
        self.log_path = root.with_name(f"{root.name}-gate.log")
        self.port = 0
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, on its previous port, and return once it accepts connections."""
        self.spawn()
        self.await_ready()

    def spawn(self) -> None:
        """Start it without waiting until it accepts connections."""
        listen = f"127.0.0.1:{self.port}"
        self._before = len(self.log) if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            line = [*self._prefix, *sidecar("gate", "--root", self.root, "--listen", listen, *self._arguments)]
            numbers = [each.fileno() for each in self._sockets]
            if numbers:
                line = [sys.executable, "-c", _HAND_OVER, ",".join(map(str, numbers)), *line]
            self.process: subprocess.Popen[bytes]
            if forks(line, self._env) and not self._anew:
                self.process = Forked(line, stderr=log.fileno(), env=self._env)
            else:
                self.process = subprocess.Popen(line, stderr=log, env=self._env, pass_fds=numbers)

    def await_ready(self) -> None:
        """Return once it accepts connections."""

        def has_begun() -> bool:
            assert self.process.poll() is None, self.log
            return _SERVES.search(self.log, self._before) is not None

        eventually(has_begun)
        found = _SERVES.search(self.log, self._before)
        assert found
        self.port = int(found[1])

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """Return the output on stderr of all its runs."""
        return self.log_path.read_text(errors="surrogateescape")

    @property
    def origin(self) -> str:
        """Return its address for a browser."""
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request over a separate connection."""
        with self.asked(method, path, body, headers) as response:
            return Answer(response.status, dict(response.getheaders()), response.read())

    def get(self, path: str, **headers: str) -> Answer:
        """Send a GET; ``last_event_id`` is ``Last-Event-Id``."""
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: bytes | dict[str, Any] = b"", media_type: str = "text/plain") -> Answer:
        """Send a POST; a dict is sent as JSON."""
        if isinstance(body, dict):
            return self.ask("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return self.ask("POST", path, body, {"Content-Type": media_type})

    def make_group(self, group: str, route: str = "orders") -> None:
        """Create a group that has not processed any record."""
        made = self.ask("PUT", f"/v1/routes/{route}/cursors/{group}", b'{"sequence": "earliest"}')
        assert made.status == 200, made.body

    @contextmanager
    def asked(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request; the block reads the response as it arrives."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body, dict(headers or {}))
            yield connection.getresponse()
        finally:
            connection.close()
