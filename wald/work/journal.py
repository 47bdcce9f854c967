"""Journal of a work group, ``routes/R/cursors/G.work``: read at start-up, appended to, and compacted when large.

Its only writer holds the lock of the group (``G.drain``). A line counts once it is synced; after a crash, the owner
cuts off the remains of unsynced lines. Anything else that is unreadable is damage: the group does not start, and its
cursor pins the same records as before.

Blank lines are preallocated after the last line, and new lines overwrite them. So the file does not grow with each
line, and a sync need not write its size.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from wald.errors import Damaged, Replaced
from wald.files.cursor_directory import is_companion, open_group_file
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import FileIdentity, read_regular
from wald.format.ledger_lines import decode_line
from wald.format.names import WORK_SUFFIX
from wald.format.work import (
    BadWork,
    Commit,
    DeadRecord,
    FailureReason,
    JournalLine,
    JournalPage,
    JournalStart,
    WorkerLease,
    decode_work,
    encode_work,
    last_read,
)
from wald.hints import command_line
from wald.log import Log
from wald.retention.cursor_moves import EarlierReclaim
from wald.segments.durable_end import readable_head
from wald.work.deliveries import Deliveries
from wald.work.window import Run, runs_of

_MODE = 0o644  # as for cursors: the log's owner reads the files of other users
_GROWN_BYTES = 256 << 10
_GROWN_TIMES = 2
_PREALLOCATED_BYTES = 64 << 10  # so that few leases wait for a longer sync
_SECTOR_BYTES = 512  # the smallest unit that a disk writes atomically
_BLANK = b"\n\0"  # preallocated bytes, and lost sectors of a file that has grown
_PREALLOCATED = b"\n"
_FIRST_BLANK = re.compile(rb"[\n\0]|\Z")
_END = b', "crc": "________"}'  # end of a line; not part of a string in it, because quotes are escaped
_LOST = re.compile(rb"\n*\0*")  # contents of a sector that did not reach the disk
_READ_AGAIN = 5
_AGAIN_SECONDS = 0.02


class Journal:
    """Journal of the group in ``start``, open for its owner. ``is_new`` is True if it was empty.

    ``apply`` is called with each line; if an error follows, the lines are void.
    """

    def __init__(self, root: Root, disk: Disk, start: JournalStart, apply: Callable[[JournalLine], None]) -> None:
        self._disk = disk
        self._root = root
        self.path, self._descriptor = open_group_file(root, disk, start.route, start.group, WORK_SUFFIX)
        try:
            os.fchmod(self._descriptor, _MODE)
            read = read_whole(self.path, root, apply)
            if read.start is not None and read.start.owner != start.owner:
                raise _damaged(self.path, root, 0, "belongs to another log, route or group")
            self.is_new = read.start is None
            self._identity = FileIdentity(self.path, self._descriptor)
            self._end = read.end
            self._disk.truncate(self._descriptor, self._end)
            self._synced = self._compacted_bytes = self._preallocated_end = self._end
            if self.is_new:
                self.rewrite([start])
        except BaseException:
            disk.close(self._descriptor)
            raise

    def append(self, lines: Iterable[JournalLine]) -> None:
        """Write lines, which the next :meth:`sync` makes durable.

        After an OSError, lines appended since the last sync may or may not be in the file.
        """
        data = b"".join(encode_work(line, self._synced) for line in lines)
        if data:
            self._disk.write(self._descriptor, [data], self._end)
            self._end += len(data)
            if self._end > self._preallocated_end:
                self._preallocate()

    def sync(self) -> None:
        if self._synced < self._end:
            self._disk.sync(self._descriptor)
            self._synced = self._end

    def require_place(self) -> None:
        """Raise Replaced unless the open file is still at the path: the next owner would not see its lines."""
        if self._identity.is_current():
            return
        try:
            os.stat(self.path)
            what = "replaced by another file"
        except FileNotFoundError:
            what = "removed"
        raise Replaced(
            f"{self.path}: the journal was {what} while the work group was open",
            hint="restart this program: it then reads its positions from disk",
        )

    @property
    def has_grown(self) -> bool:
        return self._end > _GROWN_BYTES + _GROWN_TIMES * self._compacted_bytes

    def rewrite(self, lines: Iterable[JournalLine]) -> None:
        data = b"".join(encode_work(line, 0) for line in lines)
        self._disk.replace(self.path, data, mode=_MODE)
        descriptor = self._disk.open(self.path)
        self._disk.close(self._descriptor)
        self._descriptor = descriptor
        self._identity = FileIdentity(self.path, descriptor)
        self._end = self._synced = self._compacted_bytes = len(data)
        self._preallocate()

    def close(self) -> None:
        self._disk.close(self._descriptor)

    def _preallocate(self) -> None:
        """Write blank lines behind the end; the next sync makes them durable."""
        self._preallocated_end = self._end
        size = -self._end % _PREALLOCATED_BYTES
        with suppress(OSError):  # a full disk may still have space for the lines themselves
            self._preallocated_end += self._disk.write(self._descriptor, [_PREALLOCATED * size], self._end)


def discard(root: Root, disk: Disk, route: str, group: str) -> None:
    """Remove a group's journal, if it exists, so that all records above the cursor are redelivered."""
    path = root.cursor_directory(route) / f"{group}{WORK_SUFFIX}"
    if os.path.lexists(path):
        disk.unlink(path)
        disk.sync_directory(path.parent)


