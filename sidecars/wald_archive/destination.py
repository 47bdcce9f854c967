"""Where bags go: a directory on any mounted file system; and what a destination has to be able to do.

A file is created, written from its beginning to its end in large pieces, synced, and never touched again: no rename, no
overwriting, no change in place. That suits a tape (LTFS) as well as a disk. A file that is there already, because a run
was interrupted, is compared with what is to be written: what is missing at its end is appended, anything else refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wald.errors import InvalidInput, Refused
from wald.files.disk import Disk
from wald.files.layout import require_no_link
from wald.format.batch import Buffer

WRITE_BYTES = 1 << 20  # at least, but for the end of a file: small writes make tapes stop and start
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """What is in a directory, by name."""

    folders: Sequence[str] = ()
    files: Sequence[str] = ()


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: Buffer) -> None:
        """
        Raises:
            Refused: the file is there already, and other bytes are at this place.
            OSError: the destination does not take it.
        """


class Destination(Protocol):
    """A place for bags. Names are relative to it, with slashes.

    Attributes:
        address: its absolute path or address, as the ledger has it.
    """

    address: str

    def listing(self, folder: str) -> Listing:
        """What is in ``folder``; nothing if it is not there."""

    def length(self, name: str) -> int:
        """The bytes of a file.

        Raises:
            FileNotFoundError: it is not there.
        """

    def read(self, name: str) -> Iterator[bytes]:
        """A file, in pieces.

        Raises:
            FileNotFoundError: it is not there.
        """

    def writing(self, name: str) -> AbstractContextManager[Sink]:
        """Write a file; at the end of the block it is whole and synced, unless the block raised.

        Raises:
            Refused: the file is there already, and is not what was written.
            OSError: the destination does not take it.
        """

    def sync_folder(self, folder: str) -> None:
        """Return when the names in ``folder`` and above it, down from the destination, are durable."""

    def full_name(self, name: str) -> str:
        """The path or address of a file, for people."""


class Directory:
    """A directory; made when the first file is written.

    Raises:
        InvalidInput: a file has its name.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = Path(os.path.abspath(path))
        if self._path.exists() and not self._path.is_dir():
            raise InvalidInput(f"{self._path}: not a directory", hint="name a directory that exists or can be made")
        self._disk = disk
        self.address = str(self._path)

    def full_name(self, name: str) -> str:
        return str(self._path / name)

    def listing(self, folder: str) -> Listing:
        try:
            entries = list(os.scandir(self._path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return Listing()
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return Listing(sorted(folders), sorted({entry.name for entry in entries} - set(folders)))

    def length(self, name: str) -> int:
        return os.stat(self._path / name).st_size

    def read(self, name: str) -> Iterator[bytes]:
        with open(self._path / name, "rb", buffering=0) as file:
            while data := file.read(READ_BYTES):
                yield data

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        """As :meth:`Destination.writing`; Damaged if a symbolic link below the destination leads elsewhere."""
        path = self._path / name
        for above in path.relative_to(self._path).parents[:-1]:
            require_no_link(self._path / above)
        self._disk.make_directory(path.parent)
        file = _Growing(path, self._disk)
        try:
            yield file
            file.finish()
        finally:
            file.close()

    def sync_folder(self, folder: str) -> None:
        path = self._path / folder
        while path.is_relative_to(self._path):
            self._disk.sync_directory(path)
            path = path.parent
        self._disk.sync_names_above(self._path)


class _Growing:
    """A file that grows at its end only; what is there at first is compared."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._end = 0
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        try:
            self._descriptor = disk.create(path)
            self._found = 0
        except FileExistsError:
            self._descriptor = disk.open(path)
            self._found = os.fstat(self._descriptor).st_size

    def write(self, data: Buffer) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= WRITE_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        if self._found > self._end:
            raise differs(str(self._path), self._end)
        self._disk.sync(self._descriptor)
        # BundleReader back is to ask the device, not the cache.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._disk.close(self._descriptor)

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        known = min(len(data), max(0, self._found - self._end))
        if known:
            there = os.pread(self._descriptor, known, self._end)
            if (same := first_difference(there, data[:known])) is not None:
                raise differs(str(self._path), self._end + same)
        if known < len(data):
            self._disk.write(self._descriptor, [memoryview(data)[known:]], self._end + known)
        self._end += len(data)


def first_difference(one: Buffer, other: Buffer) -> int | None:
    """The offset of the first byte in which they differ, or at which one of them ends; None if they are the same."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((offset for offset, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def differs(name: str, offset: int) -> Refused:
    """The error for a file that is there, and is another one."""
    return Refused(
        f"{name}: offset {offset}: a file of this name exists with different content; it is not overwritten",
        hint=f"archive to another place: --dest DIR; or, if a crash has left it, rm {name}",
    )
