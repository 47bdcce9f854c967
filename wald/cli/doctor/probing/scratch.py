"""A directory to try things out in: made in the one that is examined, and always removed.

It is reached through its descriptor, so a user who renames it cannot lead anything elsewhere. Its lock says that its
program runs; one without is left over from a program that was killed, and is removed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wald.files.layout import TEMPORARY

_PREFIX = "wald-doctor-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """A path that leads into a new scratch directory; what is made in the block is for this user only.

    Raises:
        OSError: it cannot be made.
    """
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    name = f"{_PREFIX}{secrets.token_hex(8)}{TEMPORARY}"
    descriptor, umask = -1, os.umask(0o077)
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        descriptor = os.open(name, _FLAGS, dir_fd=parent)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        if descriptor >= 0:
            _remove(parent, name, descriptor)
            os.close(descriptor)
        else:  # interrupted before it was opened, or not even made
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent)
        os.close(parent)
        os.umask(umask)


def remove_left_over(directory: Path) -> int:
    """Remove the scratch directories whose programs were killed; returns how many."""
    removed = 0
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(parent):
            if is_scratch(name):
                with contextlib.suppress(OSError):  # another one has removed it, or it is another user's
                    removed += _remove_unlocked(parent, name)
    finally:
        os.close(parent)
    return removed


def is_scratch(name: str) -> bool:
    """Whether a file may be a scratch directory, by its name."""
    return name.startswith(_PREFIX) and name.endswith(TEMPORARY)


def _remove_unlocked(parent: int, name: str) -> bool:
    descriptor = os.open(name, _FLAGS, dir_fd=parent)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _remove(parent, name, descriptor)
        return True
    finally:
        os.close(descriptor)


def _remove(parent: int, name: str, descriptor: int) -> None:
    """The files in it, none of which is a directory, and itself."""
    # Opened anew: on btrfs a directory does not list what was made after it was opened.
    listed = os.open(".", _FLAGS, dir_fd=descriptor)
    try:
        for each in os.listdir(listed):
            os.unlink(each, dir_fd=listed)
    finally:
        os.close(listed)
        os.rmdir(name, dir_fd=parent)
