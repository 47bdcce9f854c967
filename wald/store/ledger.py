"""A ledger file: chained JSON lines, appended and synced by their one owner."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from wald.format.ledger import GENESIS, Decoded, decode_ledger, digest, encode_line
from wald.store.disk import Disk

_TAIL_BYTES = 64 << 10  # more than any line but that of a segment with a thousand routes


class Ledger:
    """The appending side. Opening cuts a torn last line; a broken chain is kept and told by :func:`read_ledger`."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._end = 0
        self._prev = ""
        with self._mutex:
            self._open(known_bytes=None)
        disk.sync_directory(path.parent)

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line and return when it is on disk.

        Raises:
            OSError: it is not; the descriptor is given up, and the next append opens the file anew and cuts away
                what this one may have left.
        """
        with self._mutex:
            descriptor = self._open(known_bytes=self._end) if self._descriptor is None else self._descriptor
            line = encode_line(entry, self._prev)
            try:
                self._disk.write(descriptor, [line], self._end)
                self._disk.sync(descriptor)
            except OSError:
                self._descriptor = None  # a descriptor whose sync failed may claim success the next time
                self._disk.close(descriptor)
                raise
            self._end += len(line)
            self._prev = digest(line)

    def entries(self) -> list[dict[str, Any]]:
        """What the ledger says; a line whose append failed is not among it, whatever the file holds."""
        with self._mutex:
            return decode_ledger(self._path.read_bytes()[: self._end]).entries

    def close(self) -> None:
        with self._mutex:
            if self._descriptor is not None:
                self._disk.close(self._descriptor)
                self._descriptor = None

    def _open(self, *, known_bytes: int | None) -> int:
        """Open at the end of the last whole line, or at ``known_bytes`` where what follows was never acknowledged."""
        descriptor = self._disk.open_append(self._path)
        try:
            length = os.fstat(descriptor).st_size
            line, end = _last_line(descriptor, length if known_bytes is None else min(known_bytes, length))
            if length > end:
                self._disk.truncate(descriptor, end)
        except OSError:
            self._disk.close(descriptor)
            raise
        self._descriptor, self._end, self._prev = descriptor, end, digest(line) if line else GENESIS
        return descriptor


def _last_line(descriptor: int, end: int) -> tuple[bytes, int]:
    """The last whole line before ``end``, and where it ends; read from the back, for a ledger only grows."""
    want = _TAIL_BYTES
    while True:
        start = max(0, end - want)
        tail = os.pread(descriptor, end - start, start)
        whole = tail.rfind(b"\n") + 1
        begin = tail.rfind(b"\n", 0, max(0, whole - 1)) + 1
        if start == 0 or (whole and begin):
            return tail[begin:whole], start + whole
        want *= 2


def read_ledger(path: Path) -> Decoded:
    """What the ledger at ``path`` says; an absent one is empty."""
    try:
        return decode_ledger(path.read_bytes())
    except FileNotFoundError:
        return decode_ledger(b"")
