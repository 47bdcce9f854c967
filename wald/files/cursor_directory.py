"""The directory of a route's cursors: who may leave files in it, and which user owns each.

    routes/R            0750, the log's owner     the FIFO, ``retired``
    routes/R/cursors    0750, the same            cursors, journals, pins and locks of all groups
                        3775, group GROUP         if the route has cursor owners
                        1750                      if it had some before

The names of a group belong to the user who created its cursor. The sticky bit keeps all users except the log's owner
from renaming or removing the files of others. It remains when the cursor owners lose their right, because their files
remain. Root's files count as those of the directory's owner.
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from wald.errors import NotPermitted
from wald.files.disk import Disk
from wald.files.layout import Root, require_no_link
from wald.hints import user_name

ROOTS_GROUP = "group"
UNKNOWN_USER = 65534  # the kernel's overflowuid: any user outside the namespace of a unit with PrivateUsers=
_NO_GROUP = (1 << 32) - 1  # for chown(2): do not change the group
_OPEN_MODE = 0o3775  # others: members of the root's group, as the directories above keep all others out
_CLOSED_MODE = 0o1750


def is_group(text: str) -> bool:
    """Return True for the number of a group, for ROOTS_GROUP, and for "", which means no group."""
    return text in ("", ROOTS_GROUP) or (text.isascii() and text.isdecimal() and int(text) < _NO_GROUP)


def make_cursor_directory(root: Root, disk: Disk, route: str) -> Path:
    """Make the directory of a route's cursors, unless it exists.

    Raises:
        Damaged: a symbolic link has its name.
        NotPermitted: this user may not make it.
    """
    directory = root.cursor_directory(route)
    require_no_link(directory)
    if not directory.is_dir():
        try:
            disk.make_directory(directory)
        except PermissionError as error:
            raise not_permitted(root, route, directory, error) from error
        disk.sync_directory(directory.parent)
    return directory


def admit(root: Root, disk: Disk, route: str, group: str) -> None:
    """Let the members of ``group``, and of no other group, leave cursors in a route.

    Args:
        group: as :func:`is_group` describes; "": no group may. Existing cursors stay, and count.

    Raises:
        NotPermitted: this user is not a member of the group.
    """
    directory = make_cursor_directory(root, disk, route)
    if not group and not directory.stat().st_mode & (stat.S_ISVTX | stat.S_IWGRP):
        return
    wanted = int(group) if group.isdecimal() else root.path.stat().st_gid
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if group == "":
            os.fchmod(descriptor, _CLOSED_MODE)  # first: with another group, members of that could write for a moment
        if os.fstat(descriptor).st_gid != wanted:
            _give(directory, descriptor, wanted)
        if group:
            os.fchmod(descriptor, _OPEN_MODE)
    except OSError as error:
        error.filename = os.fspath(directory)
        raise
    finally:
        os.close(descriptor)
    disk.sync_directory(directory)


def admitted(root: Root, route: str) -> str:
    """Return the group whose members may leave cursors in a route; "" without one."""
    try:
        status = root.cursor_directory(route).stat()
    except OSError:
        return ""
    is_open = status.st_mode & stat.S_IWGRP and status.st_mode & stat.S_ISVTX
    return group_name(status.st_gid) if is_open else ""


def group_name(group_id: int) -> str:
    """Return the name of a group; the number as text if the group database does not have it."""
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)


def user_of(path: Path) -> int | None:
    """Return the user who owns a file in a directory of cursors; None without a file."""
    try:
        user_id = path.lstat().st_uid
        return path.parent.stat().st_uid if user_id == 0 else user_id
    except (FileNotFoundError, NotADirectoryError):
        return None


def own_user(directory: Path) -> int:
    """Return the user who owns the files that this process makes in a directory of cursors."""
    return os.geteuid() or directory.stat().st_uid


def is_companion(path: Path, cursor: Path) -> bool:
    """Return True if a file exists and counts for the group of a cursor: another user may have planted it.

    It must belong to the cursor's owner; without a cursor, to the user of this process.
    """
    if not os.path.lexists(path):
        return False
    owner = user_of(cursor)
    return user_of(path) == (own_user(cursor.parent) if owner is None else owner)


def not_permitted(root: Root, route: str, path: Path, error: PermissionError) -> NotPermitted:
    """The error for a user who may not write or remove ``path``, a file of a consumer group, and what permits it."""
    directory = root.cursor_directory(route)
    may_write = os.access(directory, os.W_OK | os.X_OK)
    left_by = user_of(path)
    group = admitted(root, route)
    message = f"{path}: permission denied"
    if path != directory and left_by is not None and (may_write or not group or left_by == directory.stat().st_uid):
        if own_user(directory) == directory.stat().st_uid:
            return NotPermitted(message, case="file-of-other-user", path=path)
        user = None if left_by == UNKNOWN_USER else left_by
        return NotPermitted(message, case="cursor-left-by-other-user", path=path, user=user)
    if group:
        me = user_name(os.geteuid())
        return NotPermitted(message, case="cursor-group-needed", group=group, user=me, directory=directory)
    if os.access(root.route(route), os.X_OK):
        owner = root.path.stat().st_uid
        return NotPermitted(message, case="cursor-owner-needed", root=root.path, route=route, owner=owner)
    return NotPermitted.of(error, path)


def _give(directory: Path, descriptor: int, group_id: int) -> None:
    try:
        os.fchown(descriptor, -1, group_id)
    except PermissionError as error:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise
        user, group = user_name(os.geteuid()), group_name(group_id)
        raise NotPermitted(
            f"{directory}: user {user} is not in group {group}, or was not when this program started",
            case="group-unavailable",
            group=group,
            user=user,
        ) from error


def open_own(root: Root, disk: Disk, route: str, group: str, suffix: str) -> tuple[Path, int]:
    """Open the file ``<group><suffix>``, made if missing; return its path and a descriptor.

    Raises:
        NotPermitted: this user may not write there, or another user has put it there.
        OSError: it cannot be made, or is not a regular file.
    """
    path = make_cursor_directory(root, disk, route) / f"{group}{suffix}"
    try:
        return path, disk.open_lock(path)
    except PermissionError as error:
        raise not_permitted(root, route, path, error) from error


class GroupFile:
    """``<group><suffix>`` of ``route``, open for reading and writing until it is closed.

    Attributes:
        path, descriptor: of the file.

    Raises:
        NotFound: there is no such route.
        NotPermitted: this user may not.
        OSError: it cannot be made, or is no file.
    """

    def __init__(self, root: Root, route: str, group: str, suffix: str, disk: Disk) -> None:
        root.require_route(route)
        self._place = root, disk, route, group, suffix
        self.disk = disk
        self.path, self.descriptor = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it; the lock ends when all processes that share it have."""
        self.disk.close(self.descriptor)

    def lock(self) -> bool:
        """Take the lock; False if it is held by a process that has another descriptor."""
        return self.disk.lock(self.descriptor)

    def renew(self) -> None:
        """Open the file again: processes that share the descriptor so far do not share the lock of the new one."""
        path, descriptor = self._opened()
        self.close()
        self.path, self.descriptor = path, descriptor

    def _opened(self) -> tuple[Path, int]:
        return open_own(*self._place)
