"""The directory of a route in which the users of one group leave cursors: opening it, closing it, and who may.

    routes/R               0750, the log's owner        the FIFO, ``retired``, the owner's own cursors
    routes/R/consumers     1775, the same, group GROUP  cursors, and files of wald-drain, each its writer's own

What the log's owner decides by stands where no other user can make, rename or remove a name. In ``consumers`` the
sticky bit keeps each user to their own files. Whatever stands there is a cursor at most; it is read as any cursor is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from wald.errors import NotPermitted
from wald.hints import group_name, user_name
from wald.store.files.directory import Root, require_no_link
from wald.store.files.disk import DIRECTORY_MODE, Disk

ROOTS_GROUP = "group"
UNKNOWN_USER = 65534  # the kernel's overflowuid: any user outside the namespace of a unit with PrivateUsers=
_NO_GROUP = (1 << 32) - 1  # for chown(2): leave the group that it has
_OPEN_MODE = 0o1775  # others: members of the root's group, as the directories above keep all others out


def is_group(text: str) -> bool:
    """Whether it is the number of a group; ROOTS_GROUP; or "", which is none."""
    return text in ("", ROOTS_GROUP) or (text.isascii() and text.isdecimal() and int(text) < _NO_GROUP)


def admit(root: Root, disk: Disk, route: str, group: str) -> None:
    """Let the members of ``group`` leave cursors in a route, in the place of those that could so far.

    Args:
        group: as :func:`is_group` says; "": no group may. Cursors that are there stay, and count.

    Raises:
        NotPermitted: this user is not a member of the group.
    """
    directory = root.consumers(route)
    if not group and not directory.exists():
        return
    require_no_link(directory)
    disk.make_directory(directory)
    wanted = int(group) if group.isdecimal() else root.path.stat().st_gid
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if group == "":
            os.fchmod(descriptor, DIRECTORY_MODE)  # first: with another group, members of that could write for a moment
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
    """The group whose members may leave cursors in a route; "" if there is none."""
    try:
        status = root.consumers(route).stat()
    except OSError:
        return ""
    return group_name(status.st_gid) if status.st_mode & stat.S_IWGRP else ""


def open_own(root: Root, disk: Disk, route: str, group: str, suffix: str) -> tuple[Path, int]:
    """The lock of a consumer group, beside its cursor: its path, and a descriptor.

    Raises:
        NotPermitted: this user may not write there, or another user has put it there.
        OSError: it cannot be made, or is no file.
    """
    path = root.place(route, group) / f"{group}{suffix}"
    try:
        return path, disk.open_lock(path)
    except PermissionError as error:
        raise not_permitted(root, route, path, error) from error


def not_permitted(root: Root, route: str, path: Path, error: PermissionError) -> NotPermitted:
    """The error for a user who may not write or remove ``path``, a file of a consumer group, and what permits it."""
    directory = path.parent
    may_write = os.access(directory, os.W_OK | os.X_OK)
    if os.path.lexists(path) and (may_write or directory == root.route(route)):
        left_by = path.lstat().st_uid
        user = None if left_by == UNKNOWN_USER else left_by
        return NotPermitted(f"{path}: permission denied", case="cursor-left-by-other-user", path=path, user=user)
    if group := admitted(root, route):
        me = user_name(os.geteuid())
        return NotPermitted(
            f"{path}: permission denied", case="cursor-group-needed", group=group, user=me, directory=directory
        )
    if os.access(root.route(route), os.X_OK):
        owner = root.path.stat().st_uid
        return NotPermitted(
            f"{path}: permission denied", case="cursor-owner-needed", root=root.path, route=route, owner=owner
        )
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
