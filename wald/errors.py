"""Every error wald raises on purpose: what happened, what to type next, and the exit code of a command that it ends.

A message is one line and names the file, and the offset if one is known; the hint is a command or an action, which a
traceback shows below the message. ``wald.hints`` makes it from the case and the facts of the error.
Exit codes are part of the interface. 0 is success, 2 also a wrong usage of a command.
"""

from __future__ import annotations

import errno
import os
from functools import cached_property
from pathlib import Path
from typing import Self

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRONG_TYPES = {errno.EISDIR: "a directory has the name of a file", errno.ENOTDIR: "not a directory"}
DISK_ERRORS = (*DISK_FULL, errno.EIO, errno.EROFS, errno.EFBIG)  # the disk is full or fails, or a limit is reached


class WaldError(Exception):
    """An error that an operator can act on; the base of all others.

    Args:
        message: what happened, in one line.
        hint: a command to type, or what to do, for an error without a case.
        case: the name of a template of ``wald.hints``, which makes the hint.
        facts: the values that the template needs.

    Attributes:
        exit_code: of a command that ends with this error.
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
        """A command to type, or what to do; "" if there is no hint."""
        from wald.hints import hint_for

        return hint_for(self.case, **self.facts)

    @cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # add_note() finds and extends the list
        """The lines that a traceback shows below the message."""
        return [f"  hint: {self.hint}"] if self.hint else []

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle the hint as this process gives it: another may be of another user."""
        _ = self.hint
        return super().__reduce__()


class InvalidInput(WaldError):
    """A name, a number, a time or a setting that can never be right."""

    exit_code = 2


class NotFound(WaldError):
    """The root, route, cursor or sequence that was asked for does not exist."""

    exit_code = 3


class Damaged(WaldError):
    """Bytes on disk differ from those that were written.

    Attributes:
        last: the last of the records that cannot be read for it; 0: none, or it is not known.
    """

    exit_code = 4
    last = 0


def wrong_type(error: OSError) -> Damaged | None:
    """Return the error for a directory in the place of a file, or vice versa; None for any other error."""
    path = error.filename2 or error.filename
    if not isinstance(path, str | os.PathLike) or error.errno not in _WRONG_TYPES:
        return None
    at = Path(path)
    if error.errno == errno.ENOTDIR:
        at = next((each for each in (at, *at.parents) if each.exists() and not each.is_dir()), at)
    return Damaged(
        f"{at}: {_WRONG_TYPES[error.errno]}",
        case="wrong-type-of-file",
        path=at,
    )


class Locked(WaldError):
    """Another process does this work already: a daemon on this root, or another reclaim or archive run."""

    exit_code = 5


class Unavailable(WaldError):
    """The daemon cannot be reached, or will not take this now."""

    exit_code = 6


class DiskFailure(WaldError):
    """The disk is full, or a write or sync failed and could not be repeated elsewhere."""

    exit_code = 7


class UnsupportedFormat(WaldError):
    """The root was written by a newer wald."""

    exit_code = 8


class Refused(WaldError):
    """The operation would break a promise: a cursor moved backwards, or past the head."""

    exit_code = 9


class GivenUp(WaldError):
    """Records that a command could not process are dead letters now."""

    exit_code = 10


class NotPermitted(WaldError):
    """This user may not open a file of the log, or may not ask the daemon for this."""

    exit_code = 11

    @classmethod
    def of(cls, error: PermissionError, path: str | os.PathLike[str] = "") -> Self:
        """The error for a refusal by the operating system, with the users who are permitted.

        Args:
            error: the refusal.
            path: the file, if ``error`` does not name it.
        """
        wanted = Path(path or error.filename or ".").absolute()
        barrier = _barrier(wanted)
        message = f"{wanted}: permission denied" + (f" by {barrier}" if barrier != wanted else "")
        return cls(message, case="permission-denied", path=barrier)


class Partial(WaldError):
    """Everything there is was read, and records that belong to it were reclaimed."""

    exit_code = 12


class NotProcessed(WaldError):
    """The records are durable, and a group has not processed them in the time that was given."""

    exit_code = 15


class Replaced(WaldError):
    """The log that a process was reading was replaced: another log is at its path."""

    exit_code = 16


class Gone(Replaced):
    """The log that a process was reading is gone from its path; it may reappear, for example with a mount."""


class RolledBack(Replaced):
    """An older copy of the log was restored at its path: records that a process has seen are missing or differ."""


class Interrupted(WaldError):
    """Ctrl-C, while there is something to report."""

    exit_code = 130


def _barrier(wanted: Path) -> Path:
    """The path that denies access: the directory that hides ``wanted``, or the one it would be in, or itself."""
    seen = Path("/")
    for each in (*reversed(wanted.parents), wanted):
        try:
            os.stat(each)
        except OSError:
            break
        seen = each
    return seen
