"""Appends to a ledger by its one owner, and cuts, which seal a long current file into parts.

A cut:

    1. Write frames and an index to a temporary file, sync it, read it back and compare.
    2. Rename it to a part, and sync the directory.
    3. Replace the current file with one whose first line follows the part.

After step 2 both contain the lines, and the current file counts: the next cut removes a part with the same first
``prev``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from stat import S_IMODE

import zstandard

from wald.errors import Damaged, Locked
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY
from wald.files.ledger_read import (
    FRAME_BYTES,
    PartName,
    chained,
    damaged,
    frames_of,
    is_intact,
    last_line,
    newline_is_damaged,
    parts_of,
    read_index,
    stored_index,
    synced_line,
    tip_of,
)
from wald.format.ledger_lines import (
    GENESIS,
    BadLine,
    BadPart,
    Entry,
    PartIndex,
    decode_entry,
    digest,
    encode_entry,
    encode_part_index,
)
from wald.format.names import ledger_part_name
from wald.format.spans import Span

PART_BYTES = 4 << 20  # least raw length
_RETRY_SHARE = 4  # a failed cut is retried after this fraction of a part
_LEVEL = 3  # level 9 takes 8 × as long and saves nothing


class Ledger:
    """Append-only writer; truncates a torn last line, and reports a damaged one in the next; may raise Locked."""

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
        if owner:  # otherwise only one process can write it
            self._lock = lock_ledger(path, disk, owner)
        try:
            _remove_temporaries(path, disk)
            with self._mutex:
                self._open(known_bytes=None)
            disk.sync_directory(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, *entries: Entry) -> None:
        """Append lines durably. A crash may leave the first few; after an OSError, the next append truncates them."""
        with self._mutex:
            descriptor = self._reopened() if self._descriptor is None else self._descriptor
            lines, prev = [], self._prev
            appended = (*self._damage, *entries)
            for entry in appended:
                lines.append(encode_entry(entry, prev, self._end if len(appended) > 1 else None))
                prev = digest(lines[-1])
            try:
                written = self._disk.write(descriptor, lines, self._end)
                self._disk.sync(descriptor)
            except OSError:
                self._descriptor = None  # after a failed sync, the next may succeed wrongly
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
                self._reopened()

    def cut(self) -> None:
        """Seal a long current file into parts; after a failure, retry later."""
        with self._mutex:
            if self._descriptor is None or self._end < self._cut_bytes:
                return
            self._cut_bytes = self._end + self._part_bytes // _RETRY_SHARE
            try:
                cut = _Cut(self.path, self._descriptor, self._end, self._disk, part_bytes=self._part_bytes)
                self._begin_file(cut.seal())
            except (OSError, Damaged):  # verify reports damage
                return
            self._cut_bytes = self._part_bytes

    def _begin_file(self, sealed: PartIndex) -> None:
        assert self._descriptor is not None
        status = os.fstat(self._descriptor)
        entry = {"event": "continues", "line": sealed.line + sealed.lines - 1, "about": sealed.span}
        descriptor, self._descriptor = self._descriptor, None  # if the replacement fails, reopen by name
        self._disk.close(descriptor)
        owner = status.st_uid if os.geteuid() == 0 else -1
        self._disk.replace(self.path, encode_entry(entry, sealed.tip), mode=S_IMODE(status.st_mode), owner=owner)
        self._reopened()

    def _reopened(self) -> int:
        """Open the file; sync its name, which a failure may have prevented."""
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
        """Open at the end of the last synced line, or of the known acknowledged ones."""
        descriptor = self._disk.open_append(self.path)
        try:
            length = os.fstat(descriptor).st_size
            if known_bytes is None:
                line, end = synced_line(descriptor, length)
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
        self._prev = digest(line) if line else tip_of(parts_of(self.path)) or GENESIS
        self._damage = [] if is_intact(line) else [{"event": "after-damage"}]
        return descriptor


def lock_ledger(path: Path, disk: Disk, owner: str) -> int:
    """Lock a ledger, by a file that its readers cannot open, until the descriptor is closed."""
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


class _Cut:
    """One cut, up to ``end``."""

    def __init__(self, path: Path, descriptor: int, end: int, disk: Disk, *, part_bytes: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._end = end
        self._disk = disk
        self._part_bytes = part_bytes
        self._frame_bytes = min(FRAME_BYTES, part_bytes)
        self._lines = 0  # of the current file, in parts

    def seal(self) -> PartIndex:
        """Seal every line; return the last index. An error leaves the current file complete."""
        _remove_temporaries(self._path, self._disk)
        line, prev, before = self._previous()
        offset = 0
        while True:
            rest = self._end - offset
            wanted = rest if rest < 2 * self._part_bytes else self._part_bytes
            index, offset = self._seal_part(PartIndex(line, 0, prev, prev, before=before), offset, wanted)
            line, prev, before = index.line + index.lines, index.tip, index.span
            if offset == self._end:
                return index

    def _previous(self) -> tuple[int, str, Span | None]:
        """Return the first line's number and ``prev``, and the span before; remove copies."""
        first = next(self._chunks(0), b"")
        try:
            prev = str(decode_entry(first[: first.find(b"\n")])["prev"])
        except BadLine as error:
            raise damaged(self._path, 1, str(error)) from error
        copies: list[PartName] = []
        for part in reversed(parts_of(self._path)):
            index = read_index(part)
            if index.tip == prev:
                self._remove(copies)
                return part.line + index.lines, prev, index.span
            copies.append(part)
            if index.prev == prev and prev == GENESIS:
                break
        if copies and prev != GENESIS:
            raise damaged(self._path, 1, "does not follow the line before it")
        self._remove(copies)
        return 1, prev, None

    def _remove(self, copies: list[PartName]) -> None:
        for part in copies:
            self._disk.unlink(part.path)
        if copies:
            self._disk.sync_directory(self._path.parent)

    def _seal_part(self, index: PartIndex, begin: int, wanted: int) -> tuple[PartIndex, int]:
        """Seal about ``wanted`` bytes; return the index and their end."""
        path = self._path.with_name(ledger_part_name(self._path.name, index.line))
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            end, checksum = self._write(temporary, index, begin, wanted)
            if not _reads_back(PartName(index.line, temporary), index, checksum):
                raise damaged(temporary, 1, f"does not read back as {self._path.name}")
            self._disk.rename(temporary, path)
        except Exception:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._disk.sync_directory(path.parent)
        return index, end

    def _write(self, temporary: Path, index: PartIndex, begin: int, wanted: int) -> tuple[int, bytes]:
        """Write and sync a part, completing ``index``; return the lines' end and checksum."""
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        checksum, offset, stored_bytes = sha256(), begin, 0
        descriptor = self._disk.create(temporary)
        try:
            _copy_mode(self._descriptor, descriptor)
            for data in self._chunks(begin):
                entries, tip = chained(self._path, data, line=self._lines + 1, prev=index.tip, listed=False)
                frame = compressor.compress(data)
                stored_bytes += self._disk.write(descriptor, [frame], stored_bytes)
                index.add(len(frame), len(data), entries, tip)
                checksum.update(data)
                offset += len(data)
                self._lines += len(entries)
                if offset - begin >= wanted:
                    break
            self._disk.write(descriptor, [encode_part_index(index)], stored_bytes)
            self._disk.sync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # read back from the disk
        finally:
            self._disk.close(descriptor)
        return offset, checksum.digest()

    def _chunks(self, offset: int) -> Iterator[bytes]:
        length = self._frame_bytes
        while offset < self._end:
            data = os.pread(self._descriptor, min(length, self._end - offset), offset)
            whole = data.rfind(b"\n") + 1
            if whole:
                yield data[:whole]
                offset += whole
                length = self._frame_bytes
            elif length >= self._end - offset:
                raise damaged(self._path, self._lines + 1, "it does not end in a newline")
            else:
                length *= 2


def _reads_back(part: PartName, index: PartIndex, checksum: bytes) -> bool:
    found = sha256()
    try:
        for _, data in frames_of(part.path):
            found.update(data)
        return found.digest() == checksum and stored_index(part) == index
    except (BadPart, Damaged):
        return False


def _copy_mode(source: int, target: int) -> None:
    status, made = os.fstat(source), os.fstat(target)
    if made.st_mode != status.st_mode:
        os.fchmod(target, status.st_mode & 0o7777)
    if os.geteuid() == 0 and (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
        os.fchown(target, status.st_uid, status.st_gid)
