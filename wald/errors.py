"""Errors that wald raises on purpose, each with a hint and a documented exit code.

A message is one line, and names the file and, if known, the offset. ``wald.hints`` makes the hint from the case and
facts.
"""

from __future__ import annotations

import errno
import os
from functools import cached_property
from pathlib import Path
from typing import Self

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRONG_TYPES = {errno.EISDIR: "a directory, not a file", errno.ENOTDIR: "not a directory"}
DISK_ERRORS = (*DISK_FULL, errno.EIO, errno.EROFS, errno.EFBIG)  # the disk is full or fails, or a limit is reached


class WaldError(Exception):
    """Base class: an error that an operator can act on.

    Args:
        message: what happened, in one line.
        hint: a command to type or an action, for an error without a case.
        case: name of a template in ``wald.hints``.
        facts: values for the template.

    Attributes:
        exit_code: exit code of a command that fails with this error.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", case: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.case = case
        self.facts = facts
        if not case:
            self.hint = hint

    @cached_property
    def hint(self) -> str:
        """A command to type or an action; "" if there is no hint."""
        from wald.hints import hint_for

        return hint_for(self.case, **self.facts)

    @cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # add_note() finds and extends the list
        """Lines that a traceback shows below the message."""
        return [f"  hint: {self.hint}"] if self.hint else []

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle the hint too: it depends on the user of this process."""
        _ = self.hint
        return super().__reduce__()


class InvalidInput(WaldError):
    """A name, number, time or setting that can never be valid."""

    exit_code = 2


class NotFound(WaldError):
    """The requested root, route, cursor or sequence does not exist."""

    exit_code = 3


class Damaged(WaldError):
    """Bytes on disk differ from those that were written.

    Attributes:
        last: the last unreadable record; 0 if none or unknown.
    """

    exit_code = 4
    last = 0


def wrong_type(error: OSError) -> Damaged | None:
    """Convert an OSError about a directory at the path of a file, or vice versa; else return None."""
    path = error.filename2 or error.filename
    if not isinstance(path, str | os.PathLike) or error.errno not in _WRONG_TYPES:
        return None
    entry = Path(path)
    if error.errno == errno.ENOTDIR:
        entry = next((each for each in (entry, *entry.parents) if each.exists() and not each.is_dir()), entry)
    return Damaged(f"{entry}: {_WRONG_TYPES[error.errno]}", case="wrong-type-of-file", path=entry)


class Locked(WaldError):
    """Another process already does this work, such as a daemon on this root."""

    exit_code = 5


class Unavailable(WaldError):
    """The daemon cannot be reached, or does not accept the request now."""

    exit_code = 6


class DiskFailure(WaldError):
    """The disk is full, or a write or sync failed and could not be retried elsewhere."""

    exit_code = 7


class UnsupportedFormat(WaldError):
    """The root was written by a newer wald."""

    exit_code = 8


class Refused(WaldError):
    """The operation would break a promise: a cursor moved backwards, or past the head."""

    exit_code = 9


class GivenUp(WaldError):
    """Records that a command could not process became dead letters."""

    exit_code = 10


class NotPermitted(WaldError):
    """This user may not open a file of the log, or may not send the daemon this request."""

    exit_code = 11

    @classmethod
    def from_error(cls, error: PermissionError, path: str | os.PathLike[str] = "") -> Self:
        """Convert a PermissionError, and name what denies access; ``path`` is the file unless ``error`` names it."""
        file = Path(path or error.filename or ".").absolute()
        barrier = Path("/")
        for each in (*reversed(file.parents), file):
            try:
                os.stat(each)
            except OSError:
                break
            barrier = each
        message = f"{file}: permission denied" + (f" by {barrier}" if barrier != file else "")
        return cls(message, case="permission-denied", path=barrier)


class Partial(WaldError):
    """Some of the requested records were reclaimed; the others were read."""

    exit_code = 12


class NotProcessed(WaldError):
    """A consumer group has not processed all durable records before the timeout."""

    exit_code = 15


class Replaced(WaldError):
    """Another log is at the path of the log that a process was reading."""

    exit_code = 16


class Gone(Replaced):
    """The log disappeared from its path; it may reappear."""


class RolledBack(Replaced):
    """An older copy of the log was restored: records that a process has seen are missing or differ."""


class Interrupted(WaldError):
    """Ctrl-C interrupted a command that has something to report."""

    exit_code = 130
