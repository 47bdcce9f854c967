"""A process that owns a work group and executes a test's calls: ``Owning``.

    python owning.py ROOT ROUTE GROUP OPTIONS

Each line on stdin is JSON: a method of :class:`wald.work.group.WorkGroup` and its arguments. Each line on stdout is its
result. The process exits at the end of its stdin.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from running import launched

from wald.work.group import WorkGroup


class Owning:
    """The process, until it is closed or killed."""

    def __init__(self, root: Path, route: str, group: str, *, before: tuple[str, ...] = (), **options: object) -> None:
        line = [*before, sys.executable, __file__, str(root), route, group, json.dumps(options)]
        self._process = launched(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, *arguments: object) -> Any:  # result of the method
        """Call a method; return its result, or the sequences of a lease."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def lease(self, worker: str, count: int, lease_for: float = 600.0) -> list[int]:
        """Lease ``count`` records."""
        got: list[int] = []
        while len(got) < count:
            more = self.ask("lease", worker, count - len(got), 1 << 20, lease_for, 30)
            assert more, "no more records came"
            got += more
        return got

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Stop it, and close the group."""
        if self._process.poll() is None:
            self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the owner has ended: {self._process.wait()}"
        return json.loads(line)


def main() -> None:
    root, route, group, options = sys.argv[1:]
    with WorkGroup(root, route, group, **json.loads(options)) as work:
        _say(os.getpid())
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            answer = getattr(work, method)(*arguments)
            if method == "lease":
                answer = [delivery.record.sequence for delivery in answer]
            _say(answer)


def _say(answer: object) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
