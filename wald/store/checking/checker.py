"""Checking one segment: its checksums and digests, and that sequences, times and records go on inside it.

What depends on the segments before it is checked against the state that they leave behind. A segment that is checked
before they are is checked against :data:`NOTHING`, as the first one is; :meth:`Checked.following`
says afterwards what comes of it behind the others. Where it cannot, the segment has to be checked again, against what
really came before: that happens to damaged logs only, and the findings are the same either way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from stringzilla import count as count_bytes

from wald.errors import Damaged
from wald.format import columns
from wald.format.batch import BatchHeader, Encoding, Flag
from wald.format.index import SparseIndex
from wald.format.names import Kind, segment_name
from wald.format.parsing import Batches, StoredBatch
from wald.format.sealed import BadSealed, SealedIndex
from wald.format.segment import BadHeader
from wald.format.state import BadControl, LogState, Producers, decode_state
from wald.store.checking.finding import Finding, Level
from wald.store.checking.opening import NOTHING, Opening
from wald.store.files.directory import Segment
from wald.store.files.regular import open_file
from wald.store.segments.compression import SealedFile
from wald.store.segments.contents import Contents
from wald.store.segments.indexes import read_index
from wald.store.segments.raw import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.store.segments.salvage import SalvagedSegment

_CONTINUES, _CONTINUED = int(Flag.CONTINUES), int(Flag.CONTINUED)  # enums are slow
_ENDS_WITHOUT_NEWLINE = int(Flag.CONTINUED | Flag.UNTERMINATED)


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment, and what has to be known of it from elsewhere.

    Attributes:
        log_id: of the log it must belong to; None if nobody knows.
        durable: where in it the head stands, if it does: what is behind is not read.
        endless: whether nobody knows where it has to end: it is the newest, and there is no head.
        sha256: of its raw bytes by the ledger; None if that does not tell.
    """

    segment: Segment
    log_id: bytes | None
    durable: int | None = None
    endless: bool = False
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of a check.

    Attributes:
        raw_bytes: how much there was to read, before it was compressed.
        after: what the segment leaves behind, given what it was checked against.
    """

    findings: tuple[Finding, ...]
    records: int
    raw_bytes: int
    after: LogState
    opening: Opening

    def following(self, before: LogState) -> Checked | None:
        """The same, had it been checked against ``before`` and not against nothing; None if that may find more."""
        if not self.opening.agrees(before):
            return None
        after = replace(
            self.after,
            append_time_ns=max(before.append_time_ns, self.after.append_time_ns),
            routes=before.routes | self.after.routes,
            open_records=self.opening.going_on(before) | self.after.open_records,
        )
        return replace(self, after=after)


def check(piece: Piece, before: LogState = NOTHING) -> Checked:
    """Read a segment to its end, and tell what is there; whatever the bytes, that is no error.

    Args:
        before: what the segments before it leave behind.

    Raises:
        FileNotFoundError: it is gone: sealed or reclaimed meanwhile.
    """
    return _Check(piece, before).run()


class _Check:
    """One pass over a segment."""

    def __init__(self, piece: Piece, before: LogState) -> None:
        self._piece = piece
        self._base = piece.segment.base_sequence
        self._path = piece.segment.path
        self._contents = Contents(self._base, salt=0)
        self._opening = Opening()
        self._wrong = False  # whether any error was found
        self._raw_bytes = 0
        self._state = LogState(self._base, before.append_time_ns, dict(before.routes), dict(before.open_records))

    def run(self) -> Checked:
        findings = tuple(self._findings())
        after = replace(self._state, producers=Producers())  # which nobody checks
        return Checked(findings, self._records, self._raw_bytes, after, self._opening)

    @property
    def _records(self) -> int:
        return sum(self._contents.table.counts)

    def _findings(self) -> Iterator[Finding]:
        try:
            yield from self._raw() if self._piece.segment.kind.form is Kind.RAW else self._sealed()
        except FileNotFoundError:
            raise
        except OSError as error:
            yield self._error(0, f"cannot be read ({error.strerror})")
        except Damaged as error:
            yield self._damaged(error)

    def _raw(self) -> Iterator[Finding]:
        durable = self._piece.durable
        with open_file(self._path) as file:
            whole = RawFile(file.fileno(), index=self._index)
            limit = whole.limit if durable is None else min(durable, whole.limit)
            raw = RawFile(file.fileno(), limit=limit, index=self._index)
            try:
                header = raw.header()
            except BadHeader as error:
                yield self._error(0, str(error))
            else:
                yield from self._belongs(header.log_id, header.base_sequence)
            for found in raw.scan():
                self._raw_bytes = found.offset
                if isinstance(found, SegmentEnd):
                    yield from self._tail(found)
                elif isinstance(found, DamagedBytes):
                    yield self._error(found.offset, f"{found.length} bytes are no batch: {found.reason}")
                else:
                    payload = memoryview(raw.payload(found))
                    yield from self._batch(found.offset, found.header, found.route, payload)
            if durable is not None:
                yield from self._behind(next(whole.scan(start=durable)))
        yield from self._sparse_index()
        yield self._held()

    def _tail(self, tail: SegmentEnd) -> Iterator[Finding]:
        durable = self._piece.durable
        if durable is not None and tail.offset < durable:
            yield self._error(tail.offset, f"good batches end before the head, at {durable}")
        elif self._piece.endless:
            yield from self._behind(tail)
        elif tail.garbage_bytes:
            words = f"{tail.garbage_bytes} bytes behind the last batch of a complete segment ({tail.reason})"
            yield self._error(tail.offset, words)

    def _behind(self, found: ScannedBatch | DamagedBytes | SegmentEnd) -> Iterator[Finding]:
        """What stands where nothing is durable: what a running daemon writes, or what the last one has left."""
        if isinstance(found, SegmentEnd) and found.garbage_bytes:
            words = f"{found.garbage_bytes} bytes of an unfinished write; the next start cuts them ({found.reason})"
            yield Finding(Level.INFO, self._path, found.offset, words)

    def _index(self) -> SparseIndex | None:
        path = self._path.with_name(segment_name(self._base, Kind.INDEX))
        return read_index(path, self._piece.log_id or b"", self._base)

    def _sparse_index(self) -> Iterator[Finding]:
        index = self._index()
        if index is None:
            return
        path = self._path.with_name(segment_name(self._base, Kind.INDEX))
        table = self._contents.table
        known = dict(zip(table.positions, zip(table.bases, table.times_ns, strict=True), strict=True))
        end = table.positions[-1] if table.positions else 0
        entries = zip(index.positions, index.sequences, index.times_ns, strict=True)
        wrong = [p for p, sequence, time_ns in entries if p <= end and known.get(p) != (sequence, time_ns)]
        if wrong:
            words = f"{len(wrong)} of {len(index.positions)} entries point at no such batch; readers pass over them"
            yield Finding(Level.INFO, path, 0, words)

    def _sealed(self) -> Iterator[Finding]:
        try:
            file = SealedFile(self._path)
        except Damaged as error:
            yield self._damaged(error)
            yield from self._salvaged(error)
            return
        with file:
            index = file.index
            yield from self._belongs(index.log_id, index.base_sequence)
            digest, whole = hashlib.sha256(), True
            for number, frame in enumerate(index.frames):
                try:
                    data = file.frame(number)
                except Damaged as error:
                    whole = False
                    told = self._damaged(error)
                    last = frame.next_sequence - 1
                    words = f"records {frame.first_sequence} to {last} cannot be read: {told.message}"
                    yield replace(told, message=words)
                    self._state.open_records.clear()
                    self._opening.lost = True
                    self._state.next_sequence = max(self._state.next_sequence, frame.next_sequence)
                    continue
                digest.update(data)
                self._raw_bytes += len(data)
                yield from self._frame(index, number, data)
            if whole:
                yield from self._agrees(index, digest.digest())
        if self._path.with_name(segment_name(self._base, Kind.RAW)).exists():
            yield Finding(Level.INFO, self._path, 0, "the raw form is still there; the sealer removes it")
        yield self._held()

    def _salvaged(self, error: Damaged) -> Iterator[Finding]:
        """What readers still get of a segment whose index cannot be trusted."""
        self._state.open_records.clear()
        self._opening.lost = True
        if self._piece.log_id is None:
            return
        try:
            with closing(SalvagedSegment(self._piece.segment, self._piece.log_id, error)) as salvaged:
                for met in salvaged.batches(FIRST_BATCH, None):
                    if isinstance(met, DamagedBytes):
                        words = f"{met.length} bytes at {met.offset} of the raw segment cannot be read: {met.reason}"
                        yield self._error(salvaged.file_offset(met.offset), words)
                    elif isinstance(met, StoredBatch) and not met.header.is_control:
                        self._contents.add(met.position, met.header, met.route)
                        self._state.next_sequence = max(met.header.end_sequence, self._state.next_sequence)
        except Damaged as other:
            if other is not error:
                yield self._damaged(other)
            return
        yield self._held()

    def _frame(self, index: SealedIndex, number: int, data: bytes) -> Iterator[Finding]:
        frame = index.frames[number]
        for position, length in index.damage:
            if position <= frame.raw_offset < position + length:
                if position == frame.raw_offset:
                    words = f"{length} bytes at {position} of the raw segment were damaged before it was sealed"
                    yield self._error(frame.offset, words)
                return
        at = FIRST_BATCH if number == 0 else 0
        self._contents.take()  # of the frame before, which may have been damaged
        batches = Batches(data, at, position=frame.raw_offset, salt=index.salt)
        for batch in batches:
            yield from self._batch(batch.position, batch.header, batch.route, batch.payload)
        if batches.end < len(data):
            words = f"at {batches.end} of frame {number}: {batches.rest.reason or 'zeros where a batch belongs'}"
            yield self._error(frame.offset, words)
            return
        span, held = self._contents.take(), self._contents.routes()
        names = {index.routes[i].route for i in frame.routes if i < len(index.routes)}
        wrong = names != {held[i].route for i in span.routes}
        if span.routes:
            wrong = wrong or (span.earliest_ns, span.latest_ns) != (frame.earliest_ns, frame.latest_ns)
        if wrong:
            yield self._error(frame.offset, f"the index is wrong about frame {number}")

    def _agrees(self, index: SealedIndex, digest: bytes) -> Iterator[Finding]:
        """Index and ledger against what the frames hold."""
        contents, told = self._contents, self._piece.sha256
        if digest != index.sha256:
            yield self._error(0, f"the sha256 is {digest.hex()}, the index says {index.sha256.hex()}")
        if told is None:
            yield Finding(Level.INFO, self._path, 0, "the ledger does not tell of it")
        elif told != digest.hex():
            yield self._error(0, f"the sha256 is {digest.hex()}, the ledger says {told}")
        try:
            table = index.batch_table()
        except BadSealed as error:
            yield self._error(0, str(error))
            return
        names = {number: entry.route for number, entry in enumerate(index.routes)}
        held = contents.routes()
        same = [names.get(i) for i in table.routes] == [held[i].route for i in contents.table.routes]
        for column in ("positions", "bases", "counts", "times_ns"):
            same = same and getattr(table, column) == getattr(contents.table, column)
        if not same:
            yield self._error(0, "the index's batch table is not that of the frames")
        counted = {entry.route: entry for entry in index.routes}
        if counted != {entry.route: entry for entry in held} or index.next_sequence != self._state.next_sequence:
            yield self._error(0, "the index's counts are not those of the frames")

    def _belongs(self, log_id: bytes, base_sequence: int) -> Iterator[Finding]:
        if self._piece.log_id is not None and log_id != self._piece.log_id:
            yield self._error(16, f"belongs to log {log_id.hex()}")
        if base_sequence != self._base:
            yield self._error(32, f"is segment {base_sequence} by its header and {self._base} by its name")

    def _batch(self, offset: int, header: BatchHeader, route: str, payload: memoryview) -> Iterator[Finding]:
        """A batch whose checksums hold: does it say what its payload does, and does it follow the one before it?"""
        wrong: list[str] = []
        self._opening.meet(header, route)
        if header.is_control:
            wrong += self._control_wrong(header, payload)
        else:
            wrong += _payload_wrong(header, payload)
            wrong += self._order_wrong(header, route)
            self._contents.add(offset, header, route)
        if header.append_time_ns < self._state.append_time_ns:
            wrong.append("its append time is before that of the batch before it")
        self._state.apply(header, route)
        for words in wrong:
            yield self._error(offset, words)

    def _order_wrong(self, header: BatchHeader, route: str) -> Iterator[str]:
        if header.base_sequence != self._state.next_sequence:
            yield f"begins with record {header.base_sequence}; {self._state.next_sequence} is due"
        begun = self._state.open_records.get(route)
        if begun is not None and header.continues_sequence != begun:
            yield f"record {begun} of route {route} has not ended, and this batch does not continue it"

    def _control_wrong(self, header: BatchHeader, payload: memoryview) -> Iterator[str]:
        try:
            state = decode_state(payload)
        except BadControl as error:
            yield f"the control state does not decode: {error}"
            return
        self._opening.meet_control(state)
        if header.count or state.next_sequence != header.base_sequence:
            yield f"the control state goes on with record {state.next_sequence}, the batch with {header.base_sequence}"
        for route, last in self._state.routes.items():
            if last > state.routes.get(route, 0):
                yield f"the control state has record {state.routes.get(route, 0)} as route {route}'s last; {last} is"
        for route, sequence in self._state.open_records.items():
            if state.open_records.get(route) != sequence:
                yield f"the control state does not know that record {sequence} of route {route} has not ended"

    def _held(self) -> Finding:
        """How much there is, which is good if nothing else was wrong; under a wrong name readers do not get it."""
        words = f"{len(self._contents.table)} batches, {self._records} records"
        if self._wrong:
            return Finding(Level.INFO, self._path, 0, f"{words} in it are whole")
        return Finding(Level.OK, self._path, 0, words)

    def _error(self, offset: int, message: str) -> Finding:
        self._wrong = True
        return Finding(Level.ERROR, self._path, offset, message)

    def _damaged(self, error: Damaged) -> Finding:
        self._wrong = True
        return Finding.of(Level.ERROR, self._path, error.message)


def _payload_wrong(header: BatchHeader, payload: memoryview) -> Iterator[str]:
    """What the header says of the payload against the payload."""
    if header.encoding == Encoding.COLUMNS:
        try:
            count = columns.decode(payload).count
        except columns.BadColumns as error:
            yield f"the columns do not decode: {error}"
            return
    else:
        newlines = count_bytes(payload, b"\n") if payload else 0
        count = newlines + bool(header.flags & _ENDS_WITHOUT_NEWLINE) - bool(header.flags & _CONTINUES)
    if count != header.count:
        yield f"the header counts {header.count} records, the payload has {count}"
