"""A ledger file: chained JSON lines, appended and synced by their one owner.

A program that decides something by a ledger reads it with :func:`entries_of`, which requires the chain to be whole. A
program that reports reads it with :func:`read_ledger`, which reports damage and goes on. What a power cut has left of
the last append was never acknowledged: its owner cuts it away, and until then both leave it off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from crc32c import crc32c

from wald.errors import Damaged, Locked
from wald.format.ledger import (
    GENESIS,
    BadLine,
    Decoded,
    decode_ledger,
    decode_line,
    digest,
    encode_line,
    ends_wrongly,
)
from wald.store.files.disk import Disk
from wald.store.files.regular import open_file

_SECTOR_BYTES = 512  # what a disk writes at once, at least
_PART_BYTES = 1 << 20  # of what is read again
_NEWEST_BYTES = 4 << 20  # of what is read to find the newest entries
_TAIL_BYTES = 64 << 10  # more than any line but that of a segment with a thousand routes


class Ledger:
    """The appending side. Opening cuts a torn last line; a damaged one is kept, and the line after it says so.

    Args:
        owner: the program whose ledger it is, where several may be started; one at a time gets it, until it is closed.
        reserve_bytes: kept allocated for later lines, for an owner that has to write them on a full disk.

    Raises:
        Locked: another of these owners has it.
    """

    def __init__(self, path: Path, disk: Disk, *, owner: str = "", reserve_bytes: int = 0) -> None:
        self._path = path
        self._disk = disk
        self._reserve_bytes = reserve_bytes
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._lock: int | None = None
        self._end = 0
        self._prev = ""
        self._damage: list[dict[str, Any]] = []
        if owner:
            self._lock = lock_ledger(path, disk, owner)
        try:
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
            descriptor = self._open(known_bytes=self._end) if self._descriptor is None else self._descriptor
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

    def entries(self) -> list[dict[str, Any]]:
        """What the ledger says; a line whose append failed is not among it, whatever the file holds.

        Raises:
            Damaged: a line is damaged, or missing.
        """
        with self._mutex:
            decoded = decode_ledger(self._path.read_bytes()[: self._end])
        for number, reason in decoded.broken:
            raise damaged(self._path, number, reason)
        return decoded.entries

    def close(self) -> None:
        with self._mutex:
            for descriptor in (self._descriptor, self._lock):
                if descriptor is not None:
                    self._disk.close(descriptor)
            self._descriptor = self._lock = None

    def _open(self, *, known_bytes: int | None) -> int:
        """Open at the end of the last whole line, or at ``known_bytes`` where what follows was never acknowledged."""
        descriptor = self._disk.open_append(self._path)
        try:
            length = os.fstat(descriptor).st_size
            if known_bytes is None:
                line, end = _synced(descriptor, length)
                rest = os.pread(descriptor, length - end, end)
            else:
                line, end = _last_line(descriptor, min(known_bytes, length))
                rest = b""
            if _newline_is_damaged(rest, end):
                line, end = rest, length + self._disk.write(descriptor, [b"\n"], length)
            elif length > end:
                self._disk.truncate(descriptor, end)
            if self._reserve_bytes:
                self._disk.reserve(descriptor, end, self._reserve_bytes)
        except OSError:
            self._disk.close(descriptor)
            raise
        self._descriptor, self._end, self._prev = descriptor, end, digest(line) if line else GENESIS
        self._damage = [] if _is_whole(line) else [{"event": "after-damage"}]
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
            f"{path}: another {owner} is at work on this root",
            hint=f"fuser -v {path} names it; if that is a service: systemctl stop {owner}",
        )
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


def _synced(descriptor: int, length: int) -> tuple[bytes, int]:
    """As :func:`_last_line`, without what shows that it was never synced: a lost sector in the last append."""
    line, end = _last_line(descriptor, length)
    while _lost_a_sector(line, end - len(line)):
        line, end = _last_line(descriptor, end - len(line))
    begin = _append(line)
    if begin is not None and 0 <= begin < end:
        offset = begin
        for each in os.pread(descriptor, end - begin, begin).splitlines(keepends=True):
            if _lost_a_sector(each, offset):
                return _last_line(descriptor, offset)
            offset += len(each)
    return line, end


def _append(line: bytes) -> int | None:
    """The offset of the first line that was written with this one; None if it was written alone, or is damaged."""
    try:
        begin = decode_line(line.removesuffix(b"\n")).get("append")
    except BadLine:
        return None
    return begin if isinstance(begin, int) else None


def _lost_a_sector(line: bytes, offset: int) -> bool:
    """Whether a sector of the last line never reached the disk, which leaves zeros up to its end: it was not synced."""
    end, start = offset + len(line), offset
    while start < end:
        stop = min(end, (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
        if not any(line[start - offset : stop - offset]):
            return True
        start = stop
    return False


def _newline_is_damaged(rest: bytes, offset: int) -> bool:
    """Whether ``rest``, which follows what was synced, was a line once; else it is torn."""
    return ends_wrongly(rest) and not _lost_a_sector(rest, offset)


def _is_whole(line: bytes) -> bool:
    """Whether the last line is as it was written; where there is none, nothing is wrong with it."""
    try:
        return not line or bool(decode_line(line.removesuffix(b"\n")))
    except BadLine:
        return False


def read_ledger(path: Path) -> Decoded:
    """What the ledger at ``path`` says; an absent one is empty."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return decode_ledger(b"")
    with file:
        length = os.fstat(file.fileno()).st_size
        _, end = _synced(file.fileno(), length)
        data = file.read(length)
    return decode_ledger(data if _newline_is_damaged(data[end:], end) else data[:end])


