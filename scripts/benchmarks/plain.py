"""The daemon with one change: bytes leave a pipe when they are read, not when they are on disk.

Shows the cost of `read(2)` compared with `tee(2)` and a second read, in an otherwise identical round. It loses bytes
when it is killed, which is the point. Run as a program: the daemon on the root given with --root.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from wald.daemon import intake, loop
from wald.daemon.pipes import Scratch
from wald.settings import load

_SHORT_BYTES = 4096


class PlainScratch(Scratch):
    """Scratch that reads at once, and keeps bytes that a round does not commit for the next."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = b""
        self._looked = memoryview(b"")

    def peek(self, source: int, into: memoryview) -> int | None:
        kept = len(self._kept)
        into[:kept] = self._kept
        try:
            length = os.readv(source, [into[kept:]])
        except BlockingIOError:
            return None
        self._looked = into[: kept + length]
        # A round that takes nothing does not consume either; the bench's lines are short, so that takes a short read.
        self._kept = bytes(self._looked) if length < _SHORT_BYTES else b""
        self._kept = bytes(self._looked)
        return kept + length

    def consume(self, source: int, length: int, mark: memoryview) -> int:  # noqa: ARG002 - as the real one
        self._kept = bytes(self._looked[length:])
        return length


if __name__ == "__main__":
    intake.Scratch = PlainScratch  # type: ignore[misc]
    sys.exit(loop.run(Path(sys.argv[sys.argv.index("--root") + 1]), load(None, os.environ)))
