"""The file of a work group, ``routes/R/cursors/G.work``: read at the start, appended to, and rewritten when large.

Who uses it holds the lock of the group (``G.drain``), so there is one writer. A line counts once it is synced; what a
crash leaves behind the last one that was is cut off. Anything else that cannot be read is damage: the group does not
start, and its cursor keeps what it kept.

Behind the last line is room for more: blank lines, which new lines are written over. So the file does not grow with
each line, and a sync has no size to write.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from wald.errors import Damaged, Replaced
from wald.files.cursor_directory import open_group_file
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import read_regular
from wald.format.ledger_lines import decode_line
from wald.format.names import WORK_SUFFIX
from wald.format.work import BadWork, JournalLine, JournalStart, decode_work, encode_work, last_read
from wald.hints import command_line
from wald.segments.durable_end import readable_head

_MODE = 0o644  # as a cursor's: the log's owner reads what others have left
_GROWN_BYTES = 256 << 10
_GROWN_TIMES = 2
_ROOM_BYTES = 64 << 10  # so that few leases wait for a sync of more
_SECTOR_BYTES = 512  # what a disk writes at once, at least
_BLANK = b"\n\0"  # room, and what a file system makes of a sector that never reached the disk where the file has grown
_ROOM = b"\n"
_FIRST_BLANK = re.compile(rb"[\n\0]|\Z")
_END = b', "crc": "________"}'  # of a line; no string in one has that, as its quotes are escaped
_LOST = re.compile(rb"\n*\0*")  # what is in a sector that did not reach the disk: room, or where the file has grown
_READ_AGAIN = 5
_AGAIN_SECONDS = 0.02


class Journal:
    """The journal of one group, open for its owner.

    Attributes:
        path: the file.
        is_new: whether it said nothing when it was opened.
    """

    def __init__(self, root: Root, disk: Disk, start: JournalStart, take: Callable[[JournalLine], None]) -> None:
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
        self.path, self._descriptor = open_group_file(root, disk, start.route, start.group, WORK_SUFFIX)
        try:
            os.fchmod(self._descriptor, _MODE)
            read = read_whole(self.path, root, take)
            if read.start is not None and not _same(read.start, start):
                raise _damaged(self.path, root, 0, "the journal of another log, route or group")
            self.is_new = read.start is None
            self._opened = os.fstat(self._descriptor)
            self._end = read.end
            self._disk.truncate(self._descriptor, self._end)
            self._synced = self._anew_bytes = self._room_end = self._end
            if self.is_new:
                self.rewrite([start])
        except BaseException:
            disk.close(self._descriptor)
            raise

    def append(self, lines: Iterable[JournalLine]) -> None:
        """Write lines, which the next :meth:`sync` makes durable.

        Raises:
            OSError: the disk is full, or fails; what was appended since the last sync may be there or not.
        """
        data = b"".join(encode_work(line, self._synced) for line in lines)
        if data:
            self._disk.write(self._descriptor, [data], self._end)
            self._end += len(data)
            if self._end > self._room_end:
                self._make_room()

    def sync(self) -> None:
        """Return when all that was appended is on disk."""
        if self._synced < self._end:
            self._disk.sync(self._descriptor)
            self._synced = self._end

    def require_place(self) -> None:
        """Check that the path still has the file that is open; a log that was copied back has another one there.

        Raises:
            Replaced: it has another file, or none. The next owner would not read the lines.
            OSError: as of stat(2), if that cannot be seen.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, self._opened):
            what = "removed" if found is None else "replaced by another file"
            raise Replaced(
                f"{self.path}: the journal was {what} while the work group was open",
                hint="restart this program: it then reads its positions from disk",
            )

    @property
    def has_grown(self) -> bool:
        """Whether it is time to write it anew."""
        return self._end > _GROWN_BYTES + _GROWN_TIMES * self._anew_bytes

    def rewrite(self, lines: Iterable[JournalLine]) -> None:
        """Replace all lines by these; on disk when this returns, and the old ones are there until then."""
        data = b"".join(encode_work(line, 0) for line in lines)
        self._disk.replace(self.path, data, mode=_MODE)
        descriptor = self._disk.open(self.path)
        self._disk.close(self._descriptor)
        self._descriptor = descriptor
        self._opened = os.fstat(descriptor)
        self._end = self._synced = self._anew_bytes = len(data)
        self._make_room()

    def close(self) -> None:
        """Close the file; nothing is synced."""
        self._disk.close(self._descriptor)

    def _make_room(self) -> None:
        """Write blank lines behind the end, on disk with the next sync."""
        self._room_end = self._end
        room = -self._end % _ROOM_BYTES
        with suppress(OSError):  # on a full disk it goes on without, for as long as there is room for the lines
            self._room_end += self._disk.write(self._descriptor, [_ROOM * room], self._end)


def discard(root: Root, disk: Disk, route: str, group: str) -> None:
    """Remove the journal of a group, if there is one: what is above the cursor is delivered to it again."""
    path = root.cursor_directory(route) / f"{group}{WORK_SUFFIX}"
    if os.path.lexists(path):
        disk.unlink(path)
        disk.sync_directory(path.parent)


@dataclass(slots=True)
class Reading:
    """What was read of a journal.

    Attributes:
        size: of the file, in bytes.
        start: its first line; None if it says nothing.
        lines: how many are whole, up to the first one that is not.
        end: where they end, in bytes.
        damage: what is wrong there; "" if nothing is, or only what a crash has torn.
        torn: whether a crash has left something there.
        behind: how many lines behind that are whole.
        last: the last sequence that was read from the log.
    """

    size: int
    start: JournalStart | None = None
    lines: int = 0
    end: int = 0
    damage: str = ""
    torn: bool = False
    behind: int = 0
    last: int = 0


