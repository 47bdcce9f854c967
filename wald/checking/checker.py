"""Check of one segment, batch by batch: checksums, digests, and the order of sequences, times and records.

A segment is checked against the state at the end of the previous one. To check segments in parallel, that state may be
:data:`NOTHING`, as for the first segment: :meth:`Checked.following` then returns the result for the actual state, or
None if the segment must be checked again, which only damage can cause. :class:`Opening` collects the facts for that.
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
from wald.format.sealed_index import BadSealed, BatchTable, Frame, RouteEntry, SealedIndex
from wald.format.segment import BadHeader, SparseIndex
from wald.segments.index_builder import SegmentIndexBuilder, find_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.segments.reader import SkippedBatches
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import SealedFile
from wald.segments.view import truncated


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    INFO = "info"
    """Not damage: for example leftovers of crashes and interrupted work."""
    ERROR = "error"
    """Bytes differ from those written, or two facts contradict each other."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Observation about one file, at ``offset`` bytes."""

    level: Level
    path: Path
    offset: int
    message: str

    @classmethod
    def of(cls, level: Level, path: Path, message: str) -> Self:
        """Return the finding for an error message, without its leading ``path`` and offset."""
        found = re.fullmatch(r"(?:offset (\d+): )?(.*)", message.removeprefix(f"{path}: "), re.DOTALL)
        assert found is not None, "the pattern matches any text"
        return cls(level, path, int(found[1] or 0), found[2])


_CONTINUES = int(Flag.CONTINUES)  # enums are slow
_ENDS_WITHOUT_NEWLINE = int(Flag.CONTINUED | Flag.UNTERMINATED)


def batch_wrong(
    header: BatchHeader, route: str, payload: memoryview, before: LogState, opening: Opening
) -> Iterator[str]:
    """Check a batch against its payload and ``before``; add a control batch to ``opening``."""
    if header.is_dropped:
        yield from _order_wrong(header, route, before)
    elif header.is_state:
        yield from _control_wrong(header, payload, before, opening)
    elif header.is_control:
        yield from _peer_wrong(header, payload, before)
    else:
        yield from payload_wrong(header, payload)
        yield from _order_wrong(header, route, before)
    if header.append_time_ns < before.append_time_ns:
        yield "its append time is earlier than that of the previous batch"


def payload_wrong(header: BatchHeader, payload: memoryview) -> Iterator[str]:
    if header.encoding == Encoding.COLUMNS:
        try:
            count = records.decode_columns(payload).count
        except records.BadColumns as error:
            yield f"the columns do not decode: {error}"
            return
    else:
        newlines = count_bytes(payload, b"\n") if payload else 0
        count = newlines + bool(header.flags & _ENDS_WITHOUT_NEWLINE) - bool(header.flags & _CONTINUES)
    if count != header.count:
        yield f"the header counts {header.count} records, the payload has {count}"


def _order_wrong(header: BatchHeader, route: str, before: LogState) -> Iterator[str]:
    if header.base_sequence != before.next_sequence:
        yield f"begins with record {header.base_sequence} instead of {before.next_sequence}"
    begun = before.open_records.get(route)
    if begun is not None and header.continues_sequence != begun:
        yield f"record {begun} of route {route} has not ended, and this batch does not continue it"


def _control_wrong(header: BatchHeader, payload: memoryview, before: LogState, opening: Opening) -> Iterator[str]:
    try:
        state = decode_state(payload)
    except BadControl as error:
        yield f"the control state does not decode: {error}"
        return
    opening.add_control(state)
    if header.count or state.next_sequence != header.base_sequence:
        yield f"the control state continues with record {state.next_sequence}, the batch with {header.base_sequence}"
    for route, last in before.routes.items():
        if last > state.routes.get(route, 0):
            yield f"the last record of route {route} is {last}; the control state has {state.routes.get(route, 0)}"
    for route, sequence in before.open_records.items():
        if state.open_records.get(route) != sequence:
            yield f"record {sequence} of route {route} has not ended; the control state does not list it"


