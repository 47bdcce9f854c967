"""Cursor files of consumer groups.

Cursors: how far each consumer group has processed each route.

A cursor is replaced atomically and owned by its group. One that cannot be trusted (unreadable, linked, of another log,
beyond the head) counts as if nothing had been processed: it pins what RECLAIM might delete, and never frees it.
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

_TURN_SECONDS = 5.0  # for others that move a cursor of the route; each takes two syncs
_POLL_SECONDS = 0.002
_MODE = 0o644  # the log's owner reads cursors that others have left; the directories above keep strangers out


class CursorState(Enum):
    """Whether a cursor file can be trusted."""

    VALID = "valid"
    ABSENT = "absent"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"
    """Written for another log."""
    LINKED = "linked"
    """The file has another name too, so another user may have written it."""
    BEYOND = "beyond"
    """Points beyond the last record of the log."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """One group's position on one route.

    Attributes:
        sequence: what the file says; 0 where it says nothing usable.
        message: what is wrong with it; "" if valid. For one just set: which records it needs that are not there.
        user_id: the owner of the file; -1 if there is none.
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
        """True if it is the ack floor of a work group, so that records behind it may be done."""
        return is_companion(self.path.with_suffix(WORK_SUFFIX), self.path)

    @property
    def other_user(self) -> str:
        """The name of its owner, if that is neither the log's owner nor root; otherwise ""."""
        if self.user_id in (-1, 0) or self.user_id == self.path.parent.stat().st_uid:
            return ""
        return "another user" if self.user_id == UNKNOWN_USER else f"user {user_name(self.user_id)}"

    @property
    def effective(self) -> int:
        """Up to where everything is certainly processed; 0 for a cursor that pins."""
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
    """Return what ``group`` has processed of ``route``. The contents of the file never raise an error.

    Args:
        head_sequence: the last durable record.
        any_user: return a cursor that another user has left even to a program of the log's owner, to show it.

    Raises:
        InvalidInput: an illegal name.
        NotFound: no such route.
        Refused: the cursor is another user's, and this program runs as the log's owner or as root.
    """
    root.require_route(route)
    cursor = _read(root.cursor(route, check_group(group)), route, group, log_id, head_sequence)
    if not any_user:
        _require_own(root, cursor)
    return cursor


def _require_own(root: Root, cursor: Cursor) -> None:
    """Refuse a program of the log's owner a cursor by which another user could make it skip records.

    Raises:
        Refused: the cursor is another user's, and this program runs as the log's owner or as root.
    """
    if cursor.user_id == -1:
        return
    owner, user = cursor.path.parent.stat().st_uid, os.geteuid()
    if cursor.user_id in (0, owner, user) or user not in (0, owner, root.path.stat().st_uid):
        return
    left_by = "another user" if cursor.user_id == UNKNOWN_USER else f"user {user_name(cursor.user_id)}"
    raise Refused(
        f"{cursor.path}: the cursor of {left_by}, so the log's owner does not use it",
        case="cursor-of-other-user",
        root=root.path,
        route=cursor.route,
        group=cursor.group,
    )


