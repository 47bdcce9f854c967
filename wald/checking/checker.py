"""Check of one segment, batch by batch: checksums, digests, and the order of sequences, times and records.

A segment is checked against the log state at the end of the previous segment, or, to check segments in parallel,
against :data:`INITIAL_STATE`. :meth:`CheckResult.for_state` then returns the result for the actual state, or None if
the segment must be checked again, which only damage can cause.
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
    """Observation about one file, at a byte offset."""

    level: Level
    path: Path
    offset: int
    message: str

    @classmethod
    def of(cls, level: Level, path: Path, message: str) -> Self:
        """Create a finding from an error message that may begin with ``path`` and an offset."""
        match = re.fullmatch(r"(?:offset (\d+): )?(.*)", message.removeprefix(f"{path}: "), re.DOTALL)
        assert match is not None, "the pattern matches any text"
        return cls(level, path, int(match[1] or 0), match[2])


_CONTINUES = int(Flag.CONTINUES)  # ints are faster than enums
_ENDS_WITHOUT_NEWLINE = int(Flag.CONTINUED | Flag.UNTERMINATED)


def payload_errors(header: BatchHeader, payload: memoryview) -> Iterator[str]:
    """Yield an error if the payload does not have as many records as the header says."""
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
        yield f"the header counts {header.count} records, but the payload has {count}"


INITIAL_STATE = LogState(next_sequence=0, append_time_ns=-(1 << 63))
"""State before the first segment."""


@dataclass(slots=True)
class Opening:
    """Facts of a segment that must agree with the segments before it."""

    time_ns: int | None = None  # append time of the first batch
    continues: dict[str, int] = field(default_factory=dict)  # route → record that its first batch continues, or 0
    # Routes and open records of each control state.
    controls: list[tuple[dict[str, int], dict[str, int]]] = field(default_factory=list)
    dropped: Mapping[str, int] = field(default_factory=dict)  # route → last dropped record; see still_open()
    may_end_any: bool = False  # any open record may have ended in lost batches, or in dropped ones of unknown routes

    def add(self, header: BatchHeader, route: str, dropped: Mapping[str, int] | None) -> None:
        if self.time_ns is None:
            self.time_ns = header.append_time_ns
        if header.is_dropped and dropped is None:
            self.may_end_any = True
        elif dropped is not None and header.is_dropped and not self.dropped:
            self.dropped = {route: last for route, last in dropped.items() if route not in self.continues}
        if not header.is_control:
            self.continues.setdefault(route, header.continues_sequence)

    def agrees_with(self, before: LogState) -> bool:
        """Return True if checks against ``before`` and against :data:`INITIAL_STATE` have the same findings."""
        if self.time_ns is not None and self.time_ns < before.append_time_ns:
            return False
        if self.may_end_any and before.open_records:
            return False
        for routes, open_records in self.controls:
            if any(last > routes.get(route, 0) for route, last in before.routes.items()):
                return False
            if any(open_records.get(route) != at for route, at in before.open_records.items()):
                return False
        unfinished = still_open(before.open_records, self.dropped)
        return all(self.continues.get(route, at) == at for route, at in unfinished.items())

    def untouched_records(self, before: LogState) -> dict[str, int]:
        """Return the open records of ``before`` that no batch of the segment continues or ends."""
        unfinished = still_open(before.open_records, self.dropped)
        return {route: at for route, at in unfinished.items() if route not in self.continues}


@dataclass(frozen=True, slots=True)
class SegmentToCheck:
    """A segment with the facts needed to check it. Digests are of raw bytes."""

    segment: Segment
    log_id: bytes | None  # log that the segment must belong to; None if unknown
    durable: int | None = None  # position of the head, if in this segment; later bytes are not checked
    open_ended: bool = False  # the newest segment without a head may end anywhere
    sha256: str | None = None  # digest at sealing, from the ledger
    shrunk: frozenset[str] = frozenset()  # digests after each shrinking, from the ledger
    dropped: Mapping[str, int] | None = field(default=None, hash=False)  # route → last, by the ledger; None if unknown
    end: int = 0  # position where a raw segment was cut; 0 if unknown


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of checking a segment against a log state."""

    findings: tuple[Finding, ...]
    records: int
    raw_bytes: int
    end_state: LogState
    opening: Opening

    @property
    def errors(self) -> list[str]:
        return [finding.message for finding in self.findings if finding.level is Level.ERROR]

    def for_state(self, before: LogState) -> CheckResult | None:
        """Derive the result for ``before`` from a check against :data:`INITIAL_STATE`; None if findings may differ."""
        if not self.opening.agrees_with(before):
            return None
        end_state = replace(
            self.end_state,
            append_time_ns=max(before.append_time_ns, self.end_state.append_time_ns),
            routes=before.routes | self.end_state.routes,
            open_records=self.opening.untouched_records(before) | self.end_state.open_records,
        )
        return replace(self, end_state=end_state)


