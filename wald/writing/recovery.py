"""Recovery of the log when a daemon starts: examine the newest segment, decide, repair, report.

Only the newest raw segment can be unfinished: a segment is named only after the previous one was complete. A scan of
this one segment rebuilds the state of the log. Bytes after the last good batch are copied to ``quarantine/`` and
truncated. The writer never appends to an old segment.

Errors in the report are losses of durable bytes, which a crash cannot cause. The daemon starts despite errors, and
never reuses lost sequences.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from wald.errors import Damaged, UnsupportedFormat
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root
from wald.files.listing import Segment, list_segments
from wald.files.safe_open import open_file
from wald.files.uptime import boot_id, read_steps, step_between
from wald.format.batch import FRAMING_BYTES, BatchHeader, Flag, ParseOutcome, StoredBatch, padded
from wald.format.log_state import BadControl, LogState, PreviousEnd, decode_state, encode_state
from wald.format.names import Kind, segment_name
from wald.format.segment import BadHeader, NewerVersion
from wald.hints import hint_for
from wald.segments.durable_end import readable_head
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.segments.reader import Misplaced, identify, require_matching_name
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import SealedFile
from wald.segments.view import no_segment
from wald.writing.daemon_lock import require_own_files
from wald.writing.run_reports import describe_last_end
from wald.writing.sequence_floor import find_floor, is_given_up, last_sealed

_BARRIER = int(Flag.BARRIER)  # ints are faster than enums
REPORTS_KEPT = 32
_EPOCH = re.compile(r"[0-9]{1,10}")  # a repair adds 16 digits of a hash


class Header(Enum):
    """State of the segment's header."""

    OURS = "ours"
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # intact, but of another log or segment
    NEWER = "newer"  # intact, but of a newer wald


class Content(Enum):
    """Contents of the segment's good batches."""

    NOTHING = "nothing"  # not even the control batch
    CONTROL = "control"
    PIECES = "pieces"  # of an earlier segment's record; no sequence is used
    RECORDS = "records"


class Fate(StrEnum):
    """Treatment of the newest raw segment."""

    CUT = "cut"  # complete; the sealer seals it
    CARRY = "carry"  # no sequence is used, so the next segment takes the name and a copy of the pieces
    REPLACE = "replace"  # no record, so the next segment takes the name
    QUARANTINE = "quarantine"  # nothing is readable
    REFUSE = "refuse"  # the start fails


_FATES = {
    Content.NOTHING: Fate.QUARANTINE,
    Content.CONTROL: Fate.REPLACE,
    Content.PIECES: Fate.CARRY,
    Content.RECORDS: Fate.CUT,
}


def decide_fate(header: Header, content: Content) -> Fate:
    return Fate.REFUSE if header in (Header.FOREIGN, Header.NEWER) else _FATES[content]


@dataclass(slots=True)
class Report:
    """Findings and actions of one start, as written to ``recovery/<epoch>.json``."""

    epoch: int
    at_ns: int
    life: str = field(default_factory=lambda: secrets.token_hex(16))  # unique even among copies of the log
    boot: str = ""
    before: str = ""
    segment: str = ""
    fate: str = ""
    scanned_bytes: int = 0
    scanned_batches: int = 0
    trimmed_bytes: int = 0
    kept_in: str = ""
    next_sequence: int = 1
    seconds: float = 0.0
    skipped: tuple[int, int, str] | None = None  # first, last, reason
    given_up: bool = False
    info: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    pid: int = 0
    host: str = ""
    started: str = ""
    software: str = ""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovered:
    """State and segment with which the writer starts."""

    state: LogState
    carry: tuple[Path, int] | None  # see :class:`wald.writing.writer.Writer`
    report: Report


def recover(
    root: Root, disk: Disk, *, log_id: bytes, epoch: int, now_ns: int, about: Mapping[str, Any] | None = None
) -> Recovered:
    """Repair ``root`` for writing and write a report that includes ``about``. A crash at any step does no harm."""
    started = time.monotonic()
    require_own_files(root)
    for leftover in (*root.recovery.glob(f"*{TEMPORARY}"), *root.quarantine.glob(f"*{TEMPORARY}")):
        disk.unlink(leftover)
    report = Report(epoch, now_ns, boot=boot_id(), before=describe_last_end(root), **(about or {}))
    state, carry = _Recovery(root, disk, log_id, report).run()
    for name in root.route_names():
        state.routes.setdefault(name, 0)
    report.next_sequence = state.next_sequence
    report.seconds = round(time.monotonic() - started, 6)
    disk.replace(root.report(epoch), json.dumps(asdict(report), indent=2).encode() + b"\n")
    for old in sorted(root.recovery.glob("*.json"))[:-REPORTS_KEPT]:
        disk.unlink(old)
    return Recovered(state, carry, report)