def read_journal(path: Path, take: Callable[[JournalLine], None]) -> Reading:
    """Read a journal. Who does not hold the lock of the group may see a line in the middle of being written, as damage.

    Lines count up to the first one that is not whole, or blank. A line behind that which was synced shows that this is
    damage: a crash leaves all that was synced, and of the rest some sectors of the disk, in any order.

    Args:
        take: gets each whole line before the first one that is not.

    Raises:
        Damaged: it is no regular file.
        OSError: as of open(2).
    """
    data = read_regular(path)
    read = Reading(len(data))
    offset = synced = 0
    unreadable = ""
    for piece in BytesIO(data[: len(data.rstrip(_BLANK)) + 1]):
        try:
            line, on_disk = _decoded(piece)
            synced = max(synced, on_disk)
            if unreadable:
                read.behind += 1
            else:
                _begin(read, line)
                take(line)
                read.lines += 1
                read.last = max(read.last, last_read(line))
                read.end = offset + len(piece)
        except BadWork as error:
            unreadable = unreadable or str(error)
        offset += len(piece)
    if unreadable:
        read.torn = synced <= read.end and _is_torn(data, read.end)
        read.damage = "" if read.torn else unreadable
    return read


def read_beside_owner(path: Path) -> tuple[Reading, list[JournalLine]]:
    """Read a journal that its owner may write to meanwhile: what is damage stays so when it is read again.

    Returns:
        what was read, and the lines before the first one that is not whole.

    Raises:
        Damaged, OSError: as of :func:`read_journal`.
    """
    for number in range(_READ_AGAIN):
        if number:
            time.sleep(_AGAIN_SECONDS)
        lines: list[JournalLine] = []
        read = read_journal(path, lines.append)
        if not read.damage:
            break
    return read, lines


def read_whole(path: Path, root: Root, take: Callable[[JournalLine], None]) -> Reading:
    """Read a journal as :func:`read_journal` does; damage is an error.

    Raises:
        Damaged: a line that was on disk cannot be read, or it names records beyond the head.
        OSError: as of open(2).
    """
    read = read_journal(path, take)
    if read.damage:
        raise _damaged(path, root, read.end, read.damage)
    if why := beyond_head(root, read):
        raise _damaged(path, root, 0, why)
    return read


def beyond_head(root: Root, read: Reading) -> str:
    """Says that a journal names records which the log does not have, if it does; else "".

    The log is older than the journal then: what gets these numbers next would be taken for done. The head is read after
    the journal, so one that an owner writes to is never beyond it.
    """
    head = readable_head(root)
    if head is None or read.last <= head.sequence:
        return ""
    return f"it has records up to {read.last}, and the last one of the log is {head.sequence}"


def _is_torn(data: bytes, offset: int) -> bool:
    """Return True if the bytes at ``offset`` may be the beginning of a line that was not written completely.

    Either the write was short: only blanks follow, to the end of the file. Or a sector never reached the disk: the line
    ends with the file, or at the start of a sector that is blank. If its first sector is lost, all bytes up to the next
    sector are blank. A line that has its end is whole, unless only its newline was lost.
    """
    blank = _FIRST_BLANK.search(data, offset).start()  # type: ignore[union-attr]  # if nowhere else, at the end
    text = data[offset:blank]
    if _has_end(text) and (data[blank : blank + 1] == b"\n" or decode_line(text) is None):
        return False
    if not data[blank:].strip(_ROOM):
        return True
    sector_end = min(len(data), blank - blank % _SECTOR_BYTES + _SECTOR_BYTES)
    at_sector = blank == offset or blank % _SECTOR_BYTES == 0
    return at_sector and _LOST.fullmatch(data, blank, sector_end) is not None


def _has_end(text: bytes) -> bool:
    """Whether a line has its end, in which one byte may be another, and one in the place of its newline."""
    for tail in (text[-len(_END) :], text[-len(_END) - 1 : -1]):
        fixed = [found == meant for found, meant in zip(tail, _END, strict=False) if meant != ord("_")]
        if len(tail) == len(_END) and fixed.count(False) <= 1:
            return True
    return False


def _decoded(piece: bytes) -> tuple[JournalLine, int]:
    """Decode a line; its last byte before the newline may be a blank that the line should have overwritten."""
    if not piece.endswith(b"\n"):
        raise BadWork("a line without its end")
    if piece.endswith(b'"\n'):
        return decode_work(piece[:-1] + b"}")
    return decode_work(piece)


def _begin(read: Reading, line: JournalLine) -> None:
    """Take in the first line, which is the only one that says whose journal it is."""
    if read.start is None:
        if not isinstance(line, JournalStart):
            raise BadWork("its first line does not say whose it is")
        read.start = line
    elif isinstance(line, JournalStart):
        raise BadWork("two lines say whose it is")


def _same(line: JournalLine, start: JournalStart) -> bool:
    return isinstance(line, JournalStart) and (line.log_id, line.route, line.group) == (
        start.log_id,
        start.route,
        start.group,
    )


def _damaged(path: Path, root: Root, offset: int, why: str) -> Damaged:
    route = path.relative_to(root.routes).parts[0]
    return Damaged(
        f"{path}: offset {offset}: {why}; the state of records above the cursor is unknown",
        hint=f"{command_line(root.path, f'group show {route} {path.stem}')} says what can be done",
    )
