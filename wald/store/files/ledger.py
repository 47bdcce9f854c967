"""A ledger file: chained JSON lines, appended, synced and cut into parts by their one owner.

What a power cut has left of the last append was never acknowledged: its owner cuts it away, and until then readers
leave it off. Programs that decide by a ledger read it with :mod:`wald.store.files.lines`, which requires that the chain
is whole. Programs that report read it with :func:`read_files`, which reports damage and goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE
from typing import Any

from wald.errors import Damaged, Locked
from wald.format.ledger import GENESIS, BadLine, Decoded, decode_ledger, decode_line, digest, encode_line
from wald.format.ledger_part import BadPart, PartIndex
from wald.store.files.cutting import Cutting, remove_temporaries
from wald.store.files.disk import Disk
from wald.store.files.ledger_parts import (
    PartName,
    decode_part,
    first_prev,
    frames_of,
    parts_of,
    read_index,
    without_copies,
)
from wald.store.files.ledger_tail import is_whole, last_line, newline_is_damaged, synced
from wald.store.files.part_index import CLOCK_UNKNOWN
from wald.store.files.regular import open_file

PART_BYTES = 4 << 20  # of lines in a sealed part, at least
_RETRY_SHARE = 4  # what could not be cut is tried again when it has grown by such a part of PART_BYTES
_NEWEST_BYTES = 4 << 20  # of what is read to find the newest entries


class Ledger:
    """The appending side. Opening cuts a torn last line; a damaged one is kept, and the line after it says so.

    Args:
        owner: the program whose ledger it is, where several may be started; one at a time gets it, until it is closed.
        reserve_bytes: kept allocated for later lines, for an owner that has to write them on a full disk.
        part_bytes: how long the active file is when :meth:`cut` seals its lines.

    Attributes:
        path: of the active file.

    Raises:
        Locked: another of these owners has it.
    """

    def __init__(
        self, path: Path, disk: Disk, *, owner: str = "", reserve_bytes: int = 0, part_bytes: int = PART_BYTES
    ) -> None:
        self.path = path
        self._disk = disk
        self._reserve_bytes = reserve_bytes
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._lock: int | None = None
        self._end = 0
        self._prev = ""
        self._damage: list[dict[str, Any]] = []
        self._part_bytes = self._cut_bytes = part_bytes
        if owner:
            self._lock = lock_ledger(path, disk, owner)
        try:
            remove_temporaries(path, disk)
            with self._mutex:
                self._open(known_bytes=None)
            disk.sync_directory(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, *entries: dict[str, Any]) -> None:
        """Write a line for each entry, and return when they are on disk. A crash may leave the first few of them.

        Raises:
            OSError: they are not; the descriptor is given up, and the next append opens the file again and cuts away
                what this one may have left.
        """
        with self._mutex:
            descriptor = self._reopened() if self._descriptor is None else self._descriptor
            lines, prev = [], self._prev
            appended = (*self._damage, *entries)
            for entry in appended:
                lines.append(encode_line(entry, prev, self._end if len(appended) > 1 else None))
                prev = digest(lines[-1])
            try:
                written = self._disk.write(descriptor, lines, self._end)
                self._disk.sync(descriptor)
            except OSError:
                self._descriptor = None  # a descriptor whose sync failed may claim success the next time
                self._disk.close(descriptor)
                raise
            self._end += written
            self._prev = prev
            self._damage = []
            if self._reserve_bytes:
                self._disk.reserve(descriptor, self._end, self._reserve_bytes)

    def settle(self) -> None:
        """Cut away what a failed append may have left, so that readers find the lines that were acknowledged."""
        with self._mutex:
            if self._descriptor is None:
                self._reopened()

    def cut(self) -> None:
        """Seal the lines of a long active file into parts, and begin a new one; a short one stays as it is.

        Nothing is lost if that fails: the lines stay where they are, and it is tried again when there are more.
        """
        with self._mutex:
            if self._descriptor is None or self._end < self._cut_bytes:
                return
            self._cut_bytes = self._end + self._part_bytes // _RETRY_SHARE
            try:
                cutting = Cutting(self.path, self._descriptor, self._end, self._disk, part_bytes=self._part_bytes)
                self._begin_file(cutting.seal())
            except (OSError, Damaged):  # verify reports a damaged line, which is not sealed
                return
            self._cut_bytes = self._part_bytes

    def _begin_file(self, sealed: PartIndex) -> None:
        """Put a new active file in the place of the one whose lines were sealed."""
        assert self._descriptor is not None
        status = os.fstat(self._descriptor)
        line = encode_line({"event": "continues", "line": sealed.line + sealed.lines}, sealed.tip)
        descriptor, self._descriptor = self._descriptor, None  # whichever file has the name, it is opened again
        self._disk.close(descriptor)
        owner = status.st_uid if os.geteuid() == 0 else -1
        self._disk.replace(self.path, line, mode=S_IMODE(status.st_mode), owner=owner)
        self._reopened()

    def _reopened(self) -> int:
        """Open the file again after a failure, and make its name durable, which the failure may have prevented."""
        descriptor = self._open(known_bytes=self._end)
        self._disk.sync_directory(self.path.parent)
        return descriptor

    def close(self) -> None:
        with self._mutex:
            for descriptor in (self._descriptor, self._lock):
                if descriptor is not None:
                    self._disk.close(descriptor)
            self._descriptor = self._lock = None

    def _open(self, *, known_bytes: int | None) -> int:
        """Open at the end of the last whole line, or at ``known_bytes`` where what follows was never acknowledged."""
        descriptor = self._disk.open_append(self.path)
        try:
            length = os.fstat(descriptor).st_size
            if known_bytes is None:
                line, end = synced(descriptor, length)
                rest = os.pread(descriptor, length - end, end)
            else:
                line, end = last_line(descriptor, min(known_bytes, length))
                rest = b""
            if newline_is_damaged(rest, end):
                line, end = rest, length + self._disk.write(descriptor, [b"\n"], length)
            elif length > end:
                self._disk.truncate(descriptor, end)
            if self._reserve_bytes:
                self._disk.reserve(descriptor, end, self._reserve_bytes)
        except OSError:
            self._disk.close(descriptor)
            raise
        self._descriptor, self._end = descriptor, end
        self._prev = digest(line) if line else _tip(parts_of(self.path)) or GENESIS
        self._damage = [] if is_whole(line) else [{"event": "after-damage"}]
        return descriptor


def lock_ledger(path: Path, disk: Disk, owner: str) -> int:
    """The lock of a ledger that has an owner; it ends when the descriptor is closed.

    It is a file beside the ledger, which itself may be opened, and so locked, by every user who may read it.

    Raises:
        Locked: another of these owners has it.
    """
    path = path.with_suffix(".lock")
    descriptor = disk.open_lock(path)
    if not disk.lock(descriptor):
        disk.close(descriptor)
        raise Locked(
            f"{path}: another {owner} is running on this root",
            case="ledger-locked",
            path=path,
            owner=owner,
        )
    return descriptor


def _tip(parts: list[PartName]) -> str | None:
    """The digest of the last line of the last part; None if it is not known, or there is no part."""
    with suppress(BadPart, Damaged, OSError):
        return read_index(parts[-1], CLOCK_UNKNOWN).tip if parts else None
    return None


def tip_before(path: Path, data: bytes) -> str | None:
    """What the first line of the active file ``path`` with ``data`` in it should carry as ``prev``; None: not known."""
    parts = without_copies(parts_of(path), first_prev(data))
    return _tip(parts) if parts else GENESIS


def read_ledger(path: Path) -> Decoded:
    """What the active file of the ledger at ``path`` says; an absent one is empty."""
    data = _active(path)  # first: what is cut meanwhile is in it
    return decode_ledger(data, tip_before(path, data))


def read_files(path: Path) -> Iterator[tuple[Path, Decoded]]:
    """What each file of the ledger at ``path`` says, oldest first, one at a time; the active one is the last.

    Parts that are missing before the first one there is are not reported: what they said is not known.
    """
    data = _active(path)  # first: what is cut meanwhile is in it
    tip: str | None = GENESIS
    for number, part in enumerate(without_copies(parts_of(path), first_prev(data))):
        decoded = decode_part(part, None if number == 0 and part.line > 1 else tip)
        tip = decoded.tip
        yield part.path, decoded
    yield path, decode_ledger(data, tip)


def reported_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of the ledger at ``path``, oldest first, for programs that report: what is damaged is left out."""
    for _, decoded in read_files(path):
        yield from decoded.entries


