"""Cursor files: how far each consumer group has processed each route.

A cursor is replaced atomically. An invalid cursor counts as position 0, so it pins records and never releases them.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from wald.errors import Damaged, NotFound, Refused
from wald.files.cursor_directory import UNKNOWN_USER, is_companion, not_permitted
from wald.files.disk import Disk
from wald.files.layout import Root, scan_cursor_directory
from wald.files.safe_open import open_regular
from wald.format.head import CURSOR_MAX_BYTES, BadCursor, decode_cursor
from wald.format.names import CURSOR_SUFFIX, DEFAULT_GROUP, PIN_SUFFIX, WORK_SUFFIX, check_group, parse_cursor_name
from wald.hints import hint_for, user_name

_SETTLED_NS = 1_000_000_000  # a more recently changed file may change again with the same time stamps


class CursorState(Enum):
    """Validity of a cursor."""

    VALID = "valid"
    ABSENT = "absent"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"
    LINKED = "linked"  # the file has a second name, so another user may have written it
    BEYOND = "beyond"  # ahead of the last record of the log


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of one group on one route.

    Attributes:
        sequence: position in the file; 0 if the file has none.
        message: the problem with the cursor, or "". After a move, the missing records that the cursor needs.
        user_id: owner of the file; -1 without a file.
    """

    route: str
    group: str
    path: Path
    state: CursorState
    sequence: int
    message: str = ""
    user_id: int = -1

    @property
    def of_work_group(self) -> bool:
        """True if the cursor is the ack floor of a work group, so that later records may be done too."""
        return is_companion(self.path.with_suffix(WORK_SUFFIX), self.path)

    @property
    def other_user(self) -> str:
        """Name of the file's owner, or "" for the log's owner and root."""
        if self.user_id in (-1, 0) or self.user_id == self.path.parent.stat().st_uid:
            return ""
        return _owner_name(self.user_id)

    @property
    def effective(self) -> int:
        """Sequence up to which all records are certainly processed; 0 if the cursor is invalid."""
        return self.sequence if self.state is CursorState.VALID else 0


def read_cursor(
    root: Root,
    route: str,
    group: str = DEFAULT_GROUP,
    *,
    log_id: bytes,
    head_sequence: int,
    any_user: bool = False,
) -> Cursor:
    """Read a cursor. The contents of its file never raise an error.

    Without ``any_user``, raise Refused if the log's owner or root reads the cursor of another user.
    """
    root.require_route(route)
    cursor = read_cursor_file(root.cursor(route, check_group(group)), route, group, log_id, head_sequence)
    if any_user or cursor.user_id == -1:
        return cursor
    owner, user = cursor.path.parent.stat().st_uid, os.geteuid()
    if cursor.user_id in (0, owner, user) or user not in (0, owner, root.path.stat().st_uid):
        return cursor
    raise Refused(
        f"{cursor.path}: the cursor belongs to {_owner_name(cursor.user_id)}, "
        "who could make the log's owner skip records",
        case="cursor-of-other-user",
        root=root.path,
        route=cursor.route,
        group=cursor.group,
    )


def read_cursors(root: Root, route: str, *, log_id: bytes, head_sequence: int) -> list[Cursor]:
    """Return the cursors of a route, or an absent cursor of the default group if there are none.

    An unreadable directory, or a file with an impossible name, counts as an unreadable cursor.
    """
    try:
        groups, misnamed = root.cursors(route)
    except OSError as error:
        path = Path(error.filename)
        return [Cursor(route, DEFAULT_GROUP, path, CursorState.UNREADABLE, 0, f"{path}: {error.strerror}")]
    if not groups and not misnamed:
        groups = {DEFAULT_GROUP: root.cursor(route, DEFAULT_GROUP)}
    cursors = [read_cursor_file(path, route, group, log_id, head_sequence) for group, path in groups.items()]
    return cursors + [_misnamed_cursor(route, path) for path in misnamed]


def _owner_name(user_id: int) -> str:
    return "another user" if user_id == UNKNOWN_USER else f"user {user_name(user_id)}"


