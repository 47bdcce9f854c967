"""Recovery: what the last life of the daemon left behind, made into a log that can be written on.

Facts → verdict → repair. Only the newest raw segment can be unfinished, because the next one is named only after it was
complete; older raw segments are cut and wait for the sealer. The newest is scanned batch by batch, whatever is behind
the last good batch is copied to ``quarantine/`` and cut away, and the writer then starts a new segment: nobody ever
appends to an old file. So the time a start takes is bounded by one raw segment, not by the log.

What a report calls info is what crashes do. Errors are what they cannot do: bytes that were durable and are gone or
wrong. No error stops the start; the sequences it concerns are named, and none is given out again.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from wald.errors import Damaged, UnsupportedFormat
from wald.format.batch import BatchHeader, Flag
from wald.format.head import Head, decode_head
from wald.format.names import Kind, segment_name
from wald.format.parsing import Batches, Outcome, StoredBatch
from wald.format.segment import HEADER as SEGMENT_HEADER
from wald.format.segment import BadHeader, NewerVersion
from wald.format.state import BadControl, LogState, decode_state
from wald.store.files.directory import TEMPORARY, Listing, Root, Segment, list_segments
from wald.store.files.disk import Disk
from wald.store.files.regular import open_file, read_regular
from wald.store.files.uptime import boot_id
from wald.store.segments.compression import SealedFile
from wald.store.segments.indexes import read_index
from wald.store.segments.raw import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch, SegmentEnd
from wald.store.segments.salvage import SalvagedSegment
from wald.store.writing.floor import find_floor, last_sealed
from wald.store.writing.lives import last_end, report_path

REPORTS_KEPT = 32
_BARRIER = int(Flag.BARRIER)  # flags are slow to combine, and each batch comes along


class Header(Enum):
    """The first 64 bytes of the newest raw segment."""

    OURS = "ours"
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # whole, but of another log, or of another segment
    NEWER = "newer"  # whole, but of a newer wald


class Content(Enum):
    """What the good batches of the newest raw segment hold."""

    NOTHING = "nothing"  # not even the control batch, which was durable before the segment had its name
    CONTROL = "control"  # no more than the control batch
    PIECES = "pieces"  # of a record that began earlier; no sequence of its own
    RECORDS = "records"


class Fate(Enum):
    """What becomes of the newest raw segment."""

    CUT = "cut"  # it is complete; the sealer will have it
    CARRY = "carry"  # it has no sequence, so its name is needed: the next segment takes its pieces over
    REPLACE = "replace"  # it holds no record; the next segment takes its name
    QUARANTINE = "quarantine"  # nothing in it can be read
    REFUSE = "refuse"  # it is not ours to touch


@dataclass(frozen=True, slots=True)
class Verdict:
    """What recovery carries out.

    Attributes:
        trim: whether bytes behind the last good batch are kept aside and cut away.
    """

    fate: Fate
    trim: bool


def verdict(*, header: Header, content: Content, torn: bool) -> Verdict:
    """Decide about the newest raw segment; every combination of facts has an answer."""
    match header, content:
        case ((Header.FOREIGN | Header.NEWER), _):
            return Verdict(Fate.REFUSE, trim=False)
        case _, Content.NOTHING:
            return Verdict(Fate.QUARANTINE, trim=False)
        case _, Content.CONTROL:
            return Verdict(Fate.REPLACE, trim=torn)
        case _, Content.PIECES:
            return Verdict(Fate.CARRY, trim=torn)
        case _, Content.RECORDS:
            return Verdict(Fate.CUT, trim=torn)
    raise AssertionError("unreachable")


@dataclass(slots=True)
class Report:
    """One start, told: written to ``recovery/<epoch>.json``.

    Attributes:
        skipped: the first and the last sequence that are not given out any more, and why.
        boot: the kernel's number of the boot that it was in.
        before: how the life before ended, in words.
    """

    epoch: int
    at_ns: int
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
    skipped: tuple[int, int, str] | None = None
    info: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the writer starts from."""

    state: LogState
    carry: tuple[Path, int] | None
    report: Report


