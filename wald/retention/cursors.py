"""Cursor files: how far each consumer group has processed each route.

A cursor is replaced atomically; its owner is the user of its group. An invalid one counts as position 0: it pins
records that RECLAIM might delete, and never releases them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.files.cursor_directory import UNKNOWN_USER, is_companion, make_cursor_directory, not_permitted
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.safe_open import open_regular
from wald.format.head import CURSOR_MAX_BYTES, BadCursor, CursorLines, decode_cursor, encode_cursor
from wald.format.names import DEFAULT_GROUP, PIN_SUFFIX, WORK_SUFFIX, check_group, parse_cursor_name
from wald.hints import command_line, user_name

_LOCK_SECONDS = 5.0  # other moves on the route take two syncs each
_POLL_SECONDS = 0.002
_MODE = 0o644  # the log's owner reads cursors of other users; the directories above keep others out
_SETTLED_NS = 1_000_000_000  # a file changed this recently may change again with the same time stamps


class CursorState(Enum):
    """Validity of a cursor."""

    VALID = "valid"
    ABSENT = "absent"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"  # written for another log
    LINKED = "linked"  # the file has a second name, so another user may have written it
    BEYOND = "beyond"  # ahead of the last record of the log


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position of one group on one route.

    Attributes:
        sequence: position in the file; 0 without a usable one.
        message: the problem with it, or "". After a move: the records that it needs and that are missing.
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
        """True for the ack floor of a work group: records after it may be done, too."""
        return is_companion(self.path.with_suffix(WORK_SUFFIX), self.path)

    @property
    def other_user(self) -> str:
        """Name of its owner, or "" if that is the log's owner or root."""
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
    """Return a cursor; the contents of its file never raise an error.

    Raise Refused if it is another user's, and this program runs as the log's owner or root, without ``any_user``.
    """
    root.require_route(route)
    cursor = _read(root.cursor(route, check_group(group)), route, group, log_id, head_sequence)
    if not any_user:
        _require_own(root, cursor)
    return cursor


def read_cursors(root: Root, route: str, *, log_id: bytes, head_sequence: int) -> list[Cursor]:
    """Return the cursors of a route; without any, an absent one of the default group.

    An impossible group's file, or an unreadable directory, counts as an unreadable cursor.
    """
    try:
        groups, strange = root.cursors(route)
    except OSError as error:
        path = Path(error.filename)
        return [Cursor(route, DEFAULT_GROUP, path, CursorState.UNREADABLE, 0, f"{path}: {error.strerror}")]
    if not groups and not strange:
        groups = {DEFAULT_GROUP: root.cursor(route, DEFAULT_GROUP)}
    cursors = [_read(path, route, group, log_id, head_sequence) for group, path in groups.items()]
    return cursors + [_strange(route, path) for path in strange]


def _require_own(root: Root, cursor: Cursor) -> None:
    """Keep the log's owner from using a cursor with which another user could make it skip records."""
    if cursor.user_id == -1:
        return
    owner, user = cursor.path.parent.stat().st_uid, os.geteuid()
    if cursor.user_id in (0, owner, user) or user not in (0, owner, root.path.stat().st_uid):
        return
    raise Refused(
        f"{cursor.path}: the cursor of {_owner_name(cursor.user_id)}, so the log's owner does not use it",
        case="cursor-of-other-user",
        root=root.path,
        route=cursor.route,
        group=cursor.group,
    )


def _owner_name(user_id: int) -> str:
    return "another user" if user_id == UNKNOWN_USER else f"user {user_name(user_id)}"


