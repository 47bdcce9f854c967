"""Cursors: how far each consumer group has processed each route.

A cursor is replaced atomically and owned by its group. One that cannot be trusted (unreadable, linked, of another log,
beyond the head) counts as if nothing had been processed: it pins what RECLAIM might delete, and never frees it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.format.cursor import CURSOR_MAX_BYTES, BadCursor, CursorLines, decode_cursor, encode_cursor
from wald.format.names import (
    CONSUMERS,
    DEFAULT_GROUP,
    PIN_SUFFIX,
    WORK_SUFFIX,
    check_group,
    cursor_name,
    parse_cursor_name,
)
from wald.hints import command_line, user_name
from wald.store.files.consumers import not_permitted
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.identity import read_identity
from wald.store.files.regular import open_regular

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
        message: what is wrong with it; "" if valid. Of one just set: which records it needs that are not there, and
            whose it was.
        other: the second cursor of the group, which holds back less: the log's owner's, or a consumer's.
    """

    route: str
    group: str
    path: Path
    state: CursorState
    sequence: int
    message: str = ""
    other: Path | None = None

    @property
    def options(self) -> str:
        """What names it in the command line of the log's owner."""
        return f"--group {self.group}{' --of-consumer' if self.path.parent.name == CONSUMERS else ''}"

    @property
    def of_work_group(self) -> bool:
        """Whether it is the ack floor of a work group, so that records behind it may be done."""
        return os.path.lexists(self.path.with_suffix(WORK_SUFFIX))

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
    of_consumer: bool = False,
) -> Cursor:
    """What ``group`` has processed of ``route``. Never raises for what the file holds.

    Args:
        head_sequence: the last durable record.
        of_consumer: whether a consumer's cursor is meant, as of :meth:`Root.place`.

    Raises:
        InvalidInput: an illegal name.
        NotFound: no such route.
    """
    root.require_route(route)
    path = root.cursor(route, check_group(group), of_consumer=of_consumer)
    return _read(path, route, group, log_id, head_sequence)


def _read(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    try:
        return _judge(path, route, group, log_id, head_sequence)
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        return Cursor(route, group, path, CursorState.UNREADABLE, 0, message)


def _judge(path: Path, route: str, group: str, log_id: bytes, head_sequence: int) -> Cursor:
    """Judge a cursor by its file.

    Raises:
        OSError: it cannot be read now, for a reason that may pass.
    """

    def judged(state: CursorState, sequence: int = 0, message: str = "") -> Cursor:
        return Cursor(route, group, path, state, sequence, message and f"{path}: {message}")

    try:
        content, names = _content(path)
        lines = decode_cursor(content)
    except FileNotFoundError:
        return judged(CursorState.ABSENT, message="no cursor yet")
    except Damaged:
        return judged(CursorState.UNREADABLE, message="not a regular file")
    except PermissionError:
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


def _content(path: Path) -> tuple[bytes, int]:
    """The beginning of a cursor file, and how many names the file has; errors as of :func:`open_regular`."""
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, CURSOR_MAX_BYTES + 1), os.fstat(descriptor).st_nlink
    finally:
        os.close(descriptor)


@contextmanager
def turn(directory: Path, disk: Disk) -> Iterator[None]:
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
    of_consumer: bool = False,
) -> Cursor:
    """Record that ``group`` has processed ``route`` up to ``sequence``; on disk when this returns.

    Of two that do it at once, the lower one may be the last: :func:`turn` keeps them apart.

    Args:
        rewind: whether the cursor may move backwards, or replace one that cannot be trusted.
        head_sequence: the last durable record.
        epoch, now: the daemon's life and the time, as they are to stand in the file.
        of_consumer: whether a consumer's cursor is meant, as of :meth:`Root.place`.

    Raises:
        InvalidInput: an illegal name, or a negative sequence.
        NotFound: no such route.
        NotPermitted: this user may not leave a cursor there, or the cursor is another user's.
        Refused: backwards without ``rewind``, or beyond the head; or a directory has its place.
    """
    log_id = read_identity(root).log_id
    current = read_cursor(root, route, group, log_id=log_id, head_sequence=head_sequence, of_consumer=of_consumer)
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
            options=current.options,
        )
    if not rewind and sequence < current.sequence:
        raise Refused(
            f"{current.path}: {sequence} would move the cursor backwards from {current.sequence}",
            case="rewind-needed",
            root=root.path,
            route=route,
            sequence=sequence,
            options=current.options,
        )
    journal = current.path.with_suffix(WORK_SUFFIX)
    if rewind and sequence < current.sequence and os.path.lexists(journal):
        raise Refused(
            f"{journal}: has the records that the workers of group {group} have done; while it exists, "
            f"none of them is redelivered",
            case="journal-in-the-way",
            root=root.path,
            route=route,
            sequence=sequence,
            options=current.options,
            path=journal,
        )
    lines = CursorLines(sequence, log_id, epoch, group, now)
    owner = _owner(current.path)
    try:
        disk.replace(current.path, encode_cursor(lines), mode=_MODE, owner=owner if os.geteuid() == 0 else -1)
    except PermissionError as error:
        raise not_permitted(root, route, current.path, error) from error
    except IsADirectoryError:
        raise _directory(current.path) from None
    cursor = _read(current.path, route, group, log_id, head_sequence)
    return cursor if os.geteuid() in (0, owner) else replace(cursor, message=_taken_over(cursor.path, owner))


