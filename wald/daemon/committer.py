"""Commit rounds: collect, write, sync, publish the head, release the sources, reply.

Until it is durable, input stays in an arena, whose fixed size bounds the daemon's memory, or in an unnamed file.

After a failed write or sync, the descriptor is never used again: the same batches go to a new segment. A full disk
raises :class:`Full`, and the same round can be committed again later. Any other failure ends the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

from stringzilla import count as count_bytes
from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.errors import DISK_FULL, DiskFailure
from wald.files.disk import Disk, free_bytes
from wald.files.layout import Root
from wald.files.safe_open import InPlaceFile
from wald.files.uptime import ClockStep, add_step
from wald.format.batch import Buffer, Encoding, Flag
from wald.format.checksum import crc32c
from wald.format.head import HEAD_BYTES, Head, encode_head
from wald.format.log_state import DedupEntry, Producers
from wald.format.protocol import Code, ProtocolError, Publish
from wald.format.times import utc
from wald.hints import hint_for
from wald.settings import Config
from wald.writing.daemon_lock import Lock, root_gone
from wald.writing.disk_budget import Cause, DiskBudget, Sizes
from wald.writing.writer import Draft, Route, Sender, Writer

ARENA_BYTES = 4 << 20  # several pipe chunks; at a millisecond per round, more is not faster
FULL_SECONDS = 0.25  # between checks of a full disk
NAME_PATIENCE_SECONDS = 2.0  # for the active segment to regain its name, unless the disk is full
_CAUSE_SECONDS = 5.0  # between checks of a full disk's cause
_NAME_SECONDS = 1.0  # between checks of the active segment's name
_CUT_RETRY_SECONDS = 1.0  # between attempts to cut if room is missing


class Full(DiskFailure):
    """The disk is full; the same round may be retried."""


class Arena:
    """Memory of one round. Bytes up to ``used`` are processed, those up to ``filled`` received."""

    def __init__(self, length: int = ARENA_BYTES) -> None:
        self.buffer = bytearray(length)
        self.view = memoryview(self.buffer)
        self.used = self.filled = 0

    @property
    def free(self) -> int:
        return len(self.buffer) - self.used


class Spooling:
    """Payload of a request, spilled to a file that :mod:`connections` writes."""

    def __init__(self, request: Publish, route: Route) -> None:
        self.request = request
        self.file: FileIO | None = None
        self.unwritten: memoryview | None = None  # accepted part
        self.columns: bytes | memoryview = b""  # complete payload
        self.missing_bytes = request.payload_bytes
        self.newlines = 0
        self.ends_in_newline = False
        self._checksum = crc32c(route.prefix)

    def accept(self, part: memoryview) -> None:
        self.unwritten = part
        self._checksum = crc32c(part, self._checksum)
        self.newlines += int(count_bytes(part, b"\n"))
        self.ends_in_newline = part[-1] == ord("\n")
        self.missing_bytes -= len(part)

    @property
    def promised_bytes(self) -> int:
        """Bytes still to be written, to the file and to the log."""
        return self.missing_bytes + self.request.payload_bytes

    @property
    def body_checksum(self) -> int:
        return crc32c(bytes(-self.request.payload_bytes & 7), self._checksum)


class Ticket(NamedTuple):
    """Position of a request's records in a draft."""

    draft: Draft
    offset: int
    records: int