def _active(path: Path) -> bytes:
    """The bytes of an active file, without what was never synced."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return b""
    with file:
        length = os.fstat(file.fileno()).st_size
        _, end = synced(file.fileno(), length)
        data = file.read(length)
    return data if newline_is_damaged(data[end:], end) else data[:end]


def newest_entries(path: Path, *events: str) -> Iterator[dict[str, Any]]:
    """The entries of these kinds, newest first, as far as the end of the ledger has them.

    For programs that report: the chain is not checked, and a damaged line is passed over.
    """
    kinds = tuple(b'"event":"%s"' % event.encode() for event in events)
    for line in _newest_lines(path):
        if any(kind in line for kind in kinds):  # before it is decoded: lines may be long
            with suppress(BadLine):
                if (entry := decode_line(line))["event"] in events:
                    yield entry


def _newest_lines(path: Path) -> Iterator[bytes]:
    """The lines at the end of the active file, newest first, and those of the last part if there are few."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - _NEWEST_BYTES))
        data = file.read()
    yield from reversed(data.split(b"\n"))
    parts = without_copies(parts_of(path), first_prev(data)) if length < _NEWEST_BYTES else []
    with suppress(Damaged, OSError):
        for _, lines in reversed(list(frames_of(parts[-1].path))) if parts else []:
            yield from reversed(lines.split(b"\n"))