def read_cursor_file(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    """Read a cursor file; any failure makes the cursor unreadable."""
    try:
        return _read_or_raise(path, route, group, log_id, head_sequence)
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        return Cursor(route, group, path, CursorState.UNREADABLE, 0, message, _owner_id(path))


def _read_or_raise(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    """Read a cursor file. Raise OSError for a failure that may be transient."""
    user_id = -1

    def cursor(state: CursorState, sequence: int = 0, message: str = "") -> Cursor:
        return Cursor(route, group, path, state, sequence, message and f"{path}: {message}", user_id)

    try:
        content, status = read_with_status(path, CURSOR_MAX_BYTES + 1)
        user_id, links = status.st_uid, status.st_nlink
        lines = decode_cursor(content)
    except FileNotFoundError:
        return cursor(CursorState.ABSENT, message="no cursor yet")
    except Damaged:
        user_id = _owner_id(path)
        return cursor(CursorState.UNREADABLE, message="not a regular file")
    except PermissionError:
        user_id = _owner_id(path)
        hint = hint_for("cursor-not-permitted", path=path)
        return cursor(CursorState.UNREADABLE, message=f"permission denied; {hint}")
    except BadCursor as error:
        return cursor(CursorState.UNREADABLE, message=f"offset 0: {error}")
    if links > 1:
        message = f"has {links} hard links, so another user may have written it; it counts again after its next move"
        return cursor(CursorState.LINKED, lines.sequence, message)
    if lines.log_id is not None and lines.log_id != log_id:
        return cursor(CursorState.FOREIGN, lines.sequence, f"belongs to log {lines.log_id.hex()}, not to this one")
    if lines.sequence > head_sequence:
        return cursor(
            CursorState.BEYOND, lines.sequence, f"{lines.sequence} is beyond the last durable record, {head_sequence}"
        )
    return cursor(CursorState.VALID, lines.sequence)


def _owner_id(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except OSError:
        return -1


def read_with_status(path: Path, length: int) -> tuple[bytes, os.stat_result]:
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, length), os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _misnamed_cursor(route: str, path: Path) -> Cursor:
    message = f"{path}: no group can have this name; {hint_for('cursor-misnamed')}"
    return Cursor(route, path.stem, path, CursorState.UNREADABLE, 0, message)


def cursor_is_directory(path: Path) -> Refused:
    return Refused(f"{path}: is a directory, not a cursor", case="cursor-is-a-directory", path=path)


def remove_cursor(root: Root, route: str, group: str, *, disk: Disk) -> Path:
    root.require_route(route)
    path = root.cursor(route, check_group(group))
    try:
        disk.unlink(path)
    except FileNotFoundError:
        raise NotFound(f"{path}: group {group} has no cursor", case="no-cursor", root=root.path, route=route) from None
    except PermissionError as error:
        raise not_permitted(root, route, path, error) from error
    except IsADirectoryError:
        raise cursor_is_directory(path) from None
    with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # only an unfinished handover has a pin
        disk.unlink(path.with_suffix(PIN_SUFFIX))
    disk.sync_directory(path.parent)
    return path


def new_group_warning(root: Root, route: str, group: str, *, with_workers: bool = False) -> str:
    """Return a warning if a group is new, or "". A misspelt group retains records for ever."""
    others = root.groups(route)
    if check_group(group) in others or (group == DEFAULT_GROUP and not others):
        return ""
    existing = f", which already has {', '.join(others)}" if others else ""
    hint = hint_for("work-group-is-new" if with_workers else "group-is-new", root=root.path, route=route, group=group)
    return (
        f"group {group} is new on route {route}{existing}: from now on, records are retained until it has read them\n"
        f"  hint: {hint}"
    )


def reject_leftover_journal(root: Root, cursor: Cursor) -> None:
    """Raise Refused if a journal has outlived its cursor: it would apply to a new one."""
    if cursor.state is CursorState.ABSENT and cursor.of_work_group:
        raise Refused(
            f"{cursor.path.with_suffix(WORK_SUFFIX)}: is left over from a work group whose cursor was "
            f"removed; records that it lists as done would not be delivered",
            case="journal-left-over",
            root=root.path,
            route=cursor.route,
            group=cursor.group,
        )


class SlowestCursor:
    """Finder of a route's lowest cursor, which rereads only changed files."""

    def __init__(self) -> None:
        self._unchanged: dict[str, tuple[tuple[int, ...], Cursor]] = {}

    def find(self, root: Root, route: str, *, log_id: bytes, head_sequence: int) -> Cursor:
        settled_ns = time.time_ns() - _SETTLED_NS
        cursors: list[Cursor] = []
        unchanged: dict[str, tuple[tuple[int, ...], Cursor]] = {}
        try:
            for entry in scan_cursor_directory(root.cursor_directory(route), CURSOR_SUFFIX):
                if (group := parse_cursor_name(entry.name)) is None:
                    return _misnamed_cursor(route, Path(entry.path))  # no cursor can be further behind
                status = entry.stat(follow_symlinks=False)
                key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                old_key, cursor = self._unchanged.get(entry.path, ((), None))
                is_now_valid = cursor and cursor.state is CursorState.BEYOND and cursor.sequence <= head_sequence
                if cursor is None or old_key != key or is_now_valid:
                    try:
                        cursor = _read_or_raise(Path(entry.path), route, group, log_id, head_sequence)
                    except OSError:
                        cursors.append(read_cursor_file(Path(entry.path), route, group, log_id, head_sequence))
                        continue
                cursors.append(cursor)
                if status.st_ctime_ns < settled_ns:
                    unchanged[entry.path] = key, cursor
        except OSError:
            cursors = []
        self._unchanged = unchanged
        # Without cursors, or with an unreadable directory:
        cursors = cursors or read_cursors(root, route, log_id=log_id, head_sequence=head_sequence)
        return min(cursors, key=lambda cursor: (cursor.effective, cursor.group))
