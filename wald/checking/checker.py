"""Check of one segment, batch by batch: checksums, digests, and the order of sequences, times and records.

A segment is checked against the log state at the end of the previous segment, or, to check segments in parallel,
against :data:`NOTHING`. :meth:`Checked.following` then returns the result for the actual state, or None if the segment
must be checked again, which only damage can cause.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Self

from stringzilla import count as count_bytes

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.format import records
from wald.format.batch import BatchHeader, Encoding, Flag, StoredBatch
from wald.format.log_state import BadControl, LogState, Producers, decode_peer, decode_state, still_open
from wald.format.names import Kind, segment_name
from wald.format.sealed_index import BadSealed, BatchTable, RouteEntry, SealedIndex
from wald.format.segment import BadHeader, SegmentHeader, SparseIndex
from wald.segments.index_builder import SegmentIndexBuilder, find_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.segments.reader import SkippedBatches
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import SealedFile
from wald.segments.view import truncated_segment


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    INFO = "info"  # not damage, for example leftovers of crashes
    ERROR = "error"  # bytes differ from those written, or two facts contradict each other


@dataclass(frozen=True, slots=True)
class Finding:
    """Observation about one file, at ``offset`` bytes."""

    level: Level
    path: Path
    offset: int
    message: str

    @classmethod
    def of(cls, level: Level, path: Path, message: str) -> Self:
        """Create a finding from an error message that may begin with ``path`` and an offset."""
        found = re.fullmatch(r"(?:offset (\d+): )?(.*)", message.removeprefix(f"{path}: "), re.DOTALL)
        assert found is not None, "the pattern matches any text"
        return cls(level, path, int(found[1] or 0), found[2])


_CONTINUES = int(Flag.CONTINUES)  # enums are slow
_ENDS_WITHOUT_NEWLINE = int(Flag.CONTINUED | Flag.UNTERMINATED)


def payload_wrong(header: BatchHeader, payload: memoryview) -> Iterator[str]:
    """Yield an error if the payload does not have the records that the header counts."""
    if header.encoding == Encoding.COLUMNS:
        try:
            count = records.decode_columns(payload).count
        except records.BadColumns as error:
            yield f"the columns cannot be decoded: {error}"
            return
    else:
        newlines = count_bytes(payload, b"\n") if payload else 0
        count = newlines + bool(header.flags & _ENDS_WITHOUT_NEWLINE) - bool(header.flags & _CONTINUES)
    if count != header.count:
        yield f"the header counts {header.count} records, the payload has {count}"


NOTHING = LogState(next_sequence=0, append_time_ns=-(1 << 63))
"""The state before the first segment."""


@dataclass(slots=True)
class Opening:
    """Facts of a segment that must agree with the segments before it."""

    time_ns: int | None = None  # append time of the first batch
    continues: dict[str, int] = field(default_factory=dict)  # route → record that its first batch continues, or 0
    # Routes and open records of each control state.
    controls: list[tuple[dict[str, int], dict[str, int]]] = field(default_factory=list)
    dropped: Mapping[str, int] = field(default_factory=dict)  # route → last dropped record; see still_open()
    lost: bool = False  # any open record may have ended in lost batches, or in dropped ones of unknown routes

    def add(self, header: BatchHeader, route: str, dropped: Mapping[str, int] | None) -> None:
        if self.time_ns is None:
            self.time_ns = header.append_time_ns
        if header.is_dropped and dropped is None:
            self.lost = True
        elif dropped is not None and header.is_dropped and not self.dropped:
            self.dropped = {route: last for route, last in dropped.items() if route not in self.continues}
        if not header.is_control:
            self.continues.setdefault(route, header.continues_sequence)

    def agrees(self, before: LogState) -> bool:
        """Return True if checks against ``before`` and :data:`NOTHING` have the same findings."""
        if self.time_ns is not None and self.time_ns < before.append_time_ns:
            return False
        if self.lost and before.open_records:
            return False
        for routes, open_records in self.controls:
            if any(last > routes.get(route, 0) for route, last in before.routes.items()):
                return False
            if any(open_records.get(route) != at for route, at in before.open_records.items()):
                return False
        begun = still_open(before.open_records, self.dropped)
        return all(self.continues.get(route, at) == at for route, at in begun.items())

    def still_open(self, before: LogState) -> dict[str, int]:
        """Return the open records of ``before`` that no batch of the segment continues or ends."""
        begun = still_open(before.open_records, self.dropped)
        return {route: at for route, at in begun.items() if route not in self.continues}


@dataclass(frozen=True, slots=True)
class SegmentToCheck:
    """A segment with the facts needed to check it. Digests are of raw bytes."""

    segment: Segment
    log_id: bytes | None  # log that the segment must belong to; None if unknown
    durable: int | None = None  # position of the head, if in this segment; bytes after it are not checked
    open_ended: bool = False  # the newest segment may end anywhere if the head is missing
    sha256: str | None = None  # digest at sealing, from the ledger
    shrunk: frozenset[str] = frozenset()  # digests after each shrinking, from the ledger
    dropped: Mapping[str, int] | None = field(default=None, hash=False)  # route → last, by the ledger; None if unknown
    end: int = 0  # position at which a raw segment was cut; 0 if unknown


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check against a log state."""

    findings: tuple[Finding, ...]
    records: int
    raw_bytes: int
    after: LogState  # at the end of the segment
    opening: Opening

    @property
    def errors(self) -> list[str]:
        return [found.message for found in self.findings if found.level is Level.ERROR]

    def following(self, before: LogState) -> Checked | None:
        """Derive the result for ``before`` from a check against :data:`NOTHING`; None if findings may differ."""
        if not self.opening.agrees(before):
            return None
        after = replace(
            self.after,
            append_time_ns=max(before.append_time_ns, self.after.append_time_ns),
            routes=before.routes | self.after.routes,
            open_records=self.opening.still_open(before) | self.after.open_records,
        )
        return replace(self, after=after)


