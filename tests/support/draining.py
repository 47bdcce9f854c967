"""Wald-drain as a process that a test runs or starts, and inside this process."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import TIMEOUT_SECONDS, readable, run

import wald
from wald.errors import WaldError
from wald.files.disk import Disk
from wald_drain.process import runners_for
from wald_drain.redrive import Consumer, redrive
from wald_drain.run import drain as run_drain
from wald_drain.worker import Counts, Job, RunContext

Start = Callable[..., subprocess.Popen[bytes]]
"""The fixture ``start``."""
NOW_NS = 1_795_255_200_000_000_000


def drain_command(*arguments: object) -> list[str]:
    """Return the command line of ``wald-drain ARGUMENTS`` under this interpreter."""
    return [sys.executable, "-m", "wald_drain", *map(str, arguments)]


def drain(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run it to completion; the exit code and stderr are not checked."""
    return run(drain_command(*arguments))


def drain_refusal(*arguments: object) -> tuple[int, str, str]:
    """Return exit code, message and hint of a failing drain; earlier progress reports are ignored."""
    done = drain(*arguments)
    match = re.search(r"^wald-drain: (.+)\n  hint: (.+)\n\Z", done.stderr.decode(), re.MULTILINE)
    assert match, done.stderr.decode()
    assert done.returncode != 0
    return done.returncode, match[1], match[2]


def await_line(process: subprocess.Popen[bytes], text: str) -> None:
    """Return once the process has reported ``text``; call it once, since it discards later output read with it."""
    assert process.stderr is not None
    said = b""
    while text.encode() not in said:
        assert readable(process.stderr.fileno(), within=TIMEOUT_SECONDS), said.decode()
        more = os.read(process.stderr.fileno(), 1 << 16)
        assert more, said.decode()
        said += more


def cursor(root: Path) -> int:
    """Return the cursor of the drain group on route a."""
    return wald.open(root).cursor("a").effective


class InProcess:
    """A drain in this process, and the lines that it reported."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stop, self.stop_requested = threading.Event(), threading.Event()
        self.reported: list[str] = []
        self.given_up = 0

    def report(self, line: str) -> None:
        self.reported.append(line)

    def run(
        self,
        *words: object,
        route: str = "a",
        group: str = "processed",
        disk: Disk | None = None,
        now_ns: int = NOW_NS,
        **options: Any,
    ) -> None:
        """Run a job to completion; the options are fields of a job."""
        # Any: their types differ.
        job: dict[str, Any] = {
            "command": tuple(map(str, words)),
            "stdin_format": "raw",
            "records_max": 1000,
            "tries": 1,
            "dead_letter": "dead_letter",
            "daemon": self.root,
            "exit_at_end": True,
        }
        consumer = self.consumer(route, group, disk=disk, now_ns=now_ns)
        context = RunContext(consumer, Job(**(job | options)), Counts(), self.stop, self.report, self.stop_requested)
        with runners_for(context.job.command, 1) as runners:
            try:
                self.given_up = run_drain(context, runners)
            except WaldError:
                self.stop.clear()  # the worker that failed has set it
                raise

    def redrive(self, route: str, *, group: str = "processed", disk: Disk | None = None, now_ns: int = NOW_NS) -> None:
        """Put the dead letters of a route back."""
        redrive(
            self.consumer(route, group, disk=disk, now_ns=now_ns), daemon=self.root, stop=self.stop, report=self.report
        )

    def consumer(self, route: str, group: str, *, disk: Disk | None, now_ns: int) -> Consumer:
        """Return a group on a route of the log."""
        return Consumer(wald.open(self.root), route, group, disk or Disk(), lambda: now_ns)


class Gate:
    """A FIFO with which a command signals progress, or on which it waits until a test releases it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    def await_writer(self) -> bytes:
        """Return the bytes of a writer once it has closed the FIFO."""
        return self.path.read_bytes()

    def let_reader_go(self) -> None:
        """Return once the FIFO has a reader."""
        self.path.write_bytes(b"go\n")
