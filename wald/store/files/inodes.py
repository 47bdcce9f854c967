"""Which file it is, asked with statx(2) and without its times.

Linux 6.13 and newer notes that a process has read a file's times, and then gives it a new one at its next write
(multigrain timestamps), where it would else take one every few milliseconds. So stat(2) before each write makes each
write change the inode, and on ext4 the next sync of any file there waits for it: 40 µs of 150.
"""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path
from struct import Struct

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
_TYPE_AND_INO = 0x1 | 0x100
_FIELDS = Struct("=28xHxxQ96xII112x")  # of struct statx, in linux/stat.h: mode, inode, major and minor of the device
_statx = getattr(ctypes.CDLL(None), "statx", None)  # old C libraries have none


class Name:
    """A path, and the open file that it names until that is removed, moved or replaced."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._file = _Look(descriptor, b"", _AT_EMPTY_PATH)()[1:]
        self._look = _Look(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW)

    def holds(self) -> bool:
        """Whether it is still so; a link to the file is not the file."""
        return self._look()[1:] == self._file


def is_regular(descriptor: int) -> bool:
    """Whether the open file is a regular one."""
    return stat.S_ISREG(_Look(descriptor, b"", _AT_EMPTY_PATH)()[0])


class _Look:
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
