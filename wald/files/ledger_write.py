"""Writer of a ledger: appends lines, and cuts a long current file into sealed parts.

A cut:

    1. Write frames and an index to a temporary file, sync it, read it back and compare.
    2. Rename it to a part, and sync the directory.
    3. Replace the current file with one whose first line follows the part.

After step 2 both files contain the lines. The current file counts, and the next cut removes a part that begins with the
same ``prev``.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from stat import S_IMODE
from typing import BinaryIO

import zstandard

from wald.errors import Damaged, Locked
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY
from wald.files.ledger_read import (
    PartName,
    chained,
    damaged,
    first_entry,
    frames_of,
    last_line_begin,
    parts_of,
    read_index,
    stored_index,
    synced,
    tip_of,
    without_copies,
)
from wald.format.ledger_lines import GENESIS, BadPart, Entry, PartIndex, digest, encode_entry, encode_part_index
from wald.format.names import ledger_part_name
from wald.format.spans import Span

PART_BYTES = 4 << 20  # minimum raw length
_FRAME_BYTES = 256 << 10
_RETRY_SHARE = 4  # a failed cut is retried after this fraction of a part
_LEVEL = 3  # level 9 takes 8 × as long and saves nothing


class Ledger:
    """Append-only writer. Raises Locked if another process owns the ledger.

    Truncates a torn last line. The next append reports a damaged last line.
    """

    def __init__(
        self, path: Path, disk: Disk, *, owner: str = "", reserve_bytes: int = 0, part_bytes: int = PART_BYTES
    ) -> None:
        self.path = path
        self._disk = disk
        self._reserve_bytes = reserve_bytes  # for lines that must be written on a full disk
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._lock: int | None = None
        self._end = 0
        self._prev = ""
        self._damage: list[Entry] = []
        self._part_bytes = self._cut_bytes = part_bytes
        if owner:  # otherwise the caller ensures a single writer
            self._lock = lock_ledger(path, disk, owner)
        try:
            _remove_temporaries(path, disk)
            self._open(None)
        except OSError:
            self.close()
            raise

    def append(self, *entries: Entry) -> None:
        """Append lines durably. A crash may leave the first few; after an OSError, the next append truncates them."""
        with self._mutex:
            descriptor = self._open(self._end) if self._descriptor is None else self._descriptor
            lines, prev = [], self._prev
            appended = (*self._damage, *entries)
            for entry in appended:
                lines.append(encode_entry(entry, prev, self._end if len(appended) > 1 else None))
                prev = digest(lines[-1])
            try:
                written = self._disk.write(descriptor, lines, self._end)
                self._disk.sync(descriptor)
            except OSError:
                self._descriptor = None  # after a failed sync, the next sync may succeed wrongly
                self._disk.close(descriptor)
                raise
            self._end += written
            self._prev = prev
            self._damage = []
            if self._reserve_bytes:
                self._disk.reserve(descriptor, self._end, self._reserve_bytes)

    def settle(self) -> None:
        """Truncate a failed append, so that readers find only acknowledged lines."""
        with self._mutex:
            if self._descriptor is None:
                self._open(self._end)

    def cut(self) -> None:
        """Seal a long current file into parts. After a failure, a later call retries."""
        with self._mutex:
            if self._descriptor is None or self._end < self._cut_bytes:
                return
            self._cut_bytes = self._end + self._part_bytes // _RETRY_SHARE
            with suppress(OSError, Damaged, BadPart):  # verify reports damage
                with open(self._descriptor, "rb", closefd=False) as file:
                    line, prev, span = self._seal(file)
                first = encode_entry({"event": "continues", "line": line, "about": span}, prev)
                status, descriptor = os.fstat(self._descriptor), self._descriptor
                self._descriptor = None  # if the replacement fails, reopen by name
                self._disk.close(descriptor)
                owner = status.st_uid if os.geteuid() == 0 else -1
                self._disk.replace(self.path, first, mode=S_IMODE(status.st_mode), owner=owner)
                self._open(self._end)
                self._cut_bytes = self._part_bytes

    def close(self) -> None:
        with self._mutex:
            for descriptor in (self._descriptor, self._lock):
                if descriptor is not None:
                    self._disk.close(descriptor)
            self._descriptor = self._lock = None

    def _open(self, known_bytes: int | None) -> int:
        """Open the file, truncated to the acknowledged ``known_bytes`` or, if None, to the synced lines."""
        descriptor = self._disk.open_append(self.path)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                stored = file.read()
            data, end = synced(stored) if known_bytes is None else (stored, stored.rfind(b"\n", 0, known_bytes) + 1)
            line = data[last_line_begin(data, end) : end]
            if known_bytes is None and len(data) > end:
                line, end = data[end:], len(data) + self._disk.write(descriptor, [b"\n"], len(data))
            elif len(stored) > end:
                self._disk.truncate(descriptor, end)
            if self._reserve_bytes:
                self._disk.reserve(descriptor, end, self._reserve_bytes)
            self._disk.sync_directory(self.path.parent)  # a failure may have prevented this sync
        except OSError:
            self._disk.close(descriptor)
            raise
        self._descriptor, self._end = descriptor, end
        self._prev = digest(line) if line else tip_of(parts_of(self.path)) or GENESIS
        self._damage = [{"event": "after-damage"}] if line and not first_entry(line) else []
        return descriptor

    def _seal(self, file: BinaryIO) -> tuple[int, str, Span | None]:
        """Seal every line. Return the last line's number and digest, and the last part's sequences."""
        _remove_temporaries(self.path, self._disk)
        file.seek(0)
        prev = first_entry(file.readline()).get("prev")
        file.seek(0)
        parts = parts_of(self.path)
        kept = without_copies(parts, prev)
        last = read_index(kept[-1]) if kept else None
        if prev is None or (parts and prev != (last.tip if last else GENESIS)):
            raise damaged(self.path, 1, "does not follow the line before it")
        for part in parts[len(kept) :]:
            self._disk.unlink(part.path)
        if kept != parts:
            self._disk.sync_directory(self.path.parent)
        line, before = (last.line + last.lines, last.span) if last else (1, None)
        while (rest := self._end - file.tell()) > 0:
            index = PartIndex(line, 0, prev, prev, before=before)
            self._seal_part(file, index, rest if rest < 2 * self._part_bytes else self._part_bytes)
            line, prev, before = line + index.lines, index.tip, index.span
        return line - 1, prev, before

    def _seal_part(self, file: BinaryIO, index: PartIndex, wanted: int) -> None:
        """Seal about ``wanted`` bytes as one part, and complete its ``index``."""
        path = self.path.with_name(ledger_part_name(self.path.name, index.line))
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            checksum = self._write_part(file, temporary, index, wanted)
            found = sha256()
            for _, data in frames_of(temporary):
                found.update(data)
            if found.digest() != checksum or stored_index(PartName(index.line, temporary)) != index:
                raise BadPart(f"its lines differ from {self.path.name} when read back")
            self._disk.rename(temporary, path)
        except Exception:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._disk.sync_directory(path.parent)

    def _write_part(self, file: BinaryIO, temporary: Path, index: PartIndex, wanted: int) -> bytes:
        """Write and sync a part; return the checksum of its lines."""
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        checksum, raw_bytes, stored_bytes = sha256(), 0, 0
        descriptor = self._disk.create(temporary)
        try:
            status, made = os.fstat(file.fileno()), os.fstat(descriptor)
            if made.st_mode != status.st_mode:
                os.fchmod(descriptor, status.st_mode & 0o7777)
            if os.geteuid() == 0 and (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
                os.fchown(descriptor, status.st_uid, status.st_gid)
            while raw_bytes < wanted:
                data = b"".join(file.readlines(min(_FRAME_BYTES, self._part_bytes)))
                if not data.endswith(b"\n"):
                    raise damaged(self.path, 1, "it does not end in a newline")
                entries, tip = chained(self.path, data, line=1, prev=index.tip, listed=False)
                frame = compressor.compress(data)
                stored_bytes += self._disk.write(descriptor, [frame], stored_bytes)
                index.add(len(frame), len(data), entries, tip)
                checksum.update(data)
                raw_bytes += len(data)
            self._disk.write(descriptor, [encode_part_index(index)], stored_bytes)
            self._disk.sync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # to read back from the disk
        finally:
            self._disk.close(descriptor)
        return checksum.digest()


def lock_ledger(path: Path, disk: Disk, owner: str) -> int:
    """Lock a ledger until the descriptor is closed, or raise Locked.

    The lock file is separate, so that readers of the ledger cannot open and lock it.
    """
    path = path.with_suffix(".lock")
    descriptor = disk.open_lock(path)
    if not disk.lock(descriptor):
        disk.close(descriptor)
        raise Locked(f"{path}: another {owner} is running on this root", case="ledger-locked", path=path, owner=owner)
    return descriptor


def _remove_temporaries(path: Path, disk: Disk) -> None:
    for name in os.listdir(path.parent):
        if name.startswith((f"{path.name}.", f"{path.stem}-")) and name.endswith(TEMPORARY):
            disk.unlink(path.with_name(name))
