"""The file of a work group, ``routes/R/G.work``: read at the start, appended to, and written anew when it has grown.

Who uses it holds the lock of the group (``G.drain``), so there is one writer. A line counts once it is synced; what a
crash leaves behind the last one that was is cut off. Anything else that cannot be read is damage: the group does not
start, and its cursor keeps what it kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from wald.errors import Damaged, command_line
from wald.format.names import WORK_SUFFIX
from wald.format.work import BadWork, Line, Start, decode_work, encode_work
from wald.store.files.consumers import open_own
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.ledger_tail import lost_a_sector
from wald.store.files.regular import read_regular

_MODE = 0o644  # as a cursor's: the log's owner reads what others have left
_GROWN_BYTES = 256 << 10
_GROWN_TIMES = 2


class Journal:
    """The journal of one group, open for its owner.

    Attributes:
        path: the file.
        is_new: whether it said nothing when it was opened.
    """

    def __init__(self, root: Root, disk: Disk, start: Start, take: Callable[[Line], None]) -> None:
        """
        Args:
            start: whose journal it must be, and the floor of a new one.
            take: gets what it says, line after line; all of it is void if an error follows.

        Raises:
            Damaged: a line cannot be read, or it is the journal of another group.
            NotPermitted: this user may not.
            OSError: it cannot be written.
        """
        self._disk = disk
        self._root = root
        self.path, self._descriptor = open_own(root, disk, start.route, start.group, WORK_SUFFIX)
        try:
            os.fchmod(self._descriptor, _MODE)
            read = read_whole(self.path, root, take)
            if read.start is not None and not _same(read.start, start):
                raise _damaged(self.path, root, 0, "the journal of another log, route or group")
            self.is_new = read.start is None
            self._end = read.end
            self._disk.truncate(self._descriptor, self._end)
            self._synced = self._anew_bytes = self._end
            if self.is_new:
                self.rewrite([start])
        except BaseException:
            disk.close(self._descriptor)
            raise

    def append(self, lines: Iterable[Line]) -> None:
        """Write lines, which the next :meth:`sync` makes durable.

        Raises:
            OSError: the disk is full, or fails; what was appended since the last sync may be there or not.
        """
        data = b"".join(encode_work(line, self._synced) for line in lines)
        if data:
            self._disk.write(self._descriptor, [data], self._end)
            self._end += len(data)

    def sync(self) -> None:
        """Return when all that was appended is on disk."""
        if self._synced < self._end:
            self._disk.sync(self._descriptor)
            self._synced = self._end

    @property
    def has_grown(self) -> bool:
        """Whether it is time to write it anew."""
        return self._end > _GROWN_BYTES + _GROWN_TIMES * self._anew_bytes

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Replace all lines by these; on disk when this returns, and the old ones are there until then."""
        data = b"".join(encode_work(line, 0) for line in lines)
        self._disk.replace(self.path, data, mode=_MODE)
        descriptor = self._disk.open(self.path)
        self._disk.close(self._descriptor)
        self._descriptor = descriptor
        self._end = self._synced = self._anew_bytes = len(data)

    def close(self) -> None:
        """Close the file; nothing is synced."""
        self._disk.close(self._descriptor)


def discard(root: Root, disk: Disk, route: str, group: str) -> None:
    """Remove the journal of a group, if there is one: what is above the cursor is delivered to it again."""
    path = root.place(route, group) / f"{group}{WORK_SUFFIX}"
    if os.path.lexists(path):
        disk.unlink(path)
        disk.sync_directory(path.parent)


@dataclass(slots=True)
class Reading:
    """What was read of a journal.

    Attributes:
        start: its first line; None if it says nothing.
        lines: how many are whole, up to the first one that is not.
        end: where they end, in bytes.
        size: of the file, in bytes.
        damage: what is wrong there; "" if nothing is, or only what a crash has torn.
        behind: how many lines behind that are whole.
    """

    size: int
    start: Start | None = None
    lines: int = 0
    end: int = 0
    damage: str = ""
    behind: int = 0


def read_journal(path: Path, take: Callable[[Line], None]) -> Reading:
    """Read a journal, also one that its owner writes to meanwhile.

    Args:
        take: gets each whole line before the first one that is not.

    Raises:
        Damaged: it is no regular file.
        OSError: as of open(2).
    """
    data = read_regular(path)
    read = Reading(len(data))
    offset = synced = 0
    unreadable, torn = "", False
    for piece in BytesIO(data):
        try:
            line, on_disk = _decoded(piece)
            synced = max(synced, on_disk)
            if unreadable:
                read.behind += 1
            else:
                _begin(read, line)
                take(line)
                read.lines += 1
                read.end = offset + len(piece)
        except BadWork as error:
            if not unreadable:
                unreadable = str(error)
                torn = not piece.endswith(b"\n") or lost_a_sector(piece, offset)
        offset += len(piece)
    if unreadable and (synced > read.end or not torn):
        read.damage = unreadable
    return read


def read_whole(path: Path, root: Root, take: Callable[[Line], None]) -> Reading:
    """Read a journal as :func:`read_journal` does; damage is an error.

    Raises:
        Damaged: a line that was on disk cannot be read.
        OSError: as of open(2).
    """
    read = read_journal(path, take)
    if read.damage:
        raise _damaged(path, root, read.end, read.damage)
    return read


def _decoded(piece: bytes) -> tuple[Line, int]:
    if not piece.endswith(b"\n"):
        raise BadWork("a line without its end")
    return decode_work(piece)


def _begin(read: Reading, line: Line) -> None:
    """Take in the first line, which is the only one that says whose journal it is."""
    if read.start is None:
        if not isinstance(line, Start):
            raise BadWork("its first line does not say whose it is")
        read.start = line
    elif isinstance(line, Start):
        raise BadWork("two lines say whose it is")


def _same(line: Line, start: Start) -> bool:
    return isinstance(line, Start) and (line.log_id, line.route, line.group) == (start.log_id, start.route, start.group)


def _damaged(path: Path, root: Root, offset: int, why: str) -> Damaged:
    route = path.relative_to(root.routes).parts[0]
    return Damaged(
        f"{path}: offset {offset}: {why}; what it says of records above the cursor is not known",
        hint=f"{command_line(root.path, f'group show {route} {path.stem}')} says what can be done",
    )