def _peer_wrong(header: BatchHeader, payload: memoryview, before: LogState) -> Iterator[str]:
    try:
        decode_peer(payload)
    except BadControl as error:
        yield f"the batch that introduces peer {header.peer} does not decode: {error}"
    if header.count or header.base_sequence != before.next_sequence:
        yield f"the batch that introduces peer {header.peer} has records, or is out of order"


NOTHING = LogState(next_sequence=0, append_time_ns=-(1 << 63))
"""The state before the first segment."""


@dataclass(slots=True)
class Opening:
    """Facts in a segment that depend on the segments before it.

    Attributes:
        time_ns: append time of the first batch; None without a batch.
        continues: route → record that its first batch continues, or 0.
        lasts: route → last record, as all control batches state it; None without one.
        open_records: route → unfinished record, as all state it.
        dropped: route → last dropped sequence. Records open before may have ended up to there.
        lost: records are lost, or records of unknown routes were dropped, so that any open record may have ended.
    """

    time_ns: int | None = None
    continues: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, int] | None = None
    open_records: dict[str, int] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    lost: bool = False

    def add(self, header: BatchHeader, route: str, dropped: Mapping[str, int] | None) -> None:
        if self.time_ns is None:
            self.time_ns = header.append_time_ns
        if header.is_dropped and dropped is None:
            self.lost = True
        elif header.is_dropped and not self.dropped:
            self.dropped = {route: last for route, last in (dropped or {}).items() if route not in self.continues}
        if not header.is_control:
            self.continues.setdefault(route, header.continues_sequence)

    def add_control(self, state: LogState) -> None:
        """Keep the facts that all control batches agree on."""
        lasts, begun = state.routes, state.open_records
        if self.lasts is not None:
            lasts = {route: min(last, lasts.get(route, 0)) for route, last in self.lasts.items()}
        if self.open_records is not None:
            begun = {route: at for route, at in self.open_records.items() if begun.get(route) == at}
        self.lasts, self.open_records = lasts, begun

    def agrees(self, before: LogState) -> bool:
        """True if checks against ``before`` and :data:`NOTHING` have the same findings."""
        if self.time_ns is not None and self.time_ns < before.append_time_ns:
            return False
        if self.lost and before.open_records:
            return False
        for route, sequence in before.open_records.items():
            if self.open_records is not None and self.open_records.get(route) != sequence:
                return False
        for route, sequence in still_open(before.open_records, self.dropped).items():
            if self.continues.get(route, sequence) != sequence:
                return False
        lasts = self.lasts
        return lasts is None or all(last <= lasts.get(route, 0) for route, last in before.routes.items())

    def still_open(self, before: LogState) -> dict[str, int]:
        """Return the open records of ``before`` without a batch of their route here."""
        begun = still_open(before.open_records, self.dropped)
        return {route: at for route, at in begun.items() if route not in self.continues}


@dataclass(frozen=True, slots=True)
class SegmentToCheck:
    """
    Attributes:
        log_id: log that it must belong to; None if unknown.
        durable: position of the head, if the head is in this segment. Bytes after it are not checked.
        open_ended: the segment may end anywhere, because it is the newest and the head is missing.
        sha256: digest of its raw bytes when it was sealed, from the ledger; None if the ledger lacks it.
        shrunk: digests of its raw bytes after each shrinking, from the ledger.
        dropped: route → last dropped sequence, from the ledger, for segments whose index lacks it; None if unknown.
        end: position at which a raw segment was cut; 0 if unknown.
    """

    segment: Segment
    log_id: bytes | None
    durable: int | None = None
    open_ended: bool = False
    sha256: str | None = None
    shrunk: frozenset[str] = frozenset()
    dropped: Mapping[str, int] | None = field(default=None, hash=False)
    end: int = 0


