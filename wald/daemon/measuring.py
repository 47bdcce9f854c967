"""What the directory shows, for ``/metrics``: the output of ``wald metrics``, which runs when a scraper asks.

A process of its own reads the segments' indexes, because a turn would have to wait for the interpreter's lock that this
takes. Scrapers share what it has printed for some seconds, and for nine times as long as it took.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL_SECONDS = 10.0  # between two measurements, at least
_REST = 9  # times the duration: a tenth of one core
_PATIENCE_SECONDS = 3.0  # the scraper for which a measurement begins waits for so long
_SECONDS_MAX = 600.0
_NICENESS = 5  # with 19 it would take minutes on a busy machine


class Measuring:
    """Measures the directory at ``root`` when it is asked, and not too often.

    Args:
        needed_bytes: returns with how much free space input is taken.
    """

    def __init__(self, root: Path, needed_bytes: Callable[[], int]) -> None:
        self._root = root
        self._needed_bytes = needed_bytes
        self._mutex = threading.Lock()
        self._due = 0.0
        self._text = b""
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.failures = 0

    def text(self) -> bytes:
        """The newest text; empty before the first one, and if the last attempt failed."""
        with self._mutex:
            running = self._thread is not None and self._thread.is_alive()
            begins = not running and not self._closed and time.monotonic() >= self._due
            if begins:
                self._thread = threading.Thread(target=self._measure, name="measuring", daemon=True)
                self._thread.start()
        if begins and self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)  # this scraper alone: the places of others are wanted by others
        return self._text

    def close(self) -> None:
        """End the process that is at work."""
        with self._mutex:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()

    def _measure(self) -> None:
        began = time.monotonic()
        try:
            self._text = self._output()
        except (OSError, subprocess.SubprocessError):
            self._text = b""  # old numbers would hide that there are no new ones
            self.failures += 1
        now = time.monotonic()
        self._due = max(began + INTERVAL_SECONDS, now + _REST * (now - began))

    def _output(self) -> bytes:
        # -P: the working directory, which may be the root, is not searched for modules.
        command = [sys.executable, "-P", "-m", "wald", "--root", str(self._root), "metrics"]
        command += ["--needed-bytes", str(self._needed_bytes())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with process:
            with self._mutex:
                self._process = process
                if self._closed:
                    process.kill()
            with contextlib.suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            try:
                output, _ = process.communicate(timeout=_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
        return output