def recover(root: Root, disk: Disk, *, log_id: bytes, epoch: int, now_ns: int) -> Recovered:
    """Bring ``root`` into a state that can be written on. May be interrupted at any step and run again.

    Raises:
        UnsupportedFormat: the newest segment was written by a newer wald.
        Damaged: it belongs to another log.
        OSError: the disk does not let it.
    """
    started = time.monotonic()
    for left_over in (*root.recovery.glob(f"*{TEMPORARY}"), *root.quarantine.glob(f"*{TEMPORARY}")):
        disk.unlink(left_over)
    report = Report(epoch, now_ns, boot_id(), last_end(root))
    listing = list_segments(root)
    newest = listing.segments[-1] if listing.segments else None
    if newest is not None and newest.kind is Kind.RAW:
        examined = _examine(root, listing, log_id, report)
        recovered = _repair(root, disk, listing, log_id, examined, report)
    else:
        recovered = Recovered(_replayed(listing, log_id, report), None, report)
    _never_reuse(root, recovered.state, newest, report)
    _pass_over(root, recovered.state, log_id, report)
    its_name_is_needed = report.fate in (Fate.CARRY.value, Fate.REPLACE.value)
    if its_name_is_needed and newest is not None and recovered.state.next_sequence > newest.base_sequence:
        # Not any more: the records that are not there stand between it and the next segment.
        recovered, report.fate = replace(recovered, carry=None), Fate.CUT.value
    for name in root.route_names():
        recovered.state.routes.setdefault(name, 0)
    report.next_sequence = recovered.state.next_sequence
    report.seconds = round(time.monotonic() - started, 6)
    _write_report(root, disk, report)
    return recovered


@dataclass(slots=True)
class _Examined:
    """The facts about the newest raw segment, and the state at its end."""

    segment: Segment
    header: Header
    state: LogState
    content: Content
    gaps: list[DamagedBytes]
    tail: SegmentEnd
    batches: int
    reason: str


def _examine(root: Root, listing: Listing, log_id: bytes, report: Report) -> _Examined:
    segment = listing.segments[-1]
    torn_turn = _TornTurn(_durable_bytes(root, segment))
    examined = _scan(root, listing, log_id, report, torn_turn)
    if torn_turn.offset is None:
        return examined
    # The batches behind the gap are as little durable as the gap: look at what stands in front of it only.
    end = examined.tail.offset + examined.tail.garbage_bytes
    examined = _scan(root, listing, log_id, report, _TornTurn(None), limit=torn_turn.offset)
    reason = "parts of one turn reached the disk, others did not"
    examined.tail = SegmentEnd(torn_turn.offset, Outcome.TORN, reason, end - torn_turn.offset)
    return examined


class _TornTurn:
    """Finds a gap that a power cut can leave in the last turn, whose pages reach the disk in any order.

    A turn's first batch says whether all before it was synced before it was written. So a gap behind the durable end
    is an unfinished write if no such batch follows it, and damage if one does. Append times would not tell: while a
    clock that was set back catches up, every turn has the same.

    Attributes:
        offset: where the unfinished turn begins; None if there is none.
    """

    def __init__(self, durable_bytes: int | None) -> None:
        self.offset: int | None = None
        # The control batch was durable before the segment had its name.
        self._from = None if durable_bytes is None else max(durable_bytes, FIRST_BATCH + 1)

    def add(self, found: ScannedBatch | DamagedBytes) -> None:
        if isinstance(found, ScannedBatch):
            if found.header.flags & _BARRIER:
                self.offset = None
        elif self.offset is None and self._from is not None and found.offset >= self._from:
            self.offset = found.offset


def _scan(
    root: Root, listing: Listing, log_id: bytes, report: Report, torn_turn: _TornTurn, *, limit: int | None = None
) -> _Examined:
    segment = listing.segments[-1]
    with open_file(segment.path) as file:
        raw = RawFile(
            file.fileno(),
            limit=limit,
            durable=_durable_bytes(root, segment),
            index=lambda: read_index(root.segment(segment.base_sequence, Kind.INDEX), log_id, segment.base_sequence),
        )
        header, reason = _header_fact(raw, log_id, segment.base_sequence)
        replay = _Replay(LogState(next_sequence=segment.base_sequence))
        gaps: list[DamagedBytes] = []

        tail: SegmentEnd | None = None
        for found in raw.scan():
            if isinstance(found, SegmentEnd):
                tail = found
                continue
            torn_turn.add(found)
            if isinstance(found, ScannedBatch):
                replay.add(found.header, found.route, raw.payload(found) if found.header.is_control else b"")
                continue
            gaps.append(found)
            if found.offset == FIRST_BATCH:  # the control batch is gone: its state has to come from further back
                replay.state = _replayed(Listing(listing.segments[:-1]), log_id, report)
        assert tail is not None, "a scan ends with its tail"
    content = Content.CONTROL if replay.batches else Content.NOTHING
    if replay.state.next_sequence > segment.base_sequence:
        content = Content.RECORDS
    elif replay.pieces:
        content = Content.PIECES
    return _Examined(segment, header, replay.state, content, gaps, tail, replay.batches, reason)