def _directory(path: Path) -> Refused:
    return Refused(f"{path}: a directory, not a cursor", case="cursor-is-a-directory", path=path)


def _owner(path: Path) -> int:
    """The user whose cursor it is; of a new one, the one who writes it."""
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return os.geteuid() or -1  # Disk gives what root makes to the log's owner


def _taken_over(path: Path, owner: int) -> str:
    name = user_name(owner)
    return f"{path}: was left by user {name}, who may not move it any more\n  hint: chown {name} {path}, as root"


def remove_cursor(root: Root, route: str, group: str, *, disk: Disk, of_consumer: bool = False) -> Path:
    """Take ``group`` away from ``route``: what it has not processed is not kept for it any more.

    Args:
        of_consumer: whether a consumer's cursor is meant, as of :meth:`Root.place`.

    Returns:
        where its cursor was; gone from the disk when this returns.

    Raises:
        InvalidInput: an illegal name.
        NotFound: no such route, or the group has no cursor on it.
        NotPermitted: this user may not remove it.
    """
    root.require_route(route)
    path = root.cursor(route, check_group(group), of_consumer=of_consumer)
    try:
        disk.unlink(path)
    except FileNotFoundError:
        other = root.consumers(route) / path.name
        raise NotFound(
            f"{path}: group {group} has no cursor",
            case="cursor-of-a-consumer" if os.path.lexists(other) else "no-cursor",
            root=root.path,
            route=route,
            group=group,
        ) from None
    except PermissionError as error:
        raise not_permitted(root, route, path, error) from error
    except IsADirectoryError:
        raise _directory(path) from None
    with suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # only an unfinished handover has one
        disk.unlink(path.with_suffix(PIN_SUFFIX))
    disk.sync_directory(path.parent)
    return path


def newcomer(root: Root, route: str, group: str, *, of_consumer: bool = False, with_workers: bool = False) -> str:
    """The warning about a group that is about to get its first cursor on a route, with its hint; "" if there is none.

    A misspelt name makes a group like any other, and what it has not read is kept for ever. The default group is no
    mistake, unless the route has other groups.

    Raises:
        InvalidInput: an illegal name.
        NotFound: no such route.
    """
    others = root.groups(route)
    if check_group(group) in others:
        path, other = root.cursor(route, group, of_consumer=of_consumer), root.consumers(route) / cursor_name(group)
        return "" if os.path.lexists(path) or not os.path.lexists(other) else _namesake(root, route, group, other)
    if group == DEFAULT_GROUP and not others:
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
        option = " --of-consumer" * (cursor.path.parent.name == CONSUMERS)
        raise Refused(
            f"{cursor.path.with_suffix(WORK_SUFFIX)}: left over from a work group whose cursor was "
            f"removed; records that it lists as done would not be delivered",
            case="journal-left-over",
            root=root.path,
            route=cursor.route,
            group=cursor.group,
            option=option,
        )


def _namesake(root: Root, route: str, group: str, other: Path) -> str:
    removing = command_line(root.path, f"cursor remove {route} --group {group} --of-consumer")
    return (
        f"{other}: is the cursor of another user's group {group}; it is not used, but holds records back\n"
        f"  hint: {removing} takes it away"
    )


def cursors_of(root: Root, route: str, *, log_id: bytes, head_sequence: int) -> list[Cursor]:
    """A cursor for each group of a route; the default group's, absent, if there is none at all.

    Of two that a group has, it is the lower one: it holds back more, and neither frees what the other needs.

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
        groups = {DEFAULT_GROUP: [root.cursor(route, DEFAULT_GROUP)]}
    cursors = [
        _lower([_read(path, route, group, log_id, head_sequence) for path in paths]) for group, paths in groups.items()
    ]
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


def _lower(cursors: list[Cursor]) -> Cursor:
    """Of the cursors of one group, the one that holds back most; of two alike, the one that cannot be trusted."""
    if len(cursors) == 1:
        return cursors[0]
    lower, higher = sorted(cursors, key=lambda each: (each.effective, each.state is CursorState.VALID))
    return replace(lower, other=higher.path)