def check(target: SegmentToCheck, before: LogState = NOTHING) -> Checked:
    """Check a segment against the state before it. Damage is a finding; only FileNotFoundError is raised."""
    checking = _Check(target, before)
    try:
        if target.segment.kind.form is Kind.RAW:
            checking.check_raw()
        else:
            checking.check_sealed()
    except FileNotFoundError:
        raise
    except OSError as error:
        checking.error(0, f"cannot be read ({error.strerror})")
    except Damaged as error:
        checking.damage(error)
    after = replace(checking.state, producers=Producers())  # producers are not checked
    return Checked(tuple(checking.findings), checking.records, checking.raw_bytes, after, checking.opening)


class _Check:
    def __init__(self, target: SegmentToCheck, before: LogState) -> None:
        self._target = target
        self._base = target.segment.base_sequence
        self._path = target.segment.path
        self._contents = SegmentIndexBuilder(self._base)
        self._dropped = target.dropped
        self.findings: list[Finding] = []
        self.opening = Opening()
        self.raw_bytes = 0
        self.state = LogState(self._base, before.append_time_ns, dict(before.routes), dict(before.open_records))

    @property
    def records(self) -> int:
        return sum(self._contents.table.counts)

    def error(self, offset: int, message: str) -> None:
        self.findings.append(Finding(Level.ERROR, self._path, offset, message))

    def damage(self, error: Damaged) -> None:
        self.findings.append(Finding.of(Level.ERROR, self._path, error.message))

    def _info(self, message: str, offset: int = 0) -> None:
        self.findings.append(Finding(Level.INFO, self._path, offset, message))

    def check_raw(self) -> None:
        durable = self._target.durable
        with open_file(self._path) as file:
            whole = RawFile(file.fileno(), index=self._index)
            raw = RawFile(file.fileno(), limit=durable, index=self._index)
            try:
                self._check_name(raw.header())
            except BadHeader as error:
                self.error(0, str(error))
            for found in raw.scan():
                self.raw_bytes = found.offset
                if isinstance(found, SegmentEnd):
                    self._end(found)
                elif isinstance(found, DamagedBytes):
                    self.error(found.offset, f"{found.length} bytes are not a batch: {found.reason}")
                else:
                    self._batch(found.offset, found.header, found.route, memoryview(raw.payload(found)))
            if durable is not None:
                self._unfinished(next(whole.scan(start=durable)))
        self._sparse_index()
        self._count()

    def _end(self, end: SegmentEnd) -> None:
        durable = self._target.durable
        if durable is not None and end.offset < durable:
            self.error(end.offset, f"intact batches end before the head at {durable}")
        elif self._target.open_ended:
            self._unfinished(end)
        elif end.garbage_bytes:
            message = f"{end.garbage_bytes} bytes after the last batch of a complete segment ({end.reason})"
            self.error(end.offset, message)
        elif end.offset < self._target.end:
            self._lose_open_records()
            error = truncated_segment(self._path, end.offset, self._target.end)
            found = Finding.of(Level.ERROR, self._path, error.message)
            self.error(found.offset, f"{found.message}; {error.hint}")

    def _unfinished(self, found: ScannedBatch | DamagedBytes | SegmentEnd) -> None:
        """Report an unfinished write after the durable bytes: the daemon is writing it, or was killed."""
        if isinstance(found, SegmentEnd) and found.garbage_bytes:
            unfinished = f"{found.garbage_bytes} bytes of an unfinished write"
            self._info(f"{unfinished}; the next start removes them ({found.reason})", found.offset)

    def _index(self) -> SparseIndex:
        return find_index(self._path.parent, self._target.log_id, self._base)

    def _sparse_index(self) -> None:
        entries, path = self._index().entries, self._path.with_name(segment_name(self._base, Kind.INDEX))
        table = self._contents.table
        known = dict(zip(table.positions, zip(table.bases, table.times_ns, strict=True), strict=True))
        end = table.positions[-1] if table.positions else 0
        wrong = [at for sequence, at, time_ns in entries if at <= end and known.get(at) != (sequence, time_ns)]
        if wrong:
            message = f"{len(wrong)} of {len(entries)} entries do not match a batch; readers skip them"
            self.findings.append(Finding(Level.INFO, path, 0, message))

    def check_sealed(self) -> None:
        try:
            file = SealedFile(self._path)
        except Damaged as error:
            self.damage(error)
            self._salvage(error)
            return
        with file:
            index, digest, whole = file.index, hashlib.sha256(), True
            if index.shrunk is not None and index.shrunk.is_complete:
                self._dropped = index.shrunk.last_by_route
            self._check_name(index)
            for number in range(len(index.frames)):
                try:
                    data = file.frame(number)
                except Damaged as error:
                    whole = False
                    self._lost(file, number, error)
                    continue
                digest.update(data)
                self.raw_bytes += len(data)
                self._frame(file, number, data)
            if whole:
                self._agrees(index, digest.digest())
        if self._path.with_name(segment_name(self._base, Kind.RAW)).exists():
            self._info("the raw form is still there; the sealer removes it")
        self._count()

    def _lost(self, file: SealedFile, number: int, error: Damaged) -> None:
        """Check the readable start of a damaged frame, and report the lost records."""
        frame = file.index.frames[number]
        for batch in file.batches(number, file.readable_start(number)):
            self._batch(batch.position, batch.header, batch.route, batch.payload)
        first = max(self.state.next_sequence, frame.first_sequence)
        self._lose_open_records()
        self.state.next_sequence = max(first, frame.next_sequence)
        found = Finding.of(Level.ERROR, self._path, error.message)
        lost = f"records {first} to {frame.next_sequence - 1} cannot be read"
        lost = lost if first < frame.next_sequence else "no record is lost"
        self.error(found.offset, f"{lost}: {found.message}")

    def _lose_open_records(self) -> None:
        self.state.open_records.clear()
        self.opening.lost = True

    def _salvage(self, error: Damaged) -> None:
        self._lose_open_records()
        if self._target.log_id is None:
            return
        try:
            with closing(SalvagedSegment(self._target.segment, self._target.log_id, error)) as salvaged:
                for met in salvaged.batches(FIRST_BATCH, None):
                    if isinstance(met, DamagedBytes):
                        message = f"{met.length} bytes at {met.offset} of the raw segment cannot be read: {met.reason}"
                        self.error(salvaged.file_offset(met.offset), message)
                    elif isinstance(met, StoredBatch) and not met.header.is_control:
                        self._contents.add(met.position, met.header, met.route)
                        self.state.next_sequence = max(met.header.end_sequence, self.state.next_sequence)
                    elif isinstance(met, SkippedBatches):
                        self.state.next_sequence = max(met.next_sequence, self.state.next_sequence)
        except Damaged as other:
            if other is not error:
                self.damage(other)
            return
        self._count()

    def _frame(self, file: SealedFile, number: int, data: bytes) -> None:
        index, frame = file.index, file.index.frames[number]
        damage = next((span for span in index.damage if span[0] <= frame.raw_offset < sum(span)), None)
        if damage is not None:
            if damage[0] == frame.raw_offset:
                message = f"{damage[1]} bytes at {damage[0]} of the raw segment were damaged before it was sealed"
                self.error(frame.offset, message)
            return
        self._contents.end_frame()  # of the previous frame, which may have been damaged
        batches = file.batches(number, data)
        for batch in batches:
            self._batch(batch.position, batch.header, batch.route, batch.payload)
        if batches.end < len(data):
            message = f"at {batches.end} of frame {number}: {batches.rest.reason or 'zeros where a batch belongs'}"
            self.error(frame.offset, message)
            return
        span, held = self._contents.end_frame(), self._contents.routes()
        same_routes = {index.routes[i].route for i in frame.routes if i < len(index.routes)} == {
            held[i].route for i in span.routes
        }
        same_times = (span.earliest_ns, span.latest_ns) == (frame.earliest_ns, frame.latest_ns)
        if not same_routes or (span.routes and not same_times):
            self.error(frame.offset, f"the index describes frame {number} incorrectly")

    def _agrees(self, index: SealedIndex, digest: bytes) -> None:
        """Compare the frames with the index and the ledger."""
        # A segment without sequences, which wald repair may leave, has no ledger line.
        sha256 = self._target.sha256 if index.next_sequence > index.base_sequence else None
        if digest != index.sha256:
            self.error(0, f"the sha256 is {digest.hex()}, the index says {index.sha256.hex()}")
        if sha256 is None:
            self._info("the ledger has no line about it")
        elif digest.hex() in {sha256, *self._target.shrunk}:
            pass
        elif index.shrunk is not None and digest == index.sha256 and index.shrunk.sha256.hex() == sha256:
            self._info("the ledger has no line about its shrinking")
        else:
            self.error(0, f"the sha256 is {digest.hex()}, the ledger says {sha256}")
        try:
            table, peers = index.batch_table(), index.peers()
        except BadSealed as error:
            self.error(0, str(error))
            return
        held = self._contents.routes()
        if _columns(table, index.routes) != _columns(self._contents.table, held):
            self.error(0, "the batch table in the index does not match the frames")
        if (index.shrunk.ranges if index.shrunk else []) != list(self._contents.dropped):
            self.error(0, "the dropped records in the index do not match the frames")
        counted = {entry.route: entry for entry in index.routes}
        if counted != {entry.route: entry for entry in held} or index.next_sequence != self.state.next_sequence:
            self.error(0, "the counts in the index do not match the frames")
        if peers != self._contents.peers:
            self.error(0, "the peers in the index do not match the frames")

    def _check_name(self, found: SegmentHeader | SealedIndex) -> None:
        if self._target.log_id is not None and found.log_id != self._target.log_id:
            self.error(16, f"belongs to log {found.log_id.hex()}")
        if found.base_sequence != self._base:
            self.error(32, f"its header has segment {found.base_sequence}, its name {self._base}")

    def _batch(self, offset: int, header: BatchHeader, route: str, payload: memoryview) -> None:
        state = self.state
        self.opening.add(header, route, self._dropped)
        self._contents.add(offset, header, route, payload)
        if header.is_state:
            self._control(offset, header, payload)
        elif header.is_control and not header.is_dropped:
            try:
                decode_peer(payload)
            except BadControl as error:
                self.error(offset, f"the batch that introduces peer {header.peer} cannot be decoded: {error}")
            if header.count or header.base_sequence != state.next_sequence:
                self.error(offset, f"the batch that introduces peer {header.peer} has records, or is out of order")
        else:
            for message in () if header.is_dropped else payload_wrong(header, payload):
                self.error(offset, message)
            if header.base_sequence != state.next_sequence:
                self.error(offset, f"begins with record {header.base_sequence} instead of {state.next_sequence}")
            begun = state.open_records.get(route)
            if begun is not None and header.continues_sequence != begun:
                message = f"record {begun} of route {route} has not ended, and this batch does not continue it"
                self.error(offset, message)
        if header.append_time_ns < state.append_time_ns:
            self.error(offset, "its append time is earlier than that of the previous batch")
        state.apply(header, route, self._dropped)

    def _control(self, offset: int, header: BatchHeader, payload: memoryview) -> None:
        try:
            state = decode_state(payload)
        except BadControl as error:
            self.error(offset, f"the control state cannot be decoded: {error}")
            return
        self.opening.controls.append((state.routes, state.open_records))
        following, base = state.next_sequence, header.base_sequence
        if header.count or following != base:
            self.error(offset, f"the control state continues with record {following}, the batch with {base}")
        for route, last in self.state.routes.items():
            found = state.routes.get(route, 0)
            if last > found:
                self.error(offset, f"the last record of route {route} is {last}; the control state has {found}")
        for route, sequence in self.state.open_records.items():
            if state.open_records.get(route) != sequence:
                message = f"record {sequence} of route {route} has not ended; the control state does not list it"
                self.error(offset, message)

    def _count(self) -> None:
        """Report the number of intact batches and records."""
        message = f"{len(self._contents.table)} batches, {self.records} records"
        if dropped := sum(last - first + 1 for first, last in self._contents.dropped):
            message += f"; {dropped} records dropped"
        if any(found.level is Level.ERROR for found in self.findings):
            self._info(f"{message} are intact")
        else:
            self.findings.append(Finding(Level.OK, self._path, 0, message))


def _columns(table: BatchTable, routes: Sequence[RouteEntry]) -> list[Sequence[object]]:
    """Return the columns of a table with names of routes, because route ids may differ."""
    names = {number: entry.route for number, entry in enumerate(routes)}
    return [table.positions, table.bases, table.counts, table.times_ns, [names.get(i) for i in table.routes]]