@dataclass(slots=True)
class CommitRound:
    """Drafts of one round, whose payloads are in ``arena``; the first ``committed`` are durable.

    Lines of one route and peer share a draft; a batch with a producer id has its own, for deduplication.
    """

    producers: Producers
    arena: Arena
    drafts: list[Draft] = field(default_factory=list)
    committed: int = 0
    payload_bytes: int = 0
    _line_drafts: dict[tuple[str, Sender], Draft] = field(default_factory=dict)
    _tickets: dict[int, dict[int, Ticket]] = field(default_factory=dict)

    @property
    def open_routes(self) -> frozenset[str]:
        """Routes with an unfinished record."""
        return frozenset(draft.route.name for draft in self.drafts if draft.flags & Flag.CONTINUED)

    def add(self, draft: Draft) -> None:
        self.drafts.append(draft)
        self.payload_bytes += draft.payload_bytes

    def publish_lines(self, route: Route, payload: Buffer, count: int, peer: Sender) -> Ticket:
        """Add lines without a producer id, which may share a batch."""
        draft = self._line_drafts.get((route.name, peer))
        length = len(payload)
        if draft is None:
            draft = self._line_drafts[route.name, peer] = Draft(route, [payload], length, count, peer=peer)
            self.add(draft)
            return Ticket(draft, 0, count)
        ticket = Ticket(draft, draft.count, count)
        draft.payload.append(payload)
        draft.payload_bytes += length
        draft.count += count
        self.payload_bytes += length
        return ticket

    def publish(
        self,
        request: Publish,
        producer_id: int,
        route: Route,
        payload: Buffer | None,
        count: int,
        peer: Sender,
        spooling: Spooling | None = None,
    ) -> Ticket | DedupEntry:
        """Add a batch; if the producer has sent it before, return the earlier result instead.

        ``payload`` is None with ``spooling``. Raise ProtocolError for a conflict, a gap or a forgotten producer.
        """
        number = request.producer_sequence
        draft = Draft(
            route,
            [] if payload is None else [payload],
            request.payload_bytes,
            count,
            encoding=Encoding.COLUMNS if request.columns else Encoding.LINES,
            producer_id=producer_id,
            producer_sequence=number,
            peer=peer,
        )
        if spooling is not None and spooling.file is not None:
            draft.spool, draft.body_checksum = spooling.file.fileno(), spooling.body_checksum
        ticket = Ticket(draft, 0, count)
        if not producer_id:
            self.add(draft)
            return ticket
        if duplicate := self._find_duplicate(draft):
            return duplicate
        self._check_order(producer_id, number, request.seen)
        self.add(draft)
        self._tickets.setdefault(producer_id, {})[number] = ticket
        return ticket

    def _find_duplicate(self, draft: Draft) -> Ticket | DedupEntry | None:
        producer_id, number = draft.producer_id, draft.producer_sequence
        earlier = self._tickets.get(producer_id, {}).get(number) or self.producers.find(producer_id, number)
        if earlier is None:
            return None
        fingerprint = earlier.fingerprint if isinstance(earlier, DedupEntry) else earlier.draft.fingerprint
        if fingerprint != draft.fingerprint:
            raise ProtocolError(Code.CONFLICT, f"batch {number} was already sent with different contents")
        return earlier

    def _check_order(self, producer_id: int, number: int, seen: int | None) -> None:
        tickets = self._tickets.get(producer_id)
        expected = max(tickets) + 1 if tickets else self.producers.next_expected(producer_id)
        if expected is None and seen is not None and seen < (last_forgotten := self.producers.evicted_upto()):
            message = (
                f"the daemon may have forgotten this producer; it may have records up to sequence {last_forgotten}"
            )
            raise ProtocolError(Code.FORGOTTEN, message)
        if expected is None or number == expected:
            return
        if number < expected:
            raise ProtocolError(Code.FORGOTTEN, f"batch {number} of this producer is too old to be deduplicated")
        raise ProtocolError(Code.GAP, f"batch {number} of this producer arrived before batch {expected}")


class Sources(Protocol):
    """Input sources, notified before a write and after its sync."""

    def before_write(self, drafts: Sequence[Draft], segment: int) -> None: ...

    def after_sync(self, drafts: Sequence[Draft]) -> list[str]:
        """Release the durable bytes; return messages about losses."""


