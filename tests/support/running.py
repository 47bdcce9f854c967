"""Real processes: a daemon that has answered, and commands run as a user runs them."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from forking import SETTINGS, Forked, forks, run_forked

TIMEOUT_SECONDS = 120.0  # generous, since a loaded machine is slow
_POLL_SECONDS = 0.01
_POLL_MOST_SECONDS = 0.05  # each check costs time, in a browser as much as the wait
_BARE = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}


def eventually(condition: Callable[[], object], *, timeout: float = TIMEOUT_SECONDS) -> None:
    """Return once ``condition`` holds; checks become rarer over time."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > timeout:
            raise TimeoutError(f"still not so after {timeout} s: {condition}")
        time.sleep(min(max(_POLL_SECONDS, waited / 20), _POLL_MOST_SECONDS))


def command(*arguments: object) -> list[str]:
    """Return the command line of ``wald ARGUMENTS`` under this interpreter."""
    return [sys.executable, "-m", "wald", *map(str, arguments)]


def sidecar(name: str, *arguments: object) -> list[str]:
    """Return the command line of ``wald-NAME ARGUMENTS`` under this interpreter."""
    return [sys.executable, "-m", f"wald_{name}", *map(str, arguments)]


def wald(
    *arguments: object, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to completion; the exit code and stderr are not checked."""
    return run(command(*arguments), stdin=stdin, env=env)


def run(
    line: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[bytes]:
    """Run one of our command lines to completion."""
    environment = _BARE | dict(env or {})
    if forks(line, environment):
        return run_forked(line, stdin=stdin, env=environment, timeout=timeout)
    return subprocess.run(line, input=stdin, env=environment, capture_output=True, timeout=timeout, check=False)


def launched(
    line: Sequence[str], *, stdin: int | None = None, stdout: int | None = None, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Start one of our command lines, optionally with pipes; leaving a ``with`` block waits for it."""
    return (Forked if forks(line, _BARE) else subprocess.Popen)(
        line, stdin=stdin, stdout=stdout, stderr=stderr, env=_BARE
    )


def feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write to the standard input of a process, which stays open."""
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


def reclaim(root: Path, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run ``wald-reclaim`` until it no longer leaves new segments to the sealer."""
    while True:
        done = run(sidecar("reclaim", "--root", root, *arguments))
        assert done.returncode == 0, done.stderr.decode()
        if b"it is not sealed yet" not in done.stdout:
            return done
        time.sleep(_POLL_SECONDS)


def output_of(*arguments: object, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """Return the stdout of a command that succeeds without warnings."""
    done = wald(*arguments, stdin=stdin, env=env)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    return done.stdout


def refusal_of(*arguments: object, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Return exit code, message and hint of a failing command; it must print one line and one hint, no traceback."""
    return refused(wald(*arguments, stdin=stdin, env=env))


def refused(done: subprocess.CompletedProcess[bytes]) -> tuple[int, str, str]:
    """Return exit code, message and hint of a command that has failed with the standard error format."""
    match = re.fullmatch(r"wald[a-z-]*: (.+)\n  hint: (.+)\n", done.stderr.decode())
    assert match, done.stderr.decode()
    assert done.returncode != 0
    return done.returncode, match[1], match[2]


def readable(descriptor: int, *, within: float = 0.0) -> bool:
    """Return True if the descriptor is readable within ``seconds``."""
    return _ready(descriptor, select.POLLIN, within)


def writable(descriptor: int) -> bool:
    """Return True if the descriptor is writable."""
    return _ready(descriptor, select.POLLOUT, 0.0)


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    poller = select.poll()  # not select(2): descriptors may be above 1024 in a long run
    poller.register(descriptor, event)
    return any(found & event for _, found in poller.poll(seconds * 1000))


class Daemon:
    """``wald run`` as a process; leaving a ``with`` block stops it if it still runs."""

    def __init__(
        self,
        root: Path,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        prefix: Sequence[str] = (),
        ready: bool = True,
        anew: bool = False,
    ) -> None:
        self.root = root
        self.socket_path = root / "wald.sock"
        self.env = _BARE | dict(env or {})
        self.stdin = stdin
        self._arguments = arguments
        self.pass_fds = pass_fds
        self._prefix = prefix
        self._anew = anew
        self.log_path = root.with_name(f"{root.name}.log")
        self.spawn()
        if ready:
            self.await_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        """Wait for the exit; return the code."""
        return self.process.wait(TIMEOUT_SECONDS)

    def start_again(self) -> None:
        """Start the daemon again after a stop or kill."""
        self.spawn()
        self.await_ready()

    def spawn(self, *prefix: str) -> None:
        """Start it under the command ``prefix``, without waiting until it answers."""
        with self.log_path.open("ab") as log:
            line = [*prefix, *self._prefix, *command("run", "--root", self.root, *self._arguments)]
            self.process: subprocess.Popen[bytes]
            if forks(line, self.env) and not self.pass_fds and not self._anew:
                self.process = Forked(line, stdin=self.stdin, stderr=log.fileno(), env=self.env)
                return
            self.process = subprocess.Popen(line, stdin=self.stdin, stderr=log, env=self.env, pass_fds=self.pass_fds)

    def await_ready(self) -> None:
        """Return once it answers."""
        assert self.wait_or_ready(), f"the daemon ended with {self.process.returncode}: {self.log}"

    def wait_or_ready(self) -> bool:
        """Return True once it answers, or False once it has exited."""
        eventually(lambda: self.process.poll() is not None or self._answers())
        return self.process.poll() is None

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith("OK")
        except OSError:
            return False

    def ask(self, words: str) -> str:
        """Return the socket's answer to one request line."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            connection.connect(os.fspath(self.socket_path))
            connection.sendall(f"{words}\n".encode())
            with connection.makefile("r") as answers:
                return answers.readline().rstrip("\n")

    @property
    def log(self) -> str:
        """Return the output on stderr of all its runs."""
        return self.log_path.read_text()


Start = Callable[..., Daemon]
"""Start a daemon that ends with its test; settings are keywords (``tests/daemon/conftest.py``)."""


class Client:
    """A connection to a daemon's socket for requests that no correct producer sends."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_SECONDS)
        try:
            self.socket.connect(os.fspath(path))
        except OSError:
            self.socket.close()
            raise
        self._replies = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._replies.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def publish(self, route: str, payload: bytes, options: str = "") -> None:
        """Send a PUB and do not wait for the reply."""
        self.send(f"PUB {route} {len(payload)} {options}".rstrip().encode() + b"\n" + payload)

    def reply(self) -> str:
        """Return the next reply, without its newline; "" if the daemon has disconnected."""
        return self._replies.readline().decode().rstrip("\n")

    def ask(self, data: bytes) -> str:
        """Send ``data`` and return the next reply."""
        self.send(data)
        return self.reply()
