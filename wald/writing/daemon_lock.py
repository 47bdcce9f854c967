"""Lock of the single writer, and the epoch, which grows by one at every start of a daemon.

The lock file is one line of JSON: epoch, pid, host, started, nonce. Some network and FUSE file systems grant the lock
twice. So a daemon reads its nonce back: if two daemons start together, the last to write continues. Before each
acknowledgement, a daemon checks that the lock file is still its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from wald.errors import Damaged, Locked, NotFound, WaldError
from wald.files import locks
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.files.safe_open import open_file, read_object, read_start
from wald.format.names import Kind
from wald.format.segment import SEGMENT_HEADER, SEGMENT_MAGIC, SPARSE_MAGIC, BadHeader, decode_segment_header

_SETTLE_SECONDS = 0.02  # longer than a clock tick of file times
_SETTLE_UNLOCKED_SECONDS = 1.0  # without flock(2), another daemon may take this long to write its nonce
_FILE_PREFIXES = {
    b"seq=": "head",
    b'{"epoch"': "lock",
    b'{"log"': "log.json",
    b'{"event"': "a ledger",
    b'{"work"': "the journal of a work group",
    SEGMENT_MAGIC: "a segment",
    SPARSE_MAGIC: "the index of a segment",
    b"\x28\xb5\x2f\xfd": "a sealed segment or a part of a ledger",
}
_PROBE_SECONDS = 0.1  # another process may hold the lock briefly to test it


class Lock:
    """Exclusive right to write to ``root``. Raises Locked if another daemon has it."""

    def __init__(self, root: Root, disk: Disk, *, now: str) -> None:
        self._path = os.fspath(root.lock)
        self._disk = disk
        self._descriptor = disk.open_lock(root.lock)
        try:
            _wait_until_free(lambda: disk.lock(self._descriptor), root)
            require_own_files(root)
            self.epoch = _last_epoch(root) + 1
            self.signature = {"epoch": self.epoch, "pid": os.getpid(), "host": socket.gethostname(), "started": now}
            self._sign(root)
        except BaseException:
            disk.close(self._descriptor)
            raise

    def is_ours(self) -> bool:
        """Return True if no other program has changed the lock file."""
        return self._file_state() == self._signed_state

    def loss(self, root: Root) -> WaldError:
        """Return the error that explains how the lock was lost."""
        if not os.path.lexists(root.identity):
            return root_gone(root)
        if not os.path.lexists(root.lock):
            return NotFound(
                f"{root.lock}: the lock file was removed while the daemon was running",
                case="lock-file-removed",
                root=root.path,
            )
        fields = read_signature(root)
        if all(fields.get(name) == value for name, value in self.signature.items()):
            return Locked(
                f"{root.lock}: the lock file of this daemon was replaced by a copy or modified",
                case="lock-file-replaced",
            )
        return Locked(
            f"{root.lock}: another daemon has taken over ({describe_daemon(fields)})",
            case="daemon-taken-over",
        )

    def release(self) -> None:
        self._disk.close(self._descriptor)

    def _sign(self, root: Root) -> None:
        nonce = secrets.token_hex(16)
        self._disk.truncate(self._descriptor, 0)
        self._disk.write(self._descriptor, [json.dumps(self.signature | {"nonce": nonce}).encode() + b"\n"], 0)
        self._disk.sync(self._descriptor)
        self._disk.sync_directory(root.path)
        self._signed_state = self._file_state()
        time.sleep(_SETTLE_SECONDS if self._has_exclusive_locks(root) else _SETTLE_UNLOCKED_SECONDS)
        if (fields := read_signature(root)).get("nonce") != nonce or not self.is_ours():
            raise Locked(
                f"{root.lock}: two daemons were started together, and the other continues ({describe_daemon(fields)})",
                case="file-system-without-locks",
            )

    def _has_exclusive_locks(self, root: Root) -> bool:
        """Return True if flock(2) works: a second descriptor cannot lock the file."""
        descriptor = self._disk.open_lock(root.lock)
        try:
            return not self._disk.lock(descriptor)
        finally:
            self._disk.close(descriptor)

    def _file_state(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return (0, 0, 0)
        return status.st_dev, status.st_ino, status.st_mtime_ns


def root_gone(root: Root) -> NotFound:
    message = "the log is gone (removed, moved or unmounted)" if root.path.is_dir() else "the root is gone"
    return NotFound(
        f"{root.path}: {message}; nothing is acknowledged until it is back",
        case="root-gone",
        root=root.path,
    )


def require_own_files(root: Root) -> None:
    """Raise Damaged if a file that a start would overwrite is really another file of the log."""
    for path in (root.lock, root.head, root.transfers):
        try:
            start = read_start(path, 32)
        except (FileNotFoundError, Damaged):  # a later open refuses it
            continue
        kind = next((name for prefix, name in _FILE_PREFIXES.items() if start.startswith(prefix)), "")
        if re.match(rb"[0-9]{1,20}\n", start):
            kind = "a cursor"
        if kind and kind != path.name:
            from wald.segments.reader import identify  # only a refused start needs it

            form, header = identify(path) or (Kind.RAW, None)
            target = None if header is None else root.segment(header.base_sequence, form)
            raise Damaged(
                f"{path}: offset 0: this is the content of {kind}, not of {path.name}; refusing to overwrite it",
                case="foreign-file-in-place",
                path=path,
                target=None if target is None or os.path.lexists(target) else target,
            )


def describe_daemon(fields: Mapping[str, object]) -> str:
    """Describe the daemon that signed a lock file."""
    if not fields:
        return "the lock file does not name it"
    if "pid" not in fields:
        return f"since {fields.get('started')}; this user may not read its pid in the lock file"
    return (
        f"pid {fields.get('pid')} on {fields.get('host')}, epoch {fields.get('epoch')}, since {fields.get('started')}"
    )


def read_signature(root: Root) -> dict[str, object]:
    """Return the lock file's fields, or {} if it is unreadable."""
    return read_object(root.lock) or {}