def _header_fact(raw: RawFile, log_id: bytes, base_sequence: int) -> tuple[Header, str]:
    try:
        found = raw.header()
    except NewerVersion as error:
        return Header.NEWER, str(error)
    except BadHeader as error:
        return Header.DAMAGED, str(error)
    if found.log_id != log_id:
        return Header.FOREIGN, f"the segment belongs to another log (log id {found.log_id.hex()})"
    if found.base_sequence != base_sequence:  # its records would be taken for none
        name = segment_name(found.base_sequence, Kind.RAW)
        return Header.FOREIGN, f"the segment begins with record {found.base_sequence}: its name was {name}"
    return Header.OURS, ""


def _repair(root: Root, disk: Disk, listing: Listing, log_id: bytes, examined: _Examined, report: Report) -> Recovered:
    path = examined.segment.path
    torn = examined.tail.garbage_bytes > 0
    decided = verdict(header=examined.header, content=examined.content, torn=torn)
    report.segment, report.fate = path.name, decided.fate.value
    report.scanned_bytes, report.scanned_batches = examined.tail.offset, examined.batches
    if decided.fate is Fate.REFUSE:
        _refuse(path, examined)
    if examined.header is Header.DAMAGED:
        report.errors.append(f"{path}: offset 0: {examined.reason}")
    for gap in examined.gaps:
        report.errors.append(f"{path}: offset {gap.offset}: {gap.length} bytes are damaged ({gap.reason})")
    missing = _durable_bytes(root, examined.segment) - examined.tail.offset
    if missing > 0:
        report.errors.append(f"{path}: offset {examined.tail.offset}: {missing} bytes were durable and are not there")
    if decided.trim:
        _keep_aside(root, disk, path, examined.tail, report)
    if decided.fate is Fate.QUARANTINE:
        target = root.quarantine / f"{path.name}.{report.epoch}"
        disk.rename(path, target)
        disk.sync_directory(root.quarantine)
        disk.sync_directory(root.segments)
        report.kept_in = str(target.relative_to(root.path))
        report.errors.append(f"{path}: nothing in it can be read; moved to {target}")
        return Recovered(_replayed(Listing(listing.segments[:-1]), log_id, report), None, report)
    _make_durable(disk, path, examined.tail.offset)
    carry = (path, examined.tail.offset) if decided.fate is Fate.CARRY else None
    return Recovered(examined.state, carry, report)


def _refuse(path: Path, examined: _Examined) -> None:
    if examined.header is Header.NEWER:
        raise UnsupportedFormat(f"{path}: offset 0: {examined.reason}", hint="pip install --upgrade wald")
    raise Damaged(
        f"{path}: offset 0: {examined.reason}",
        hint=f"move it out of {path.parent}, or give it its name again, and start again",
    )


def _keep_aside(root: Root, disk: Disk, path: Path, tail: SegmentEnd, report: Report) -> None:
    """Copy what is behind the last good batch to ``quarantine/``; cutting follows only when the copy is durable."""
    # With the epoch, because what takes the segment's name over may be torn at the same place.
    kept = root.quarantine / f"{path.name}.{tail.offset}.{report.epoch}.torn"
    temporary = root.quarantine / f"torn{TEMPORARY}"
    temporary.unlink(missing_ok=True)
    target = disk.create(temporary)
    try:
        with open_file(path) as file:
            disk.copy(target, file.fileno(), tail.garbage_bytes, 0, source_offset=tail.offset)
        disk.sync(target)
    finally:
        disk.close(target)
    disk.rename(temporary, kept)
    disk.sync_directory(root.quarantine)
    report.trimmed_bytes, report.kept_in = tail.garbage_bytes, str(kept.relative_to(root.path))
    report.info.append(
        f"{path}: offset {tail.offset}: {tail.garbage_bytes} bytes of an unfinished write cut ({tail.reason})"
    )


def _make_durable(disk: Disk, path: Path, length: int) -> None:
    """Whole batches may have been written and not synced: sync before anybody is told of them."""
    descriptor = disk.open(path)
    try:
        disk.truncate(descriptor, max(length, SEGMENT_HEADER.size))
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


