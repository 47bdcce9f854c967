"""Directory of a route's cursors, and the ownership of its files.

    routes/R            0750
    routes/R/cursors    0750
                        3775, OS group GROUP    if the route has cursor owners
                        1750                    if it had some before

The sticky bit lets only a file's owner and the log's owner remove the file. It stays because files of former cursor
owners may.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Self

from wald.errors import NotPermitted
from wald.files.disk import Disk
from wald.files.layout import Root, require_no_link
from wald.hints import group_name, user_name

ROOTS_GROUP = "group"
UNKNOWN_USER = 65534  # overflowuid: users outside the namespace of a unit with PrivateUsers=
_NO_GROUP = (1 << 32) - 1  # for chown(2): do not change the group
_OPEN_MODE = 0o3775  # "others" means the root's group: the directories above exclude everyone else
_CLOSED_MODE = 0o1750


class GroupFile:
    """Open, lockable file ``<group><suffix>`` of a consumer group."""

    def __init__(self, root: Root, route: str, group: str, suffix: str, disk: Disk) -> None:
        root.require_route(route)
        self._arguments = root, disk, route, group, suffix
        self.disk = disk
        self.path, self.descriptor = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.disk.close(self.descriptor)

    def lock(self) -> bool:
        return self.disk.lock(self.descriptor)

    def renew(self) -> None:
        """Reopen the file, so that holders of the old descriptor do not share the next lock."""
        path, descriptor = self._open()
        self.close()
        self.path, self.descriptor = path, descriptor

    def _open(self) -> tuple[Path, int]:
        return open_group_file(*self._arguments)


def open_group_file(root: Root, disk: Disk, route: str, group: str, suffix: str) -> tuple[Path, int]:
    """Open or create a group's file. Raise NotPermitted without permission, or if another user planted it."""
    path = make_cursor_directory(root, disk, route) / f"{group}{suffix}"
    try:
        return path, disk.open_lock(path)
    except PermissionError as error:
        raise not_permitted(root, route, path, error) from error


def make_cursor_directory(root: Root, disk: Disk, route: str) -> Path:
    directory = root.cursor_directory(route)
    require_no_link(directory)
    if not directory.is_dir():
        try:
            disk.make_directory(directory)
        except PermissionError as error:
            raise not_permitted(root, route, directory, error) from error
        disk.sync_directory(directory.parent)
    return directory


def is_cursor_group(text: str) -> bool:
    """Return True if ``text`` is valid for :func:`permit_cursor_owners`."""
    return text in ("", ROOTS_GROUP) or (text.isascii() and text.isdecimal() and int(text) < _NO_GROUP)


def permit_cursor_owners(root: Root, disk: Disk, route: str, group: str) -> None:
    """Let an OS group (a number, ROOTS_GROUP, or "" for none) create cursors of a route."""
    directory = make_cursor_directory(root, disk, route)
    if not group and not directory.stat().st_mode & (stat.S_ISVTX | stat.S_IWGRP):
        return
    group_id = int(group) if group.isdecimal() else root.path.stat().st_gid
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if group == "":
            os.fchmod(descriptor, _CLOSED_MODE)  # first, or the new group could write briefly
        if os.fstat(descriptor).st_gid != group_id:
            _change_group(directory, descriptor, group_id)
        if group:
            os.fchmod(descriptor, _OPEN_MODE)
    except OSError as error:
        error.filename = os.fspath(directory)
        raise
    finally:
        os.close(descriptor)
    disk.sync_directory(directory)


def cursor_creator_group(root: Root, route: str) -> str:
    """Return the OS group that may create cursors, or ""."""
    try:
        status = root.cursor_directory(route).stat()
    except OSError:
        return ""
    is_open = status.st_mode & stat.S_IWGRP and status.st_mode & stat.S_ISVTX
    return group_name(status.st_gid) if is_open else ""


def file_owner(path: Path) -> int | None:
    """Return a file's user id, or the directory owner's for a file of root."""
    try:
        user_id = path.lstat().st_uid
        return path.parent.stat().st_uid if user_id == 0 else user_id
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_own_file(path: Path) -> bool:
    return file_owner(path) == _own_user(path.parent)


def is_companion(path: Path, cursor: Path) -> bool:
    """Return True if ``path`` belongs to the cursor's owner or, without a cursor, this user. Others may plant files."""
    if not os.path.lexists(path):
        return False
    owner = file_owner(cursor)
    return file_owner(path) == (_own_user(cursor.parent) if owner is None else owner)


def not_permitted(root: Root, route: str, path: Path, error: PermissionError) -> NotPermitted:
    """Return an error whose case names the missing permission."""
    directory = root.cursor_directory(route)
    may_write = os.access(directory, os.W_OK | os.X_OK)
    owner = file_owner(path)
    group = cursor_creator_group(root, route)
    message = f"{path}: permission denied"
    if path != directory and owner is not None and (may_write or not group or owner == directory.stat().st_uid):
        if _own_user(directory) == directory.stat().st_uid:
            return NotPermitted(message, case="file-of-other-user", path=path)
        user = "the user" if owner == UNKNOWN_USER else f"user {user_name(owner)},"
        return NotPermitted(message, case="cursor-left-by-other-user", path=path, user=user)
    if group:
        me = user_name(os.geteuid())
        return NotPermitted(message, case="cursor-group-needed", group=group, user=me, directory=directory)
    if os.access(root.route(route), os.X_OK):
        user = user_name(root.path.stat().st_uid)
        return NotPermitted(message, case="cursor-owner-needed", root=root.path, route=route, user=user)
    return NotPermitted.from_error(error, path)


def _own_user(directory: Path) -> int:
    return os.geteuid() or directory.stat().st_uid


def _change_group(directory: Path, descriptor: int, group_id: int) -> None:
    try:
        os.fchown(descriptor, -1, group_id)
    except PermissionError as error:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise
        user, group = user_name(os.geteuid()), group_name(group_id)
        raise NotPermitted(
            f"{directory}: user {user} is not in group {group}, or was not in it when this program started",
            case="group-unavailable",
            group=group,
            user=user,
        ) from error
