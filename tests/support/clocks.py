"""A wall clock of Python programs that a test sets, by ``disturbing/sitecustomize.py``."""

import os
import struct
from pathlib import Path


class Clock:
    """The error of the clock, in a file; programs that start with ``env`` see each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(8))
        self.env = {
            "PYTHONPATH": os.fspath(Path(__file__).with_name("disturbing")),
            "DISTURBED_CLOCK": os.fspath(path),
        }

    def set(self, offset_ns: int) -> None:
        with self._path.open("r+b", buffering=0) as file:  # in place: programs have mapped it
            file.write(struct.pack("<q", offset_ns))
