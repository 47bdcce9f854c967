"""System calls that make bytes durable.

Everything that must survive a crash is written through :class:`Disk`, so that tests can make any step fail. Every
OSError names the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from wald.files.modes import make_directory, make_file, open_or_make_file

if TYPE_CHECKING:
    from ctypes import CDLL

    from wald.format.batch import Buffer

AT_FDCWD = -100
FILE_MODE = 0o640  # the daemon's group may read it
_LOCK_MODE = 0o600  # a user who can open a file can lock it
_DIRECTORY_MODE = 0o750
_IOV_MAX = 1024
_FALLOCATE_KEEP_SIZE = 1
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@cache
def _libc() -> CDLL:
    """Load the C library late: importing ctypes takes a twentieth of a short command."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return library


class Disk:
    """System calls on files.

    The last component of a path may not be a symbolic link; callers check the directories above.
    """

    def create(self, path: Path) -> int:
        return make_file(path, os.O_RDWR, FILE_MODE)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_or_create(self, path: Path) -> int:
        return open_or_make_file(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)

    def open_append(self, path: Path) -> int:
        return open_or_make_file(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)

    def open_lock(self, path: Path) -> int:
        """Open or create a lock file. Raise OSError if it is not regular or another user planted it."""
        descriptor = open_or_make_file(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, _LOCK_MODE)
        try:
            status, directory = os.fstat(descriptor), path.parent.stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
            # a sticky directory may once have been shared
            if directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISVTX):
                if status.st_nlink != 1:
                    raise OSError(errno.EMLINK, "the file has another hard link", os.fspath(path))
                if status.st_uid not in (0, os.geteuid(), directory.st_uid):
                    raise PermissionError(errno.EPERM, "the file belongs to another user", os.fspath(path))
            os.fchmod(descriptor, _LOCK_MODE)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        if not path.parent.exists():
            self.make_directory(path.parent)
        with contextlib.suppress(FileExistsError):  # another process was faster
            make_directory(path, _DIRECTORY_MODE)

    def close(self, descriptor: int) -> None:
        path = _descriptor_path(descriptor)  # first: a failed close(2) frees the descriptor
        try:
            os.close(descriptor)
        except OSError as error:
            error.filename = path
            raise

    def allocate(self, descriptor: int, length: int) -> bool:
        """Reserve zeros. Return False if the file system cannot: posix_fallocate(3) would write every block."""
        from ctypes import get_errno

        while _libc().fallocate(descriptor, 0, 0, length):
            number = get_errno()
            if number in _UNSUPPORTED:
                return False
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), _descriptor_path(descriptor))
        return True

    def reserve(self, descriptor: int, offset: int, length: int) -> None:
        """Reserve space, in case the disk fills up, without growing the file. Ignore failures."""
        _libc().fallocate(descriptor, _FALLOCATE_KEEP_SIZE, offset, length)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all buffers; return their total length."""
        total = 0
        try:
            for first in range(0, len(buffers), _IOV_MAX):
                chunk = buffers[first : first + _IOV_MAX]
                length = sum(map(len, chunk))
                written = os.pwritev(descriptor, chunk, offset + total) if length else 0
                if written < length:
                    data = memoryview(b"".join(chunk))
                    while written < length:
                        written += os.pwrite(descriptor, data[written:], offset + total + written)
                total += length
        except OSError as error:
            _add_path(error, descriptor)
            raise
        return total

    def update(self, descriptor: int, data: bytes, offset: int) -> None:
        try:
            if os.pwrite(descriptor, data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            _add_path(error, descriptor)
            raise

    def copy(self, descriptor: int, source: int, length: int, offset: int, *, source_offset: int = 0) -> None:
        copied = 0
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            while copied < length:
                count = os.sendfile(descriptor, source, source_offset + copied, length - copied)
                if count == 0:
                    raise OSError(errno.EIO, "the file shrank while it was being copied", _descriptor_path(source))
                copied += count
        except OSError as error:
            _add_path(error, descriptor)
            raise

    def sync(self, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            _add_path(error, descriptor)
            raise

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            _add_path(error, descriptor)
            raise
        finally:
            os.close(descriptor)

    def sync_names_above(self, path: Path) -> None:
        """Sync the directories above ``path`` in its mount: a killed process may have left them unsynced."""
        path = path.resolve()
        device = path.stat().st_dev
        for directory in path.parents:
            if directory.stat().st_dev != device:
                break
            if os.access(directory, os.R_OK):  # otherwise, it is another user's
                self.sync_directory(directory)

    def truncate(self, descriptor: int, length: int) -> None:
        try:
            os.ftruncate(descriptor, length)
        except OSError as error:
            _add_path(error, descriptor)
            raise

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def rename_to_free(self, source: Path, target: Path) -> None:
        """Rename, or raise FileExistsError if ``target`` exists.

        Without renameat2(2), an error may leave both names. Without hard links either, a target created then may be
        overwritten.
        """
        from ctypes import get_errno

        old, new = os.fsencode(source), os.fsencode(target)
        try:
            result = _libc().renameat2(AT_FDCWD, old, AT_FDCWD, new, _RENAME_NOREPLACE)
            number = get_errno() if result else 0
        except AttributeError:
            number = errno.ENOSYS
        if number in _UNSUPPORTED:
            number = 0
            try:
                os.link(source, target)
            except OSError:  # the target exists, the source is a directory, or the file system has no hard links
                if os.path.lexists(target):
                    number = errno.EEXIST
                else:
                    os.rename(source, target)
            else:
                os.unlink(source)
        if number:
            raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))

    def move_aside(self, source: Path, target: Path) -> Path:
        """Link or, if that fails, rename ``source`` to ``target``; return the new path.

        Across file systems, the new path is in the directory of ``source``.
        """
        for path in (target, source.with_name(target.name)):
            try:
                self.link(source, path)
                return path
            except OSError:  # a directory, another user's file, or no hard links
                try:
                    self.rename_to_free(source, path)
                    return path
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
        raise AssertionError("a directory is on one file system")

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def replace(
        self,
        path: Path,
        data: bytes,
        *,
        exclusive: bool = False,
        mode: int = FILE_MODE,
        owner: int = -1,
        group: int = -1,
    ) -> None:
        """Replace a file atomically and durably. With ``exclusive``, raise FileExistsError if it exists.

        An OSError leaves the old content, unless the directory's sync fails. Only root may set ``owner`` and ``group``.
        """
        try:
            temporary, descriptor = self._create_temporary(path)
            try:
                if (owner, group) != (-1, -1):
                    os.fchown(descriptor, owner, group)
                if mode != FILE_MODE:
                    os.fchmod(descriptor, mode)
                self.write(descriptor, [data], 0)
                self.sync(descriptor)
                rename = self.rename_to_free if exclusive else self.rename
                rename(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()  # to free space on a full disk
                raise
            finally:
                self.close(descriptor)
        except OSError as error:
            error.filename, error.filename2 = os.fspath(path), None
            raise
        self.sync_directory(path.parent)

    def _create_temporary(self, path: Path) -> tuple[Path, int]:
        """Create a locked temporary file, because other processes remove unlocked files."""
        while True:
            # Containers share process ids, and could publish each other's unfinished files.
            temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
            descriptor = self.create(temporary)
            try:
                is_owned = self.lock(descriptor) and os.fstat(descriptor).st_nlink > 0
            except OSError:  # without locks, no process removes files
                is_owned = True
            if is_owned:
                return temporary, descriptor
            self.close(descriptor)  # another process locked or removed it
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def lock(self, descriptor: int, *, shared: bool = False) -> bool:
        """Lock a file until it is closed. Return False if another process has the lock."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def free_bytes(path: Path) -> int:
    """Return the free space for unprivileged users."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def total_bytes(path: Path) -> int:
    """Return the total space for unprivileged users; 0 if unknown."""
    status = os.statvfs(path)
    return (status.f_blocks - (status.f_bfree - status.f_bavail)) * status.f_frsize


def _add_path(error: OSError, descriptor: int) -> None:
    if error.filename is None:
        error.filename = _descriptor_path(descriptor)


def _descriptor_path(descriptor: int) -> str | None:
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
    except OSError:
        return None
    return path if path.startswith("/") else None