@dataclass(slots=True)
class Reading:
    """Result of reading a journal."""

    size: int
    start: JournalStart | None = None  # the first line; None if the journal is empty
    lines: int = 0  # valid lines before the first invalid one
    end: int = 0  # end of those lines, in bytes
    damage: str = ""  # why the line there is invalid, unless a crash has torn it
    torn: bool = False  # a crash has left an incomplete line there
    behind: int = 0  # valid lines after the invalid one
    last: int = 0  # last sequence that was read from the log


def read_journal(path: Path, apply: Callable[[JournalLine], None]) -> Reading:
    """Read a journal; call ``apply`` with each line before the first invalid one.

    Without the group's lock, a line that is being written looks like damage. After a crash, everything synced is
    intact, and any sectors of the rest may be missing. So a later line that shows that the invalid one was synced
    proves damage.
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
                if isinstance(line, JournalStart):
                    if read.start is not None:
                        raise BadWork("two lines name its group")
                    read.start = line
                elif read.start is None:
                    raise BadWork("its first line does not name its group")
                apply(line)
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
    """Read a journal that its owner may be writing; retry, because real damage persists."""
    for number in range(_READ_AGAIN):
        if number:
            time.sleep(_AGAIN_SECONDS)
        lines: list[JournalLine] = []
        read = read_journal(path, lines.append)
        if not read.damage:
            break
    return read, lines


def read_whole(path: Path, root: Root, apply: Callable[[JournalLine], None]) -> Reading:
    """Read a journal. Raise Damaged if a synced line is invalid, or if it names records beyond the head."""
    read = read_journal(path, apply)
    if read.damage:
        raise _damaged(path, root, read.end, read.damage)
    if why := beyond_head(root, read):
        raise _damaged(path, root, 0, why)
    return read


def beyond_head(root: Root, read: Reading) -> str:
    """Return a message if a journal names records beyond the head, or "".

    Such a log is older than the journal, and future records with these sequences would count as done. The head is read
    after the journal, so an active owner's journal never appears to be beyond it.
    """
    head = readable_head(root)
    if head is None or read.last <= head.sequence:
        return ""
    return f"it lists records up to {read.last}, but the last record of the log is {head.sequence}"


def _is_torn(data: bytes, offset: int) -> bool:
    """Return True if the bytes at ``offset`` may be the beginning of a line that was not written completely.

    If the write was short, only blank lines follow, to the end of the file. If a sector never reached the disk, the
    line ends with the file or at the start of a blank sector; if its first sector is lost, all bytes up to the next
    sector are blank. A line with an end is complete, unless only its newline was lost.
    """
    blank = _FIRST_BLANK.search(data, offset).start()  # type: ignore[union-attr]  # if nowhere else, at the end
    text = data[offset:blank]
    if _has_end(text) and (data[blank : blank + 1] == b"\n" or decode_line(text) is None):
        return False
    if not data[blank:].strip(_PREALLOCATED):
        return True
    sector_end = min(len(data), blank - blank % _SECTOR_BYTES + _SECTOR_BYTES)
    at_sector = blank == offset or blank % _SECTOR_BYTES == 0
    return at_sector and _LOST.fullmatch(data, blank, sector_end) is not None


def _has_end(text: bytes) -> bool:
    """True if the end of a line is present, with at most one wrong byte, and possibly another byte for its newline."""
    for tail in (text[-len(_END) :], text[-len(_END) - 1 : -1]):
        fixed = [found == meant for found, meant in zip(tail, _END, strict=False) if meant != ord("_")]
        if len(tail) == len(_END) and fixed.count(False) <= 1:
            return True
    return False


def _decoded(piece: bytes) -> tuple[JournalLine, int]:
    """Decode a line; a blank line that was not completely overwritten may hide its last byte."""
    if not piece.endswith(b"\n"):
        raise BadWork("a line without its end")
    if piece.endswith(b'"\n'):
        return decode_work(piece[:-1] + b"}")
    return decode_work(piece)


def _damaged(path: Path, root: Root, offset: int, why: str) -> Damaged:
    route = path.relative_to(root.routes).parts[0]
    return Damaged(
        f"{path}: offset {offset}: {why}; the state of records above the cursor is unknown",
        hint=f"{command_line(root.path, f'group show {route} {path.stem}')} shows what can be done",
    )


class Failure(NamedTuple):
    """Reason why a record was last returned.

    Attributes:
        reason: as its worker gave it, or "".
        tries: failures that the workers counted; 0 if they do not count.
    """

    reason: str
    tries: int


class Replay:
    """State recovered from the previous owner. Leased records are free again, because their workers are gone.

    ``failures`` has the reasons of returned records, ``dead`` the records that are being given up.
    """

    def __init__(self, *, by_key: bool) -> None:
        self.deliveries = Deliveries(0, by_key=by_key)
        self.failures: dict[int, Failure] = {}
        self.dead: dict[int, DeadRecord] = {}

    def apply(self, line: JournalLine) -> None:
        window = self.deliveries.window
        match line:
            case JournalStart():
                window.floor, window.end = line.floor, line.end
            case JournalPage():
                window.put_page(line.first, line.tries)
                self._delay(line.due)
            case Commit():
                window.finish(line.done)
                for first, last in line.read:
                    self.deliveries.append(Run(first, last))
                self._delay(line.due)
                for held in line.leased:
                    for first, last in held.runs:
                        window.count_try(Run(first, last))
                for why in line.reasons:
                    record_failure(self.failures, why)
                self.dead |= {dead.sequence: dead for dead in line.dead}

    def end(self, floor: int) -> None:
        """Finish the replay with the position of the cursor."""
        self.deliveries.window.extend_to(floor)
        self.deliveries.finish_all(Run(0, floor))
        is_open = self.deliveries.window.is_open
        self.failures = {sequence: failure for sequence, failure in self.failures.items() if is_open(sequence)}
        self.dead = {sequence: dead for sequence, dead in self.dead.items() if is_open(sequence)}

    def _delay(self, due: Iterable[tuple[int, int]]) -> None:
        for sequence, due_ns in due:
            self.deliveries.delay(sequence, due_ns)


def record_failure(failures: dict[int, Failure], why: FailureReason) -> None:
    """Record why records were returned; the failures of a record never decrease."""
    new = Failure(why.reason, why.tries)
    for first, last in why.runs:
        for sequence in range(first, last + 1):
            before = failures.get(sequence, new)
            failures[sequence] = (
                new
                if why.reason and why.tries >= before.tries
                else Failure(why.reason or before.reason, max(why.tries, before.tries))
            )


def journal_lines(
    start: JournalStart,
    deliveries: Deliveries,
    failures: Mapping[int, Failure],
    dead: Mapping[int, DeadRecord],
    since_1970_ns: int,
) -> Iterator[JournalLine]:
    """Return the lines of a compacted journal; ``since_1970_ns`` is the wall time at monotonic time 0."""
    yield replace(start, floor=deliveries.window.floor, end=deliveries.window.end)
    due = deliveries.due_times()
    for first, tries in deliveries.window.pages():
        waiting = [(s, due[s]) for s in Run(first, first + len(tries) - 1).among(due)] if due else []
        yield JournalPage(first, tries, waiting)
    held: dict[int, WorkerLease] = {}
    for run, lease in deliveries.holdings():
        if lease.worker:
            entry = WorkerLease(lease.worker, lease.until_ns + since_1970_ns, [])
            held.setdefault(id(lease), entry).runs.append((run.first, run.last))
    alike: dict[Failure, list[int]] = {}
    for sequence, failure in failures.items():
        alike.setdefault(failure, []).append(sequence)
    why = [FailureReason(*failure, list(runs_of(sorted(sequences)))) for failure, sequences in alike.items()]
    if rest := Commit(extended=list(held.values()), reasons=why, dead=list(dead.values())):
        yield rest


@dataclass(frozen=True, slots=True)
class RecoveredProgress:
    """Progress of a group's workers, from its journal.

    ``floor`` is the ack floor, at least the cursor; ``done`` records above it are done, ``dead`` are being given up.
    """

    floor: int
    done: int
    dead: int


def recover_progress(log: Log, route: str, group: str) -> RecoveredProgress:
    """Read the progress of a group that no process owns. Raise Damaged if its journal or a record is unreadable."""
    floor = log.cursor(route, group).effective
    path = log.root.cursor_directory(route) / f"{group}{WORK_SUFFIX}"
    if not is_companion(path, log.root.cursor(route, group)):
        return RecoveredProgress(floor, 0, 0)
    replay = Replay(by_key=False)
    read_whole(path, log.root, replay.apply)
    replay.end(floor)
    window = replay.deliveries.window
    done = 0
    if window.open:  # only the log shows which sequences belong to this route
        skip = EarlierReclaim(log.root, route, group).skip
        for batch in log.batches(route, window.floor + 1, window.end - 1, on_missing=skip):
            sequences = range(batch.first_sequence, batch.last_sequence + 1)
            done += sum(window.floor < each < window.end and not window.is_open(each) for each in sequences)
    return RecoveredProgress(window.floor, done, len(replay.dead))