class _Replay:
    """State, brought forward batch by batch: a control batch replaces it, the others add to it."""

    def __init__(self, state: LogState) -> None:
        self.state = state
        self.batches = 0
        self.pieces = False

    def add(self, header: BatchHeader, route: str, payload: bytes | memoryview) -> None:
        self.batches += 1
        self.pieces = self.pieces or bool(header.continues_sequence)
        self.state.apply(header, route)
        if not header.is_control:
            return
        with contextlib.suppress(BadControl):  # its checksum held, so a newer wald wrote it; what follows tells enough
            before, self.state = self.state, decode_state(payload)
            self.state.next_sequence = max(self.state.next_sequence, before.next_sequence)
            self.state.append_time_ns = max(self.state.append_time_ns, before.append_time_ns)


def _replayed(listing: Listing, log_id: bytes, report: Report) -> LogState:
    """The state at the end of the newest segment, whatever its form, as far as it can be read; else a fresh one."""
    if not listing.segments:
        return LogState()
    newest = listing.segments[-1]
    replay = _Replay(LogState(next_sequence=newest.base_sequence))
    if newest.kind is Kind.RAW:
        _replay_raw(newest, replay)
        return replay.state
    try:
        with SealedFile(newest.path) as sealed:
            _replay_sealed(sealed, replay, report)
    except Damaged as error:
        report.errors.append(error.message)
        _replay_salvaged(newest, log_id, replay, error)
    return replay.state


def _replay_raw(segment: Segment, replay: _Replay) -> None:
    with open_file(segment.path) as file:
        raw = RawFile(file.fileno())
        for met in raw.scan():
            if isinstance(met, ScannedBatch):
                replay.add(met.header, met.route, raw.payload(met) if met.header.is_control else b"")


def _replay_sealed(sealed: SealedFile, replay: _Replay, report: Report) -> None:
    for number, frame in enumerate(sealed.index.frames):
        if sealed.index.is_damage(frame):
            continue  # what it holds may look like batches
        try:
            data = sealed.frame(number)
        except Damaged as error:
            report.errors.append(error.message)
            continue
        offset = SEGMENT_HEADER.size if number == 0 else 0
        for batch in Batches(data, offset, position=frame.raw_offset, salt=sealed.index.salt):
            replay.add(batch.header, batch.route, batch.payload)
    replay.state.next_sequence = max(replay.state.next_sequence, sealed.index.next_sequence)


def _replay_salvaged(segment: Segment, log_id: bytes, replay: _Replay, error: Damaged) -> None:
    """What can be read of a sealed segment without its index."""
    with contextlib.suppress(Damaged), contextlib.closing(SalvagedSegment(segment, log_id, error)) as salvaged:
        for met in salvaged.batches(FIRST_BATCH, None):
            if isinstance(met, StoredBatch):
                replay.add(met.header, met.route, met.payload)


def _durable_bytes(root: Root, segment: Segment) -> int:
    """How much of a segment the head says is on disk; 0 if it says nothing about it."""
    head = _head(root)
    return head.position if head is not None and head.segment == segment.base_sequence else 0


def _head(root: Root) -> Head | None:
    try:
        return decode_head(read_regular(root.head))
    except (FileNotFoundError, Damaged):
        return None


def _never_reuse(root: Root, state: LogState, newest: Segment | None, report: Report) -> None:
    """Start above everything that was ever acknowledged, even if it cannot be found any more."""
    head = _head(root)
    floor = max(head.sequence if head else 0, last_sealed(root, next_sequence=state.next_sequence)) + 1
    if newest is not None:
        # A raw segment may be empty; a sealed one is not, however little of it can be read.
        floor = max(floor, newest.base_sequence + (newest.kind is Kind.SEALED))
    if floor > state.next_sequence:
        report.errors.append(
            f"{root.path}: records {state.next_sequence} to {floor - 1} were acknowledged and are not there"
        )
        state.next_sequence = floor


def _pass_over(root: Root, state: LogState, log_id: bytes, report: Report) -> None:
    """Start above everything that cursors and ledgers name as well: what they are of was newer than the segments."""
    floor = find_floor(root, log_id=log_id, next_sequence=state.next_sequence)
    report.warnings += floor.doubts
    if floor.last >= state.next_sequence:
        report.skipped = (state.next_sequence, floor.last, floor.why)
        report.warnings.append(
            f"{root.path}: sequences {state.next_sequence} to {floor.last} are passed over: {floor.why}, so they were "
            f"given out, and the records are not there; an older backup beside newer cursors looks like this"
        )
        state.next_sequence = floor.last + 1


def _write_report(root: Root, disk: Disk, report: Report) -> None:
    told: dict[str, Any] = asdict(report)
    disk.replace(report_path(root, report.epoch), json.dumps(told, indent=2).encode() + b"\n")
    for old in sorted(root.recovery.glob("*.json"))[:-REPORTS_KEPT]:
        disk.unlink(old)