def _read(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    try:
        return _judge(path, route, group, log_id, head_sequence)
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        return Cursor(route, group, path, CursorState.UNREADABLE, 0, message, _user_id(path))


def _judge(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    """Judge a cursor by its file.

    Raises:
        OSError: it cannot be read now, for a reason that may pass.
    """
    user_id = -1

    def judged(state: CursorState, sequence: int = 0, message: str = "") -> Cursor:
        return Cursor(route, group, path, state, sequence, message and f"{path}: {message}", user_id)

    try:
        content, status = _content(path)
        user_id, names = status.st_uid, status.st_nlink
        lines = decode_cursor(content)
    except FileNotFoundError:
        return judged(CursorState.ABSENT, message="no cursor yet")
    except Damaged:
        user_id = _user_id(path)
        return judged(CursorState.UNREADABLE, message="not a regular file")
    except PermissionError:
        user_id = _user_id(path)
        return judged(CursorState.UNREADABLE, message="permission denied; chmod a+r makes it count")
    except BadCursor as error:
        return judged(CursorState.UNREADABLE, message=f"offset 0: {error}")
    if names > 1:
        message = f"has {names} names, so it may be a link to another file; it counts again when its group moves it"
        return judged(CursorState.LINKED, lines.sequence, message)
    if lines.log_id is not None and lines.log_id != log_id:
        return judged(CursorState.FOREIGN, lines.sequence, f"written for log {lines.log_id.hex()}, not for this one")
    if lines.sequence > head_sequence:
        return judged(CursorState.BEYOND, lines.sequence, f"{lines.sequence} is beyond the head, {head_sequence}")
    return judged(CursorState.VALID, lines.sequence)


def _user_id(path: Path) -> int:
    """The owner of what has a cursor's name; -1 if nothing has."""
    try:
        return path.lstat().st_uid
    except OSError:
        return -1


def _content(path: Path) -> tuple[bytes, os.stat_result]:
    """The beginning of a cursor file, and its status; errors as of :func:`open_regular`."""
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, CURSOR_MAX_BYTES + 1), os.fstat(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def cursor_lock(directory: Path, disk: Disk) -> Iterator[None]:
    """Let one process, and one thread of it, compare and replace a cursor in ``directory`` at a time.

    It goes on without a lock if the file system has none, if this user may not read the directory, or if another
    process holds the lock for longer than that takes.
    """
    descriptor = -1
    try:
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            until = time.monotonic() + _TURN_SECONDS
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
    """Record that ``group`` has processed ``route`` up to ``sequence``; on disk when this returns.

    Of two that do it at once, the lower one may be the last: :func:`turn` keeps them apart. A new cursor never replaces
    one that another user creates at the same moment.

    Args:
        rewind: whether the cursor may move backwards, or replace one that cannot be trusted.
        head_sequence: the last durable record.
        epoch, now: the daemon's life and the time, as they are to stand in the file.
        any_user: let root move the cursor of another user, who keeps it.

    Raises:
        InvalidInput: an illegal name, or a negative sequence.
        NotFound: no such route.
        NotPermitted: this user may not leave a cursor there, or the cursor is another user's.
        Refused: backwards without ``rewind``, or beyond the head; or a directory has its place; or this program runs as
            the log's owner, and the cursor is another user's.
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
    owner = current.user_id if any_user and current.user_id > 0 else -1  # Disk gives the rest to the log's owner
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
    """Take ``group`` away from ``route``: what it has not processed is not kept for it any more.

    Returns:
        where its cursor was; gone from the disk when this returns.

    Raises:
        InvalidInput: an illegal name.
        NotFound: no such route, or the group has no cursor on it.
        NotPermitted: this user may not remove it.
    """
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
    with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # only an unfinished handover has one
        disk.unlink(path.with_suffix(PIN_SUFFIX))
    disk.sync_directory(path.parent)
    return path


def newcomer(root: Root, route: str, group: str, *, with_workers: bool = False) -> str:
    """The warning about a group that is about to get its first cursor on a route, with its hint; "" if there is none.

    A misspelt name makes a group like any other, and what it has not read is kept for ever. The default group is no
    mistake, unless the route has other groups.

    Raises:
        InvalidInput: an illegal name.
        NotFound: no such route.
    """
    others = root.groups(route)
    if check_group(group) in others or (group == DEFAULT_GROUP and not others):
        return ""
    known = f" beside {', '.join(others)}" if others else ""
    words = f"group remove {route} {group}" if with_workers else f"cursor remove {route} --group {group}"
    removing = command_line(root.path, words)
    return (
        f"group {group} is new on route {route}{known}: from now on what it has not read is kept for it\n"
        f"  hint: {removing} takes it away"
    )


def require_no_remains(root: Root, cursor: Cursor) -> None:
    """
    Raises:
        Refused: the cursor of a work group was removed and its journal was not, which would count with a new cursor.
    """
    if cursor.state is CursorState.ABSENT and cursor.of_work_group:
        raise Refused(
            f"{cursor.path.with_suffix(WORK_SUFFIX)}: left over from a work group whose cursor was "
            f"removed; records that it lists as done would not be delivered",
            case="journal-left-over",
            root=root.path,
            route=cursor.route,
            group=cursor.group,
        )


def cursors_of(root: Root, route: str, *, log_id: bytes, head_sequence: int) -> list[Cursor]:
    """A cursor for each group of a route; the default group's, absent, if there is none at all.

    A file that is named like a cursor of a group that cannot exist, or a directory that cannot be listed, counts as an
    unreadable cursor: it may have been meant as one.

    Raises:
        NotFound: no such route.
    """
    try:
        groups, strange = root.cursors(route)
    except OSError as error:
        where = Path(error.filename)
        message = f"{where}: {error.strerror}"
        return [Cursor(route, DEFAULT_GROUP, where, CursorState.UNREADABLE, 0, message)]
    if not groups and not strange:
        groups = {DEFAULT_GROUP: root.cursor(route, DEFAULT_GROUP)}
    cursors = [_read(path, route, group, log_id, head_sequence) for group, path in groups.items()]
    return cursors + [_strange(route, path) for path in strange]


def _strange(route: str, path: Path) -> Cursor:
    message = f"{path}: no group can have this name; rename the file, or remove it"
    return Cursor(route, path.stem, path, CursorState.UNREADABLE, 0, message)


_Unchanged = dict[str, tuple[tuple[int, ...], Cursor]]
_SETTLED_NS = 1_000_000_000  # a file changed this recently may change again with the same time stamps


class SlowestCursor:
    """Repeated search for the lowest cursor of a route, which rereads only files that have changed."""

    def __init__(self) -> None:
        self._unchanged: _Unchanged = {}

    def look(self, root: Root, route: str, *, log_id: bytes, head_sequence: int) -> Cursor:
        """Return the cursor that has read least; errors as in :func:`cursors_of`."""
        settled_ns = time.time_ns() - _SETTLED_NS
        found: list[Cursor] = []
        unchanged: _Unchanged = {}
        try:
            for entry in root.cursor_entries(route):
                if (group := parse_cursor_name(entry.name)) is None:
                    return _strange(route, Path(entry.path))  # no group can have read less
                status = entry.stat(follow_symlinks=False)
                key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                known = self._unchanged.get(entry.path)
                if known is not None and known[0] == key and not _overtaken(known[1], head_sequence):
                    cursor = known[1]
                else:
                    try:
                        cursor = _judge(Path(entry.path), route, group, log_id, head_sequence)
                    except OSError:
                        found.append(_read(Path(entry.path), route, group, log_id, head_sequence))
                        continue
                found.append(cursor)
                if status.st_ctime_ns < settled_ns:
                    unchanged[entry.path] = key, cursor
        except OSError:
            found = []
        self._unchanged = unchanged
        # No cursor, or an unreadable directory.
        cursors = found or cursors_of(root, route, log_id=log_id, head_sequence=head_sequence)
        return min(cursors, key=lambda cursor: (cursor.effective, cursor.group))


def _overtaken(cursor: Cursor, head_sequence: int) -> bool:
    """Tell if the head has reached a cursor that was beyond it."""
    return cursor.state is CursorState.BEYOND and cursor.sequence <= head_sequence
