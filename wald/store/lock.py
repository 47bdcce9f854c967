"""One writer: a lock on the root, held for the daemon's life, and an epoch that grows by one at every start.

The lock file holds one line of JSON: epoch, pid, host, started. A daemon that lost its lock without noticing (somebody
deleted the file, or the file system does not really lock) sees before its next acknowledgement that the file is not
the one it wrote.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from wald.errors import Damaged, Locked
from wald.format.head import decode_head
from wald.format.names import Kind
from wald.format.segment import HEADER, BadHeader, decode_header
from wald.store.directory import Root, Segment, list_segments
from wald.store.disk import Disk
from wald.store.regular import open_file, read_regular


class Lock:
    """The right to write to ``root``, and the number of this life.

    Raises:
        Locked: another daemon has it; the message says who.
    """

    def __init__(self, root: Root, disk: Disk, *, now: str) -> None:
        self._path = os.fspath(root.lock)
        self._disk = disk
        self._descriptor = disk.open_append(root.lock)
        if not disk.lock(self._descriptor):
            disk.close(self._descriptor)
            raise Locked(
                f"{root.lock}: another daemon writes to this root ({holder(root)})",
                hint="stop it first, or use its socket: wald append, wald cut",
            )
        self.epoch = _last_epoch(root) + 1
        told = {"epoch": self.epoch, "pid": os.getpid(), "host": socket.gethostname(), "started": now}
        disk.truncate(self._descriptor, 0)
        disk.write(self._descriptor, [json.dumps(told).encode() + b"\n"], 0)
        disk.sync(self._descriptor)
        disk.sync_directory(root.path)
        self._seen = self._stat()

    def is_ours(self) -> bool:
        """Whether nobody else has taken the root over; one stat(2)."""
        return self._stat() == self._seen

    def release(self) -> None:
        self._disk.close(self._descriptor)

    def _stat(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return (0, 0, 0)
        return status.st_dev, status.st_ino, status.st_mtime_ns


def holder(root: Root) -> str:
    """Who wrote the lock file last, in words."""
    told = _told(root.lock)
    if not told:
        return "the lock file does not say who"
    return f"pid {told.get('pid')} on {told.get('host')}, epoch {told.get('epoch')}, since {told.get('started')}"


def is_held(root: Root, disk: Disk) -> bool:
    """Whether a daemon runs on ``root`` now."""
    try:
        descriptor = os.open(root.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not disk.lock(descriptor)
    finally:
        os.close(descriptor)


def _told(path: Path) -> dict[str, object]:
    try:
        told = json.loads(read_regular(path))
    except (OSError, ValueError, Damaged):
        return {}
    return told if isinstance(told, dict) else {}


def _last_epoch(root: Root) -> int:
    """The largest epoch anything in the root knows of: any of the places may have been lost."""
    epoch = _told(root.lock).get("epoch", 0)
    found = [epoch if isinstance(epoch, int) else 0]
    try:
        head = decode_head(read_regular(root.head))
        found.append(head.epoch if head else 0)
    except (FileNotFoundError, Damaged):
        pass
    found += [_epoch_of(segment) for segment in list_segments(root).segments[-1:]]
    return max(found)


def _epoch_of(segment: Segment) -> int:
    from wald.store.compression import SealedFile  # only a start needs it, not wald append asking who holds the lock

    try:
        if segment.kind is Kind.SEALED:
            with SealedFile(segment.path) as sealed:
                return sealed.index.epoch
        with open_file(segment.path) as file:
            return decode_header(file.read(HEADER.size)).epoch
    except (BadHeader, Damaged):
        return 0