class Committer:
    """Owner of the writer and the head: commits rounds, cuts segments, handles disk failures."""

    def __init__(
        self,
        root: Root,
        disk: Disk,
        writer: Writer,
        lock: Lock,
        budget: DiskBudget,
        sources: Sources,
        config: Config,
        metrics: Metrics,
        journal: FilteringBoundLogger,
    ) -> None:
        self.writer = writer
        self.room_bytes = 0  # when the free space was last read
        self._config = config
        self._root = root
        self._disk = disk
        self._lock = lock
        self._budget = budget
        self._sources = sources
        self._metrics = metrics
        self._journal = journal
        self._head = InPlaceFile(root.head, HEAD_BYTES, disk)
        self._first_record_at: float | None = None  # in the active segment
        self._age_share = 1.0  # of segment_max_age until the cut
        self._cut_retry_at = self._full_until = self._cause_check_at = self._name_check_at = 0.0
        self._unnamed_at: float | None = None  # when the active segment was first found unnamed
        self._is_round_refused = False  # the disk refused the last round
        self._is_request_held = False
        self._synced_at = time.monotonic()
        self._publish()
        self._head.sync()  # before any input: a power cut must leave a head under its name

    def apply_settings(self, config: Config, sizes: Sizes) -> None:
        self._config = config
        self._budget.sizes = sizes
        self.writer.segment_max_bytes = sizes.segment_bytes

    @property
    def head(self) -> Head:
        writer = self.writer
        return Head(
            writer.state.next_sequence - 1,
            writer.base_sequence,
            writer.position,
            writer.epoch,
            writer.state.append_time_ns,
        )

    def commit(self, commit_round: CommitRound) -> None:
        while (count := commit_round.committed) < len(commit_round.drafts):
            commit_round.committed += self._commit(commit_round.drafts[count:] if count else commit_round.drafts)

    def cut(self) -> bool:
        """Begin a new segment; return False if the active one is empty or the disk lacks room."""
        now = time.monotonic()
        if not self.writer.has_advanced or self.writer.failed or now < self._cut_retry_at:
            return False
        self._require_lock()
        try:
            self.restore_name()
            if not self.leave_truncated_segment():
                self.writer.cut(now_ns=time.time_ns())
        except (OSError, Full) as error:
            self._cut_retry_at = now + _CUT_RETRY_SECONDS
            self._journal.error("cut failed", reason=str(error), next="the segment grows until there is room")
            return False
        self._finish_cut()
        return True

    def step_clock(self, step: ClockStep) -> bool:
        """Record a clock step and begin a new segment; return False if impossible now."""
        writer = self.writer
        if writer.failed or not writer.may_step_clock:
            return False
        self._require_lock()
        try:
            self.restore_name()
            if self.leave_truncated_segment():  # the step names a sequence of the truncated segment
                return False
            add_step(self._root, self._disk, step)  # before any segment has earlier times
            writer.step_clock(now_ns=step.at_ns)
        except (OSError, Full) as error:
            self._journal.error("clock step failed", reason=str(error), next="append times continue as before")
            return False
        self._finish_cut()
        self._journal.warning("clock step", base=step.base, before=utc(step.before_ns), now=utc(step.at_ns))
        return True

    def run_due_tasks(self, now: float) -> None:
        """Run due tasks: check the active segment's name, sync, cut."""
        if self._name_check_at <= now:
            self._name_check_at = now + _NAME_SECONDS
            self._require_lock()  # otherwise an idle daemon would not notice a takeover
            with contextlib.suppress(Full):  # reported; the next check retries
                self.restore_name()
                self.leave_truncated_segment()
        if self.writer.unsynced and self._config.sync == "interval" and self._sync_at() <= now:
            self._synced_at = now
            self._sync()
        # On a full disk no batch cuts a full segment, and only a cut segment can be reclaimed.
        is_full = (self._metrics.degraded or self._is_request_held) and self.writer.overshoots(1)
        if is_full or self._cut_at() <= now:
            self.cut()

    def due_at(self) -> float:
        """Return the monotonic time at which :meth:`run_due_tasks` has work."""
        next_at = self._name_check_at
        if not self.writer.failed:
            next_at = min(next_at, max(self._cut_at(), self._cut_retry_at))
        if self.writer.unsynced and self._config.sync == "interval":
            next_at = min(next_at, self._sync_at())
        return next_at

    def restore_name(self) -> None:
        """Restore the active segment's name if it is gone: an unnamed file is lost when the process ends."""
        path = str(self.writer.path)
        if self.writer.is_named():
            if self._unnamed_at is None:
                return
            self._journal.info("the name of the active segment reappeared", path=path)
        elif not self._lock.is_ours():  # another daemon may own the file, or have sealed it
            return
        else:
            try:
                quarantined = self.writer.restore_name()
            except OSError as error:
                raise self._missing_name_failure(error) from error
            details = {"quarantined": str(quarantined)} if quarantined else {}
            next_step = "the daemon has restored the segment and its contents"
            self._journal.error("active segment removed or replaced", path=path, **details, next=next_step)
        self._unnamed_at, self._is_round_refused = None, False

    def leave_truncated_segment(self) -> bool:
        """Begin a new segment if another program truncated the active one; return True if so."""
        writer = self.writer
        if writer.failed or not writer.is_truncated():
            return False
        path, base, last = writer.path, writer.base_sequence, self._metrics.head_sequence
        losses = [f"acknowledged records are lost at the end of {base} to {last}"] if base <= last else []
        if unfinished := ", ".join(str(sequence) for sequence in writer.state.open_records.values()):
            losses.append(f"pieces of unfinished records are lost, so these cannot be read: {unfinished}")
        try:
            writer.leave_truncated(now_ns=time.time_ns())
        except OSError as error:
            raise self._failure(self._root.segments, error) from error
        self._publish()
        self._journal.error(
            "active segment truncated by another program",
            path=str(path),
            what="; ".join(losses) or "the end of a long record may be lost",
            next="the log continues in a new segment",
            hint=hint_for("records-of-truncated-segment", root=self._root.path),
        )
        return True

    def has_room(self, *, wanted_bytes: int | None) -> bool:
        """Return True if input can be accepted; log changes, and a request that waits for ``wanted_bytes``."""
        metrics = self._metrics
        free = metrics.free_bytes = self._read_free_bytes()
        room = self.room_bytes = self._budget.remaining_bytes(free)
        metrics.needed_bytes = free - room
        is_full = room < 0 or time.monotonic() < self._full_until
        degraded = is_full or self._is_round_refused
        # A request that waited for a full disk is retried before its wait is reported.
        was_retried = not (degraded or metrics.degraded)
        self._report_room(degraded=degraded)
        self._report_waiting_request(wanted_bytes if was_retried else None)
        return not is_full

    def close(self) -> None:
        self._head.close()

    def _commit(self, drafts: Sequence[Draft]) -> int:
        """Commit the drafts that fit in one segment; return their number."""
        writer = self.writer
        if writer.overshoots(writer.needed_bytes(drafts[0])):
            self.cut()
        start = time.monotonic()
        self._metrics.waiting_since = self._metrics.waiting_since or start
        # Also before the write: after a takeover, the new daemon treats this segment as complete.
        self._require_lock()
        self.restore_name()
        self.leave_truncated_segment()
        placed_drafts = self._write(drafts)
        self._require_lock()
        self._is_round_refused = False
        self._publish()
        for message in self._sources.after_sync(placed_drafts):
            self._journal.error("pipe", what=message)
        now = time.monotonic()
        return self._update_metrics(placed_drafts, now, now - start)

    def _write(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Write drafts; if that fails, to a new segment. Return them with the peers' introductions."""
        placed_drafts = self.writer.place(drafts, limited=True)
        try:
            if not self.writer.failed:
                return self._write_placed(placed_drafts)
        except OSError as error:
            if not self.writer.failed:  # nothing was written: another segment would not help
                raise self._failure(self._root.transfers, error) from error
            self._metrics.write_failures += 1
            self._journal.error("write failed", reason=str(error), next="the same batch is written to a new segment")
        try:
            self.writer.replace(now_ns=time.time_ns())
            self._publish()
            return self._write_placed(self.writer.place([draft for draft in placed_drafts if not draft.introduces]))
        except OSError as error:
            raise self._failure(self._root.segments, error) from error

    def _write_placed(self, placed_drafts: list[Draft]) -> list[Draft]:
        self._sources.before_write(placed_drafts, self.writer.base_sequence)
        self.writer.commit(placed_drafts, now_ns=time.time_ns())
        return placed_drafts

    def _update_metrics(self, placed_drafts: Sequence[Draft], now: float, seconds: float) -> int:
        """Return the number of drafts, without introductions."""
        metrics = self._metrics
        drafts = [draft for draft in placed_drafts if not draft.introduces]
        records = sum(draft.count for draft in drafts)
        written_bytes = self.writer.position - placed_drafts[0].position
        metrics.commit_rounds += 1
        metrics.records += records
        metrics.payload_bytes += sum(draft.payload_bytes for draft in drafts)
        metrics.written_bytes += written_bytes
        metrics.round_records.observe(records)
        metrics.round_bytes.observe(written_bytes)
        metrics.commit_seconds.observe(seconds)
        if self.writer.sync_commits:
            metrics.sync_seconds.observe(self.writer.sync_seconds)
        metrics.waiting_since = 0.0
        if self._first_record_at is None and self.writer.has_advanced:
            # Jitter only shortens: logs started together do not cut together, and no log cuts late.
            self._first_record_at, self._age_share = now, 1 - random.random() * self._config.segment_age_jitter  # noqa: S311
        return len(drafts)

    def _publish(self) -> None:
        head = self.head
        try:
            self._head.restore()  # readers would not find a removed file
            self._head.write(encode_head(head))
        except OSError as error:
            raise DiskFailure(
                f"{self._root.head}: the head cannot be written ({error.strerror})",
                case="head-cannot-be-written",
                root=self._root.path,
                head=self._root.head,
                error=error,
            ) from error
        self._metrics.head_sequence = head.sequence

    def _require_lock(self) -> None:
        if not self._lock.is_ours():
            self.writer.abandon()
            raise self._lock.loss(self._root)

    def _finish_cut(self) -> None:
        self._first_record_at = None
        self._metrics.cuts += 1
        self._publish()

    def _cut_at(self) -> float:
        age = self._config.segment_max_age
        return (
            float("inf") if self._first_record_at is None or not age else self._first_record_at + age * self._age_share
        )

    def _sync_at(self) -> float:
        return self._synced_at + self._config.sync_interval

    def _sync(self) -> None:
        try:
            self.writer.sync()
        except OSError as error:
            self._metrics.write_failures += 1
            self._journal.error("sync failed", reason=str(error), next="the log continues in a new segment")
        else:
            self._metrics.sync_seconds.observe(self.writer.sync_seconds)

    def _failure(self, path: Path, error: OSError) -> DiskFailure:
        where = error.filename or path
        if error.errno in DISK_FULL:
            self._note_full_disk()
            return Full(
                f"{where}: {error.strerror}",
                case="disk-failed",
                root=self._root.path,
                segments=self._root.segments,
                error=error,
            )
        return DiskFailure(
            f"{where}: {error.strerror}; no acknowledged record was lost; unacknowledged records were discarded",
            case="disk-failed",
            root=self._root.path,
            segments=self._root.segments,
            error=error,
        )

    def _missing_name_failure(self, error: OSError) -> DiskFailure:
        """Return the error for an active segment without a name: Full while retrying may help."""
        writer, now = self.writer, time.monotonic()
        is_first, self._unnamed_at = self._unnamed_at is None, self._unnamed_at or now
        is_full = error.errno in DISK_FULL
        error_type = Full if is_full or now - self._unnamed_at < NAME_PATIENCE_SECONDS else DiskFailure
        if error.errno == errno.ESTALE:
            failure = error_type(
                f"{self._root.segments}: the directory was unmounted or replaced; acknowledged records are still in "
                "the original directory; the daemon accepts no further records",
                case="segments-unmounted",
                segments=self._root.segments,
            )
        else:
            failure = error_type(
                f"{writer.path}: the active segment was removed or replaced and cannot be restored ({error}); its "
                f"records (sequence {writer.base_sequence} and later) will be lost when the daemon exits",
                case="active-segment-gone",
                root=self._root.path,
                segments=self._root.segments,
            )
        if is_first:
            self._journal.error(
                "active segment removed or replaced", what=failure.message, next="the daemon retries", hint=failure.hint
            )
        if is_full:
            self._note_full_disk()
        if error_type is DiskFailure:
            writer.abandon()
        return failure

    def _note_full_disk(self) -> None:
        self._is_round_refused, self._full_until = True, time.monotonic() + FULL_SECONDS
        self._report_room(degraded=True)

    def _read_free_bytes(self) -> int:
        segments = self._root.segments
        try:
            return free_bytes(segments)
        except FileNotFoundError:
            if self._root.path.exists():  # restore_name waits for the directory, and reports it
                return self._metrics.free_bytes
            raise root_gone(self._root) from None
        except OSError as error:
            raise DiskFailure(
                f"{segments}: the free space cannot be read ({error.strerror}); no acknowledged record was lost; "
                "unacknowledged records were discarded",
                case="disk-failed",
                root=self._root.path,
                segments=segments,
                error=error,
            ) from error

    def _report_room(self, *, degraded: bool) -> None:
        """Log that the disk became full, each new cause, or that the disk has room again."""
        metrics, now = self._metrics, time.monotonic()
        was_degraded, metrics.degraded = metrics.degraded, degraded
        details = {"free": metrics.free_bytes, "needed": metrics.needed_bytes}
        if not degraded:
            if was_degraded:
                metrics.degraded_by = ""
                self._journal.info("disk has room again", **details)
            return
        if was_degraded and now < self._cause_check_at:
            return
        self._cause_check_at = now + _CAUSE_SECONDS
        cause = Cause.REFUSED if self._is_round_refused else self._budget.cause(metrics.free_bytes)
        if cause != metrics.degraded_by:
            metrics.degraded_by = cause
            self._journal.error(
                "disk full: input waits", degraded_by=cause, **details, hint=cause.hint(self._root.path)
            )

    def _report_waiting_request(self, wanted_bytes: int | None) -> None:
        was_reported, self._is_request_held = self._is_request_held, wanted_bytes is not None
        if wanted_bytes is None or was_reported:
            return
        metrics = self._metrics
        cause = self._budget.cause(metrics.free_bytes - wanted_bytes)
        details = {"wanted": wanted_bytes, "free": metrics.free_bytes, "needed": metrics.needed_bytes}
        self._journal.warning("request waits for room", because=cause, **details, hint=cause.hint(self._root.path))
