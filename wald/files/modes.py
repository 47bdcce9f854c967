"""Modes and owners of files, directories and FIFOs that wald creates.

Modes do not depend on the umask. Files that root creates get the directory's owner and group, unless the file system
refuses. Mode and owner are set by descriptor, because that user could replace the name, or a directory above, by a
link.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_CREATE = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_PATH_ONLY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def make_file(path: Path, flags: int, mode: int) -> int:
    with _directory_of(path) as directory:
        descriptor = os.open(path.name, flags | _CREATE, mode, dir_fd=directory)
        try:
            _set_owner(descriptor, directory)
            os.fchmod(descriptor, mode)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_or_make_file(path: Path, flags: int, mode: int) -> int:
    """Open or create a file; an existing file keeps its owner and mode."""
    try:
        return make_file(path, flags, mode)
    except FileExistsError:
        return os.open(path, flags | os.O_CLOEXEC)


def make_directory(path: Path, mode: int) -> None:
    with _directory_of(path) as directory:
        # Not by chmod(2), which clears an inherited set-group-id bit if the user is not in the group.
        with umask_for(mode):
            os.mkdir(path.name, mode, dir_fd=directory)
        _set_owner_and_mode(path.name, directory, stat.S_IFDIR)


def make_fifo(path: Path, mode: int) -> None:
    """Create a FIFO that other users cannot open before its mode is set."""
    with _directory_of(path) as directory:
        with umask_for(mode & 0o600):
            os.mkfifo(path.name, mode & 0o600, dir_fd=directory)
        _set_owner_and_mode(path.name, directory, stat.S_IFIFO, mode)


def set_socket_owner(path: Path) -> None:
    with _directory_of(path) as directory:
        _set_owner_and_mode(path.name, directory, stat.S_IFSOCK)


@contextlib.contextmanager
def umask_for(mode: int) -> Iterator[None]:
    previous = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(previous)


@contextlib.contextmanager
def _directory_of(path: Path) -> Iterator[int]:
    """Open the directory of ``path``. Errors in the block name ``path``."""
    try:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def _set_owner_and_mode(name: str, directory: int, kind: int, mode: int | None = None) -> None:
    """Set owner and mode of a new file, unless another kind of file has replaced it."""
    descriptor = os.open(name, _PATH_ONLY, dir_fd=directory)
    try:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
            path = f"/proc/self/fd/{descriptor}"  # fchown(2) and fchmod(2) reject O_PATH descriptors
            if mode is not None:
                os.chmod(path, mode)
            _set_owner(path, directory)
    finally:
        os.close(descriptor)


def _set_owner(file: int | str, directory: int) -> None:
    """Give a file that root created to its directory's owner."""
    if os.geteuid() == 0 and (status := os.fstat(directory)).st_uid != 0:
        with contextlib.suppress(OSError):
            os.chown(file, status.st_uid, status.st_gid)
