"""Modes and owners of files, directories and FIFOs that wald creates.

Making files, directories and FIFOs: the mode is the same under every umask, and root makes them for their user.

What root makes in a directory of another user belongs to that user and to the directory's group. So the programs of
that user go on with a log on which root has run one. Owner and mode are set by descriptor, and the owner is that of the
directory that the name is really in: its user could put a link in the place of a name, or of a directory above.

Where root may not give (some network file systems and containers), what it makes stays its own.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # what has the name, without opening it


def make_file(path: Path, flags: int, mode: int) -> int:
    """A new file, open; FileExistsError rather than touch an old one."""
    with _directory_of(path) as directory:
        descriptor = os.open(path.name, flags | _NEW, mode, dir_fd=directory)
        try:
            _give(descriptor, directory)
            os.fchmod(descriptor, mode)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_or_make_file(path: Path, flags: int, mode: int) -> int:
    """A file, open; one that is there keeps its owner and mode."""
    try:
        return make_file(path, flags, mode)
    except FileExistsError:
        return os.open(path, flags | os.O_CLOEXEC)


def make_directory(path: Path, mode: int) -> None:
    """A new directory; the one above gives it its set-group-id bit."""
    with _directory_of(path) as directory:
        # Not chmod(2): it takes away the set-group-id bit if the user is not a member of the group.
        with umask_for(mode):
            os.mkdir(path.name, mode, dir_fd=directory)
        _give_name(path.name, directory, stat.S_IFDIR)


def make_fifo(path: Path, mode: int) -> None:
    """A new FIFO; until it has its mode no other user may open it."""
    with _directory_of(path) as directory:
        with umask_for(mode & 0o600):
            os.mkfifo(path.name, mode & 0o600, dir_fd=directory)
        _give_name(path.name, directory, stat.S_IFIFO, mode)


def give_socket(path: Path) -> None:
    """Give a socket that was just bound to the user of the directory."""
    with _directory_of(path) as directory:
        _give_name(path.name, directory, stat.S_IFSOCK)


@contextlib.contextmanager
def umask_for(mode: int) -> Iterator[None]:
    """A umask under which what is made in the block gets ``mode``."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _directory_of(path: Path) -> Iterator[int]:
    """The directory that ``path`` is in, as a descriptor; errors in the block are about ``path``."""
    try:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def _give_name(name: str, directory: int, kind: int, mode: int | None = None) -> None:
    """Give what has just been made, and its mode; nothing if something of another kind has its name already."""
    descriptor = os.open(name, _PLACE, dir_fd=directory)
    try:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
            made = f"/proc/self/fd/{descriptor}"  # fchown(2) and fchmod(2) want an open file
            if mode is not None:
                os.chmod(made, mode)
            _give(made, directory)
    finally:
        os.close(descriptor)


def _give(made: int | str, directory: int) -> None:
    if os.geteuid() == 0 and (owner := os.fstat(directory)).st_uid != 0:
        with contextlib.suppress(OSError):
            os.chown(made, owner.st_uid, owner.st_gid)
