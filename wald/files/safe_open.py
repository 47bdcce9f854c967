"""Opening of regular files without blocking, and small files written in place.

Only this module opens a log's files for reading, because another user can plant a FIFO, which would block, a device or
a link.

:class:`FileIdentity` uses statx(2) without times: since Linux 6.13 (multigrain timestamps), each write after a stat(2)
changes the inode, and on ext4 the next sync of any file waits for that change (40 µs of 150).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from wald.errors import Damaged
from wald.files.disk import AT_FDCWD, Disk

_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_LINK_OR_SOCKET_ERRORS = (errno.ELOOP, errno.ENXIO)
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
_TYPE_AND_INO = 0x1 | 0x100
_STATX_FIELDS = Struct("=28xHxxQ96xII112x")  # of struct statx: mode, inode, device major and minor
_early_calls = iter(range(16))  # use stat(2): importing ctypes takes a twentieth of a short command


@cache
def _statx() -> Callable[..., int]:
    import ctypes

    return getattr(ctypes.CDLL(None), "statx", lambda *_: -1)


class _StatxCall:
    """Prepared statx(2) call that returns ``_STATX_FIELDS``, or zeros after a failure."""

    def __init__(self, directory: int, path: bytes, flags: int) -> None:
        self._request = directory, path, flags
        self._buffer = bytearray(_STATX_FIELDS.size)
        self._call: Callable[[], int] | None = None

    def __call__(self) -> tuple[int, ...]:
        if next(_early_calls, None) is None:
            if self._call is None:
                self._call = self._prepare()
            if not self._call():
                return _STATX_FIELDS.unpack(self._buffer)
        directory, path, _ = self._request
        try:  # some containers forbid statx(2)
            status = os.stat(path or directory, follow_symlinks=not path)
        except OSError:
            return (0,) * 4
        return status.st_mode, status.st_ino, os.major(status.st_dev), os.minor(status.st_dev)

    def _prepare(self) -> Callable[[], int]:
        import ctypes

        directory, path, flags = self._request
        return partial(
            _statx(),
            ctypes.c_int(directory),
            ctypes.c_char_p(path),
            ctypes.c_int(flags),
            ctypes.c_uint(_TYPE_AND_INO),
            (ctypes.c_char * _STATX_FIELDS.size).from_buffer(self._buffer),
        )


class FileIdentity:
    """Path and the file that it named when opened."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._file = _StatxCall(descriptor, b"", _AT_EMPTY_PATH)()[1:]
        self._stat_path = _StatxCall(AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW)

    def is_current(self) -> bool:
        """Return True if the path still names the file, not a link to it."""
        return self._stat_path()[1:] == self._file


def is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(_StatxCall(descriptor, b"", _AT_EMPTY_PATH)()[0])


def open_regular(path: Path) -> int:
    """Open a regular file for reading, or raise Damaged."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        if error.errno in _LINK_OR_SOCKET_ERRORS:
            raise _not_regular(path) from error
        raise
    if not is_regular(descriptor):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def open_file(path: Path) -> BinaryIO:
    return os.fdopen(open_regular(path), "rb")


def read_regular(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing or invalid."""
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError, Damaged):
        return None
    return value if isinstance(value, dict) else None


def read_start(path: Path, length: int) -> bytes:
    with open_file(path) as file:
        return file.read(length)


def _not_regular(path: Path) -> Damaged:
    return Damaged(f"{path}: not a regular file", case="not-a-regular-file", path=path)


class InPlaceFile:
    """Small file of ``length`` bytes (the head, the transfers), created with zeros.

    Readers see each write at once. A crash of the machine may lose unsynced bytes: the next start rebuilds the head
    from the segments, and the transfers' pipes are gone. A memory map would raise SIGBUS if another program shortened
    the file; pwrite(2) extends it or fails.
    """

    def __init__(self, path: Path, length: int, disk: Disk) -> None:
        self._path = path
        self._length = length
        self._disk = disk
        self.descriptor = -1  # for reading; changed by restore()
        self._open()

    def write(self, data: bytes, offset: int = 0) -> None:
        self._disk.update(self.descriptor, data, offset)

    def sync(self) -> None:
        self._disk.sync(self.descriptor)
        self._disk.sync_directory(self._path.parent)

    def restore(self) -> bool:
        """Reopen or recreate the file and return True if the path no longer names it."""
        if self._identity.is_current():
            return False
        self.close()
        self._open()
        return True

    def close(self) -> None:
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
            self._disk.allocate(descriptor, self._length)  # the disk may be full later
            self._identity = FileIdentity(self._path, descriptor)
        except OSError:
            self.close()
            raise