def is_lock_hidden(root: Root) -> bool:
    """Return True if this user may not read the lock file."""
    return os.path.lexists(root.lock) and not os.access(root.lock, os.R_OK, effective_ids=True)


def require_free(root: Root, disk: Disk) -> None:
    """Raise Locked or PermissionError if this user cannot start a daemon on ``root``. Writes nothing."""
    if os.path.lexists(root.lock):
        disk.close(disk.open_lock(root.lock))  # fails without permission
        _wait_until_free(lambda: not locks.is_locked(root.lock, disk), root)


def _wait_until_free(is_free: Callable[[], bool], root: Root) -> None:
    until = time.monotonic() + _PROBE_SECONDS
    while not is_free():
        if time.monotonic() > until:
            raise Locked(
                f"{root.lock}: another daemon writes to this root ({describe_daemon(read_signature(root))})",
                case="daemon-is-running",
                root=root.path,
            )
        time.sleep(_PROBE_SECONDS / 10)


def _last_epoch(root: Root) -> int:
    """Return the largest epoch in lock file, head and newest segment; any may be lost."""
    from wald.segments.durable_end import readable_head
    from wald.segments.sealed_file import SealedFile

    epoch, head = read_signature(root).get("epoch"), readable_head(root)
    epochs = [epoch if isinstance(epoch, int) else 0, head.epoch if head else 0]
    for segment in list_segments(root).segments[-1:]:
        with suppress(BadHeader, Damaged):
            if segment.kind is Kind.SEALED:
                with SealedFile(segment.path) as sealed:
                    epochs.append(sealed.index.epoch)
            else:
                with open_file(segment.path) as file:
                    epochs.append(decode_segment_header(file.read(SEGMENT_HEADER.size)).epoch)
    return max(epochs)
