"""Life of a log: every program that writes, in turn, and the files that they create."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from running import TIMEOUT_SECONDS, Daemon, command, run, sidecar
from tracing import strace

_CHANGING = "%file,fchmod,fchown,ftruncate,bind"
_SETTINGS = {"WALD_SEGMENT_MAX_BYTES": "1MiB", "WALD_FREE_SPACE_MIN": "0"}
_TORN = b"torn" * 10


@dataclass
class Life:
    """A log, an archive of it, and methods to run its programs."""

    root: Path
    archive: Path
    umask: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    traces: Path | None = None
    failed: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def live(self) -> None:
        """Run each program once: with a daemon, then with one that finds the traces of a crash."""
        self._run(command("init", "--root", self.root))
        with self._daemon() as daemon:
            if daemon.wait_or_ready():
                self._beside_a_daemon()
            daemon.kill()
        active = max(self.root.glob("segments/*.wal"), default=None)
        if active is not None and not active.is_symlink() and not active.parent.is_symlink():
            with active.open("r+b") as file:  # a crash leaves bytes after the last batch
                file.seek(len(active.read_bytes().rstrip(b"\0")) + 8)
                file.write(_TORN)
        with self._daemon() as daemon:
            if daemon.wait_or_ready():
                daemon.stop()
        self._without_a_daemon()

    def _beside_a_daemon(self) -> None:
        root = ("--root", self.root)
        for route in ("r", "x"):
            self._run(command("route", "add", *root, route))
        self._run(command("route", "add", *root, "f", "--fifo"))
        self._run(command("route", "add", *root, "c", "--consumers", os.getgid()))
        self._run(command("append", *root, "c"), stdin=b"x\n")
        self._run(command("cursor", "set", *root, "c", 0, "--group", "g"))
        for _ in range(2):
            self._run(command("append", *root, "r"), stdin=b"one\ntwo\nthree\n")
            self._run(command("cut", *root))
        self._run(command("append", *root, "r"), stdin=b"l" * (300 << 10) + b"\n")
        with suppress(OSError), open(os.open(self.root / "routes/f/in", os.O_WRONLY | os.O_NONBLOCK), "wb") as fifo:
            fifo.write(b"line\n")
        self._run(command("route", "retire", *root, "x"))
        self._run(command("cursor", "set", *root, "r", 1, "--group", "g"))
        self._run(command("cursor", "remove", *root, "r", "--group", "g"))
        self._run(sidecar("drain", "r", *root, "--group", "d", "--tries", 1, "--exit-at-end", "--", "false"))
        self._run(sidecar("drain", "r", *root, "--exit-at-end", "--", "cat"))
        self._archive()

    def _without_a_daemon(self) -> None:
        root = ("--root", self.root)
        self._run(command("route", "add", *root, "x"))
        self._run(command("route", "add", *root, "y", "--fifo"))
        self._run(command("route", "retire", *root, "y"))
        self._run(command("cursor", "set", *root, "r", 1, "--group", "s"))
        self._run(command("verify", *root))
        self._archive()

    def _archive(self) -> None:
        dest = ("--dest", self.archive)
        self._run(sidecar("archive", "pack", "--root", self.root, *dest, "r", "--group", "a", "--engine", "local"))
        self._run(sidecar("archive", "verify", self.archive))
        self._run(sidecar("archive", "restore", self.archive, "r"))
        self._run(sidecar("reclaim", "--root", self.root, "--grace", "0s"))

    def _daemon(self) -> Daemon:
        return Daemon(self.root, env=self._settings, ready=False, prefix=self._prefix("-D"))

    def _run(self, line: Sequence[str], stdin: bytes = b"") -> None:
        if prefix := self._prefix():
            line, env = [*prefix, *line], os.environ | self._settings
            done = subprocess.run(line, input=stdin, env=env, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
        else:
            done = run(line, stdin=stdin, env=self._settings)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        if done.returncode:
            self.failed.append(f"{' '.join(line)}: {done.stderr.decode()}")

    @property
    def _settings(self) -> dict[str, str]:
        return {**_SETTINGS, **self.environment}

    def _prefix(self, *options: str) -> list[str]:
        prefix = [] if self.umask is None else ["sh", "-c", f'umask {self.umask:o}; exec "$@"', "sh"]
        if self.traces is None:
            return prefix
        path = self.traces / f"{next(self._numbers)}"
        return [*prefix, strace(), "-f", *options, "-y", "-e", f"trace={_CHANGING}", "-o", str(path)]
