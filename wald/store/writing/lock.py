"""One writer: a lock on the root, held for the daemon's life, and an epoch that grows by one at every start.

The lock file holds one line of JSON: epoch, pid, host, started, nonce. Some network and FUSE file systems let two have
the lock. So whoever has it writes a nonce into the file and looks again before anything is written to the log: of two
that start together the last to write goes on, and the other finds its nonce gone. A daemon that lost its lock later
(somebody deleted the file, or another started where nothing locks) sees before its next acknowledgement that the file
is not the one it wrote.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from wald.errors import Damaged, Locked, command_line
from wald.format.head import decode_head
from wald.format.names import Kind
from wald.format.segment import HEADER, BadHeader, decode_header
from wald.store.files.directory import Root, Segment, list_segments
from wald.store.files.disk import Disk
from wald.store.files.regular import open_file, read_regular

_SETTLE_SECONDS = 0.02  # more than a tick of the clock that files' times come from
_SETTLE_UNLOCKED_SECONDS = 1.0  # where flock(2) does not lock: what another may take from there to its nonce
_ASKED_SECONDS = 0.1  # for so long a lock is tried that somebody may hold just to see whether it is held


class Lock:
    """The right to write to ``root``, and the number of this life.

    Raises:
        Locked: another daemon has it; the message says who.
    """

    def __init__(self, root: Root, disk: Disk, *, now: str) -> None:
        self._path = os.fspath(root.lock)
        self._disk = disk
        self._descriptor = disk.open_lock(root.lock)
        try:
            _await(lambda: disk.lock(self._descriptor), root)
            self.epoch = _last_epoch(root) + 1
            self._sign(root, {"epoch": self.epoch, "pid": os.getpid(), "host": socket.gethostname(), "started": now})
        except BaseException:
            disk.close(self._descriptor)
            raise

    def is_ours(self) -> bool:
        """Whether nobody else has taken the root over; one stat(2)."""
        return self._stat() == self._seen

    def release(self) -> None:
        self._disk.close(self._descriptor)

    def _sign(self, root: Root, told: dict[str, object]) -> None:
        nonce = secrets.token_hex(16)
        self._disk.truncate(self._descriptor, 0)
        self._disk.write(self._descriptor, [json.dumps(told | {"nonce": nonce}).encode() + b"\n"], 0)
        self._disk.sync(self._descriptor)
        self._disk.sync_directory(root.path)
        self._seen = self._stat()
        time.sleep(_SETTLE_SECONDS if self._excludes(root) else _SETTLE_UNLOCKED_SECONDS)
        if _told(root.lock).get("nonce") != nonce or not self.is_ours():
            raise Locked(
                f"{root.lock}: two daemons were started together, and the other goes on ({holder(root)})",
                hint="the file system does not lock: put the root on a local one, or start only one daemon",
            )

    def _excludes(self, root: Root) -> bool:
        """Whether the lock keeps another descriptor out; a file system of several machines may do so on each alone."""
        descriptor = self._disk.open_lock(root.lock)
        try:
            return not self._disk.lock(descriptor)
        finally:
            self._disk.close(descriptor)

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
    """Whether a daemon runs on ``root`` now; who may not open its lock is told by the kernel's list of locks."""
    try:
        descriptor = os.open(root.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return _is_listed(root.lock)
    try:
        return not disk.lock(descriptor)
    finally:
        os.close(descriptor)


def require_free(root: Root, disk: Disk) -> None:
    """Look whether a daemon could begin on ``root``, and write nothing.

    Raises:
        Locked: another one runs; the message says who.
        PermissionError: this user may run none.
    """
    if os.path.lexists(root.lock):
        disk.close(disk.open_lock(root.lock))  # who may not write to it may run none, whoever does
        _await(lambda: not is_held(root, disk), root)


def _await(is_free: Callable[[], bool], root: Root) -> None:
    until = time.monotonic() + _ASKED_SECONDS
    while not is_free():
        if time.monotonic() > until:
            raise Locked(
                f"{root.lock}: another daemon writes to this root ({holder(root)})",
                hint=f"stop it first, or use its socket: {command_line(root.path, 'append ROUTE')}",
            )
        time.sleep(_ASKED_SECONDS / 10)


def _is_listed(path: Path) -> bool:
    """Source: proc_locks(5): ``1: FLOCK  ADVISORY  WRITE 123 fe:00:4711 0 EOF``."""
    try:
        status = os.stat(path)
        lines = Path("/proc/locks").read_text().splitlines()
    except FileNotFoundError:
        return False
    file = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    return any(file in line for line in lines)


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
    from wald.store.segments.compression import (
        SealedFile,  # only a start needs it, not wald append asking who holds the lock
    )

    try:
        if segment.kind is Kind.SEALED:
            with SealedFile(segment.path) as sealed:
                return sealed.index.epoch
        with open_file(segment.path) as file:
            return decode_header(file.read(HEADER.size)).epoch
    except (BadHeader, Damaged):
        return 0