def check(target: SegmentToCheck, before: LogState = INITIAL_STATE) -> CheckResult:
    """Check a segment against the state before it. Report damage as findings; raise only FileNotFoundError."""
    checker = _SegmentChecker(target, before)
    try:
        if target.segment.kind.form is Kind.RAW:
            checker.check_raw()
        else:
            checker.check_sealed()
    except FileNotFoundError:
        raise
    except OSError as error:
        checker.add_error(0, f"cannot be read ({error.strerror})")
    except Damaged as error:
        checker.add_damage(error)
    end_state = replace(checker.state, producers=Producers())  # producers are not checked
    return CheckResult(tuple(checker.findings), checker.records, checker.raw_bytes, end_state, checker.opening)


class _SegmentChecker:
    def __init__(self, target: SegmentToCheck, before: LogState) -> None:
        self._target = target
        self._base = target.segment.base_sequence
        self._path = target.segment.path
        self._builder = SegmentIndexBuilder(self._base)
        self._dropped = target.dropped
        self.findings: list[Finding] = []
        self.opening = Opening()
        self.raw_bytes = 0
        self.state = LogState(self._base, before.append_time_ns, dict(before.routes), dict(before.open_records))

    @property
    def records(self) -> int:
        return sum(self._builder.table.counts)

    def add_error(self, offset: int, message: str) -> None:
        self.findings.append(Finding(Level.ERROR, self._path, offset, message))

    def add_damage(self, error: Damaged) -> None:
        self.findings.append(Finding.of(Level.ERROR, self._path, error.message))

    def _add_info(self, message: str, offset: int = 0) -> None:
        self.findings.append(Finding(Level.INFO, self._path, offset, message))

    def check_raw(self) -> None:
        durable = self._target.durable
        with open_file(self._path) as file:
            whole_file = RawFile(file.fileno(), index=self._read_sparse_index)
            raw = RawFile(file.fileno(), limit=durable, index=self._read_sparse_index)
            try:
                self._check_header(raw.header())
            except BadHeader as error:
                self.add_error(0, str(error))
            for item in raw.scan():
                self.raw_bytes = item.offset
                if isinstance(item, SegmentEnd):
                    self._check_end(item)
                elif isinstance(item, DamagedBytes):
                    self.add_error(item.offset, f"{item.length} bytes are not a batch: {item.reason}")
                else:
                    self._check_batch(item.offset, item.header, item.route, memoryview(raw.payload(item)))
            if durable is not None:
                self._report_unfinished_write(next(whole_file.scan(start=durable)))
        self._check_sparse_index()
        self._report_counts()

    def _check_end(self, end: SegmentEnd) -> None:
        durable = self._target.durable
        if durable is not None and end.offset < durable:
            self.add_error(end.offset, f"the intact batches end before the head at offset {durable}")
        elif self._target.open_ended:
            self._report_unfinished_write(end)
        elif end.garbage_bytes:
            message = f"{end.garbage_bytes} bytes follow the last batch of a complete segment ({end.reason})"
            self.add_error(end.offset, message)
        elif end.offset < self._target.end:
            self._lose_open_records()
            error = truncated_segment(self._path, end.offset, self._target.end)
            finding = Finding.of(Level.ERROR, self._path, error.message)
            self.add_error(finding.offset, f"{finding.message}; {error.hint}")

    def _report_unfinished_write(self, item: ScannedBatch | DamagedBytes | SegmentEnd) -> None:
        """Report an unfinished write after the durable bytes: the daemon is writing it, or was killed."""
        if isinstance(item, SegmentEnd) and item.garbage_bytes:
            message = f"{item.garbage_bytes} bytes of an unfinished write ({item.reason})"
            self._add_info(f"{message}; the next start of the daemon removes them", item.offset)

    def _read_sparse_index(self) -> SparseIndex:
        return find_index(self._path.parent, self._target.log_id, self._base)

    def _check_sparse_index(self) -> None:
        entries, path = self._read_sparse_index().entries, self._path.with_name(segment_name(self._base, Kind.INDEX))
        table = self._builder.table
        batches = dict(zip(table.positions, zip(table.bases, table.times_ns, strict=True), strict=True))
        end = table.positions[-1] if table.positions else 0
        mismatches = [at for sequence, at, time_ns in entries if at <= end and batches.get(at) != (sequence, time_ns)]
        if mismatches:
            message = f"{len(mismatches)} of {len(entries)} entries do not match a batch; readers skip them"
            self.findings.append(Finding(Level.INFO, path, 0, message))

    def check_sealed(self) -> None:
        try:
            file = SealedFile(self._path)
        except Damaged as error:
            self.add_damage(error)
            self._check_without_index(error)
            return
        with file:
            index, digest, is_readable = file.index, hashlib.sha256(), True
            if index.shrunk is not None and index.shrunk.is_complete:
                self._dropped = index.shrunk.last_by_route
            self._check_header(index)
            for number in range(len(index.frames)):
                try:
                    data = file.frame(number)
                except Damaged as error:
                    is_readable = False
                    self._check_damaged_frame(file, number, error)
                    continue
                digest.update(data)
                self.raw_bytes += len(data)
                self._check_frame(file, number, data)
            if is_readable:
                self._compare_with_index(index, digest.digest())
        if self._path.with_name(segment_name(self._base, Kind.RAW)).exists():
            self._add_info("the raw file still exists; the sealer removes it")
        self._report_counts()

    def _check_damaged_frame(self, file: SealedFile, number: int, error: Damaged) -> None:
        """Check a frame's readable start; report the lost records."""
        frame = file.index.frames[number]
        for batch in file.batches(number, file.readable_start(number)):
            self._check_batch(batch.position, batch.header, batch.route, batch.payload)
        first = max(self.state.next_sequence, frame.first_sequence)
        self._lose_open_records()
        self.state.next_sequence = max(first, frame.next_sequence)
        finding = Finding.of(Level.ERROR, self._path, error.message)
        loss = f"records {first} to {frame.next_sequence - 1} cannot be read"
        loss = loss if first < frame.next_sequence else "no record is lost"
        self.add_error(finding.offset, f"{loss}: {finding.message}")

    def _lose_open_records(self) -> None:
        self.state.open_records.clear()
        self.opening.may_end_any = True

    def _check_without_index(self, error: Damaged) -> None:
        """Check a sealed segment that cannot be opened because of ``error``."""
        self._lose_open_records()
        if self._target.log_id is None:
            return
        try:
            with closing(SalvagedSegment(self._target.segment, self._target.log_id, error)) as salvaged:
                for item in salvaged.batches(FIRST_BATCH, None):
                    if isinstance(item, DamagedBytes):
                        message = f"{item.length} bytes at raw offset {item.offset} cannot be read: {item.reason}"
                        self.add_error(salvaged.file_offset(item.offset), message)
                    elif isinstance(item, StoredBatch) and not item.header.is_control:
                        self._builder.add(item.position, item.header, item.route)
                        self.state.next_sequence = max(item.header.end_sequence, self.state.next_sequence)
                    elif isinstance(item, SkippedBatches):
                        self.state.next_sequence = max(item.next_sequence, self.state.next_sequence)
        except Damaged as other:
            if other is not error:
                self.add_damage(other)
            return
        self._report_counts()

    def _check_frame(self, file: SealedFile, number: int, data: bytes) -> None:
        index, frame = file.index, file.index.frames[number]
        damage = next((span for span in index.damage if span[0] <= frame.raw_offset < sum(span)), None)
        if damage is not None:
            if damage[0] == frame.raw_offset:
                message = f"{damage[1]} bytes at raw offset {damage[0]} were damaged before the segment was sealed"
                self.add_error(frame.offset, message)
            return
        self._builder.end_frame()  # of the previous frame, which may have been damaged
        batches = file.batches(number, data)
        for batch in batches:
            self._check_batch(batch.position, batch.header, batch.route, batch.payload)
        if batches.end < len(data):
            reason = batches.rest.reason or "zeros instead of a batch"
            self.add_error(frame.offset, f"offset {batches.end} of frame {number}: {reason}")
            return
        span, routes = self._builder.end_frame(), self._builder.routes()
        listed_routes = {index.routes[i].route for i in frame.routes if i < len(index.routes)}
        same_routes = listed_routes == {routes[i].route for i in span.routes}
        same_times = (span.earliest_ns, span.latest_ns) == (frame.earliest_ns, frame.latest_ns)
        if not same_routes or (span.routes and not same_times):
            self.add_error(frame.offset, f"the routes or times of frame {number} differ from those in the index")

    def _compare_with_index(self, index: SealedIndex, digest: bytes) -> None:
        # A segment without sequences, which wald repair may leave, has no ledger line.
        sha256 = self._target.sha256 if index.next_sequence > index.base_sequence else None
        if digest != index.sha256:
            self.add_error(0, f"the sha256 is {digest.hex()}, but the index says {index.sha256.hex()}")
        if sha256 is None:
            self._add_info("the ledger has no line about this segment")
        elif digest.hex() in {sha256, *self._target.shrunk}:
            pass
        elif index.shrunk is not None and digest == index.sha256 and index.shrunk.sha256.hex() == sha256:
            self._add_info("the ledger has no line about its shrinking")
        else:
            self.add_error(0, f"the sha256 is {digest.hex()}, but the ledger says {sha256}")
        try:
            table, peers = index.batch_table(), index.peers()
        except BadSealed as error:
            self.add_error(0, str(error))
            return
        routes = self._builder.routes()
        if _named_columns(table, index.routes) != _named_columns(self._builder.table, routes):
            self.add_error(0, "the batch table in the index does not match the frames")
        if (index.shrunk.ranges if index.shrunk else []) != list(self._builder.dropped):
            self.add_error(0, "the dropped records in the index do not match the frames")
        by_name = {entry.route: entry for entry in index.routes}
        if by_name != {entry.route: entry for entry in routes} or index.next_sequence != self.state.next_sequence:
            self.add_error(0, "the counts in the index do not match the frames")
        if peers != self._builder.peers:
            self.add_error(0, "the peers in the index do not match the frames")

    def _check_header(self, header: SegmentHeader | SealedIndex) -> None:
        if self._target.log_id is not None and header.log_id != self._target.log_id:
            self.add_error(16, f"belongs to log {header.log_id.hex()}")
        if header.base_sequence != self._base:
            self.add_error(32, f"contains segment {header.base_sequence}, but is named {self._base}")

    def _check_batch(self, offset: int, header: BatchHeader, route: str, payload: memoryview) -> None:
        state = self.state
        self.opening.add(header, route, self._dropped)
        self._builder.add(offset, header, route, payload)
        if header.is_state:
            self._check_control_state(offset, header, payload)
        elif header.is_control and not header.is_dropped:
            try:
                decode_peer(payload)
            except BadControl as error:
                self.add_error(offset, f"the batch that introduces peer {header.peer} cannot be decoded: {error}")
            if header.count or header.base_sequence != state.next_sequence:
                self.add_error(offset, f"the batch that introduces peer {header.peer} has records, or is out of order")
        else:
            for message in () if header.is_dropped else payload_errors(header, payload):
                self.add_error(offset, message)
            if header.base_sequence != state.next_sequence:
                self.add_error(offset, f"begins with record {header.base_sequence} instead of {state.next_sequence}")
            unfinished = state.open_records.get(route)
            if unfinished is not None and header.continues_sequence != unfinished:
                message = f"record {unfinished} of route {route} is unfinished, but this batch does not continue it"
                self.add_error(offset, message)
        if header.append_time_ns < state.append_time_ns:
            self.add_error(offset, "the append time is earlier than that of the previous batch")
        state.apply(header, route, self._dropped)

    def _check_control_state(self, offset: int, header: BatchHeader, payload: memoryview) -> None:
        try:
            state = decode_state(payload)
        except BadControl as error:
            self.add_error(offset, f"the control state cannot be decoded: {error}")
            return
        self.opening.controls.append((state.routes, state.open_records))
        next_sequence, base = state.next_sequence, header.base_sequence
        if header.count or next_sequence != base:
            message = f"the control state continues with record {next_sequence}, but the batch with record {base}"
            self.add_error(offset, message)
        for route, last in self.state.routes.items():
            stated = state.routes.get(route, 0)
            if last > stated:
                message = f"the last record of route {route} is {last}, but the control state says {stated}"
                self.add_error(offset, message)
        for route, sequence in self.state.open_records.items():
            if state.open_records.get(route) != sequence:
                message = f"record {sequence} of route {route} is unfinished, but the control state does not list it"
                self.add_error(offset, message)

    def _report_counts(self) -> None:
        is_damaged = any(finding.level is Level.ERROR for finding in self.findings)
        message = f"{len(self._builder.table)} batches, {self.records} records{' are intact' * is_damaged}"
        if dropped := sum(last - first + 1 for first, last in self._builder.dropped):
            message += f"; {dropped} records were dropped"
        self.findings.append(Finding(Level.INFO if is_damaged else Level.OK, self._path, 0, message))


def _named_columns(table: BatchTable, routes: Sequence[RouteEntry]) -> list[Sequence[object]]:
    """Return a table's columns with route names, because route ids may differ."""
    names = {number: entry.route for number, entry in enumerate(routes)}
    return [table.positions, table.bases, table.counts, table.times_ns, [names.get(i) for i in table.routes]]
