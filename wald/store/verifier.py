"""Verifying: everything is read, nothing is changed, and every bad byte is told of instead of raised.

Checked are the checksums of every batch and frame, the digests in indexes and ledgers, that sequences and append times
go on without a gap or a step back within and between segments, that indexes, control batches, the head and the cursors
agree with what the segments hold, and the chains of the ledgers. The daemon may run meanwhile: what stands behind the
head as it was at the beginning is not read, and a segment that is sealed meanwhile is read in its new form.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from wald.errors import Damaged, UnsupportedFormat
from wald.format import columns, control
from wald.format.batch import BatchHeader, Encoding, Flag, Outcome, look, payload_of, route_of
from wald.format.head import Head
from wald.format.names import Kind, parse_segment_name, segment_name
from wald.format.sealed import BadSealed, BatchTable, SealedIndex
from wald.format.segment import BadHeader
from wald.store.compression import SealedFile
from wald.store.cursors import CursorState, cursors_of
from wald.store.directory import Root, Segment, list_segments, look_again, read_identity
from wald.store.head import read_head
from wald.store.history import History
from wald.store.indexes import read_index
from wald.store.ledger import read_ledger
from wald.store.raw import FIRST_BATCH, Gap, RawFile, Scanned, Tail

LEDGERS = ("segments.jsonl", "reclaim.jsonl", "archive.jsonl")


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    INFO = "info"
    """Worth knowing, and what crashes and interrupted work leave behind."""
    ERROR = "error"
    """Bytes are not what was written, or two things that must agree do not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found in one file, at ``offset`` bytes."""

    level: Level
    path: Path
    offset: int
    message: str


def verify(root: Root) -> Iterator[Finding]:
    """Read everything in ``root`` and tell what is there; no error finding means that all of it is good.

    Raises:
        NotFound: there is no log.
    """
    return _Verification(root).run()


@dataclass(slots=True)
class _Contents:
    """What one segment turned out to hold, and the state at its end."""

    sequence: int
    batches: int = 0
    records: int = 0
    table: BatchTable = field(default_factory=BatchTable)
    route_ids: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, position: int, header: BatchHeader, route: str) -> None:
        self.batches += 1
        self.records += header.count
        self.counts[route] = self.counts.get(route, 0) + header.count
        self.payload_bytes[route] = self.payload_bytes.get(route, 0) + header.payload_bytes
        self.lasts[route] = header.last_sequence
        table = self.table
        table.positions.append(position)
        table.bases.append(header.base_sequence)
        table.counts.append(header.count)
        table.routes.append(self.route_ids.setdefault(route, len(self.route_ids)))
        table.times_ns.append(header.append_time_ns)


class _Verification:
    """One pass over a root."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._history = History(root)
        self._log_id: bytes | None = None
        self._head: Head | None = None
        self._expected = 0  # the next sequence; 0 before the first segment
        self._time_ns = -(1 << 63)
        self._open: dict[str, int] = {}
        self._lasts: dict[str, int] = {}

    def run(self) -> Iterator[Finding]:
        yield from self._identity()
        yield from self._read_head()
        yield from self._strangers()
        yield from self._segments()
        yield from self._head_agrees()
        for name in LEDGERS:
            yield from self._ledger(self._root.ledger / name)
        yield from self._cursors()

    def _identity(self) -> Iterator[Finding]:
        try:
            self._log_id = read_identity(self._root).log_id
        except (Damaged, UnsupportedFormat) as error:
            yield Finding(Level.ERROR, self._root.identity, 0, error.message)

    def _read_head(self) -> Iterator[Finding]:
        try:
            self._head = read_head(self._root)
        except Damaged as error:
            yield Finding(Level.ERROR, self._root.head, 0, error.message)
        else:
            if self._head is None:
                yield Finding(Level.INFO, self._root.head, 0, "no head: the next start makes it from the segments")

    def _strangers(self) -> Iterator[Finding]:
        """Files in ``segments/`` that are no segments to read."""
        if not self._root.segments.is_dir():
            return  # told of where they are listed
        for entry in sorted(os.scandir(self._root.segments), key=lambda entry: entry.name):
            name = parse_segment_name(entry.name)
            if name is not None and name.kind is Kind.DOOMED:
                yield Finding(Level.INFO, Path(entry.path), 0, "reclaimed; waits out its grace period")
            elif name is None and not entry.name.endswith(".tmp"):
                yield Finding(Level.INFO, Path(entry.path), 0, "not a file of the log")

    def _segments(self) -> Iterator[Finding]:
        """Every segment as far as the head that was read before."""
        try:
            listing = list_segments(self._root)
        except Damaged as error:
            yield Finding(Level.ERROR, self._root.segments, 0, error.message)
            return
        waiting = deque(listing.segments)
        while waiting:
            segment = waiting.popleft()
            if self._head is not None and segment.base_sequence > self._head.segment:
                yield Finding(Level.INFO, segment.path, 0, "behind the head; not read")
                continue
            try:
                try:
                    found = list(self._segment(segment, newest=not waiting))
                except FileNotFoundError as gone:
                    listing = look_again(self._root, listing, gone)
                    waiting = deque(s for s in listing.segments if s.base_sequence >= segment.base_sequence)
                    continue
            except Damaged as error:
                found = [Finding(Level.ERROR, segment.path, 0, error.message)]
            yield from found

    def _segment(self, segment: Segment, *, newest: bool) -> Iterator[Finding]:
        """One segment, and whether it follows the one before it."""
        before = (self._expected, self._time_ns, dict(self._open), dict(self._lasts))
        try:
            contents = _Contents(segment.base_sequence)
            yield from self._follows(segment)
            if segment.kind is Kind.RAW:
                yield from self._raw(segment, contents, newest=newest)
            else:
                yield from self._sealed(segment, contents)
            self._lasts |= contents.lasts
        except FileNotFoundError:
            self._expected, self._time_ns, self._open, self._lasts = before
            raise
        except OSError as error:
            yield Finding(Level.ERROR, segment.path, 0, f"cannot be read ({error.strerror})")

    def _follows(self, segment: Segment) -> Iterator[Finding]:
        base = segment.base_sequence
        expected = self._expected or 1
        if base > expected:
            missing = f"records {expected} to {base - 1}"
            if self._history.all_reclaimed(expected, base - 1):
                yield Finding(Level.INFO, segment.path, 0, f"{missing} before it were reclaimed")
            else:
                words = f"{missing} before it are in no segment, and no ledger says why"
                yield Finding(Level.ERROR, segment.path, 0, words)
            self._open.clear()
        elif base < expected:
            yield Finding(
                Level.ERROR, segment.path, 0, f"begins before record {expected}, where the one before it ends"
            )
        self._expected = base

    def _raw(self, segment: Segment, contents: _Contents, *, newest: bool) -> Iterator[Finding]:
        path = segment.path
        durable = self._durable(segment)
        with path.open("rb", buffering=0) as file:
            whole = RawFile(file.fileno())
            raw = whole if durable is None else RawFile(file.fileno(), limit=min(durable, whole.limit))
            try:
                header = raw.header()
            except BadHeader as error:
                yield Finding(Level.ERROR, path, 0, str(error))
            else:
                yield from self._belongs(path, header.log_id, header.base_sequence, segment.base_sequence)
            for found in raw.scan(next_sequence=segment.base_sequence):
                if isinstance(found, Tail):
                    yield from self._tail(path, found, durable, newest=newest)
                elif isinstance(found, Gap):
                    words = f"{found.length} bytes are no batch: {found.reason}"
                    yield Finding(Level.ERROR, path, found.offset, words)
                else:
                    payload = memoryview(raw.payload(found))
                    yield from self._batch(path, found.offset, found.header, found.route, payload, contents)
            if durable is not None:
                yield from self._behind(path, next(whole.scan(start=durable)))
        yield from self._sparse_index(segment, contents)
        yield Finding(Level.OK, path, 0, f"{contents.batches} batches, {contents.records} records")

    def _durable(self, segment: Segment) -> int | None:
        """Where the head stands in a segment; None: not in this one."""
        head = self._head
        return head.position if head is not None and head.segment == segment.base_sequence else None

    def _tail(self, path: Path, tail: Tail, durable: int | None, *, newest: bool) -> Iterator[Finding]:
        if durable is not None and tail.offset < durable:
            yield Finding(Level.ERROR, path, tail.offset, f"good batches end before the head, at {durable}")
        elif self._head is None and newest:
            yield from self._behind(path, tail)
        elif tail.garbage_bytes:
            words = f"{tail.garbage_bytes} bytes behind the last batch of a complete segment ({tail.reason})"
            yield Finding(Level.ERROR, path, tail.offset, words)

    def _behind(self, path: Path, found: Scanned | Gap | Tail) -> Iterator[Finding]:
        """What stands where nothing is durable: what a running daemon writes, or what the last one has left."""
        if isinstance(found, Tail) and found.garbage_bytes:
            words = f"{found.garbage_bytes} bytes of an unfinished write; the next start cuts them ({found.reason})"
            yield Finding(Level.INFO, path, found.offset, words)

    def _sparse_index(self, segment: Segment, contents: _Contents) -> Iterator[Finding]:
        path = segment.path.with_name(segment_name(segment.base_sequence, Kind.INDEX))
        index = read_index(path, self._log_id or b"", segment.base_sequence)
        if index is None:
            return
        table = contents.table
        known = dict(zip(table.positions, zip(table.bases, table.times_ns, strict=True), strict=True))
        end = table.positions[-1] if table.positions else 0
        entries = zip(index.positions, index.sequences, index.times_ns, strict=True)
        wrong = [p for p, sequence, time_ns in entries if p <= end and known.get(p) != (sequence, time_ns)]
        if wrong:
            words = f"{len(wrong)} of {len(index.positions)} entries point at no such batch; readers pass over them"
            yield Finding(Level.INFO, path, 0, words)

    def _sealed(self, segment: Segment, contents: _Contents) -> Iterator[Finding]:
        path = segment.path
        try:
            file = SealedFile(path)
        except Damaged as error:
            yield Finding(Level.ERROR, path, 0, error.message)
            return
        with file:
            index = file.index
            yield from self._belongs(path, index.log_id, index.base_sequence, segment.base_sequence)
            digest, whole = hashlib.sha256(), True
            for number, frame in enumerate(index.frames):
                try:
                    data = file.frame(number)
                except Damaged as error:
                    whole = False
                    words = (
                        f"records {frame.first_sequence} to {frame.next_sequence - 1} cannot be read: {error.message}"
                    )
                    yield Finding(Level.ERROR, path, frame.offset, words)
                    self._open.clear()
                    self._expected = max(self._expected, frame.next_sequence)
                    continue
                digest.update(data)
                yield from self._frame(path, index, number, data, contents)
            if whole:
                yield from self._agrees(path, index, digest.digest(), contents)
        if segment.path.with_name(segment_name(segment.base_sequence, Kind.RAW)).exists():
            yield Finding(Level.INFO, path, 0, "the raw form is still there; the sealer removes it")
        yield Finding(Level.OK, path, 0, f"{contents.batches} batches, {contents.records} records")

    def _frame(
        self, path: Path, index: SealedIndex, number: int, data: bytes, contents: _Contents
    ) -> Iterator[Finding]:
        frame = index.frames[number]
        for position, length in index.damage:
            if position <= frame.raw_offset < position + length:
                if position == frame.raw_offset:
                    words = f"{length} bytes at {position} of the raw segment were damaged before it was sealed"
                    yield Finding(Level.ERROR, path, frame.offset, words)
                return
        at = FIRST_BATCH if number == 0 else 0
        begin = len(contents.table)
        while at < len(data):
            found = look(data, at)
            if found.outcome is not Outcome.WHOLE or found.header is None:
                words = f"at {at} of frame {number}: {found.reason or 'zeros where a batch belongs'}"
                yield Finding(Level.ERROR, path, frame.offset, words)
                return
            payload = payload_of(data, at, found.header)
            route = route_of(data, at, found.header)
            yield from self._batch(path, frame.raw_offset + at, found.header, route, payload, contents)
            at += found.header.total_bytes
        times = contents.table.times_ns[begin:]
        names = {index.routes[i].route for i in frame.routes if i < len(index.routes)}
        held = {name for name, i in contents.route_ids.items() if i in set(contents.table.routes[begin:])}
        span = (min(times), max(times)) if times else None
        if (times and span != (frame.earliest_ns, frame.latest_ns)) or names != held:
            yield Finding(Level.ERROR, path, frame.offset, f"the index is wrong about frame {number}")

    def _agrees(self, path: Path, index: SealedIndex, digest: bytes, contents: _Contents) -> Iterator[Finding]:
        """Index and ledger against what the frames hold."""
        if digest != index.sha256:
            yield Finding(Level.ERROR, path, 0, f"the sha256 is {digest.hex()}, the index says {index.sha256.hex()}")
        told = self._history.sealed(index.base_sequence)
        if told is None:
            yield Finding(Level.INFO, path, 0, "the ledger does not tell of it")
        elif told.get("sha256") != digest.hex():
            yield Finding(Level.ERROR, path, 0, f"the sha256 is {digest.hex()}, the ledger says {told.get('sha256')}")
        try:
            table = index.batch_table()
        except BadSealed as error:
            yield Finding(Level.ERROR, path, 0, str(error))
            return
        names = {number: entry.route for number, entry in enumerate(index.routes)}
        ours = {number: route for route, number in contents.route_ids.items()}
        same = [names.get(i) for i in table.routes] == [ours[i] for i in contents.table.routes]
        for column in ("positions", "bases", "counts", "times_ns"):
            same = same and getattr(table, column) == getattr(contents.table, column)
        if not same:
            yield Finding(Level.ERROR, path, 0, "the index's batch table is not that of the frames")
        counted = {r.route: (r.count, r.last, r.payload_bytes) for r in index.routes}
        held = {r: (contents.counts[r], contents.lasts[r], contents.payload_bytes[r]) for r in contents.counts}
        if counted != held or index.next_sequence != contents.sequence:
            yield Finding(Level.ERROR, path, 0, "the index's counts are not those of the frames")

    def _belongs(self, path: Path, log_id: bytes, found: int, named: int) -> Iterator[Finding]:
        if self._log_id is not None and log_id != self._log_id:
            yield Finding(Level.ERROR, path, 16, f"belongs to log {log_id.hex()}")
        if found != named:
            yield Finding(Level.ERROR, path, 32, f"is segment {found} by its header and {named} by its name")

    def _batch(
        self, path: Path, offset: int, header: BatchHeader, route: str, payload: memoryview, contents: _Contents
    ) -> Iterator[Finding]:
        """A batch whose checksums hold: does it say what its payload does, and does it follow the one before it?"""
        wrong: list[str] = []
        if header.is_control:
            wrong += self._control_wrong(header, payload)
        else:
            wrong += _payload_wrong(header, payload)
            wrong += self._order_wrong(header, route)
            contents.add(offset, header, route)
            self._expected = contents.sequence = max(header.end_sequence, self._expected)
        if header.append_time_ns < self._time_ns:
            wrong.append("its append time is before that of the batch before it")
        self._time_ns = max(self._time_ns, header.append_time_ns)
        for words in wrong:
            yield Finding(Level.ERROR, path, offset, words)

    def _order_wrong(self, header: BatchHeader, route: str) -> Iterator[str]:
        if header.base_sequence != self._expected:
            yield f"begins with record {header.base_sequence}; {self._expected} is due"
        begun = self._open.pop(route, None)
        if begun is not None and header.continues_sequence != begun:
            yield f"record {begun} of route {route} has not ended, and this batch does not continue it"
        if header.flags & Flag.CONTINUED:
            self._open[route] = header.end_sequence - 1 if header.count else header.continues_sequence

    def _control_wrong(self, header: BatchHeader, payload: memoryview) -> Iterator[str]:
        try:
            state = control.decode(payload)
        except control.BadControl as error:
            yield f"the control state does not decode: {error}"
            return
        if header.count or state.next_sequence != header.base_sequence:
            yield f"the control state goes on with record {state.next_sequence}, the batch with {header.base_sequence}"
        for route, last in self._lasts.items():
            if last > state.routes.get(route, 0):
                yield f"the control state has record {state.routes.get(route, 0)} as route {route}'s last; {last} is"
        for route, sequence in self._open.items():
            if state.open_records.get(route) != sequence:
                yield f"the control state does not know that record {sequence} of route {route} has not ended"

    def _head_agrees(self) -> Iterator[Finding]:
        head, last = self._head, max(self._expected - 1, 0)
        if head is None:
            return
        if head.sequence > last and not self._history.all_reclaimed(last + 1, head.sequence):
            words = f"records {last + 1} to {head.sequence} are durable by the head and in no segment"
            yield Finding(Level.ERROR, self._root.head, 0, words)
        else:
            yield Finding(Level.OK, self._root.head, 0, f"record {head.sequence}")

    def _ledger(self, path: Path) -> Iterator[Finding]:
        decoded = read_ledger(path)
        for number, reason in decoded.broken:
            yield Finding(Level.ERROR, path, 0, f"line {number}: {reason}")
        if path.exists() and not decoded.broken:
            yield Finding(Level.OK, path, 0, f"{len(decoded.entries)} lines")
        if path.exists() and path.stat().st_size > decoded.whole_bytes:
            yield Finding(Level.INFO, path, decoded.whole_bytes, "an unfinished line; its owner cuts it")

    def _cursors(self) -> Iterator[Finding]:
        for route in self._root.route_names():
            cursors = cursors_of(self._root, route, log_id=self._log_id or b"", head_sequence=self._last())
            if any(cursor.state is CursorState.BEYOND for cursor in cursors):
                # The head may have moved on since it was read, and a cursor after it.
                cursors = cursors_of(self._root, route, log_id=self._log_id or b"", head_sequence=self._last())
            for cursor in cursors:
                if cursor.state is CursorState.VALID:
                    yield Finding(Level.OK, cursor.path, 0, f"record {cursor.sequence}")
                elif cursor.state is not CursorState.ABSENT:
                    yield Finding(Level.ERROR, cursor.path, 0, f"{cursor.message}; it counts as 0")

    def _last(self) -> int:
        """The last durable record by now."""
        head = self._head
        with contextlib.suppress(Damaged):  # told of at the beginning
            head = read_head(self._root) or head
        return head.sequence if head is not None else max(self._expected - 1, 0)


def _payload_wrong(header: BatchHeader, payload: memoryview) -> Iterator[str]:
    """What the header says of the payload against the payload."""
    if header.encoding == Encoding.COLUMNS:
        try:
            count = columns.decode(payload).count
        except columns.BadColumns as error:
            yield f"the columns do not decode: {error}"
            return
    else:
        flags = header.flags
        tail = bool(flags & (Flag.CONTINUED | Flag.UNTERMINATED))
        count = bytes(payload).count(b"\n") + tail - bool(flags & Flag.CONTINUES)
    if count != header.count:
        yield f"the header counts {header.count} records, the payload has {count}"
