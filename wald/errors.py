"""Every error wald raises on purpose: what happened, what to type next, and the exit code of a command that it ends.

A message is one line and names the file and the offset where there is one; the hint is a command or an action, which
a traceback shows below the message.
Exit codes are part of the interface. 0 is success, 2 also a wrong usage of a command.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Self

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRONG_TYPES = {errno.EISDIR: "a directory has the name of a file", errno.ENOTDIR: "not a directory"}
DISK_ERRORS = (*DISK_FULL, errno.EIO, errno.EROFS, errno.EFBIG)  # the disk is full or fails, or a limit is reached


class WaldError(Exception):
    """An error that an operator can act on; the base of all others.

    Args:
        message: what happened, in one line.
        hint: a command to type, or what to do.

    Attributes:
        exit_code: of a command that ends with this error.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"  hint: {hint}")


class InvalidInput(WaldError):
    """A name, a number, a time or a setting that can never be right."""

    exit_code = 2


class NotFound(WaldError):
    """The root, route, cursor or sequence that was asked for does not exist."""

    exit_code = 3


class Damaged(WaldError):
    """Bytes on disk are not what was written there.

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
        hint=f"ls -ld {at}; move it away, and restore the original",
    )


class Locked(WaldError):
    """Another process does this work already: a daemon on this root, a reclaim or an archive beside it."""

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
        return cls(message, hint=f"{_how_to_permit(barrier)}; ls -ld {barrier}")


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


def command_line(root: str | os.PathLike[str], arguments: str = "", *, program: str = "wald") -> str:
    """A command for a hint, quoted so that it can be typed as it is for every root.

    >>> command_line("/srv/my log", "routes")
    "wald --root '/srv/my log' routes"
    """
    import shlex

    return f"{program} --root {shlex.quote(os.fspath(root))} {arguments}".rstrip()


def room_commands(*paths: str | os.PathLike[str], error: OSError | None = None) -> str:
    """Return the commands of a hint that show the full resource: space and inodes, or the file size limit.

    >>> room_commands("/srv/my log")
    "df -h '/srv/my log'; df -i '/srv/my log'"
    """
    import shlex

    if error is not None and error.errno == errno.EFBIG:
        return "ulimit -f unlimited, or LimitFSIZE=infinity in a unit"
    at = "".join(f" {shlex.quote(os.fspath(path))}" for path in paths)
    return f"df -h{at}; df -i{at}"


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


def user_name(user_id: int) -> str:
    """The name of a user; the number as text if the user database does not have it."""
    import pwd

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _how_to_permit(path: Path) -> str:
    """What changes the permission, or which user has it; a group only for a user who is not a member."""
    import grp

    status = path.stat()
    if os.geteuid() == 0:
        return f"lsattr -d {path}"  # no mode keeps root out
    if os.geteuid() == status.st_uid:
        return f"chmod u+rwX {path}"
    user = user_name(status.st_uid)
    if status.st_uid == 0 and path.parent.stat().st_uid == os.geteuid():  # root ran a program on a log of this user
        return f"chown {user_name(os.geteuid())} {path}, as root"
    if not status.st_mode & stat.S_IRWXG or status.st_gid in {os.getegid(), *os.getgroups()}:
        return f"be user {user}"
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"be user {user}, or in group {group}"
