"""Opening of regular files without blocking, and small files written in place.

Which file it is, asked with statx(2) and without its times.

Linux 6.13 and newer notes that a process has read a file's times, and then gives it a new one at its next write
(multigrain timestamps), where it would else take one every few milliseconds. So stat(2) before each write makes each
write change the inode, and on ext4 the next sync of any file there waits for it: 40 µs of 150.

Opening a file of a log to read it: a regular file and nothing else, which is never waited for.

A user who may write to a root can plant a FIFO, a device or a link where a file belongs. Opening a FIFO as usual
waits for a writer that never comes. So every file of a log that is read is opened here.

A small file that is written in place: a reader sees it at once, and the writer never waits.

The head and the transfers are such files. What is written survives the death of the process (the pages belong to the
kernel) but, unless it is synced, not that of the machine: the head is made again from the segments then, and the pipes
that the transfers are about are gone.

Others may shorten, remove or replace the file at any moment. Assigning to a map of it would be a SIGBUS then, so the
bytes go through the kernel, which makes the file longer again, or answers with an error.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from wald.errors import Damaged
from wald.files.disk import Disk

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
_TYPE_AND_INO = 0x1 | 0x100
_FIELDS = Struct("=28xHxxQ96xII112x")  # of struct statx, in linux/stat.h: mode, inode, major and minor of the device
_statx = getattr(ctypes.CDLL(None), "statx", None)  # old C libraries have none


class FileIdentity:
    """A path, and the open file that it names until that is removed, moved or replaced."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._file = _StatxCall(descriptor, b"", _AT_EMPTY_PATH)()[1:]
        self._look = _StatxCall(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW)

    def holds(self) -> bool:
        """Whether it is still so; a link to the file is not the file."""
        return self._look()[1:] == self._file


def is_regular(descriptor: int) -> bool:
    """Whether the open file is a regular one."""
    return stat.S_ISREG(_StatxCall(descriptor, b"", _AT_EMPTY_PATH)()[0])


class _StatxCall:
    """A call that is prepared once and made often: mode, inode, major, minor; zeros if it fails."""

    def __init__(self, directory: int, path: bytes, flags: int) -> None:
        self._place = path or directory
        self._found = bytearray(_FIELDS.size)
        self._arguments = (
            ctypes.c_int(directory),
            ctypes.c_char_p(path),
            ctypes.c_int(flags),
            ctypes.c_uint(_TYPE_AND_INO),
            (ctypes.c_char * _FIELDS.size).from_buffer(self._found),
        )

    def __call__(self) -> tuple[int, ...]:
        if _statx is not None and not _statx(*self._arguments):
            return _FIELDS.unpack(self._found)
        try:  # some containers forbid the newer call
            status = os.stat(self._place, follow_symlinks=isinstance(self._place, int))
        except OSError:
            return _NOTHING
        return status.st_mode, status.st_ino, os.major(status.st_dev), os.minor(status.st_dev)


_NOTHING = (0,) * 4


_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_IS_LINK_OR_SOCKET = (errno.ELOOP, errno.ENXIO)


def open_regular(path: Path) -> int:
    """A descriptor for reading, which the caller closes.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: something else stands there.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in _IS_LINK_OR_SOCKET:
            raise _not_regular(path) from error
        raise
    if not is_regular(descriptor):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def open_file(path: Path) -> BinaryIO:
    """The same as a file object; errors as of :func:`open_regular`."""
    return os.fdopen(open_regular(path), "rb")


def read_regular(path: Path) -> bytes:
    """All that is in it; errors as of :func:`open_regular`."""
    with open_file(path) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing or is not one. ``Any``: it is JSON."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError, Damaged):
        return None
    return found if isinstance(found, dict) else None


def read_start(path: Path, length: int) -> bytes:
    """The first ``length`` bytes of it, or as many as there are; errors as of :func:`open_regular`."""
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, length)
    finally:
        os.close(descriptor)


def _not_regular(path: Path) -> Damaged:
    return Damaged(f"{path}: not a regular file", case="not-a-regular-file", path=path)


class InPlaceFile:
    """``length`` bytes of the file at ``path``, created with zeros if missing.

    Attributes:
        descriptor: for reading it; another one after :meth:`restore`.

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, length: int, disk: Disk) -> None:
        self._path = path
        self._length = length
        self._disk = disk
        self.descriptor = -1
        self._open()

    def write(self, data: bytes, offset: int = 0) -> None:
        """
        Raises:
            OSError: the file was shortened, and there is no room to make it longer again.
        """
        self._disk.update(self.descriptor, data, offset)

    def sync(self) -> None:
        """Return when the bytes and the name are on disk."""
        self._disk.sync(self.descriptor)
        self._disk.sync_directory(self._path.parent)

    def restore(self) -> bool:
        """Make the file again if its name is that of another, or of none; return whether that was so.

        Raises:
            OSError: as for the class.
        """
        if self._name.holds():
            return False
        self.close()
        self._open()
        return True

    def close(self) -> None:
        """May be called twice."""
        if self.descriptor >= 0:
            self._disk.close(self.descriptor)
            self.descriptor = -1

    def _open(self) -> None:
        descriptor = self.descriptor = self._disk.open_or_create(self._path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", os.fspath(self._path))
            if status.st_size != self._length:
                self._disk.truncate(descriptor, self._length)
            self._disk.allocate(descriptor, self._length)  # later there may be no room
            self._name = FileIdentity(self._path, descriptor)
        except OSError:
            self.close()
            raise
