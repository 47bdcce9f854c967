"""The file of a work group, ``routes/R/G.work``: read at the start, appended to, and written anew when it has grown.

Who uses it holds the lock of the group (``G.drain``), so there is one writer. A line counts once it is synced; what a
crash leaves behind the last one that was is cut off. Anything else that cannot be read is damage: the group does not
start, and its cursor keeps what it kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
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
        lines: what it said when it was opened; empty for a new one.
    """

    def __init__(self, root: Root, disk: Disk, start: Start) -> None:
        """
        Args:
            start: whose journal it must be, and the floor of a new one.

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
            self.lines, self._end = read_lines(self.path, root)
            if self.lines and not _same(self.lines[0], start):
                raise _damaged(self.path, root, 0, "the journal of another log, route or group")
            self._disk.truncate(self._descriptor, self._end)
            self._synced = self._anew_bytes = self._end
            if not self.lines:
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


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of a journal.

    Attributes:
        lines: that are whole, up to the first one that is not.
        end: where they end, in bytes.
        size: of the file, in bytes.
        damage: what is wrong there; "" if nothing is, or only what a crash has torn.
        behind: how many lines behind that are whole.
    """

    lines: list[Line]
    end: int
    size: int
    damage: str = ""
    behind: int = 0


def read_journal(path: Path) -> Reading:
    """Read a journal, also one that its owner writes to meanwhile.

    Raises:
        Damaged: it is no regular file.
        OSError: as of open(2).
    """
    lines: list[Line] = []
    data = read_regular(path)
    offset = synced = behind = 0
    end, why = -1, ""
    for piece in data.splitlines(keepends=True):
        try:
            if not piece.endswith(b"\n"):
                raise BadWork("a line without its end")
            line, on_disk = decode_work(piece)
            synced = max(synced, on_disk)
            if end < 0:
                lines.append(line)
            else:
                behind += 1
        except BadWork as error:
            if end < 0:
                end, why = offset, str(error)
                torn = not piece.endswith(b"\n") or lost_a_sector(piece, offset)
        offset += len(piece)
    if end >= 0 and (synced > end or not torn):
        return Reading(lines, end, len(data), why, behind)
    if why := _misbegun(lines):
        return Reading([], 0, len(data), why, len(lines))
    return Reading(lines, offset if end < 0 else end, len(data))


def read_lines(path: Path, root: Root) -> tuple[list[Line], int]:
    """The lines of a journal, and where the last whole one ends; what a crash has torn behind it is not there.

    Raises:
        Damaged: a line that was on disk cannot be read.
        OSError: as of open(2).
    """
    read = read_journal(path)
    if read.damage:
        raise _damaged(path, root, read.end, read.damage)
    return read.lines, read.end


def _misbegun(lines: list[Line]) -> str:
    """What is wrong with its first line; "" if nothing is."""
    if lines and not isinstance(lines[0], Start):
        return "its first line does not say whose it is"
    if any(isinstance(line, Start) for line in lines[1:]):
        return "two lines say whose it is"
    return ""


def _same(line: Line, start: Start) -> bool:
    return isinstance(line, Start) and (line.log_id, line.route, line.group) == (start.log_id, start.route, start.group)


def _damaged(path: Path, root: Root, offset: int, why: str) -> Damaged:
    route = path.relative_to(root.routes).parts[0]
    return Damaged(
        f"{path}: offset {offset}: {why}; what it says of records above the cursor is not known",
        hint=f"{command_line(root.path, f'group show {route} {path.stem}')} says what can be done",
    )