class _Recovery:
    """Steps of one recovery, in the order of :meth:`run`."""

    def __init__(self, root: Root, disk: Disk, log_id: bytes, report: Report) -> None:
        self._root = root
        self._disk = disk
        self._log_id = log_id
        self._report = report
        self._listing = list_segments(root)
        segments = self._listing.segments
        self._newest = segments[-1] if segments else None
        self._older = segments[-2] if len(segments) > 1 else None
        self._head = readable_head(root)
        self._newest_end: PreviousEnd | None = None  # of a raw newest segment

    def run(self) -> tuple[LogState, tuple[Path, int] | None]:
        self._require_mounted()
        self._check_segment_names()
        report, newest = self._report, self._newest
        if newest is not None and newest.kind is Kind.RAW:
            state, carry = self._repair(newest)
        else:
            state, carry = state_after(newest, self._log_id, report.errors), None
        first = _lowest_step_base(self._older if report.fate == Fate.QUARANTINE else newest, state)
        recovered_next = state.next_sequence
        self._skip_acknowledged(state)
        if state.next_sequence == recovered_next:
            self._skip_after_lost_pieces(state)
        self._skip_named(state)
        _replay_clock_step(self._root, state, first, state.next_sequence)
        name_is_needed = report.fate in (Fate.CARRY, Fate.REPLACE)
        if name_is_needed and newest is not None and state.next_sequence > newest.base_sequence:
            # The next segment begins after the skipped sequences, so it has another name.
            carry, report.fate = None, Fate.CUT
            state.previous = self._newest_end
        return state, carry

    def _require_mounted(self) -> None:
        """Raise Damaged if the head names a record but no segment exists: ``segments/`` may not be mounted.

        Nothing is wrong if a repair gave up the segment or a start moved it away.
        """
        head, root = self._head, self._root
        if self._newest or self._listing.released or head is None or not head.sequence:
            return
        # A later start may have moved the segment away before it was killed.
        name = segment_name(head.segment, Kind.RAW)
        copies = chain.from_iterable(each.glob(f"{name}.*") for each in (root.quarantine, root.segments))
        epochs = (path.name.removeprefix(f"{name}.") for path in copies)
        was_moved = any(_EPOCH.fullmatch(epoch) and int(epoch) > head.epoch for epoch in epochs)
        if not was_moved and not is_given_up(root, head.sequence, head.sequence):
            raise no_segment(root, head.sequence, starting=True)

    def _check_segment_names(self) -> None:
        """Report older segment files that contain another segment than their names say.

        Raise Damaged if the newest file does, unless it is raw: :meth:`_repair` refuses that. Older sealed files are
        not checked, because opening them takes too long.
        """
        for segment in self._listing.segments:
            if segment is not self._newest and segment.kind is not Kind.RAW:
                continue
            try:
                require_matching_name(segment, self._log_id)
            except Misplaced as error:
                if segment is not self._newest:
                    hint = hint_for("segments-misnamed", root=self._root.path)
                    self._report.errors.append(f"{error.message}; {hint}")
                    continue
                form, _ = identify(segment.path) or (Kind.RAW, None)
                if Kind.SEALED in (segment.kind, form):
                    raise Damaged(error.message, case="newest-segment-misnamed", root=self._root.path) from error
            except OSError:  # the next open reports it
                continue

    def _repair(self, newest: Segment) -> tuple[LogState, tuple[Path, int] | None]:
        """Make the newest raw segment durable up to its last good batch, or move it away if unreadable."""
        report, path, head = self._report, newest.path, self._head
        durable_bytes = head.position if head is not None and head.segment == newest.base_sequence else 0
        facts = self._examine(newest, durable_bytes)
        end, fate = facts.tail.offset, decide_fate(facts.header, facts.content)
        report.segment, report.fate = path.name, fate
        report.scanned_bytes, report.scanned_batches = end, facts.batches
        if fate is Fate.REFUSE:
            if facts.header is Header.NEWER:
                raise UnsupportedFormat(f"{path}: offset 0: {facts.reason}", case="newer-format")
            raise Damaged(f"{path}: offset 0: {facts.reason}", case="newest-segment-refused", directory=path.parent)
        if facts.header is Header.DAMAGED:
            report.errors.append(f"{path}: offset 0: {facts.reason}")
        for gap in facts.gaps:
            report.errors.append(f"{path}: offset {gap.offset}: {gap.length} bytes are damaged ({gap.reason})")
        if durable_bytes > end:
            report.errors.append(f"{path}: offset {end}: {durable_bytes - end} durable bytes are missing")
        if fate is Fate.QUARANTINE:
            self._quarantine(path)
            return state_after(self._older, self._log_id, report.errors), None
        if facts.tail.garbage_bytes:
            self._save_torn_end(path, facts.tail)
        # Sync even without a torn end: good batches may not be durable yet, and readers see them after this start.
        descriptor = self._disk.open(path)
        try:
            self._disk.truncate(descriptor, max(end, FIRST_BATCH))
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)
        self._newest_end = PreviousEnd(facts.salt, end)
        if fate is Fate.CUT:
            facts.state.previous = self._newest_end
        return facts.state, (path, end) if fate is Fate.CARRY else None

    def _quarantine(self, path: Path) -> None:
        target = self._root.quarantine / f"{path.name}.{self._report.epoch}"
        try:
            self._disk.rename(path, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            target = path.with_name(target.name)
            self._disk.rename(path, target)
        self._disk.sync_directory(target.parent)
        self._disk.sync_directory(self._root.segments)
        self._report.kept_in = str(target.relative_to(self._root.path))
        self._report.errors.append(f"{path}: no part of the segment is readable; it was moved to {target}")

    def _save_torn_end(self, path: Path, tail: SegmentEnd) -> None:
        """Durably copy the bytes after the last good batch to ``quarantine/`` before they are truncated."""
        report, quarantine = self._report, self._root.quarantine
        # With the epoch: a later segment of this name may be torn there too.
        copy = quarantine / f"{path.name}.{tail.offset}.{report.epoch}.torn"
        copy_durably(self._disk, path, copy, tail.offset, tail.garbage_bytes)
        self._disk.sync_directory(quarantine)
        report.trimmed_bytes, report.kept_in = tail.garbage_bytes, str(copy.relative_to(self._root.path))
        report.info.append(
            f"{path}: offset {tail.offset}: {tail.garbage_bytes} bytes of an unfinished write were cut ({tail.reason})"
        )

    def _skip_acknowledged(self, state: LogState) -> None:
        """Raise the next sequence above every acknowledged sequence, even of lost records."""
        head, newest = self._head, self._newest
        floor = max(head.sequence if head else 0, last_sealed(self._root, next_sequence=state.next_sequence)) + 1
        if newest is not None:
            # A sealed segment has a record, even if it is unreadable; a raw segment may have none.
            floor = max(floor, newest.base_sequence + (newest.kind is Kind.SEALED))
        if floor > state.next_sequence:
            first, last = state.next_sequence, floor - 1
            message = f"{self._root.path}: acknowledged records {first} to {last} are missing"
            if is_given_up(self._root, first, last):
                self._report.given_up = True
                self._report.info.append(f"{message}; a repair gave them up")
            else:
                self._report.errors.append(message)
            state.next_sequence = floor

    def _skip_after_lost_pieces(self, state: LogState) -> None:
        """Skip one sequence if pieces of a record are lost, so that readers do not join the rest."""
        head, newest, report = self._head, self._newest, self._report
        if not state.open_records or head is None or newest is None or head.segment < newest.base_sequence:
            return
        if head.segment == newest.base_sequence and newest.kind is Kind.SEALED:
            return
        if report.fate == Fate.QUARANTINE or head.segment > newest.base_sequence:
            end = FIRST_BATCH + padded(FRAMING_BYTES + len(encode_state(state)))  # a lost control batch costs no record
        else:
            end = report.scanned_bytes
        if head.position <= end:
            return
        pieces = ", ".join(str(sequence) for sequence in state.open_records.values())
        report.errors.append(
            f"{self._root.path}: pieces of the unfinished record {pieces} are lost, so it cannot be read; sequence "
            f"{state.next_sequence} is skipped"
        )
        state.next_sequence += 1

    def _skip_named(self, state: LogState) -> None:
        """Raise the next sequence above every sequence that a cursor or ledger names."""
        report = self._report
        floor = find_floor(self._root, log_id=self._log_id, next_sequence=state.next_sequence)
        report.warnings += floor.warnings
        if floor.last >= state.next_sequence:
            report.skipped = (state.next_sequence, floor.last, floor.reason)
            report.warnings.append(
                f"{self._root.path}: sequences {state.next_sequence} to {floor.last} are skipped: {floor.reason}, so "
                "they were assigned, but their records are missing, as after restoring a backup older than the cursors"
            )
            state.next_sequence = floor.last + 1

    def _examine(self, newest: Segment, durable_bytes: int) -> _Facts:
        """Scan the newest raw segment, and distinguish damage from an unfinished write.

        A power cut can leave a gap in the last commit round. A round's first batch is flagged if everything before it
        was synced. So a gap after ``durable_bytes``, the durable end, is damage if a flagged batch follows. Otherwise
        it is an unfinished write, and only batches before it count. Append times prove nothing: after a clock step,
        rounds may share one.
        """
        facts, gap = self._scan(newest, durable_bytes)
        if gap is None:
            return facts
        end = facts.tail.offset + facts.tail.garbage_bytes
        facts, _ = self._scan(newest, durable_bytes, limit=gap)
        reason = "only parts of one commit round reached the disk"
        return replace(facts, tail=SegmentEnd(gap, ParseOutcome.TORN, reason, end - gap))

    def _scan(self, newest: Segment, durable_bytes: int, *, limit: int | None = None) -> tuple[_Facts, int | None]:
        """Return facts, and the offset of the first gap after the last flagged batch and the durable end."""
        base, log_id, tail = newest.base_sequence, self._log_id, None
        replay, gaps = _Replay(base), list[DamagedBytes]()
        first_gap: int | None = None
        gap_from = max(durable_bytes, FIRST_BATCH + 1)  # the control batch was durable before the segment was named
        with open_file(newest.path) as file:
            index = partial(find_index, newest.path.parent, log_id, base)
            raw = RawFile(file.fileno(), limit=limit, durable_end=durable_bytes, index=index)
            salt = raw.salt
            header, reason = _classify_header(raw, log_id, base)
            for item in raw.scan():
                if isinstance(item, SegmentEnd):
                    tail = item
                elif isinstance(item, ScannedBatch):
                    if item.header.flags & _BARRIER:
                        first_gap = None
                    replay.add(item.header, item.route, raw.control_payload(item))
                else:
                    if first_gap is None and item.offset >= gap_from:
                        first_gap = item.offset
                    gaps.append(item)
                    if item.offset == FIRST_BATCH:  # without the control batch, the previous segment has the state
                        replay.state = state_before(self._root, newest, self._older, log_id, self._report.errors)
        assert tail is not None, "a scan ends with its tail"
        if replay.state.next_sequence > base:
            content = Content.RECORDS
        elif replay.has_pieces:
            content = Content.PIECES
        else:
            content = Content.CONTROL if replay.batches else Content.NOTHING
        return _Facts(header, reason, content, replay.state, replay.batches, gaps, tail, salt), first_gap


def copy_durably(disk: Disk, path: Path, target: Path, offset: int, length: int) -> None:
    """Copy bytes of ``path`` to ``target`` and sync them; the caller syncs the directory."""
    temporary = target.with_name(target.name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    descriptor = disk.create(temporary)
    try:
        with open_file(path) as file:
            disk.copy(descriptor, file.fileno(), length, 0, source_offset=offset)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.rename(temporary, target)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts from a scan of the newest raw segment."""

    header: Header
    reason: str  # of a bad header
    content: Content
    state: LogState
    batches: int
    gaps: list[DamagedBytes]
    tail: SegmentEnd
    salt: int


def _classify_header(raw: RawFile, log_id: bytes, base_sequence: int) -> tuple[Header, str]:
    try:
        actual = raw.header()
    except NewerVersion as error:
        return Header.NEWER, str(error)
    except BadHeader as error:
        return Header.DAMAGED, str(error)
    if actual.log_id != log_id:
        return Header.FOREIGN, f"the segment belongs to another log (log id {actual.log_id.hex()})"
    if actual.base_sequence != base_sequence:  # readers would not find its records
        name = segment_name(actual.base_sequence, Kind.RAW)
        return Header.FOREIGN, f"the segment begins with record {actual.base_sequence}: its name was {name}"
    return Header.OURS, ""


DroppedLasts = Callable[[int], Mapping[str, int] | None]
"""Function from a segment's base to the last sequence of each route that shrinking dropped, or None if unknown."""


def state_after(
    segment: Segment | None, log_id: bytes, errors: list[str], dropped: DroppedLasts = lambda _base: None
) -> LogState:
    """Return the log state at the end of a segment; add its unreadable parts to ``errors``.

    ``dropped`` returns the dropped routes of shrunk segments whose index lacks them.
    """
    if segment is None:
        return LogState()
    replay = _Replay(segment.base_sequence, dropped(segment.base_sequence))
    if segment.kind is Kind.RAW:
        _replay_raw(segment, log_id, replay)
        return replay.state
    try:
        with SealedFile(segment.path) as sealed:
            _replay_sealed(sealed, replay, errors)
    except Damaged as error:
        errors.append(error.message)
        with suppress(Damaged), closing(SalvagedSegment(segment, log_id, error)) as salvaged:
            for item in salvaged.batches(FIRST_BATCH, None):
                if isinstance(item, StoredBatch):
                    replay.add(item.header, item.route, item.payload)
        replay.state.previous = None
    return replay.state


def state_before(
    root: Root,
    segment: Segment,
    older: Segment | None,
    log_id: bytes,
    errors: list[str],
    dropped: DroppedLasts = lambda _base: None,
) -> LogState:
    """Return the state at the start of ``segment``: the state after ``older``, changed by any clock step since."""
    state = state_after(older, log_id, errors, dropped)
    _replay_clock_step(root, state, _lowest_step_base(older, state), segment.base_sequence)
    return state


def _lowest_step_base(older: Segment | None, state: LogState) -> int:
    """Return the lowest base of a clock step after ``older``, whose end has ``state``."""
    return max(state.next_sequence, older.base_sequence + 1) if older else 1


def _replay_clock_step(root: Root, state: LogState, first: int, base: int) -> None:
    """Set the append time back if a clock step is recorded at a base from ``first`` to ``base``."""
    step = step_between(read_steps(root), first, base)
    if step is not None:
        state.append_time_ns = min(state.append_time_ns, step.at_ns)


class _Replay:
    """Log state rebuilt from batches. A control batch replaces the state, any other updates it."""

    def __init__(self, base_sequence: int, dropped: Mapping[str, int] | None = None) -> None:
        self.state = LogState(next_sequence=base_sequence)
        self.batches = 0
        self.has_pieces = False  # of a record that began in an earlier segment
        self.dropped = dropped  # see :func:`wald.format.log_state.still_open`

    def add(self, header: BatchHeader, route: str, payload: bytes | memoryview) -> None:
        self.batches += 1
        self.has_pieces = self.has_pieces or bool(header.continues_sequence)
        self.state.apply(header, route, self.dropped)
        if header.is_dropped:
            for dropped_route, last in (self.dropped or {}).items():
                if last < header.end_sequence:
                    self.state.routes[dropped_route] = max(last, self.state.routes.get(dropped_route, 0))
        if not header.is_state:
            return
        with suppress(BadControl):  # written by a newer wald; later batches suffice
            before, self.state = self.state, decode_state(payload)
            self.state.next_sequence = max(self.state.next_sequence, before.next_sequence)
            self.state.append_time_ns = max(self.state.append_time_ns, before.append_time_ns)


def _replay_raw(segment: Segment, log_id: bytes, replay: _Replay) -> None:
    index = partial(find_index, segment.path.parent, log_id, segment.base_sequence)
    with open_file(segment.path) as file:
        raw = RawFile(file.fileno(), index=index)
        for item in raw.scan():
            if isinstance(item, ScannedBatch):
                replay.add(item.header, item.route, raw.control_payload(item))
            elif isinstance(item, SegmentEnd):
                replay.state.previous = PreviousEnd(raw.salt, item.offset)


def _replay_sealed(sealed: SealedFile, replay: _Replay, errors: list[str]) -> None:
    if sealed.index.shrunk is not None and sealed.index.shrunk.is_complete:
        replay.dropped = sealed.index.shrunk.last_by_route
    for number, frame in enumerate(sealed.index.frames):
        if sealed.index.was_damaged(frame):
            continue  # its bytes may look like batches
        try:
            data = sealed.frame(number)
        except Damaged as error:
            errors.append(error.message)
            continue
        for batch in sealed.batches(number, data):
            replay.add(batch.header, batch.route, batch.payload)
    replay.state.next_sequence = max(replay.state.next_sequence, sealed.index.next_sequence)
    replay.state.previous = PreviousEnd(sealed.index.salt, sealed.index.raw_bytes)
