"""System calls that make bytes durable.

The system calls that make bytes durable: create, write, sync, rename, truncate, unlink, lock.

What has to survive a crash is written through a :class:`Disk`, so a test can pass one that fails, stops or forgets at
the n-th step. No other module of ``wald`` syncs, allocates or truncates a file. Some write or remove what may be lost:
``indexes`` its hint, ``recovery`` and ``sealer`` a temporary file that is left over, ``fifos`` a FIFO. Errors are the
operating system's own, with the path of the file, even if the call takes a descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wald.files.modes import make_directory, make_file, open_or_make_file

if TYPE_CHECKING:
    from wald.format.batch import Buffer

_IOV_MAX = 1024  # what Linux takes in one gather-write
_KEEP_SIZE = 1
_AT_FDCWD = -100
_NOREPLACE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_fallocate = _LIBC.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
FILE_MODE = 0o640  # only the daemon's group may read it
_LOCK_MODE = 0o600  # a user who may open a file may hold its lock
DIRECTORY_MODE = 0o750


class Disk:
    """Real system calls. What they make has the same mode under every umask; what was there keeps its own.

    No file is written through a symbolic link. The directory that it is in is the caller's affair.
    """

    def create(self, path: Path) -> int:
        """A new file, open for reading and writing; FileExistsError rather than touch an old one."""
        return make_file(path, os.O_RDWR, FILE_MODE)

    def open(self, path: Path) -> int:
        """An existing file, open for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_or_create(self, path: Path) -> int:
        """A file, open for reading and writing; created if missing, and never waited for if it is something else."""
        return open_or_make_file(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)

    def open_append(self, path: Path) -> int:
        """A file whose writes all go to its end; created if missing."""
        return open_or_make_file(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)

    def open_lock(self, path: Path) -> int:
        """A file to :meth:`lock`, created if missing; only its owner may open it.

        Raises:
            OSError: it cannot be made; or it is something that another user has put there.
        """
        descriptor = open_or_make_file(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, _LOCK_MODE)
        try:
            _require_own(path, os.fstat(descriptor))
            os.fchmod(descriptor, _LOCK_MODE)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def make_directory(self, path: Path) -> None:
        """A directory, and those above it that are missing; one that is there already stays as it is."""
        if path.is_dir():
            return
        if not path.parent.exists():
            self.make_directory(path.parent)
        with contextlib.suppress(FileExistsError):  # two may make it at once
            make_directory(path, DIRECTORY_MODE)

    def close(self, descriptor: int) -> None:
        path = _path_of(descriptor)  # a failed close(2) frees the descriptor too
        try:
            os.close(descriptor)
        except OSError as error:
            error.filename = path
            raise

    def allocate(self, descriptor: int, length: int) -> bool:
        """Reserve ``length`` bytes that read as zeros; return False if the file system cannot.

        This calls fallocate(2): there the C library's posix_fallocate would write to every block, for seconds.
        """
        while _fallocate(descriptor, 0, 0, length):
            number = ctypes.get_errno()
            if number in _UNSUPPORTED:
                return False
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), _path_of(descriptor))
        return True

    def reserve(self, descriptor: int, offset: int, length: int) -> None:
        """Make sure that ``length`` bytes at ``offset`` can be written on a full disk; where that cannot be, nothing.

        The file does not grow: fallocate(2) with FALLOC_FL_KEEP_SIZE, which the standard library does not have.
        """
        _fallocate(descriptor, _KEEP_SIZE, offset, length)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all of ``buffers`` at ``offset``; returns how many bytes."""
        total = sum(map(len, buffers))
        with _Named(descriptor):
            done = taken = os.pwritev(descriptor, buffers[:_IOV_MAX], offset) if total else 0
            first, pending = 0, list(buffers)
            while done < total:
                while taken >= len(pending[first]):
                    taken -= len(pending[first])
                    first += 1
                if taken:
                    pending[first] = memoryview(pending[first])[taken:]
                taken = os.pwritev(descriptor, pending[first : first + _IOV_MAX], offset + done)
                done += taken
        return total

    def update(self, descriptor: int, data: bytes, offset: int) -> None:
        """Write a few bytes in place."""
        with _Named(descriptor):
            if os.pwrite(descriptor, data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def copy(self, descriptor: int, source: int, length: int, offset: int, *, source_offset: int = 0) -> None:
        """Copy ``length`` bytes of ``source`` to ``offset``, inside the kernel."""
        done = 0
        with _Named(descriptor):
            os.lseek(descriptor, offset, os.SEEK_SET)
            while done < length:
                count = os.sendfile(descriptor, source, source_offset + done, length - done)
                if count == 0:
                    raise OSError(errno.EIO, "the file to copy is shorter than it was", _path_of(source))
                done += count

    def sync(self, descriptor: int) -> None:
        """Return when the file's bytes are on disk."""
        with _Named(descriptor):
            os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _Named(descriptor):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_names_above(self, path: Path) -> None:
        """Return when the name of ``path`` is on disk, and those of the directories it is in, up to the mount point.

        All of them, because the process that made some may have been killed before a sync. A directory that may not be
        read was made by another user, and is skipped.
        """
        path = path.resolve()
        device = path.stat().st_dev
        for above in path.parents:
            if above.stat().st_dev != device:
                break
            if os.access(above, os.R_OK):
                self.sync_directory(above)

    def truncate(self, descriptor: int, length: int) -> None:
        with _Named(descriptor):
            os.ftruncate(descriptor, length)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def rename_to_free(self, source: Path, target: Path) -> None:
        """Rename a file; FileExistsError rather than take the name of another.

        In one step where the file system can: renameat2(2) with RENAME_NOREPLACE, which the standard library does not
        have. Otherwise by a hard link. Without those, the name is looked up first, so the caller must be the only one
        that makes names there.
        """
        old, new = os.fsencode(source), os.fsencode(target)
        try:
            failed = _LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NOREPLACE)
            number = ctypes.get_errno() if failed else 0
        except AttributeError:  # the C library is too old
            number = errno.ENOSYS
        if number in _UNSUPPORTED:
            number = _link_to_free(source, target)
        if number:
            raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))

    def move_aside(self, source: Path, target: Path) -> Path:
        """Move a file or directory out of the way; with hard links, it always has at least one of the two names.

        If ``target`` is on another file system, it stays in its directory, under the name of ``target``.

        Returns:
            its new path. A file that could be linked also keeps the old name.
        """
        for path in (target, source.with_name(target.name)):
            try:
                self.link(source, path)
                return path
            except OSError:  # a directory, another user's file, or a file system without links
                try:
                    self.rename_to_free(source, path)
                    return path
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
        raise AssertionError("a directory is one file system")

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError rather than take that of another."""
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
        """Give ``path`` the content ``data`` in one step: a reader sees the old or the new, and the new survives.

        Args:
            exclusive: raise FileExistsError if there is an old one, even if it is made at the same moment.
            owner, group: to give the new one to, which only root may; -1: as what :meth:`create` makes.

        Raises:
            OSError: with ``path`` as its file name; the old content stays.
        """
        temporary, descriptor = self._create_temporary(path)
        try:
            if (owner, group) != (-1, -1):
                os.fchown(descriptor, owner, group)
            if mode != FILE_MODE:
                os.fchmod(descriptor, mode)
            self.write(descriptor, [data], 0)
            self.sync(descriptor)
            if exclusive:
                self.rename_to_free(temporary, path)
            else:
                self.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):  # what kept it from being made may keep it from being removed
                temporary.unlink()  # on a full disk it would take the room that is missing
            error.filename, error.filename2 = os.fspath(path), None  # not the temporary file
            raise
        finally:
            self.close(descriptor)
        self.sync_directory(path.parent)

    def _create_temporary(self, path: Path) -> tuple[Path, int]:
        """Create a file for :meth:`replace`, and lock it: other processes remove unlocked ones as leftovers."""
        while True:
            # A unique name: containers share process ids, and one process would publish the unfinished file of
            # another.
            temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
            try:
                descriptor = self.create(temporary)
            except OSError as error:
                error.filename, error.filename2 = os.fspath(path), None
                raise
            try:
                claimed = self.lock(descriptor) and os.fstat(descriptor).st_nlink > 0
            except OSError:  # without locks on the file system, others remove nothing
                claimed = True
            if claimed:
                return temporary, descriptor
            self.close(descriptor)  # removed as a leftover just before it was locked
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def lock(self, descriptor: int, *, shared: bool = False) -> bool:
        """Take the lock that ends with the descriptor; False if another process holds it.

        Args:
            shared: whether others may have it too, if they share it; else it is exclusive.
        """
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _link_to_free(source: Path, target: Path) -> int:
    """Rename a file without renameat2(2); return the number of an error, or 0."""
    try:
        os.link(source, target)
        os.unlink(source)
    except FileExistsError:
        return errno.EEXIST
    except OSError:  # a directory, or a file system without links
        if os.path.lexists(target):
            return errno.EEXIST
        os.rename(source, target)
    return 0


class _Named:
    """Gives an error of a system call the path of its descriptor, which the operating system does not name."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = _path_of(self._descriptor)


def _path_of(descriptor: int) -> str | None:
    """Return the path of an open file; None without one."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
    except OSError:
        return None
    return path if path.startswith("/") else None


def _require_own(path: Path, status: os.stat_result) -> None:
    """
    Raises:
        OSError: not a regular file; or, in a directory that several users write to, one that another user has made, or
            linked there.
    """
    directory = path.parent.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    if directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISVTX):  # sticky: several users could write before
        if status.st_nlink != 1:
            raise OSError(errno.EMLINK, "the file has another name too", os.fspath(path))
        if status.st_uid not in (0, os.geteuid(), directory.st_uid):
            raise PermissionError(errno.EPERM, "another user's file", os.fspath(path))


def free_bytes(path: Path) -> int:
    """What an unprivileged writer may still add to the file system of ``path``."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def total_bytes(path: Path) -> int:
    """What an unprivileged writer could add to the file system of ``path`` if it were empty; 0 if that is not known."""
    status = os.statvfs(path)
    return (status.f_blocks - (status.f_bfree - status.f_bavail)) * status.f_frsize