@dataclass(frozen=True, slots=True)
class Checked:
    """
    Attributes:
        raw_bytes: uncompressed bytes that were checked.
        after: state at the end of the segment, given the state that it was checked against.
    """

    findings: tuple[Finding, ...]
    records: int
    raw_bytes: int
    after: LogState
    opening: Opening

    @property
    def errors(self) -> list[str]:
        return [found.message for found in self.findings if found.level is Level.ERROR]

    def following(self, before: LogState) -> Checked | None:
        """Return the result for ``before`` instead of :data:`NOTHING`; None if findings may differ."""
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
    """Check a segment against the state at the end of the previous one. Damage is never raised.

    Raises:
        FileNotFoundError: the segment was sealed or reclaimed in the meantime.
    """
    return _Check(target, before).run()


class _Check:
    def __init__(self, target: SegmentToCheck, before: LogState) -> None:
        self._target = target
        self._base = target.segment.base_sequence
        self._path = target.segment.path
        self._contents = SegmentIndexBuilder(self._base)
        self._opening = Opening()
        self._dropped = target.dropped
        self._wrong = False  # an error was found
        self._raw_bytes = 0
        self._state = LogState(self._base, before.append_time_ns, dict(before.routes), dict(before.open_records))

    def run(self) -> Checked:
        findings = tuple(self._findings())
        after = replace(self._state, producers=Producers())  # they are not checked
        return Checked(findings, self._records, self._raw_bytes, after, self._opening)

    @property
    def _records(self) -> int:
        return sum(self._contents.table.counts)

    def _findings(self) -> Iterator[Finding]:
        try:
            yield from self._raw() if self._target.segment.kind.form is Kind.RAW else self._sealed()
        except FileNotFoundError:
            raise
        except OSError as error:
            yield self._error(0, f"cannot be read ({error.strerror})")
        except Damaged as error:
            yield self._damaged(error)

    def _raw(self) -> Iterator[Finding]:
        durable = self._target.durable
        with open_file(self._path) as file:
            whole = RawFile(file.fileno(), index=self._index)
            yield from self._scan(RawFile(file.fileno(), limit=durable, index=self._index))
            if durable is not None:
                yield from self._behind(next(whole.scan(start=durable)))
        yield from self._sparse_index()
        yield self._held()

    def _scan(self, raw: RawFile) -> Iterator[Finding]:
        try:
            header = raw.header()
        except BadHeader as error:
            yield self._error(0, str(error))
        else:
            yield from self._belongs(header.log_id, header.base_sequence)
        for found in raw.scan():
            self._raw_bytes = found.offset
            if isinstance(found, SegmentEnd):
                yield from self._end(found)
            elif isinstance(found, DamagedBytes):
                yield self._error(found.offset, f"{found.length} bytes are no batch: {found.reason}")
            else:
                yield from self._batch(found.offset, found.header, found.route, memoryview(raw.payload(found)))

    def _end(self, end: SegmentEnd) -> Iterator[Finding]:
        durable = self._target.durable
        if durable is not None and end.offset < durable:
            yield self._error(end.offset, f"intact batches end before the head at {durable}")
        elif self._target.open_ended:
            yield from self._behind(end)
        elif end.garbage_bytes:
            message = f"{end.garbage_bytes} bytes after the last batch of a complete segment ({end.reason})"
            yield self._error(end.offset, message)
        elif end.offset < self._target.end:
            self._state.open_records.clear()
            self._opening.lost = True
            error = truncated(self._path, end.offset, self._target.end)
            found = self._damaged(error)
            yield replace(found, message=f"{found.message}; {error.hint}")

    def _behind(self, found: ScannedBatch | DamagedBytes | SegmentEnd) -> Iterator[Finding]:
        """Report bytes after the durable ones, which a running daemon writes or the last one did not finish."""
        if isinstance(found, SegmentEnd) and found.garbage_bytes:
            message = (
                f"{found.garbage_bytes} bytes of an unfinished write; the next start removes them ({found.reason})"
            )
            yield Finding(Level.INFO, self._path, found.offset, message)

    def _index(self) -> SparseIndex:
        return find_index(self._path.parent, self._target.log_id, self._base)

    def _sparse_index(self) -> Iterator[Finding]:
        index, path = self._index(), self._path.with_name(segment_name(self._base, Kind.INDEX))
        table = self._contents.table
        known = dict(zip(table.positions, zip(table.bases, table.times_ns, strict=True), strict=True))
        end = table.positions[-1] if table.positions else 0
        entries = zip(index.positions, index.sequences, index.times_ns, strict=True)
        wrong = [p for p, sequence, time_ns in entries if p <= end and known.get(p) != (sequence, time_ns)]
        if wrong:
            message = f"{len(wrong)} of {len(index.positions)} entries do not match a batch; readers skip them"
            yield Finding(Level.INFO, path, 0, message)

    def _sealed(self) -> Iterator[Finding]:
        try:
            file = SealedFile(self._path)
        except Damaged as error:
            yield self._damaged(error)
            yield from self._salvaged(error)
            return
        with file:
            index = file.index
            if index.shrunk is not None and index.shrunk.is_complete:
                self._dropped = index.shrunk.lasts
            yield from self._belongs(index.log_id, index.base_sequence)
            yield from self._frames(file)
        if self._path.with_name(segment_name(self._base, Kind.RAW)).exists():
            yield Finding(Level.INFO, self._path, 0, "the raw form is still there; the sealer removes it")
        yield self._held()

    def _frames(self, file: SealedFile) -> Iterator[Finding]:
        index, digest, whole = file.index, hashlib.sha256(), True
        for number in range(len(index.frames)):
            try:
                data = file.frame(number)
            except Damaged as error:
                whole = False
                yield from self._lost(file, number, error)
                continue
            digest.update(data)
            self._raw_bytes += len(data)
            yield from self._frame(file, number, data)
        if whole:
            yield from self._agrees(index, digest.digest())

    def _lost(self, file: SealedFile, number: int, error: Damaged) -> Iterator[Finding]:
        frame = file.index.frames[number]
        for batch in file.batches(number, file.readable_start(number)):
            yield from self._batch(batch.position, batch.header, batch.route, batch.payload)
        first = max(self._state.next_sequence, frame.first_sequence)
        self._state.open_records.clear()
        self._opening.lost = True
        self._state.next_sequence = max(first, frame.next_sequence)
        found = self._damaged(error)
        lost = f"records {first} to {frame.next_sequence - 1} cannot be read"
        lost = lost if first < frame.next_sequence else "no record is lost"
        yield replace(found, message=f"{lost}: {found.message}")

    def _salvaged(self, error: Damaged) -> Iterator[Finding]:
        self._state.open_records.clear()
        self._opening.lost = True
        if self._target.log_id is None:
            return
        try:
            with closing(SalvagedSegment(self._target.segment, self._target.log_id, error)) as salvaged:
                for met in salvaged.batches(FIRST_BATCH, None):
                    if isinstance(met, DamagedBytes):
                        message = f"{met.length} bytes at {met.offset} of the raw segment cannot be read: {met.reason}"
                        yield self._error(salvaged.file_offset(met.offset), message)
                    elif isinstance(met, StoredBatch) and not met.header.is_control:
                        self._contents.add(met.position, met.header, met.route)
                        self._state.next_sequence = max(met.header.end_sequence, self._state.next_sequence)
                    elif isinstance(met, SkippedBatches):
                        self._state.next_sequence = max(met.next_sequence, self._state.next_sequence)
        except Damaged as other:
            if other is not error:
                yield self._damaged(other)
            return
        yield self._held()

    def _frame(self, file: SealedFile, number: int, data: bytes) -> Iterator[Finding]:
        index, frame = file.index, file.index.frames[number]
        damage = next((span for span in index.damage if span[0] <= frame.raw_offset < sum(span)), None)
        if damage is not None:
            if damage[0] == frame.raw_offset:
                message = f"{damage[1]} bytes at {damage[0]} of the raw segment were damaged before it was sealed"
                yield self._error(frame.offset, message)
            return
        self._contents.end_frame()  # of the frame before, which may have been damaged
        batches = file.batches(number, data)
        for batch in batches:
            yield from self._batch(batch.position, batch.header, batch.route, batch.payload)
        if batches.end < len(data):
            message = f"at {batches.end} of frame {number}: {batches.rest.reason or 'zeros where a batch belongs'}"
            yield self._error(frame.offset, message)
        elif not self._is_described(index, frame):
            yield self._error(frame.offset, f"the index describes frame {number} incorrectly")

    def _is_described(self, index: SealedIndex, frame: Frame) -> bool:
        span, held = self._contents.end_frame(), self._contents.routes()
        names = {index.routes[i].route for i in frame.routes if i < len(index.routes)}
        if names != {held[i].route for i in span.routes}:
            return False
        return not span.routes or (span.earliest_ns, span.latest_ns) == (frame.earliest_ns, frame.latest_ns)

    def _agrees(self, index: SealedIndex, digest: bytes) -> Iterator[Finding]:
        # A segment without sequences, which wald repair may leave, has no line.
        sha256 = self._target.sha256 if index.next_sequence > index.base_sequence else None
        if digest != index.sha256:
            yield self._error(0, f"the sha256 is {digest.hex()}, the index says {index.sha256.hex()}")
        if sha256 is None:
            yield Finding(Level.INFO, self._path, 0, "the ledger has no line about it")
        elif digest.hex() in {sha256, *self._target.shrunk}:
            pass
        elif index.shrunk is not None and digest == index.sha256 and index.shrunk.sha256.hex() == sha256:
            yield Finding(Level.INFO, self._path, 0, "the ledger has no line about its shrinking")
        else:
            yield self._error(0, f"the sha256 is {digest.hex()}, the ledger says {sha256}")
        try:
            table, peers = index.batch_table(), index.peers()
        except BadSealed as error:
            yield self._error(0, str(error))
            return
        held = self._contents.routes()
        if not _same(table, index.routes, self._contents.table, held):
            yield self._error(0, "the batch table of the index differs from the frames")
        if (index.shrunk.ranges if index.shrunk else []) != list(self._contents.dropped):
            yield self._error(0, "the dropped records in the index differ from the frames")
        counted = {entry.route: entry for entry in index.routes}
        if counted != {entry.route: entry for entry in held} or index.next_sequence != self._state.next_sequence:
            yield self._error(0, "the counts in the index differ from the frames")
        if peers != self._contents.peers:
            yield self._error(0, "the peers in the index differ from the frames")

    def _belongs(self, log_id: bytes, base_sequence: int) -> Iterator[Finding]:
        if self._target.log_id is not None and log_id != self._target.log_id:
            yield self._error(16, f"belongs to log {log_id.hex()}")
        if base_sequence != self._base:
            yield self._error(32, f"its header has segment {base_sequence}, its name {self._base}")

    def _batch(self, offset: int, header: BatchHeader, route: str, payload: memoryview) -> Iterator[Finding]:
        self._opening.add(header, route, self._dropped)
        self._contents.add(offset, header, route, payload)
        wrong = list(batch_wrong(header, route, payload, self._state, self._opening))
        self._state.apply(header, route, self._dropped)
        for message in wrong:
            yield self._error(offset, message)

    def _held(self) -> Finding:
        """Count the contents; after an error, readers may not get all of them."""
        message = f"{len(self._contents.table)} batches, {self._records} records"
        if dropped := sum(last - first + 1 for first, last in self._contents.dropped):
            message += f"; {dropped} records dropped"
        if self._wrong:
            return Finding(Level.INFO, self._path, 0, f"{message} are intact")
        return Finding(Level.OK, self._path, 0, message)

    def _error(self, offset: int, message: str) -> Finding:
        self._wrong = True
        return Finding(Level.ERROR, self._path, offset, message)

    def _damaged(self, error: Damaged) -> Finding:
        self._wrong = True
        return Finding.of(Level.ERROR, self._path, error.message)


def _same(
    table: BatchTable, routes: Sequence[RouteEntry], other: BatchTable, other_routes: Sequence[RouteEntry]
) -> bool:
    """True if two tables have the same batches; their route numbers may differ."""
    names = {number: entry.route for number, entry in enumerate(routes)}
    return [names.get(i) for i in table.routes] == [other_routes[i].route for i in other.routes] and all(
        getattr(table, column) == getattr(other, column) for column in ("positions", "bases", "counts", "times_ns")
    )
