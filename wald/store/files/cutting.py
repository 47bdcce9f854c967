"""Sealing the lines of an active ledger file into parts; the file itself is left as it is.

    1. a temporary file: whole lines in zstd frames, then the index; synced, read back and compared
    2. its name, and the sync of the directory
    3. the owner puts a new active file, whose first line follows the part, in the place of the old one

Until the third step the lines are in both, and the active file is what counts: a part is a copy if it begins as the
active file does. Copies that an earlier attempt has left are removed first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from wald.errors import Damaged
from wald.format.ledger import GENESIS, BadLine, decode_line
from wald.format.ledger_part import CLOCK_ZERO, BadPart, Clock, PartIndex, PartSummary, encode_index
from wald.store.files.chain import chained, damaged
from wald.store.files.directory import TEMPORARY
from wald.store.files.disk import Disk
from wald.store.files.ledger_parts import (
    FRAME_BYTES,
    PartName,
    compressed_frame,
    frames_of,
    part_path,
    parts_of,
    read_index,
    stored_index,
    summaries,
)
from wald.store.files.part_index import CLOCK_UNKNOWN, IndexBuilder

CATALOG_PARTS = 64  # one of so many says what all before it are about, which takes 1 % of the room at ten million lines


def remove_temporaries(path: Path, disk: Disk) -> None:
    """Remove the unfinished files of a killed owner of the ledger ``path``; only its owner may do so."""
    for name in os.listdir(path.parent):
        if name.startswith((f"{path.name}.", f"{path.stem}-")) and name.endswith(TEMPORARY):
            disk.unlink(path.with_name(name))


class Cutting:
    """One attempt.

    Args:
        descriptor: the active file ``path``, which is whole up to ``end``.
        part_bytes: how much goes into a part, at least; the last one takes less than that of the rest, too.
    """

    def __init__(self, path: Path, descriptor: int, end: int, disk: Disk, *, part_bytes: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._end = end
        self._disk = disk
        self._part_bytes = part_bytes
        self._frame_bytes = min(FRAME_BYTES, part_bytes)
        self._lines = 0  # of the active file that are in parts

    def seal(self) -> PartIndex:
        """Seal every line; returns the index of the last part.

        Raises:
            Damaged: a line, or the part before, is damaged; what cannot be believed is not sealed.
            OSError: a step failed; the active file has every line as before.
        """
        remove_temporaries(self._path, self._disk)
        line, prev, clock = self._before()
        offset = 0
        while True:
            rest = self._end - offset
            index, offset = self._part(
                IndexBuilder(line, prev, clock), offset, rest if rest < 2 * self._part_bytes else self._part_bytes
            )
            line, prev, clock = index.line + index.lines, index.tip, index.clock
            if offset == self._end:
                return index

    def _before(self) -> tuple[int, str, Clock]:
        """The number of the first line, the digest of the one before it, and the clock there; copies are removed."""
        prev = self._first_prev()
        copies: list[PartName] = []
        for part in reversed(parts_of(self._path)):
            index = read_index(part, CLOCK_UNKNOWN)
            if index.tip == prev:
                self._remove(copies)
                return part.line + index.lines, prev, index.clock
            copies.append(part)
            if index.prev == prev and prev == GENESIS:
                break
        if copies and prev != GENESIS:
            raise damaged(self._path, 1, "does not follow the line before it")
        self._remove(copies)
        return 1, prev, CLOCK_ZERO

    def _first_prev(self) -> str:
        first = next(self._chunks(0), b"")
        try:
            return str(decode_line(first[: first.find(b"\n")])["prev"])
        except BadLine as error:
            raise damaged(self._path, 1, str(error)) from error

    def _remove(self, copies: list[PartName]) -> None:
        for part in copies:
            self._disk.unlink(part.path)
        if copies:
            self._disk.sync_directory(self._path.parent)

    def _part(self, builder: IndexBuilder, begin: int, wanted: int) -> tuple[PartIndex, int]:
        """Make one part of the lines from ``begin`` on; returns its index, and where it ends."""
        line = builder.finish().line
        path = part_path(self._path, line)
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            index, end, digest = self._written(temporary, builder, begin, wanted)
            if not _reads_back(PartName(line, temporary), index, digest):
                raise damaged(temporary, 1, f"does not read back as {self._path.name}")
            self._disk.rename(temporary, path)
        except Exception:
            with suppress(OSError):  # it only takes room
                temporary.unlink(missing_ok=True)
            raise
        self._disk.sync_directory(path.parent)
        return index, end

    def _written(self, temporary: Path, builder: IndexBuilder, begin: int, wanted: int) -> tuple[PartIndex, int, bytes]:
        """Write the file, and sync it; returns its index, where its lines end, and their digest."""
        digest, offset, stored_bytes = sha256(), begin, 0
        descriptor = self._disk.create(temporary)
        try:
            _make_alike(descriptor, self._descriptor)
            for data in self._chunks(begin):
                entries, tip = chained(self._path, data, line=self._lines + 1, prev=builder.tip, listed=False)
                frame = compressed_frame(data)
                stored_bytes += self._disk.write(descriptor, [frame], stored_bytes)
                builder.add(len(frame), len(data), entries, tip)
                digest.update(data)
                offset += len(data)
                self._lines += len(entries)
                if offset - begin >= wanted:
                    break
            index = builder.finish()
            index.before = self._catalog()
            self._disk.write(descriptor, [encode_index(index)], stored_bytes)
            self._disk.sync(descriptor)
            # It is to be read back from the disk and not from memory.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self._disk.close(descriptor)
        return index, offset, digest.digest()

    def _catalog(self) -> list[PartSummary]:
        """What the next part says of all before it: nothing, mostly, and where one of them is damaged."""
        parts = parts_of(self._path)
        if len(parts) % CATALOG_PARTS == 0:
            with suppress(Damaged):
                return list(summaries(parts))
        return []

    def _chunks(self, offset: int) -> Iterator[bytes]:
        """Whole lines, about as many at once as go into a frame."""
        length = self._frame_bytes
        while offset < self._end:
            data = os.pread(self._descriptor, min(length, self._end - offset), offset)
            whole = data.rfind(b"\n") + 1
            if whole:
                yield data[:whole]
                offset += whole
                length = self._frame_bytes
            elif length >= self._end - offset:
                raise damaged(self._path, self._lines + 1, "it has no end")
            else:
                length *= 2


def _reads_back(part: PartName, index: PartIndex, digest: bytes) -> bool:
    found = sha256()
    try:
        for _, data in frames_of(part.path):
            found.update(data)
        return found.digest() == digest and stored_index(part) == index
    except (BadPart, Damaged):
        return False


def _make_alike(descriptor: int, active: int) -> None:
    """Give a part the mode of the active file, and its owner where this is root."""
    status, made = os.fstat(active), os.fstat(descriptor)
    if made.st_mode != status.st_mode:
        os.fchmod(descriptor, status.st_mode & 0o7777)
    if os.geteuid() == 0 and (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
        os.fchown(descriptor, status.st_uid, status.st_gid)
