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
    damaged_line,
    decode_chain,
    drop_unsynced,
    first_entry,
    frames_of,
    last_digest,
    last_line_start,
    parts_of,
    read_index,
    stored_index,
    without_copies,
)
from wald.format.ledger_lines import GENESIS, BadPart, Entry, PartIndex, digest, encode_entry, encode_part_index
from wald.format.names import ledger_part_name
from wald.format.spans import Span

PART_BYTES = 4 << 20  # minimum raw length
_FRAME_BYTES = 256 << 10
_RETRY_SHARE = 4  # a failed cut is retried after this fraction of a part
_LEVEL = 3  # level 9 takes eight times as long and saves nothing


class Ledger:
    """Append-only writer. Raises Locked if another process owns the ledger.

    Opening it truncates a torn last line; the next append reports a damaged last line.
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
                self._descriptor = None  # after a failed sync, another sync may wrongly succeed
                self._disk.close(descriptor)
                raise
            self._end += written
            self._prev = prev
            self._damage = []
            if self._reserve_bytes:
                self._disk.reserve(descriptor, self._end, self._reserve_bytes)

    def settle(self) -> None:
        """Truncate a failed append, so that readers see only acknowledged lines."""
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
                self._descriptor = None  # if the replacement fails, append() reopens the file
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
        """Open the file and truncate it to ``known_bytes`` (acknowledged) or, if None, to the synced lines."""
        descriptor = self._disk.open_append(self.path)
        try:
            with open(descriptor, "rb", closefd=False) as file:
                raw = file.read()
            data, end = drop_unsynced(raw) if known_bytes is None else (raw, raw.rfind(b"\n", 0, known_bytes) + 1)
            line = data[last_line_start(data, end) : end]
            if known_bytes is None and len(data) > end:
                line, end = data[end:], len(data) + self._disk.write(descriptor, [b"\n"], len(data))
            elif len(raw) > end:
                self._disk.truncate(descriptor, end)
            if self._reserve_bytes:
                self._disk.reserve(descriptor, end, self._reserve_bytes)
            self._disk.sync_directory(self.path.parent)  # a failure may have prevented this sync
        except OSError:
            self._disk.close(descriptor)
            raise
        self._descriptor, self._end = descriptor, end
        self._prev = digest(line) if line else last_digest(parts_of(self.path)) or GENESIS
        self._damage = [{"event": "after-damage"}] if line and not first_entry(line) else []
        return descriptor

    def _seal(self, file: BinaryIO) -> tuple[int, str, Span | None]:
        """Seal every line. Return the last line's number and digest, and the last part's sequences."""
        _remove_temporaries(self.path, self._disk)
        file.seek(0)
        prev = first_entry(file.readline()).get("prev")
        file.seek(0)
        parts = parts_of(self.path)
        parts_to_keep = without_copies(parts, prev)
        last = read_index(parts_to_keep[-1]) if parts_to_keep else None
        if prev is None or (parts and prev != (last.tip if last else GENESIS)):
            raise damaged_line(self.path, 1, "does not follow the line before it")
        for part in parts[len(parts_to_keep) :]:
            self._disk.unlink(part.path)
        if parts_to_keep != parts:
            self._disk.sync_directory(self.path.parent)
        line, before = (last.line + last.lines, last.span) if last else (1, None)
        while (rest := self._end - file.tell()) > 0:
            index = PartIndex(line, 0, prev, prev, before=before)
            self._seal_part(file, index, rest if rest < 2 * self._part_bytes else self._part_bytes)
            line, prev, before = line + index.lines, index.tip, index.span
        return line - 1, prev, before

    def _seal_part(self, file: BinaryIO, index: PartIndex, part_bytes: int) -> None:
        """Seal about ``part_bytes`` as one part, and complete its ``index``."""
        path = self.path.with_name(ledger_part_name(self.path.name, index.line))
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            checksum = self._write_part(file, temporary, index, part_bytes)
            stored = sha256()
            for _, data in frames_of(temporary):
                stored.update(data)
            if stored.digest() != checksum or stored_index(PartName(index.line, temporary)) != index:
                raise BadPart(f"the lines of the part differ from {self.path.name}")
            self._disk.rename(temporary, path)
        except Exception:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._disk.sync_directory(path.parent)

    def _write_part(self, file: BinaryIO, temporary: Path, index: PartIndex, part_bytes: int) -> bytes:
        """Write and sync a part; return the checksum of its lines."""
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        checksum, raw_bytes, stored_bytes = sha256(), 0, 0
        descriptor = self._disk.create(temporary)
        try:
            status, part_status = os.fstat(file.fileno()), os.fstat(descriptor)
            if part_status.st_mode != status.st_mode:
                os.fchmod(descriptor, status.st_mode & 0o7777)
            if os.geteuid() == 0 and (part_status.st_uid, part_status.st_gid) != (status.st_uid, status.st_gid):
                os.fchown(descriptor, status.st_uid, status.st_gid)
            while raw_bytes < part_bytes:
                data = b"".join(file.readlines(min(_FRAME_BYTES, self._part_bytes)))
                if not data.endswith(b"\n"):
                    raise damaged_line(self.path, 1, "the file does not end in a newline")
                entries, tip = decode_chain(self.path, data, line=1, prev=index.tip, with_routes=False)
                frame = compressor.compress(data)
                stored_bytes += self._disk.write(descriptor, [frame], stored_bytes)
                index.add(len(frame), len(data), entries, tip)
                checksum.update(data)
                raw_bytes += len(data)
            self._disk.write(descriptor, [encode_part_index(index)], stored_bytes)
            self._disk.sync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the check reads the disk
        finally:
            self._disk.close(descriptor)
        return checksum.digest()


def lock_ledger(path: Path, disk: Disk, owner: str) -> int:
    """Lock a ledger until the returned descriptor is closed, or raise Locked.

    The lock file is separate, so that readers of the ledger cannot lock it.
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
