"""Opening a file of a log to read it: a regular file and nothing else, which is never waited for.

A user who may write to a root can plant a FIFO, a device or a link where a file belongs. Opening a FIFO as usual
waits for a writer that never comes. So every file of a log that is read is opened here.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from wald.errors import Damaged
from wald.store.files.inodes import is_regular

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