def newest_entries(path: Path, *events: str) -> Iterator[dict[str, Any]]:
    """The entries of these kinds, newest first, as far as the end of the ledger has them.

    For programs that report: the chain is not checked, and a damaged line is passed over.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _NEWEST_BYTES))
        lines = file.read().split(b"\n")
    kinds = tuple(b'"event":"%s"' % event.encode() for event in events)
    for line in reversed(lines):
        if any(kind in line for kind in kinds):  # before it is decoded: lines may be long
            with suppress(BadLine):
                if (entry := decode_line(line))["event"] in events:
                    yield entry


@dataclass(slots=True)
class Bookmark:
    """How far a ledger was read: the last line, counted from 1, where it ends, its digest, and a checksum."""

    number: int = 0
    offset: int = 0
    tip: str = GENESIS
    checksum: int = 0

    def holds(self, file: BinaryIO) -> bool:
        """Whether all that was read is still there as it was: nothing was damaged, replaced or taken back since."""
        checksum, left = 0, self.offset
        file.seek(0)
        while left and (part := file.read(min(left, _PART_BYTES))):
            checksum = crc32c(part, checksum)
            left -= len(part)
        return not left and checksum == self.checksum


def entries_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of the ledger at ``path``, one at a time, for programs that decide by them; an absent one is empty.

    Raises:
        Damaged: at the first line that is damaged, or that does not follow the one before it.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        yield from entries_behind(Bookmark(), file, path)


def entries_behind(bookmark: Bookmark, file: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    """The lines behind ``bookmark``, which holds, of the ledger ``file``; it is moved on. Errors as above."""
    _, end = _synced(file.fileno(), os.fstat(file.fileno()).st_size)
    file.seek(bookmark.offset)
    for number, line in enumerate(file, start=bookmark.number + 1):
        offset = bookmark.offset + len(line)
        if offset > end:
            if not line.endswith(b"\n") and _newline_is_damaged(line, bookmark.offset):
                raise damaged(path, number, "its newline is damaged")
            return  # torn, and its owner cuts it; or newer than this reading
        try:
            entry = decode_line(line[:-1])
        except BadLine as error:
            raise damaged(path, number, str(error)) from error
        entry.pop("append", None)
        if entry.pop("prev") != bookmark.tip:
            raise damaged(path, number, "does not follow the line before it")
        bookmark.number, bookmark.offset, bookmark.tip = number, offset, digest(line)
        bookmark.checksum = crc32c(line, bookmark.checksum)
        yield entry


def damaged(path: Path, number: int, reason: str) -> Damaged:
    """The error where a decision needs a ledger of which one line cannot be believed."""
    return Damaged(
        f"{path}: line {number}: {reason}; nothing is decided by this ledger",
        hint=f"restore it from a backup, or stop its owner and give up what it says: mv {path} {path}.damaged",
    )
