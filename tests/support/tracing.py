"""Real processes under strace: system calls that hang, fail, or kill, at an exact call.

Unless all threads are requested, only the main thread is traced, which runs the commit rounds; background calls are
neither counted nor affected.
"""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import programs
from running import TIMEOUT_SECONDS, eventually


class Trace:
    """Output of strace so far."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._process = process
        self._path = path

    @property
    def calls(self) -> list[str]:
        """Return one line per system call, as strace writes it."""
        return self._path.read_text().splitlines()

    def release(self) -> None:
        """Detach from the process; a delayed call continues."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait(TIMEOUT_SECONDS)


@contextmanager
def traced(pid: int, path: Path, *expressions: str, threads: bool = False) -> Iterator[Trace]:
    """Attach strace to a running process."""
    errors = path.with_suffix(".errors")
    with errors.open("wb") as stderr:
        options = [*("-f" for _ in range(threads)), "-y", *(f"-e{each}" for each in expressions)]
        line = [strace(), *options, "-o", str(path), "-p", str(pid)]
        process = subprocess.Popen(line, stderr=stderr)
    trace = Trace(process, path)
    try:
        eventually(lambda: "attached" in errors.read_text() or process.poll() is not None)
        assert "attached" in errors.read_text(), errors.read_text()
        yield trace
    finally:
        trace.release()


def strace() -> str:
    """Return the path of strace; without it, the test is skipped."""
    return programs.program("strace")


def hangs_in(pid: int, number: int) -> bool:
    """Return True if the process is inside the system call with this number."""
    return Path(f"/proc/{pid}/syscall").read_text().startswith(f"{number} ")


def descriptor_of(call: str) -> str:
    """Return ``3</path>``, the first argument of a call as ``-y`` shows it."""
    found = re.search(r"\((\d+<[^>]*>)", call)
    assert found, call
    return found[1]
