"""Writer of a new log from batches with given sequences and append times, in order.

The identity gets its name last, so the remains of a killed restore are not a log. Each hole in the sequences gets a
ledger line. A small hole becomes a DROPPED batch, as if shrunk; a large one ends the segment.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from wald.errors import InvalidInput
from wald.files.disk import Disk
from wald.files.identity import encode_identity, make_directories
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.routes import add_route
from wald.files.uptime import ClockStep, add_step
from wald.format.batch import Buffer, Encoding, Flag
from wald.format.head import Head, encode_head
from wald.format.ledger_lines import Entry
from wald.format.log_state import LogState
from wald.segments.sealed_file import CompressedSegment
from wald.writing.daemon_lock import Lock, require_free
from wald.writing.sealing import seal, segments_to_seal
from wald.writing.writer import Draft, Route, Writer

SEGMENT_BYTES = 64 << 20
_DROPPED_MAX = 1 << 16  # longest hole inside a segment, with a byte per record before compression
_LINES_MAX = 1000  # ledger lines per sync
_NO_BASE = 1 << 64  # above every segment
_NO_ROUTE = Route.named("")


@dataclass(frozen=True, slots=True)
class RestoredBatch:
    """Consecutive whole records of one route, in stored form."""

    route: str
    first: int
    count: int
    append_time_ns: int
    payload: Buffer
    encoding: Encoding
    terminated: bool = True

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class NewLog:
    """Log under construction. Raise InvalidInput if the directory is not empty, Locked if another process uses it.

    After an error, the log stays unfinished, and a new attempt is refused.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk,
        *,
        describe: Callable[[int, int], Entry],  # ledger fields for the hole from first to last
        now: Callable[[], int],  # in ns since 1970
        moment: str,  # ``now`` as text, for the identity
        version: int,
        segment_max_bytes: int = SEGMENT_BYTES,
    ) -> None:
        _require_empty(path, disk)
        self.log_id = uuid.uuid4()
        self.root = root = Root(path)
        self.holes = self.missing = 0
        self._disk = disk
        self._describe = describe
        self._now = now
        self._version = version
        self._segment_max_bytes = segment_max_bytes
        self._lines: list[Entry] = []
        self._routes: dict[str, Route] = {}
        self._writer: Writer | None = None
        self._sealed: CompressedSegment | None = None
        make_directories(root, disk)
        self._lock = Lock(root, disk, now=moment)
        if root.identity.exists():  # another process has finished a restore
            _require_empty(path, disk)
        disk.replace(root.unfinished_identity, encode_identity(self.log_id, now=moment))
        self._ledger = Ledger(root.ledger / "segments.jsonl", disk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        self._ledger.close()
        self._lock.release()

    def add(self, batch: RestoredBatch) -> None:
        """Append a batch, and record a hole before it as lost."""
        writer = self._writer
        expected = 1 if writer is None else writer.state.next_sequence
        assert batch.first >= expected, "the sequences increase"
        if batch.first > expected:
            self._record_hole(expected, batch.first - 1)
        if writer is None:
            writer = self._writer = Writer(
                self.root,
                self._disk,
                LogState(next_sequence=batch.first),
                log_id=self.log_id.bytes,
                epoch=self._lock.epoch,
                segment_max_bytes=self._segment_max_bytes,
                now_ns=batch.append_time_ns,
                sync_commits=False,  # sealing syncs each segment
                version=self._version,
            )
        elif batch.first > expected:
            self._skip_hole(writer, batch)
        if batch.append_time_ns < writer.state.append_time_ns:
            step = ClockStep(writer.state.next_sequence, writer.state.append_time_ns, batch.append_time_ns)
            add_step(self.root, self._disk, step)
            writer.step_clock(now_ns=batch.append_time_ns)
            self._seal(writer.base_sequence)
        route = self._routes.get(batch.route)
        if route is None:
            route = self._routes[batch.route] = Route.named(batch.route)
        flags = 0 if batch.terminated else int(Flag.UNTERMINATED)
        draft = Draft(route, [batch.payload], len(batch.payload), batch.count, batch.encoding, flags)
        if writer.overshoots(draft.total_bytes):
            self._cut(writer, batch.append_time_ns)
        writer.commit(writer.place([draft]), now_ns=batch.append_time_ns)

    def finish(self) -> None:
        assert self._writer is not None, "there is a record"
        writer, self._writer = self._writer, None
        epoch, base, at_ns = writer.epoch, writer.base_sequence, writer.state.append_time_ns
        writer.close()
        self._seal(_NO_BASE)
        self._write_lines()
        root, disk = self.root, self._disk
        for name in self._routes:
            add_route(root, disk, name)
        assert self._sealed is not None
        index = self._sealed.index
        head = Head(index.next_sequence - 1, base, index.raw_bytes, epoch, at_ns)
        disk.replace(root.head, encode_head(head))
        disk.unlink(root.lock)  # no daemon has run; none can start before the next step
        disk.sync_directory(root.path)
        disk.rename(root.unfinished_identity, root.identity)
        disk.sync_directory(root.path)
        disk.sync_names_above(root.path)

    def _skip_hole(self, writer: Writer, batch: RestoredBatch) -> None:
        count = batch.first - writer.state.next_sequence
        if count <= _DROPPED_MAX:
            flags = int(Flag.CONTROL | Flag.DROPPED)
            dropped = Draft(_NO_ROUTE, [bytes(count)], count, count, Encoding.CONTROL, flags)
            if not writer.overshoots(dropped.total_bytes):
                writer.commit(writer.place([dropped]), now_ns=writer.state.append_time_ns)
                return
        writer.state.next_sequence = batch.first
        self._cut(writer, batch.append_time_ns)

    def _cut(self, writer: Writer, append_time_ns: int) -> None:
        writer.cut(now_ns=append_time_ns)
        self._seal(writer.base_sequence)

    def _seal(self, below: int) -> None:
        for segment in segments_to_seal(self.root, below):
            self._sealed = seal(self.root, segment, self._disk, self._ledger, reserve=False, now=self._now)

    def _record_hole(self, first: int, last: int) -> None:
        self.holes += 1
        self.missing += last - first + 1
        entry = {"event": "lost", "base": first, "last": last, "by": "restore"}
        self._lines.append(entry | self._describe(first, last) | {"at": self._now()})
        if len(self._lines) >= _LINES_MAX:
            self._write_lines()

    def _write_lines(self) -> None:
        if self._lines:
            self._ledger.append(*self._lines)
            self._lines.clear()


def _require_empty(path: Path, disk: Disk) -> None:
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{path}: not a directory", case="directory-for-restore-needed")
    names = set(os.listdir(path)) - {"lost+found"} if path.exists() else set[str]()
    if Root(path).unfinished_identity.name in names:
        require_free(Root(path), disk)
        raise InvalidInput(f"{path}: contains an unfinished restore, not a log", case="restore-unfinished", path=path)
    if names:
        problem = "already a log" if Root(path).identity.name in names else "not empty"
        raise InvalidInput(
            f"{path}: {problem}; records can only be restored into a new log",
            case="directory-for-restore-needed",
        )
