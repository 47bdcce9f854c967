"""A gate as a process, and requests to it."""

import hashlib
import html
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forking import Forked, forks
from running import TIMEOUT_SECONDS, Daemon, eventually, sidecar

ORDERS = "/v1/routes/orders/records"
BILLING = "/v1/routes/orders/groups/billing"
TEXT, NDJSON, JSON = "text/plain", "application/x-ndjson", "application/json"
Body = bytes | Iterator[bytes] | Mapping[str, Any] | None
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

    @property
    def page(self) -> str:
        """Return the source of a page."""
        assert self.status == 200, self.body
        return self.body.decode()

    @property
    def text(self) -> str:
        """Return the visible text of a page."""
        return " ".join(html.unescape(re.sub("<[^>]*>", " ", self.page)).split())

    def lines(self) -> list[Any]:
        """Return the objects of an ndjson body."""
        return [json.loads(line) for line in self.body.splitlines()]


def entry(name: str, **rights: object) -> str:
    """Return a line of the token file, for the token ``name``-token."""
    return json.dumps({"name": name, "sha256": hashlib.sha256(f"{name}-token".encode()).hexdigest(), **rights}) + "\n"


def request(line: str, *headers: str, body: bytes = b"", more: int = 0, media_type: str = TEXT) -> bytes:
    """Return the bytes of a request whose body lacks its last ``more`` bytes."""
    length = [] if line.startswith("GET") else [f"Content-Length: {len(body) + more}", f"Content-Type: {media_type}"]
    return "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *length, *headers, "", ""]).encode() + body


class Gate:
    """``wald-gate`` as a process; leaving a ``with`` block kills it if it still runs."""

    daemon: Daemon
    """The daemon, of a gate from ``serving``."""

    def __init__(
        self,
        root: Path,
        *arguments: object,
        config: str | None = None,
        tokens: str | None = None,
        env: Mapping[str, str] | None = None,
        sockets: Sequence[socket.socket] = (),
        prefix: Sequence[str] = (),
        anew: bool = False,
    ) -> None:
        """Start a gate.

        Args:
            config, tokens: the contents of its settings file and token file, which are next to the log.
            sockets: passed to it as systemd does.
            prefix: command in front of the command line.
            anew: True to start a separate interpreter, as for a user, even if a fork would do.
        """
        self.root = root
        self.config, self.tokens = root.with_name("gate.toml"), root.with_name("tokens")
        self._env = {**os.environ, **(env or {})}
        self._sockets = sockets
        self._prefix = prefix
        self._arguments = list(arguments)
        for option, path, text in (("--config", self.config, config), ("--tokens", self.tokens, tokens)):
            if text is not None:
                path.write_text(text)
                self._arguments += [option, path]
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

    def reload(self, *, config: str | None = None, tokens: str | None = None) -> str:
        """Change the files that are given, send SIGHUP, and return the log lines about it."""
        for path, text in ((self.config, config), (self.tokens, tokens)):
            if text is not None:
                path.write_text(text)
        before = len(self.log)
        self.process.send_signal(signal.SIGHUP)
        eventually(lambda: "wald-gate: SIGHUP: " in self.log[before:])
        return self.log[before:]

    def metric(self, name: str, by: str = "") -> float:
        """Return the value of a sample, such as ``wald_gate_connections{state="busy"}``."""
        text = self.get("/metrics", by).body.decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def ask(
        self, method: str, path: str, body: Body = None, headers: Mapping[str, str] | None = None, by: str = ""
    ) -> Answer:
        """Send one request over a separate connection; see ``asked``."""
        with self.asked(method, path, body, headers, by) as response:
            return Answer(response.status, dict(response.getheaders()), response.read())

    def get(self, path: str, by: str = "", **headers: str) -> Answer:
        """Send a GET; ``last_event_id`` is ``Last-Event-Id``."""
        return self.ask("GET", path, None, {name.replace("_", "-"): value for name, value in headers.items()}, by)

    def post(self, path: str, body: Body = b"", media_type: str = TEXT, by: str = "") -> Answer:
        """Send a POST."""
        return self.ask("POST", path, body, {} if isinstance(body, Mapping) else {"Content-Type": media_type}, by)

    def put(self, path: str, body: Mapping[str, Any], by: str = "") -> Answer:
        """Send a PUT."""
        return self.ask("PUT", path, body, None, by)

    def make_group(self, group: str, route: str = "orders") -> None:
        """Create a group that has not processed any record."""
        made = self.put(f"/v1/routes/{route}/cursors/{group}", {"sequence": "earliest"})
        assert made.status == 200, made.body

    def work(self, verb: str, worker: str = "w1", by: str = "", **fields: Any) -> Answer:
        """Ask for a verb of the work group ``billing`` of the route orders."""
        return self.post(f"{BILLING}/{verb}", {"worker": worker, **fields}, by=by)

    def worked(self, verb: str, worker: str = "w1", by: str = "", **fields: Any) -> Any:
        """Return the answer to a verb of that group, which succeeds."""
        answer = self.work(verb, worker, by, **fields)
        assert answer.status == 200, answer.body
        return answer.json()

    def leased(self, worker: str = "w1", **fields: Any) -> list[int]:
        """Return the sequences of the records of a lease."""
        return [record["sequence"] for record in self.worked("lease", worker, **fields)["records"]]

    @contextmanager
    def asked(
        self, method: str, path: str, body: Body = None, headers: Mapping[str, str] | None = None, by: str = ""
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request; the block reads the response as it arrives.

        Args:
            body: sent as JSON if it is a mapping.
            by: the name of a client, which sends its token.
        """
        sent = {"Authorization": f"Bearer {by}-token"} if by else {}
        if isinstance(body, Mapping):
            body, sent["Content-Type"] = json.dumps(body).encode(), JSON
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body, sent | dict(headers or {}))
            yield connection.getresponse()
        finally:
            connection.close()

    def connect(self, sent: bytes = b"", *, receive_bytes: int | None = None) -> socket.socket:
        """Return a connection on which some bytes are sent; ``receive_bytes`` limits what the kernel buffers for it."""
        with ExitStack() as stack:
            connection = stack.enter_context(socket.socket())
            connection.settimeout(TIMEOUT_SECONDS)
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.connect(("127.0.0.1", self.port))
            connection.sendall(sent)
            stack.pop_all()
        return connection

    def begin(self, line: str, *headers: str, **body: Any) -> socket.socket:
        """Send a request (see ``request``), and return its connection without waiting for the response."""
        return self.connect(request(line, *headers, **body))


@contextmanager
def serving(root: Path, *arguments: object, routes: Sequence[str] = ("orders",), **options: Any) -> Iterator[Gate]:
    """Run a daemon on a log with some routes, and a gate (see its arguments), which writes no traceback."""
    with Daemon(root) as daemon:
        for route in routes:
            assert daemon.ask(f"ROUTE ADD {route}").startswith("OK"), route
        with Gate(root, *arguments, **options) as gate:
            gate.daemon = daemon
            yield gate
            assert "Traceback" not in gate.log, gate.log


def received(connection: socket.socket, end: bytes = b"") -> bytes:
    """Return what arrives on a connection up to the first ``end``; without one, until the connection ends."""
    found = b""
    with suppress(ConnectionError):  # the gate may close before it has read everything
        while not (end and end in found) and (data := connection.recv(1 << 16)):
            found += data
    assert end in found, found
    return found