def _read(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    try:
        return _read_or_raise(path, route, group, log_id, head_sequence)
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        return Cursor(route, group, path, CursorState.UNREADABLE, 0, message, _owner_id(path))


def _read_or_raise(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    """Raise OSError if the file is unreadable for a reason that may pass."""
    user_id = -1

    def cursor(state: CursorState, sequence: int = 0, message: str = "") -> Cursor:
        return Cursor(route, group, path, state, sequence, message and f"{path}: {message}", user_id)

    try:
        content, status = read_with_status(path, CURSOR_MAX_BYTES + 1)
        user_id, names = status.st_uid, status.st_nlink
        lines = decode_cursor(content)
    except FileNotFoundError:
        return cursor(CursorState.ABSENT, message="no cursor yet")
    except Damaged:
        user_id = _owner_id(path)
        return cursor(CursorState.UNREADABLE, message="not a regular file")
    except PermissionError:
        user_id = _owner_id(path)
        return cursor(CursorState.UNREADABLE, message="permission denied; chmod a+r makes it count")
    except BadCursor as error:
        return cursor(CursorState.UNREADABLE, message=f"offset 0: {error}")
    if names > 1:
        message = f"has {names} names, so it may be a link to another file; it counts again when its group moves it"
        return cursor(CursorState.LINKED, lines.sequence, message)
    if lines.log_id is not None and lines.log_id != log_id:
        return cursor(CursorState.FOREIGN, lines.sequence, f"written for log {lines.log_id.hex()}, not for this one")
    if lines.sequence > head_sequence:
        return cursor(CursorState.BEYOND, lines.sequence, f"{lines.sequence} is beyond the head, {head_sequence}")
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


def _strange(route: str, path: Path) -> Cursor:
    message = f"{path}: no group can have this name; rename the file, or remove it"
    return Cursor(route, path.stem, path, CursorState.UNREADABLE, 0, message)


@contextmanager
def cursor_lock(directory: Path, disk: Disk) -> Iterator[None]:
    """Serialise cursor moves in ``directory``; continue unlocked if that is unsupported, not permitted or too slow."""
    descriptor = -1
    try:
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            until = time.monotonic() + _LOCK_SECONDS
            while not disk.lock(descriptor) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def set_cursor(
    root: Root,
    route: str,
    group: str,
    sequence: int,
    *,
    disk: Disk,
    head_sequence: int,
    epoch: int,
    now: str,
    rewind: bool = False,
    any_user: bool = False,
) -> Cursor:
    """Create or move a cursor durably.

    Without :func:`cursor_lock`, the lower of two concurrent calls may win. A new cursor never replaces one that another
    user creates at the same moment. ``rewind`` allows moving back, and replacing an invalid cursor; ``any_user`` lets
    root move the cursor of another user, who stays its owner.

    Raise InvalidInput, NotFound (of the route), NotPermitted, or Refused: backwards without ``rewind``, beyond the
    head, a directory, or as in :func:`read_cursor`.
    """
    log_id = read_identity(root).log_id
    any_user = any_user and os.geteuid() == 0
    current = read_cursor(root, route, group, log_id=log_id, head_sequence=head_sequence, any_user=any_user)
    if sequence < 0:
        raise InvalidInput(f"{current.path}: {sequence} is not a sequence", case="cursor-below-zero")
    if sequence > head_sequence:
        raise Refused(
            f"{current.path}: {sequence} is beyond the head, {head_sequence}, so it cannot have been processed",
            case="cursor-beyond-head",
            root=root.path,
        )
    if not rewind and current.state in (CursorState.UNREADABLE, CursorState.FOREIGN, CursorState.BEYOND):
        raise Refused(
            f"{current.message}; it is only replaced on request",
            case="rewind-needed",
            root=root.path,
            route=route,
            sequence=sequence,
            group=group,
        )
    if not rewind and sequence < current.sequence:
        raise Refused(
            f"{current.path}: {sequence} would move the cursor backwards from {current.sequence}",
            case="rewind-needed",
            root=root.path,
            route=route,
            sequence=sequence,
            group=group,
        )
    journal = current.path.with_suffix(WORK_SUFFIX)
    if rewind and sequence < current.sequence and current.of_work_group:
        raise Refused(
            f"{journal}: has the records that the workers of group {group} have done; while it exists, "
            f"none of them is redelivered",
            case="journal-in-the-way",
            root=root.path,
            route=route,
            sequence=sequence,
            group=group,
            path=journal,
        )
    lines = CursorLines(sequence, log_id, epoch, group, now)
    is_new = current.state is CursorState.ABSENT
    owner = current.user_id if any_user and current.user_id > 0 else -1  # Disk gives other files to the log's owner
    make_cursor_directory(root, disk, route)
    try:
        disk.replace(current.path, encode_cursor(lines), mode=_MODE, owner=owner, exclusive=is_new)
    except FileExistsError:  # created at this moment, perhaps by another user
        return set_cursor(
            root, route, group, sequence, disk=disk, head_sequence=head_sequence, epoch=epoch, now=now, rewind=rewind
        )  # without any_user: the caller has not seen that cursor
    except PermissionError as error:
        raise not_permitted(root, route, current.path, error) from error
    except IsADirectoryError:
        raise _directory(current.path) from None
    return _read(current.path, route, group, log_id, head_sequence)


def _directory(path: Path) -> Refused:
    return Refused(f"{path}: a directory, not a cursor", case="cursor-is-a-directory", path=path)


def remove_cursor(root: Root, route: str, group: str, *, disk: Disk) -> Path:
    """Remove a cursor durably; return its path."""
    root.require_route(route)
    path = root.cursor(route, check_group(group))
    try:
        disk.unlink(path)
    except FileNotFoundError:
        raise NotFound(f"{path}: group {group} has no cursor", case="no-cursor", root=root.path, route=route) from None
    except PermissionError as error:
        raise not_permitted(root, route, path, error) from error
    except IsADirectoryError:
        raise _directory(path) from None
    with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # only an unfinished handover has a pin
        disk.unlink(path.with_suffix(PIN_SUFFIX))
    disk.sync_directory(path.parent)
    return path


def new_group_warning(root: Root, route: str, group: str, *, with_workers: bool = False) -> str:
    """Return a warning, with a hint, about a group without a cursor on a route, or "".

    Unread records of a misspelt group are retained for ever. The default group needs a warning only alongside others.
    """
    others = root.groups(route)
    if check_group(group) in others or (group == DEFAULT_GROUP and not others):
        return ""
    known = f", which already has {', '.join(others)}" if others else ""
    words = f"group remove {route} {group}" if with_workers else f"cursor remove {route} --group {group}"
    remove = command_line(root.path, words)
    return (
        f"group {group} is new on route {route}{known}: from now on the records that it has not read are retained\n"
        f"  hint: {remove} removes it"
    )


def reject_leftover_journal(root: Root, cursor: Cursor) -> None:
    """Refuse a group whose journal outlived its cursor: it would count for a new one."""
    if cursor.state is CursorState.ABSENT and cursor.of_work_group:
        raise Refused(
            f"{cursor.path.with_suffix(WORK_SUFFIX)}: left over from a work group whose cursor was "
            f"removed; records that it lists as done would not be delivered",
            case="journal-left-over",
            root=root.path,
            route=cursor.route,
            group=cursor.group,
        )


class SlowestCursor:
    """Search for the lowest cursor of a route that rereads only changed files."""

    def __init__(self) -> None:
        self._unchanged: dict[str, tuple[tuple[int, ...], Cursor]] = {}

    def find(self, root: Root, route: str, *, log_id: bytes, head_sequence: int) -> Cursor:
        settled_ns = time.time_ns() - _SETTLED_NS
        found: list[Cursor] = []
        unchanged: dict[str, tuple[tuple[int, ...], Cursor]] = {}
        try:
            for entry in root.cursor_entries(route):
                if (group := parse_cursor_name(entry.name)) is None:
                    return _strange(route, Path(entry.path))  # no group can be further behind
                status = entry.stat(follow_symlinks=False)
                key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                known_key, cursor = self._unchanged.get(entry.path, ((), None))
                if cursor is None or known_key != key or _is_reached(cursor, head_sequence):
                    try:
                        cursor = _read_or_raise(Path(entry.path), route, group, log_id, head_sequence)
                    except OSError:
                        found.append(_read(Path(entry.path), route, group, log_id, head_sequence))
                        continue
                found.append(cursor)
                if status.st_ctime_ns < settled_ns:
                    unchanged[entry.path] = key, cursor
        except OSError:
            found = []
        self._unchanged = unchanged
        # Without cursors, or with an unreadable directory:
        cursors = found or read_cursors(root, route, log_id=log_id, head_sequence=head_sequence)
        return min(cursors, key=lambda cursor: (cursor.effective, cursor.group))


def _is_reached(cursor: Cursor, head_sequence: int) -> bool:
    return cursor.state is CursorState.BEYOND and cursor.sequence <= head_sequence
